"""The optimizer step: kernel, launcher and torch twin."""
