"""The work of a step, from the groups to the launch."""
