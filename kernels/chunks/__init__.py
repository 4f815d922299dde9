"""Batches of tensors, their tables, chunks and blocks: all that every kernel reads and writes."""
