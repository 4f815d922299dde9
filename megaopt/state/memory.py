"""Whether a step may write its tensors: none is shared, overlaps itself, or was made to be read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
import torch

from megaopt.options.checks import has_shared_elements

NamedTensor = tuple[str, torch.Tensor]
"""A tensor that a step writes, behind what messages call it."""


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
    if has_shared_elements(tensor):
        raise ValueError(
            f"{where} must have memory of its own for each element, got strides "
            f"{tensor.stride()} of shape {tuple(tensor.shape)}"
        )


def check_memory(tensors: Sequence[NamedTensor]) -> None:
    """Raises ValueError where a tensor cannot be written, or an element is written twice.

    On a GPU such a step would be a race. Costs a sort of the addresses; only tensors whose ranges
    of addresses meet are looked at element by element.
    """
    # device by device; empty tensors take no memory
    devices: dict[torch.device, list[NamedTensor]] = {}
    for name, tensor in tensors:
        check_writable(tensor, name)
        if tensor.numel():
            devices.setdefault(tensor.device, []).append((name, tensor))
    for _, entries in sorted(devices.items(), key=lambda item: str(item[0])):
        # sorted by their beginning: a cluster ends where a tensor begins behind all ends so far
        begins = numpy.array([t.data_ptr() for _, t in entries], dtype=numpy.int64)
        # the address past the last element of each, which strides say
        lasts = [
            sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
            for _, t in entries
        ]
        sizes = numpy.array([t.element_size() for _, t in entries], dtype=numpy.int64)
        ends = begins + (numpy.array(lasts, dtype=numpy.int64) + 1) * sizes
        order = numpy.argsort(begins, kind="stable")
        reached = numpy.maximum.accumulate(ends[order])
        starts = numpy.flatnonzero(begins[order][1:] >= reached[:-1]) + 1
        for places in numpy.split(order, starts):
            cluster = [entries[place] for place in places]
            # tensors that meet no other, and are contiguous, cannot overlap
            if len(cluster) > 1 or not cluster[0][1].is_contiguous():
                _check_elements(cluster, int(ends[places].max()))


def _check_elements(entries: Sequence[NamedTensor], end: int) -> None:
    """Marks every element's memory, up to this address; raises where it is marked already."""
    # a unit is the largest size of which all elements are multiples
    base = min(tensor.data_ptr() for _, tensor in entries)
    unit = math.gcd(*(tensor.element_size() for _, tensor in entries))
    size = (end - base) // unit
    # int64, for each unit of memory the tensor that has it, -1 for none
    owners = numpy.full(size, -1, dtype=numpy.int64)
    for index, (name, tensor) in enumerate(entries):
        # dimension by dimension: the beginnings of all elements, then their units
        width = tensor.element_size() // unit
        units = numpy.array([(tensor.data_ptr() - base) // unit])
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            units = (units[:, None] + numpy.arange(size) * stride * width).reshape(-1)
        units = (units[:, None] + numpy.arange(width)).reshape(-1)
        owner = int(owners[units].max())
        if owner >= 0:
            raise ValueError(
                f"{name} must have memory of its own, got memory shared with {entries[owner][0]}"
            )
        # one tensor has a unit twice
        if len(numpy.unique(units)) != len(units):
            raise ValueError(
                f"{name} must have memory of its own for each element, got strides "
                f"{tensor.stride()} of shape {tuple(tensor.shape)}"
            )
        owners[units] = index
