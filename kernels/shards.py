"""The shard of a DTensor that this rank has.

torch.distributed.tensor is never imported here: before somebody else has, there is no DTensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from megaopt.kernels.place import Place, place_of_box

PLAIN = {torch.Tensor, torch.nn.Parameter}
"""Classes of tensors that have memory of their own; subclasses may have none."""


def dtensor_class() -> Any:
    """Returns DTensor, for isinstance; an empty tuple where nobody has imported it."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def is_dtensor(value: object) -> bool:
    """Checks for a torch.distributed.tensor.DTensor."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local_of(value: Any) -> Any:
    """The shard of this rank, in its own memory; anything but a DTensor as it is."""
    return waited(value._local_tensor) if is_dtensor(value) else value


def waited(local: Any) -> Any:
    """A shard that a collective may still be making, once it is there."""
    if type(local) in PLAIN:
        return local
    functional = sys.modules.get("torch.distributed._functional_collectives")
    kind = getattr(functional, "AsyncCollectiveTensor", ())
    return local.wait() if isinstance(local, kind) else local


def shard_box(dtensor: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Returns where this rank's shard begins in each dimension, and its shape."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, start = compute_local_shape_and_global_offset(
        dtensor.shape, dtensor.device_mesh, dtensor.placements
    )
    return start, size


def shard_first(dtensor: Any) -> int:
    """Returns the index, row by row, of the shard's first element in the whole."""
    starts, _ = shard_box(dtensor)
    sizes = [math.prod(dtensor.shape[dim + 1 :]) for dim in range(dtensor.dim())]
    return sum(start * size for start, size in zip(starts, sizes, strict=True))


def place_of_shard(
    number: int, dtensor: Any, first: int, shape: Sequence[int], whole_shape: Sequence[int]
) -> Place:
    """Returns the place of a shard of this shape in a tensor that is split as the DTensor is.

    Raises ValueError for a shard of a part of two dimensions behind the first.
    """
    # an empty shard has no element to place
    if not math.prod(shape):
        return Place(number)
    place = place_of_box(number, first, shape, whole_shape)
    if place is None:
        raise ValueError(
            f"placements {tuple(dtensor.placements)} of shape {tuple(whole_shape)} must "
            "split at most one dimension behind the first where elements are known by their "
            "places"
        )
    return place
