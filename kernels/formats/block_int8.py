"""8 bits in blocks, linear: sign and magnitude, multiples of a 64th of the block's power of two.

A code is a magnitude from 0 to 127, plus 128 below 0; 128, "minus 0", is NaN. It is code / 64 * f,
where f = 2**(scale - 127): exact in fp32 under every scale. A value is scaled by powers of two
alone, to where fp32's pattern, which is linear up to 2**-125, is the code and 17 bits behind it.

The window differs from that of the other formats in blocks (megaopt.kernels.formats.block8):
s = clamp((bits(amax) + 0x1FFFF) >> 23, 1, 253), so that 127/128 f < amax <= 127/64 f, and the
largest code is 64 to 127. What was read and is stored again is read as an equal one, whatever the
random bits: a block's largest code from 64 on finds its window again. The only other one that
rounding makes there is 63, whose 63/64 f lies in the window below, where all codes are doubled.

For moments of which large elements need their bits and small ones none, as Muon's. To nearest an
e4m3 code is up to 6% from the value, this one at most 1/128 of f. Adam divides small elements of
exp_avg by small roots: there they have to be kept.
"""

from __future__ import annotations

from typing import Any

import torch

from megaopt.kernels.formats.base import Format
from megaopt.kernels.formats.block8 import cut, cut_reference, half, nearest_of
from megaopt.kernels.optional_triton import helper, tl

OFFSET = 0x1FFFF
"""Carries into the exponent what is more than 127/128 of a power of two."""
NAN_MAGNITUDE = 128
NAN_CODE: tl.constexpr = tl.constexpr(NAN_MAGNITUDE)
NAN_BYTE: tl.constexpr = tl.constexpr(-NAN_MAGNITUDE)
NAN: tl.constexpr = tl.constexpr(0x7FC00000)
# a code that is shifted by 17 is fp32's pattern of code * 2**-132
DOWN: tl.constexpr = tl.constexpr(2.0**-126)
UP: tl.constexpr = tl.constexpr(2.0**126)


@helper
def decode_int8(code, scale):
    wide = code.to(tl.int32)
    # a byte with a sign: that and the seven bits come to their places
    number = ((wide << 17) & -0x7F020000).to(tl.float32, bitcast=True)
    # times 2**126 and the block's factor, both exact
    value = (number * UP * scale).to(tl.int32, bitcast=True)
    return tl.where(wide == NAN_BYTE, NAN, value).to(tl.float32, bitcast=True)


@helper
def scaled_pattern(value, inverse):
    return (tl.abs(value) * inverse * DOWN).to(tl.int32, bitcast=True)


@helper
def with_sign(value, code):
    """The code, int8, with the value's sign, which 0 and NaN have not."""
    return tl.where((value < 0.0) & (code > 0), code | 0x80, code).to(tl.int8)


@helper
def encode_int8(value, inverse, bits):
    pattern = scaled_pattern(value, inverse)
    # 16 random bits and half of the next, for the 17 bits that are dropped
    return with_sign(value, cut(pattern, (bits << 1) | 1, NAN_CODE, 17))


@helper
def encode_int8_nearest(value, inverse):
    pattern = scaled_pattern(value, inverse)
    return with_sign(value, cut(pattern, half(pattern, 17), NAN_CODE, 17))


# --- the twins: scale and inverse are those of each element, of the shape of code or value


def decode_int8_reference(code: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The value, shape of `code`, fp32; factor: of each element."""
    pattern = (code.int() & 0x7F) << 17 | (code.int() & 0x80) << 24
    value = pattern.view(torch.float32) * 2.0**126 * factor
    return value.masked_fill(code == NAN_MAGNITUDE, torch.nan)


def encode_int8_reference(
    value: torch.Tensor, inverse: torch.Tensor, *bits: torch.Tensor
) -> torch.Tensor:
    """The code, uint8; infinities, NaNs and what rounds to 2**127 are 128, NaN.

    What rounds to 0 loses its sign.
    """
    code = cut_reference(value.abs() * inverse * 2.0**-126, bits, NAN_MAGNITUDE, 17)
    return torch.where((value < 0) & (code > 0), code | 0x80, code).to(torch.uint8)


def _rows(name: str, block: int) -> tuple[Format, Format]:
    codec = (torch.uint8, tl.int8, decode_int8, encode_int8)
    twins = (decode_int8_reference, encode_int8_reference)
    more: dict[str, Any] = {"block": block, "window_offset": OFFSET}
    drawn = Format(name, *codec, *twins, one_nan=True, draws=True, **more)
    return drawn, nearest_of(drawn, encode_int8_nearest)


LINEAR_BLOCKS = (*_rows("block_int8", 128), *_rows("block64_int8", 64))
