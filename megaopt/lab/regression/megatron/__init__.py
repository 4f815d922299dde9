"""Trains a Megatron-Core GPT with its own optimizer step and with ours; compares the bits."""
