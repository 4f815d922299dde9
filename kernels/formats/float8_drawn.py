"""fp8 weights without fp32 masters: rounded stochastically, or with 8 more bits beside each code.

A scaled value is multiplied by the power of two that brings it to where fp32's own pattern, cut to
8 bits, is the code; fp32's subnormals are the code's. Cut to 16 bits it is the code and 8 bits that
follow: the remainder, an int8, is what the nearest code leaves. So the pair is a number of 4 + 11
bits (e4m3) or 5 + 10 (e5m2), and the weight that number, rounded to nearest, ties away from zero.

What is beyond the largest number becomes that, infinity too; every NaN is 0x7F. A pair that no
encoding makes (somebody else wrote the code) counts within the codes' numbers: below 0 as 0, above
the largest as that.
"""

from __future__ import annotations

from typing import Any

import torch

from megaopt.kernels.formats.base import Format
from megaopt.kernels.formats.float8 import (
    NAN_CODE,
    decode_e4m3,
    decode_e5m2,
    decode_reference,
)
from megaopt.kernels.optional_triton import helper, tl

# By format: what brings values to the code's place and back, how many bits of fp32's mantissa are
# dropped, and the code of the largest number: 448 and 57344.
E4M3_DOWN: tl.constexpr = tl.constexpr(2.0**-120)
E4M3_UP: tl.constexpr = tl.constexpr(2.0**120)
E4M3_DROPPED: tl.constexpr = tl.constexpr(20)
E4M3_HALF: tl.constexpr = tl.constexpr(0x7FF)
E4M3_LARGEST: tl.constexpr = tl.constexpr(0x7E)
E5M2_DOWN: tl.constexpr = tl.constexpr(2.0**-112)
E5M2_UP: tl.constexpr = tl.constexpr(2.0**112)
E5M2_DROPPED: tl.constexpr = tl.constexpr(21)
E5M2_HALF: tl.constexpr = tl.constexpr(0xFFF)
E5M2_LARGEST: tl.constexpr = tl.constexpr(0x7B)


@helper
def magnitude(value, DOWN: tl.constexpr):
    """The pattern, int32, of which the upper bits are the code."""
    return (tl.abs(value) * DOWN).to(tl.int32, bitcast=True)


@helper
def signed(value, code):
    """A magnitude's code as int8, with the value's sign; every NaN one code."""
    code = code | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(value == value, code, NAN_CODE).to(tl.int8)


@helper
def drawn(value, bits, DOWN: tl.constexpr, DROPPED: tl.constexpr, LARGEST: tl.constexpr):
    """The code above or below a value; bits: 16 random ones, which come before a half."""
    random = (bits * 2 + 1) << (DROPPED - 17)
    return signed(value, tl.minimum((magnitude(value, DOWN) + random) >> DROPPED, LARGEST))


@helper
def parted(value, wide, LARGEST: tl.constexpr):
    """Code and remainder of a magnitude's 15 bits."""
    wide = tl.minimum(wide, LARGEST << 8)
    code = (wide + 128) >> 8
    rest = tl.where(value == value, wide - (code << 8), 0)
    return signed(value, code), rest.to(tl.int8)


@helper
def nearest_pair(
    value, DOWN: tl.constexpr, DROPPED: tl.constexpr, HALF: tl.constexpr, LARGEST: tl.constexpr
):
    """The code and what it leaves, to nearest even; HALF: just less than half of a last place."""
    bits = magnitude(value, DOWN)
    half = HALF + ((bits >> (DROPPED - 8)) & 1)
    return parted(value, (bits + half) >> (DROPPED - 8), LARGEST)


@helper
def drawn_pair(value, bits, DOWN: tl.constexpr, DROPPED: tl.constexpr, LARGEST: tl.constexpr):
    # of 16 random bits the upper ones, as many as are dropped
    wide = (magnitude(value, DOWN) + (bits >> (24 - DROPPED))) >> (DROPPED - 8)
    return parted(value, wide, LARGEST)


