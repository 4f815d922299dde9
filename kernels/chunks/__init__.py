"""What every kernel reads and writes: batches of tensors, their tables, chunks and blocks."""
