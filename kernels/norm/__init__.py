"""The L2 norm over any number of gradients, the same to the bit however they are cut."""
