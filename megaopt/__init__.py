"""The fused, sharded optimizer for Megatron-class training."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaopt.adam import FusedAdam
    from megaopt.float8 import to_float8

__version__ = "0.1.0"

__all__ = ["FusedAdam", "__version__", "to_float8"]


def __getattr__(name: str) -> Any:
    # on demand: Triton decides when the kernels are imported whether they are interpreted, and the
    # command line, which is imported after this, sets that
    if name == "FusedAdam":
        from megaopt.adam import FusedAdam

        return FusedAdam
    if name == "to_float8":
        from megaopt.float8 import to_float8

        return to_float8
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
