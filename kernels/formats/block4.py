"""4 bits in blocks: two codes a byte, and 32 elements share a scale, a power of two in one byte.

The scale is that of 8 bits (megaopt.kernels.formats.block8). A code is what fp32's own pattern, cut
above the mantissa, is of a value that is scaled to there; fp32's subnormals lie between 0 and code
1, so that rounding is linear between any two codes. The tensor of codes is half as long as the
parameter in the last dimension; the element of even index is in the lower half of a byte.

- e3m0, with a sign, for exp_avg: 1.5 * 2**-6 to 1.5 where the block's largest is in (1, 2], each
  the double of the one before. "Minus 0" is NaN.
- e4m0, without, for exp_avg_sq: 2**-12 to 2, likewise. What is not 0 never becomes 0.

Values that were read and are stored again keep their value. Numbers of a block are a chain of
doubles, on which rounding leaves them. The largest, from (1, 2], was rounded to the chain's last
number, and reads as in (1, 2] again: the same window. Or to the one before, 0.75 or 1, in (0.5, 1]:
the window is the one below, there all codes are one more, and none was the last. (The lowest window
has none below, and stays.)

exp_avg is rounded stochastically too. To nearest 0.9 times a number is that number again wherever
the next lower one is less than 0.8 of it: in blocks whose gradients stop exp_avg would stand still,
while exp_avg_sq falls. Simulated over 600 steps, log-normal sizes (sigma 1), beta1 0.9, exact
exp_avg_sq of beta2 0.999: the relative rms error of the update, its rms beside the exact one
(median), and by how much, times lr, weights drift (rms) in 2,000 steps without a gradient, in whole
blocks and in half of each (64+ is a little more than 64, so that the largest keeps its window):

| numbers, the block's largest in (0.5, 1] | error | rms | drift | half |
|---|---|---|---|---|
| exact | 0 | 1 | 2.1 | 2.1 |
| torchao's signed map, 128, fp32 scale, nearest | 53% | 0.93 | 1.7 | 4.6 |
| (1, 4, 8, 14, 24, 42, 72) / 128, the best to nearest | 40% | 0.93 | 643 | 219 |
| 2**-6 to 1, nearest | 52% | 0.95 | 703 | 640 |
| 2**-6 to 1, stochastic | 85% | 1.20 | 3.2 | 3.7 |
| a quarter of these stochastic, the rest nearest | 67% | 1.02 | 11 | 11 |
| (1.5, 4, 8, 16, 32, 64+, 96) / 128, stochastic | 69% | 1.10 | | |
| 0.75 * 2**-6 to 0.75, stochastic: e3m0 | 70% | 1.14 | 2.9 | 2.8 |
| 0.625 * 2**-6 to 0.625, stochastic | 64% | 1.10 | 3.0 | 2.6 |
| two an octave, 0.125 to 1, stochastic | 245% | 1.67 | 6.6 | 6.7 |

0.75 is less noise than 1, because the largest rarely leaves its window upwards, and takes at most a
quarter of the block's largest away; everything else is right in the mean.
"""

from __future__ import annotations

from typing import Any

import torch

from megaopt.kernels.formats.base import Format
from megaopt.kernels.formats.block8 import cut, cut_reference, half, nearest_of, some
from megaopt.kernels.optional_triton import helper, tl

SIZE = 32
"""Elements of a block."""
SIGNED_NAN, UNSIGNED_NAN, LARGEST = 8, 15, 7
NAN_OF_4_BITS: tl.constexpr = tl.constexpr(SIGNED_NAN)
LARGEST_MAGNITUDE: tl.constexpr = tl.constexpr(LARGEST)
NAN_OF_E4M0: tl.constexpr = tl.constexpr(UNSIGNED_NAN)
NAN: tl.constexpr = tl.constexpr(0x7FC00000)
# Scaled, a block's largest is in (1, 2]: 1.5 has the largest code of e3m0, 7, and 2 that of e4m0,
# 14. In fp32 1.5 * fp32(2 / 3) is 1: the numbers of e3m0 come to powers of two without an error.
TWO_THIRDS = 11184811 / 2**24
E3M0_DOWN, E3M0_UP = TWO_THIRDS * 2.0**-120, 1.5 * 2.0**120
E4M0_DOWN, E4M0_UP = 2.0**-114, 2.0**114
SIGNED_DOWN: tl.constexpr = tl.constexpr(E3M0_DOWN)
SIGNED_UP: tl.constexpr = tl.constexpr(E3M0_UP)
UNSIGNED_DOWN: tl.constexpr = tl.constexpr(E4M0_DOWN)
UNSIGNED_UP: tl.constexpr = tl.constexpr(E4M0_UP)


@helper
def decode_e3m0(code, scale):
    # the sign and the three bits come to their places
    number = (((code & 7) << 23) | ((code & 8) << 28)).to(tl.float32, bitcast=True)
    # times 1.5 * 2**120 and the block's factor
    value = (number * SIGNED_UP * scale).to(tl.int32, bitcast=True)
    return tl.where(code == NAN_OF_4_BITS, NAN, value).to(tl.float32, bitcast=True)


