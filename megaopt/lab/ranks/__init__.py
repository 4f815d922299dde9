"""The bench of steps over several cards, one card beside them."""
