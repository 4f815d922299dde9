"""Two runs, the same bits: digests of tensors."""
