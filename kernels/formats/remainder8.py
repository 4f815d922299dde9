"""24-bit masters: the 8 bits of an fp32 value that follow its bf16 weight, 1 byte beside 2.

The value is a number of 24 bits, sign, exponent and 15 bits of mantissa: of an fp32 pattern the
upper 24 bits, rounded to nearest even or stochastically. The weight is its upper 16, plus one where
the lower 8 as int8 are negative, as remainder16 has it.
"""

from __future__ import annotations

import torch

from megaopt.kernels.formats.base import Format
from megaopt.kernels.formats.remainder16 import joined_reference, or_weight
from megaopt.kernels.optional_triton import helper, tl


@helper
def decode(weight_code, code):
    # as remainder16, with 8 bits of remainder over 8 of zeros
    upper = tl.where(code < 0, weight_code - 1, weight_code).to(tl.int32)
    value = ((upper << 16) | ((code.to(tl.int32) & 0xFF) << 8)).to(tl.float32, bitcast=True)
    return or_weight(value, weight_code)


@helper
def split(value, pattern):
    """Weight and remainder of a pattern whose lower 8 bits do not count; value: whether it is NaN.

    A NaN gives up what its weight does not hold, and is quiet.
    """
    pattern = tl.where(
        value == value, pattern, (value.to(tl.int32, bitcast=True) & -65536) | 0x400000
    )
    # bits 8 to 15 as int8; the upper half is rounded up where they are negative
    code = (pattern >> 8).to(tl.int8)
    upper = pattern >> 16
    return tl.where(code < 0, upper + 1, upper).to(tl.int16), code


@helper
def encode(value):
    # to nearest even at bit 8
    bits = value.to(tl.int32, bitcast=True)
    return split(value, bits + 0x7F + ((bits >> 8) & 1))


@helper
def encode_stochastic(value, bits):
    # of 16 random bits the upper 8: as many as are dropped
    return split(value, value.to(tl.int32, bitcast=True) + (bits >> 8))


def decode_reference(weight: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """The fp32 value of a bf16 weight and its int8 remainder, all of one shape."""
    return joined_reference(weight, code, (code.int() & 0xFF) << 8)


def split_reference(
    value: torch.Tensor, pattern: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and remainder of a pattern, int32, whose lower 8 bits do not count."""
    nan = (value.view(torch.int32) & -65536) | 0x400000
    pattern = torch.where(value.isnan(), nan, pattern)
    code = (pattern << 16) >> 24
    upper = (pattern >> 16) + (code < 0).int()
    weight = ((upper << 16) >> 16).to(torch.int16).view(torch.bfloat16)
    return weight, code.to(torch.int8)


def encode_reference(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 weight and the int8 remainder of an fp32 value, to the nearest 24 bits."""
    bits = value.view(torch.int32)
    return split_reference(value, bits + 0x7F + ((bits >> 8) & 1))


def encode_stochastic_reference(
    value: torch.Tensor, bits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise, to one of the two numbers of 24 bits around the value, in the mean the value."""
    return split_reference(value, value.view(torch.int32) + (bits >> 8))


REMAINDER8 = Format(
    "remainder8",
    torch.int8,
    tl.int8,
    decode,
    encode,
    decode_reference,
    encode_reference,
    joined=True,
    requires_weight=torch.bfloat16,
)
REMAINDER8_STOCHASTIC = REMAINDER8.drawn(encode_stochastic, encode_stochastic_reference)
