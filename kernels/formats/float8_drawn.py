"""fp8 weights without fp32 masters: rounded stochastically, or with 8 more bits beside each code.

A scaled value is multiplied by the power of two that brings it to where fp32's own pattern, cut to
8 bits, is the code; fp32's subnormals are the code's. Cut to 16 bits it is the code and 8 bits that
follow: the remainder, an int8, is what the nearest code leaves. So the pair is a number of 4 + 11
bits, and the weight that number, rounded to nearest, ties away from zero.

What is beyond the largest number becomes that, infinity too; every NaN is 0x7F. A pair that no
encoding makes (somebody else wrote the code) counts within the codes' numbers: below 0 as 0, above
the largest as that.
"""

from __future__ import annotations

from typing import Any

import torch

from megaopt.kernels.formats.base import Format, converted
from megaopt.kernels.formats.float8 import FLOAT8_E4M3, NAN_CODE, decode_e4m3
from megaopt.kernels.optional_triton import helper, tl

# What brings values to the code's place and back, how many bits of fp32's mantissa are dropped,
# just less than half of a pair's last place, and the code of the largest number, 448.
DOWN: tl.constexpr = tl.constexpr(2.0**-120)
UP: tl.constexpr = tl.constexpr(2.0**120)
DROPPED: tl.constexpr = tl.constexpr(20)
HALF: tl.constexpr = tl.constexpr(0x7FF)
LARGEST: tl.constexpr = tl.constexpr(0x7E)


@helper
def magnitude(value):
    """The pattern, int32, of which the upper bits are the code."""
    return (tl.abs(value) * DOWN).to(tl.int32, bitcast=True)


@helper
def signed(value, code):
    """A magnitude's code as int8, with the value's sign; every NaN one code."""
    code = code | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(value == value, code, NAN_CODE).to(tl.int8)


@helper
def encode_e4m3(value, inverse, bits):
    """The code above or below a value; bits: 16 random ones, which come before a half."""
    # 17 bits, the last one a half, at the top of the 20 that are dropped
    random = (bits * 2 + 1) << (DROPPED - 17)
    return signed(value, tl.minimum((magnitude(value) + random) >> DROPPED, LARGEST))


@helper
def parted(value, wide):
    """Code and remainder of a magnitude's 15 bits."""
    # at most the largest code with no remainder
    wide = tl.minimum(wide, LARGEST << 8)
    # the nearest code, and what it leaves, from -128 to 127
    code = (wide + 128) >> 8
    rest = tl.where(value == value, wide - (code << 8), 0)
    return signed(value, code), rest.to(tl.int8)


@helper
def encode_pair(value):
    """The code and what it leaves, to nearest even."""
    bits = magnitude(value)
    half = HALF + ((bits >> (DROPPED - 8)) & 1)
    return parted(value, (bits + half) >> (DROPPED - 8))


@helper
def encode_drawn_pair(value, bits):
    # of 16 random bits the upper ones, as many as are dropped
    wide = (magnitude(value) + (bits >> (24 - DROPPED))) >> (DROPPED - 8)
    return parted(value, wide)


@helper
def decode_pair(weight_code, code):
    """The magnitude of a pair, with the code's sign."""
    weight = weight_code.to(tl.int32)
    # magnitudes: 256 * code + remainder, held within the codes' numbers
    wide = ((weight & 0x7F) << 8) + code.to(tl.int32)
    wide = tl.minimum(tl.maximum(wide, 0), LARGEST << 8)
    # back to fp32, then the code's sign; codes of NaN stay NaN
    value = (wide << (DROPPED - 8)).to(tl.float32, bitcast=True) * UP
    bits = value.to(tl.int32, bitcast=True) | ((weight & 0x80) << 24)
    special = (weight & 0x7F) > LARGEST
    return tl.where(special, decode_e4m3(weight_code, 1.0), bits.to(tl.float32, bitcast=True))


def magnitude_reference(value: torch.Tensor) -> torch.Tensor:
    """The pattern, int32, of which the bits above the dropped ones are the code."""
    return (value.abs() * 2.0**-120).view(torch.int32)


def signed_reference(value: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """The fp8 codes of magnitudes, with the values' signs; every NaN is 0x7F."""
    code = code | ((value.view(torch.int32) >> 24) & 0x80)
    return code.masked_fill(value.isnan(), 0x7F).to(torch.uint8).view(torch.float8_e4m3fn)


def encode_e4m3_reference(
    value: torch.Tensor, inverse: torch.Tensor | None, bits: torch.Tensor
) -> torch.Tensor:
    """The code above or below each fp32 value; bits: 16 random ones, int32."""
    code = (magnitude_reference(value) + ((bits * 2 + 1) << 3)) >> 20
    return signed_reference(value, code.clamp(max=0x7E))


def _parted(value: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = wide.clamp(max=0x7E << 8)
    code = (wide + 128) >> 8
    rest = (wide - (code << 8)).masked_fill(value.isnan(), 0)
    return signed_reference(value, code), rest.to(torch.int8)


def encode_pair_reference(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The code and the int8 remainder of an fp32 value, to the nearest pair."""
    bits = magnitude_reference(value)
    return _parted(value, (bits + 0x7FF + ((bits >> 12) & 1)) >> 12)


def encode_drawn_pair_reference(
    value: torch.Tensor, bits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise, to one of the two pairs around the value, in the mean the value."""
    return _parted(value, (magnitude_reference(value) + (bits >> 4)) >> 12)


def decode_pair_reference(weight: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """The fp32 value of fp8 codes and their remainders, all of one shape."""
    bits = weight.view(torch.uint8).int()
    wide = (((bits & 0x7F) << 8) + code.int()).clamp(0, 0x7E << 8)
    value = (wide << 12).view(torch.float32) * 2.0**120
    value = torch.where(bits >= 0x80, -value, value)
    return torch.where((bits & 0x7F) > 0x7E, converted(weight), value)


def remainder_of(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The int8 that brings a code nearest to an fp32 value: as far as it goes."""
    # the pair that the value would have
    code, rest = encode_pair_reference(value)
    wide, bits = (tensor.view(torch.uint8).int() for tensor in (code, weight))
    # from the weight's code to the value, in units of the remainder, along the code's sign
    distance = ((wide & 0x7F) << 8) + rest.int()
    distance = torch.where((wide ^ bits) >= 0x80, -distance, distance) - ((bits & 0x7F) << 8)
    # none beside NaN; -128 to 127 is as far as an int8 goes
    usable = ((bits & 0x7F) <= 0x7E) & ~value.isnan()
    return torch.where(usable, distance.clamp(-128, 127), 0).to(torch.int8)


FLOAT8_E4M3_STOCHASTIC = FLOAT8_E4M3.drawn(encode_e4m3, encode_e4m3_reference)
PAIR = Format(
    "remainder8_float8_e4m3",
    torch.int8,
    tl.int8,
    decode_pair,
    encode_pair,
    decode_pair_reference,
    encode_pair_reference,
    joined=True,
    requires_weight=torch.float8_e4m3fn,
)
PAIRS: dict[torch.dtype, dict[Any, Format]] = {
    torch.float8_e4m3fn: {
        "remainder8": PAIR,
        "remainder8_stochastic": PAIR.drawn(encode_drawn_pair, encode_drawn_pair_reference),
    }
}
"""Remainders beside codes of a dtype, by the name of master_weight_dtype."""
