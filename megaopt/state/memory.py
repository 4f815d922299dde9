"""Whether a step may write its tensors: none is shared, overlaps itself, or was made to be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy
import torch


class NamedTensor(NamedTuple):
    """A tensor that a step writes, and how messages call it."""

    where: str
    name: str
    tensor: torch.Tensor

    def __str__(self) -> str:
        """The tensor as messages call it."""
        return f"{self.where}: {self.name}"


def check_writable(tensor: torch.Tensor, where: str) -> None:
    """Raises ValueError for a tensor that torch would refuse to write, or only half."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{where} must be a tensor that may be written, got one made in "
            "torch.inference_mode(); clone it outside"
        )
    if tensor.is_neg():
        raise ValueError(
            f"{where} must be a tensor of its own values, got one with a pending negation; "
            "resolve_neg() makes one"
        )
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in strides):
        raise ValueError(
            f"{where} must have memory of its own for each element, got strides "
            f"{tensor.stride()} of shape {tuple(tensor.shape)}"
        )


def check_memory(tensors: Sequence[NamedTensor]) -> None:
    """Raises ValueError where a tensor cannot be written, or an element is written twice.

    On a GPU such a step would be a race. Costs a sort of the addresses; only tensors whose ranges
    of addresses meet are looked at element by element.
    """
    for entry in tensors:
        check_writable(entry.tensor, f"{entry.where}: {entry.name}")
    # device by device; empty tensors take no memory
    used = [entry for entry in tensors if entry.tensor.numel()]
    for device in sorted({str(entry.tensor.device) for entry in used}):
        on_device = [entry for entry in used if str(entry.tensor.device) == device]
        # sorted by their beginning: a cluster ends where a tensor begins behind all ends so far
        begins = numpy.array([entry.tensor.data_ptr() for entry in on_device], dtype=numpy.int64)
        ends = numpy.array([_end(entry.tensor) for entry in on_device], dtype=numpy.int64)
        order = numpy.argsort(begins, kind="stable")
        reached = numpy.maximum.accumulate(ends[order])
        starts = numpy.flatnonzero(begins[order][1:] >= reached[:-1]) + 1
        for part in numpy.split(order, starts):
            cluster = [on_device[index] for index in part.tolist()]
            # tensors that meet no other, and are contiguous, cannot overlap
            if len(cluster) > 1 or not cluster[0].tensor.is_contiguous():
                _check_elements(cluster)


def _end(tensor: torch.Tensor) -> int:
    """The address past the last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check_elements(tensors: Sequence[NamedTensor]) -> None:
    """Marks every element's memory; raises where it is marked already."""
    # a unit is the largest size of which all elements are multiples
    base = min(entry.tensor.data_ptr() for entry in tensors)
    unit = math.gcd(*(entry.tensor.element_size() for entry in tensors))
    size = (max(_end(entry.tensor) for entry in tensors) - base) // unit
    # int64, for each unit of memory the tensor that has it, -1 for none
    owners = numpy.full(size, -1, dtype=numpy.int64)
    for index, entry in enumerate(tensors):
        units = _units(entry.tensor, base, unit)
        owner = int(owners[units].max())
        if owner >= 0:
            raise ValueError(
                f"{entry} must have memory of its own, got memory shared with {tensors[owner]}"
            )
        # one tensor has a unit twice
        if len(numpy.unique(units)) != len(units):
            raise ValueError(
                f"{entry} must have memory of its own for each element, got strides "
                f"{entry.tensor.stride()} of shape {tuple(entry.tensor.shape)}"
            )
        owners[units] = index


def _units(tensor: torch.Tensor, base: int, unit: int) -> numpy.ndarray:
    """Returns the units of memory that the elements take, counted from the base."""
    # dimension by dimension: the beginnings of all elements, then their units
    width = tensor.element_size() // unit
    places = numpy.array([(tensor.data_ptr() - base) // unit])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + numpy.arange(size) * stride * width).reshape(-1)
    return (places[:, None] + numpy.arange(width)).reshape(-1)
