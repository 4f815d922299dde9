"""A small GPT on real text, deterministic to the bit: what the regression trains."""
