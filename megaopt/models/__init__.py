"""What works on a whole model."""
