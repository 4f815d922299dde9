"""The fused, sharded optimizer for Megatron-class training."""

__version__ = "0.1.0"
