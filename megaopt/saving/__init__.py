"""State dicts: made, read, translated."""
