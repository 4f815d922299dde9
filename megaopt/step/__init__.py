"""What a step does, from the groups to the launch."""
