"""What ranks tell each other: in a step, before a load, when a projection is made anew."""
