"""Digests of tensors: 128 bits that know places, and add up over shards."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megaopt.kernels.backends import default_backend
from megaopt.kernels.digest.codes import LAST_PLACE, WHOLE, count_of, place_of_codes
from megaopt.kernels.digest.launch import Digests
from megaopt.kernels.place import Place, place_of_box
from megaopt.kernels.refusals import is_dense, refuse
from megaopt.kernels.shards import local_of, place_of_shard, shard_first
from megaopt.recording.looks import Looks


def digest(
    tensor: torch.Tensor, start: int = 0, whole: Sequence[int] | None = None
) -> torch.Tensor:
    """Returns the digest of a tensor, or of a shard at its place in a whole one.

    Equal bits at equal places have equal digests, on every device. Digests of shards, however a
    tensor is cut, add up to the whole tensor's, modulo `2**64` in each lane. A change of one
    element is always seen; other changes are missed with a chance of about `2**-50`.
    docs/numbers.md has the definition. It is no cryptographic hash: whoever wants two tensors of
    one digest can make them.

    Args:
        tensor: of any shape, of a dtype of 1, 2, 4 or 8 bytes, or complex; a DTensor stands for its
            local shard at its place. It may be empty, or not contiguous.
        start: the index, row by row, of the tensor's first element in the whole one.
        whole: the whole tensor's shape, in which the tensor is a box; None: its elements follow
            each other.

    Returns:
        int64 [2], the two lanes, on the tensor's device, which is not waited for.

    Raises:
        ValueError: for a tensor without elements in memory, a place that the whole tensor does not
            have, or a box that is cut in two dimensions behind the first.
    """
    return digest_many([tensor], [start], [whole])[0]


def digest_many(
    tensors: Sequence[torch.Tensor],
    starts: Sequence[int] | None = None,
    wholes: Sequence[Sequence[int] | None] | None = None,
) -> torch.Tensor:
    """Returns the digests of a list of tensors on one device, in one launch on a GPU.

    Args:
        tensors: as `digest` takes them.
        starts: for each tensor the index of its first element in its whole one; None: 0.
        wholes: for each tensor the whole one's shape, or None; None: for all.

    Returns:
        int64 [n, 2].

    Raises:
        ValueError: as `digest` does, for lists of unequal lengths, and tensors of several devices.
    """
    starts = [0] * len(tensors) if starts is None else starts
    wholes = [None] * len(tensors) if wholes is None else wholes
    for name, values in (("starts", starts), ("wholes", wholes)):
        if len(values) != len(tensors):
            refuse(name, f"a list of {len(tensors)}, one for each tensor", values)
    entries = enumerate(zip(tensors, starts, wholes, strict=True))
    places = [
        place_in(tensor, start, whole, f"tensors[{i}]") for i, (tensor, start, whole) in entries
    ]
    return of_places(tensors, places)[:, :2]


def hexadecimal(lanes: torch.Tensor) -> str:
    """Returns the 32 digits of a digest, int64 [2]; waits for its device."""
    return "".join(f"{lane % 2**64:016x}" for lane in lanes[:2].tolist())


def of_places(tensors: Sequence[torch.Tensor], places: Sequence[Place]) -> torch.Tensor:
    """Returns int64 [n, 3]: digests of tensors at places, and how many elements are not finite."""
    return Digester(tensors, places)(tensors)


class Digester:
    """The digests of lists of tensors that are alike; keeps what the device needs between calls.

    A call may be captured in a CUDA graph, if one like it went before.

    Args:
        tensors: on one device.
        places: of each tensor in its whole one.

    Raises:
        ValueError: for tensors of several devices, without elements in memory, or of a dtype
            whose bits are not read, and for places beyond 2**40 - 1.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], places: Sequence[Place]) -> None:
        shards = [local_of(tensor) for tensor in tensors]
        for index, (tensor, place) in enumerate(zip(shards, places, strict=True)):
            _check(tensor, place, f"tensors[{index}]")
        devices = list(dict.fromkeys(tensor.device for tensor in shards))
        if len(devices) > 1:
            refuse("tensors", "on one device", devices)
        self._are_sharded = any(map(operator.is_not, shards, tensors))
        launches = bool(shards) and default_backend(devices[0]) == "triton"
        self._looks = Looks(shards)
        self._digests = Digests(shards, places, launches)

    def __call__(
        self, tensors: Sequence[torch.Tensor], addresses: numpy.ndarray | None = None
    ) -> torch.Tensor:
        """Returns the digests of tensors of the shapes and dtypes that the digester was made for.

        Args:
            tensors: of these shapes and dtypes.
            addresses: of plain tensors, as `Looked` has them; None: the tensors are looked at here.

        Returns:
            int64 [n, 3] on their device: the two lanes, and how many elements are not finite.

        Raises ValueError for other tensors.
        """
        shards = [*map(local_of, tensors)] if self._are_sharded else tensors
        if addresses is None:
            looked = self._looks.look(shards)
            if looked is None:
                refuse("tensors", "of the sizes, dtypes and device of those before", tensors)
            addresses = looked.addresses
        return self._digests(shards, addresses)


def place_in(tensor: Any, start: int, whole: Sequence[int] | None, name: str) -> Place:
    """Returns a tensor's place in the whole one; ValueError where the whole has no such place."""
    if type(start) is not int or start < 0:
        refuse("start", "a whole number >= 0", start)
    local = local_of(tensor)
    if local is not tensor:
        return place_of_shard(0, tensor, shard_first(tensor), local.shape, tensor.shape)
    if whole is None:
        return Place(0, start)
    shape = tuple(tensor.shape)
    if len(whole) != len(shape) or any(s > w for s, w in zip(shape, whole, strict=True)):
        refuse("whole", f"a shape that holds {name} of shape {shape}", whole)
    place = place_of_box(0, start, shape, whole)
    if place is None:
        refuse("whole", f"cut in at most one dimension behind the first for shape {shape}", whole)
    if tensor.numel() and not _holds(whole, start, shape):
        refuse("start", f"a place in shape {tuple(whole)} that holds {name}", start)
    return place


def _holds(whole: Sequence[int], start: int, shape: Sequence[int]) -> bool:
    """Returns whether a box that begins at an element ends within the whole in each dimension."""
    for size, extent in zip(reversed(shape), reversed(whole), strict=True):
        start, begin = divmod(start, extent)
        if begin + size > extent:
            return False
    return start == 0


def _check(tensor: Any, place: Place, name: str) -> None:
    """Raises ValueError for tensors without elements in memory, and places that are too large."""
    if not is_dense(tensor) or tensor.is_meta or is_traceable_wrapper_subclass(tensor):
        refuse(name, "a torch.Tensor with elements in memory of its own", tensor)
    if tensor.is_quantized or (tensor.itemsize not in WHOLE and not tensor.is_complex()):
        refuse(f"{name}.dtype", "one of 1, 2, 4 or 8 bytes, or complex", tensor.dtype)
    numel, code_place = count_of(tensor), place_of_codes(tensor, place)
    if numel and code_place.last(numel) > LAST_PLACE:
        refuse(f"{name}'s last place", f"at most {LAST_PLACE}", code_place.last(numel))
