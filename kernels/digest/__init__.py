"""The digest of tensors: 128 bits that know places and add up over shards."""