@helper
def with_sign(value, scaled, code):
    """The code with the value's sign, but 0 has none; a value in no window, as infinity, is NaN."""
    # bit 3 is the sign
    code = tl.where((value < 0.0) & (code > 0), code | 8, code)
    return tl.where(scaled <= 2.0, code, NAN_OF_4_BITS)


@helper
def encode_e3m0(value, inverse, bits):
    scaled = tl.abs(value) * inverse
    # brought down to where the exponent's lowest three bits are the code
    pattern = (scaled * SIGNED_DOWN).to(tl.int32, bitcast=True)
    # 16 random bits and half of the next, above which the mantissa's 23 are dropped
    return with_sign(value, scaled, cut(pattern, (bits << 7) | 64, LARGEST_MAGNITUDE, 23))


@helper
def encode_e3m0_nearest(value, inverse):
    scaled = tl.abs(value) * inverse
    pattern = (scaled * SIGNED_DOWN).to(tl.int32, bitcast=True)
    code = cut(pattern, half(pattern, 23), LARGEST_MAGNITUDE, 23)
    return with_sign(value, scaled, code)


@helper
def decode_e4m0(code, scale):
    # no sign: four bits of exponent
    number = (code << 23).to(tl.float32, bitcast=True)
    value = (number * UNSIGNED_UP * scale).to(tl.int32, bitcast=True)
    return tl.where(code == NAN_OF_E4M0, NAN, value).to(tl.float32, bitcast=True)


@helper
def encode_e4m0(value, inverse, bits):
    pattern = (tl.abs(value) * inverse * UNSIGNED_DOWN).to(tl.int32, bitcast=True)
    # at least code 1 where the value is not 0
    return tl.maximum(cut(pattern, (bits << 7) | 64, NAN_OF_E4M0, 23), some(value))


@helper
def encode_e4m0_nearest(value, inverse):
    pattern = (tl.abs(value) * inverse * UNSIGNED_DOWN).to(tl.int32, bitcast=True)
    code = cut(pattern, half(pattern, 23), NAN_OF_E4M0, 23)
    return tl.maximum(code, some(value))


# --- the twins: a code of its own, uint8, for each element, as scale and inverse are of each


def decode_e3m0_reference(code: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The value, shape of `code`, fp32; factor: of each element."""
    pattern = (code.int() & 7) << 23 | (code.int() & 8) << 28
    value = pattern.view(torch.float32) * E3M0_UP * factor
    return value.masked_fill(code == SIGNED_NAN, torch.nan)


def encode_e3m0_reference(
    value: torch.Tensor, inverse: torch.Tensor, *bits: torch.Tensor
) -> torch.Tensor:
    """The code, uint8; infinities, NaNs and magnitudes above 2**127 are 8, NaN.

    What rounds to 0 loses its sign.
    """
    # at most 2 within the window; what is more, and NaN, gets the code of NaN
    scaled = value.abs() * inverse
    code = cut_reference(scaled * E3M0_DOWN, bits, LARGEST, 23)
    code = torch.where((value < 0) & (code > 0), code | 8, code)
    return torch.where(scaled <= 2, code, SIGNED_NAN).to(torch.uint8)


def decode_e4m0_reference(code: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The value, shape of `code`, fp32; factor: of each element."""
    value = (code.int() << 23).view(torch.float32) * E4M0_UP * factor
    return value.masked_fill(code == UNSIGNED_NAN, torch.nan)


def encode_e4m0_reference(
    value: torch.Tensor, inverse: torch.Tensor, *bits: torch.Tensor
) -> torch.Tensor:
    """The code of the magnitude, uint8, at least 1 where the value is not +0; 15 is NaN."""
    code = cut_reference(value.abs() * inverse * E4M0_DOWN, bits, UNSIGNED_NAN, 23)
    return torch.maximum(code, (value.view(torch.int32) != 0).int()).to(torch.uint8)


def _rows() -> list[Format]:
    # common to all four rows; the tensors are uint8, two codes a byte
    same: dict[str, Any] = {"block": SIZE, "packed": 2, "one_nan": True, "draws": True}
    twins = (decode_e3m0_reference, encode_e3m0_reference)
    signed = Format("block32_e3m0", torch.uint8, tl.uint8, decode_e3m0, encode_e3m0, *twins, **same)
    twins = (decode_e4m0_reference, encode_e4m0_reference)
    codec = (torch.uint8, tl.uint8, decode_e4m0, encode_e4m0, *twins)
    unsigned = Format("block32_e4m0", *codec, unsigned=True, **same)
    # each format drawn, and its copy that rounds to nearest
    pairs = ((signed, encode_e3m0_nearest), (unsigned, encode_e4m0_nearest))
    return [form for drawn, encode in pairs for form in (drawn, nearest_of(drawn, encode))]


BLOCKS_OF_4_BITS = tuple(_rows())
