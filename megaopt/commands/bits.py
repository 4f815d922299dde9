"""Bit patterns: as integers, in hexadecimal, packed to be sent, and where two tensors differ."""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import torch

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Snapshot = dict[str, dict[str, torch.Tensor]]
"""Parameter name, in model order -> kind ("weight", "master_param", "exp_avg", "exp_avg_sq") ->
tensor in the weight's shape. There is no master_param where an fp32 weight is its own master.
An fp8 weight has "codes", "scale_inv" (of its recipe's shape) and, with delayed scaling, "scale"
and "amax_history" in the place of "weight"."""


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


def from_integers(integers: torch.Tensor, dtype: str, device: torch.device) -> torch.Tensor:
    """What `as_integers` made of a tensor of that dtype, by its name ("torch.float32"); moved."""
    return integers.to(device).view(getattr(torch, dtype.removeprefix("torch.")))


def pack(snapshot: Snapshot, arrays: bool = False) -> dict[str, Any]:
    """Dtypes' names and integers on the CPU, so that no bit is touched on the way to a file.

    As arrays for a pipe, in which tensors would share memory with a process that may have ended.
    """

    def packed(tensor: torch.Tensor) -> Any:
        integers = as_integers(tensor).cpu()
        return str(tensor.dtype), integers.numpy() if arrays else integers

    return {
        name: {kind: packed(tensor) for kind, tensor in kinds.items()}
        for name, kinds in snapshot.items()
    }


def unpack(packed: dict[str, Any], device: torch.device) -> Snapshot:
    """What `pack` packed, onto a device."""
    return {
        name: {
            kind: from_integers(torch.as_tensor(integers), dtype, device)
            for kind, (dtype, integers) in kinds.items()
        }
        for name, kinds in packed.items()
    }


def hexadecimal(tensor: torch.Tensor, index: int) -> str:
    """The bit pattern of one element, by flat index."""
    value = int(as_integers(tensor).view(-1)[index].item())
    return in_digits(value, 8 * tensor.element_size())


def in_digits(number: int, bits: int) -> str:
    """A whole number of so many bits, signed or not, in hexadecimal."""
    return f"0x{number % (1 << bits):0{bits // 4}x}"


def loss_bits(loss: float) -> str:
    """The fp32 bit pattern of a loss; of every NaN 0x7fc00000."""
    loss = math.nan if math.isnan(loss) else loss
    return f"0x{struct.unpack('<I', struct.pack('<f', loss))[0]:08x}"


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
