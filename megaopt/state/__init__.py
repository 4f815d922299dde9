"""A parameter's state: its tensors, its master, who may write them."""
