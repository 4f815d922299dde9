"""Functions that work on a whole model."""
