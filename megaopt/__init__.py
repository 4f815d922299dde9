"""The fused, sharded optimizer for Megatron-class training."""

from megaopt.adam import FusedAdam

__version__ = "0.1.0"

__all__ = ["FusedAdam", "__version__"]
