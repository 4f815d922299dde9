"""Trains variants of the optimizer step on the same data and compares them bit for bit."""
