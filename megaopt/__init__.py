"""The fused, sharded optimizer for Megatron-class training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaopt.adam import FusedAdam
    from megaopt.float8 import to_float8
    from megaopt.lion import FusedLion
    from megaopt.sgd import FusedSGD

__version__ = "0.1.0"

__all__ = ["FusedAdam", "FusedLion", "FusedSGD", "__version__", "to_float8"]

HOMES = {
    "FusedAdam": "megaopt.adam",
    "FusedLion": "megaopt.lion",
    "FusedSGD": "megaopt.sgd",
    "to_float8": "megaopt.float8",
}


def __getattr__(name: str) -> Any:
    # on demand: Triton decides when the kernels are imported whether they are interpreted, and the
    # command line, which is imported after this, sets that
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
