"""Bit patterns: as integers, in hexadecimal, and where two tensors differ."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns, as integers of the same width."""
    return tensor.detach().contiguous().view(INTEGER_OF_SIZE[tensor.element_size()])


def compared_integers(tensor: torch.Tensor) -> torch.Tensor:
    """What is compared: the bit patterns as integers, of every NaN that of torch.nan."""
    integers = as_integers(tensor)
    if not tensor.is_floating_point():
        return integers
    nan = as_integers(torch.tensor(math.nan).to(tensor.dtype))
    return integers.masked_fill(tensor.detach().isnan(), int(nan.item()))


def hexadecimal(tensor: torch.Tensor, index: int) -> str:
    """The bit pattern of one element, by flat index."""
    value, bits = int(as_integers(tensor).view(-1)[index].item()), 8 * tensor.element_size()
    return f"0x{value % (1 << bits):0{bits // 4}x}"


class Unequal(NamedTuple):
    """The first element in which two tensors differ."""

    place: int
    """Its flat index."""
    bits: str
    """Hexadecimal."""
    others: str


def first_unequal(
    tensor: torch.Tensor, other: torch.Tensor, nans_alike: bool = True
) -> Unequal | None:
    """The first element of other bits; tensors of one dtype and shape, NaNs by place alone."""
    if torch.equal(as_integers(tensor), as_integers(other)):
        return None
    integers = compared_integers if nans_alike else as_integers
    places = (integers(tensor) != integers(other)).view(-1).nonzero()
    if len(places) == 0:
        return None
    index = int(places[0].item())
    return Unequal(index, hexadecimal(tensor, index), hexadecimal(other, index))
