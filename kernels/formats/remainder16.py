"""The 16 bits of an fp32 master that its bf16 weight does not hold: exact, 2 bytes instead of 4.

The weight is the upper half, plus one where the lower half as int16 is negative: rounding to
nearest with ties away from zero. Nearest-even cannot do this: it gives an even bf16 value 65,537
fp32 values, one more than 16 bits can tell apart (two ties and all between them).
"""

from __future__ import annotations

import torch

from megaopt.kernels.formats.base import Format
from megaopt.kernels.optional_triton import helper, tl


@helper
def or_weight(value, weight_code):
    """The value of a pair; of one that no encoding makes, which would be NaN, the weight's own.

    These are zeros beside a negative remainder and infinities beside a positive one: somebody else
    wrote the weight.
    """
    weight_value = (weight_code.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return tl.where(value == value, value, weight_value)


@helper
def decode(weight_code, code):
    # a negative remainder: the weight was rounded up, by one
    upper = tl.where(code < 0, weight_code - 1, weight_code).to(tl.int32)
    value = ((upper << 16) | (code.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
    return or_weight(value, weight_code)


@helper
def encode(value):
    # lossless for every number: the carry turns at most the largest finite upper half into
    # infinity's, which decode takes back. A NaN gives up its lower half: with a carry, as
    # TransformerEngine splits it, the GPU's NaN 0x7FFFFFFF becomes the weight -0.0.
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(value == value, bits, (bits & -65536) | 0x400000)
    # lower half as int16; the upper half is rounded up where that is negative
    code = bits.to(tl.int16)
    upper = bits >> 16
    return tl.where(code < 0, upper + 1, upper).to(tl.int16), code


def joined_reference(weight: torch.Tensor, code: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """The fp32 values of pairs; of those that no encoding makes the bf16 weights' own."""
    # int32 pattern: the weight's, less the carry, over the lower half
    upper = weight.view(torch.int16).int() - (code < 0).int()
    value = ((upper << 16) | lower).view(torch.float32)
    weight_value = (weight.view(torch.int16).int() << 16).view(torch.float32)
    return torch.where(value.isnan(), weight_value, value)


def decode_reference(weight: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 weight and its int16 remainder, all of one shape."""
    return joined_reference(weight, code, code.int() & 0xFFFF)


def encode_reference(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 weight and the int16 remainder of an fp32 value."""
    bits = value.view(torch.int32)
    bits = torch.where(value.isnan(), (bits & -65536) | 0x400000, bits)
    # shifts keep the sign, and torch defines the narrowing of what then fits
    code = (bits << 16) >> 16
    upper = (bits >> 16) + (code < 0).int()
    weight = ((upper << 16) >> 16).to(torch.int16).view(torch.bfloat16)
    return weight, code.to(torch.int16)


REMAINDER16 = Format(
    "remainder16",
    torch.int16,
    tl.int16,
    decode,
    encode,
    decode_reference,
    encode_reference,
    joined=True,
    requires_weight=torch.bfloat16,
)
