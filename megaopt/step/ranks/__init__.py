"""What ranks tell each other in a step."""
