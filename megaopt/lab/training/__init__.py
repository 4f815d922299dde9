"""A small GPT on generated text, deterministic to the bit: what the regression trains."""
