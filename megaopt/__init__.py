"""The fused, sharded optimizer for Megatron-class training."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaopt.adam import FusedAdam

__version__ = "0.1.0"

__all__ = ["FusedAdam", "__version__"]


def __getattr__(name: str) -> Any:
    # on demand: Triton decides when the kernels are imported whether they are interpreted, and the
    # command line, which is imported after this, sets that
    if name == "FusedAdam":
        from megaopt.adam import FusedAdam

        return FusedAdam
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