@helper
def joined(weight_code, code, UP: tl.constexpr, DROPPED: tl.constexpr, LARGEST: tl.constexpr):
    """The magnitude of a pair, with the code's sign."""
    weight = weight_code.to(tl.int32)
    wide = ((weight & 0x7F) << 8) + code.to(tl.int32)
    wide = tl.minimum(tl.maximum(wide, 0), LARGEST << 8)
    value = (wide << (DROPPED - 8)).to(tl.float32, bitcast=True) * UP
    bits = value.to(tl.int32, bitcast=True) | ((weight & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@helper
def encode_e4m3(value, inverse, bits):
    return drawn(value, bits, E4M3_DOWN, E4M3_DROPPED, E4M3_LARGEST)


@helper
def encode_e5m2(value, inverse, bits):
    return drawn(value, bits, E5M2_DOWN, E5M2_DROPPED, E5M2_LARGEST)


@helper
def encode_pair_e4m3(value):
    return nearest_pair(value, E4M3_DOWN, E4M3_DROPPED, E4M3_HALF, E4M3_LARGEST)


@helper
def encode_pair_e5m2(value):
    return nearest_pair(value, E5M2_DOWN, E5M2_DROPPED, E5M2_HALF, E5M2_LARGEST)


@helper
def encode_drawn_pair_e4m3(value, bits):
    return drawn_pair(value, bits, E4M3_DOWN, E4M3_DROPPED, E4M3_LARGEST)


@helper
def encode_drawn_pair_e5m2(value, bits):
    return drawn_pair(value, bits, E5M2_DOWN, E5M2_DROPPED, E5M2_LARGEST)


@helper
def decode_pair_e4m3(weight_code, code):
    value = joined(weight_code, code, E4M3_UP, E4M3_DROPPED, E4M3_LARGEST)
    special = (weight_code.to(tl.int32) & 0x7F) > E4M3_LARGEST
    return tl.where(special, decode_e4m3(weight_code, 1.0), value)


@helper
def decode_pair_e5m2(weight_code, code):
    value = joined(weight_code, code, E5M2_UP, E5M2_DROPPED, E5M2_LARGEST)
    special = (weight_code.to(tl.int32) & 0x7F) > E5M2_LARGEST
    return tl.where(special, decode_e5m2(weight_code, 1.0), value)


def magnitude_reference(value: torch.Tensor, dropped: int) -> torch.Tensor:
    """The pattern, int32, of which the bits above the dropped ones are the code."""
    down = 2.0 ** (-120 if dropped == 20 else -112)
    return (value.abs() * down).view(torch.int32)


def signed_reference(value: torch.Tensor, code: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The fp8 codes of magnitudes, with the values' signs; every NaN is 0x7F."""
    code = code | ((value.view(torch.int32) >> 24) & 0x80)
    return code.masked_fill(value.isnan(), 0x7F).to(torch.uint8).view(dtype)


class Fp8:
    """The twins of one fp8 dtype; dropped: the bits of an fp32 mantissa that its own has not."""

    def __init__(self, dtype: torch.dtype, dropped: int, largest: int) -> None:
        self.dtype, self.dropped, self.largest = dtype, dropped, largest

    def encode(
        self, value: torch.Tensor, inverse: torch.Tensor | None, bits: torch.Tensor
    ) -> torch.Tensor:
        """The code above or below each fp32 value; bits: 16 random ones, int32."""
        random = (bits * 2 + 1) << (self.dropped - 17)
        code = (magnitude_reference(value, self.dropped) + random) >> self.dropped
        return signed_reference(value, code.clamp(max=self.largest), self.dtype)

    def encode_pair(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The code and the int8 remainder of an fp32 value, to the nearest pair."""
        bits = magnitude_reference(value, self.dropped)
        half = (1 << (self.dropped - 9)) - 1 + ((bits >> (self.dropped - 8)) & 1)
        return self._parted(value, (bits + half) >> (self.dropped - 8))

    def encode_drawn_pair(
        self, value: torch.Tensor, bits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Likewise, to one of the two pairs around the value, in the mean the value."""
        random = bits >> (24 - self.dropped)
        wide = (magnitude_reference(value, self.dropped) + random) >> (self.dropped - 8)
        return self._parted(value, wide)

    def _parted(self, value: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = wide.clamp(max=self.largest << 8)
        code = (wide + 128) >> 8
        rest = (wide - (code << 8)).masked_fill(value.isnan(), 0)
        return signed_reference(value, code, self.dtype), rest.to(torch.int8)

    def decode_pair(self, weight: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
        """The fp32 value of fp8 codes and their remainders, all of one shape."""
        own = weight.view(torch.uint8).int()
        wide = (((own & 0x7F) << 8) + code.int()).clamp(0, self.largest << 8)
        up = 2.0 ** (120 if self.dropped == 20 else 112)
        value = (wide << (self.dropped - 8)).view(torch.float32) * up
        value = torch.where(own >= 0x80, -value, value)
        return torch.where((own & 0x7F) > self.largest, decode_reference(weight), value)

    def remainder_of(self, weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The int8 that brings a code nearest to an fp32 value: as far as it goes."""
        code, rest = self.encode_pair(value)
        wide, own = (each.view(torch.uint8).int() for each in (code, weight))
        distance = ((wide & 0x7F) << 8) + rest.int()
        distance = torch.where((wide ^ own) >= 0x80, -distance, distance) - ((own & 0x7F) << 8)
        usable = ((own & 0x7F) <= self.largest) & ~value.isnan()
        return torch.where(usable, distance.clamp(-128, 127), 0).to(torch.int8)


E4M3 = Fp8(torch.float8_e4m3fn, 20, 0x7E)
E5M2 = Fp8(torch.float8_e5m2, 21, 0x7B)


def _drawn(name: str, own: Fp8, decode: Any, encode: Any) -> Format:
    reference = own.encode
    return Format(name, own.dtype, tl.int8, decode, encode, decode_reference, reference, draws=True)


def _pair(name: str, own: Fp8, decode: Any, encode: Any) -> Format:
    functions = (decode, encode, own.decode_pair, own.encode_pair)
    return Format(name, torch.int8, tl.int8, *functions, joined=True, requires_weight=own.dtype)


def _drawn_pair(name: str, own: Fp8, decode: Any, encode: Any) -> Format:
    functions = (decode, encode, own.decode_pair, own.encode_drawn_pair)
    return Format(
        name, torch.int8, tl.int8, *functions, joined=True, requires_weight=own.dtype, draws=True
    )


FLOAT8_E4M3_STOCHASTIC = _drawn("float8_e4m3_stochastic", E4M3, decode_e4m3, encode_e4m3)
FLOAT8_E5M2_STOCHASTIC = _drawn("float8_e5m2_stochastic", E5M2, decode_e5m2, encode_e5m2)
PAIRS: dict[torch.dtype, dict[Any, Format]] = {
    torch.float8_e4m3fn: {
        "remainder8": _pair("remainder8_float8_e4m3", E4M3, decode_pair_e4m3, encode_pair_e4m3),
        "remainder8_stochastic": _drawn_pair(
            "remainder8_float8_e4m3_stochastic", E4M3, decode_pair_e4m3, encode_drawn_pair_e4m3
        ),
    },
    torch.float8_e5m2: {
        "remainder8": _pair("remainder8_float8_e5m2", E5M2, decode_pair_e5m2, encode_pair_e5m2),
        "remainder8_stochastic": _drawn_pair(
            "remainder8_float8_e5m2_stochastic", E5M2, decode_pair_e5m2, encode_drawn_pair_e5m2
        ),
    },
}
"""Remainders beside codes of a dtype, by the name of master_weight_dtype."""
FLOAT8 = {own.dtype: own for own in (E4M3, E5M2)}
"""The twins by dtype of codes."""
