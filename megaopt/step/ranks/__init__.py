"""Messages between ranks: in a step, before a load, when a projection is made anew."""
