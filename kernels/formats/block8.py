"""8 bits in blocks: elements that follow each other share a scale, a power of two in one byte.

A block's scale is s = clamp((bits(amax) - 1) >> 23, 1, 253), where amax is the block's largest
finite magnitude: 2**(s - 127) < amax <= 2**(s - 126). A value is scaled by powers of two alone, to
where fp32's own pattern, cut to 8 bits, is the code; fp32's subnormals are the code's. A value that
was read and is stored again, whatever the random bits, is read as an equal one, also after a
checkpoint in fp32. Code and scale may be others, and exp_avg's -0 becomes +0.

- e4m3, with a sign, for exp_avg: exact to 3 bits down to 2**-13 of the block's largest.
- e5m3, without, for exp_avg_sq: down to 2**-29. What is not 0 never has code 0, which bounds the
  update. (Code 1 itself is read as 0 where fp32 ends, in blocks with amax <= 2**-117.)

Rounding is stochastic: to nearest exp_avg_sq stands still where a step would move it by less than
half the distance of two codes. The median root, divided by fp64's, of 4,096 coordinates that do not
move together:

| beta2 (steps)    | stationary: random, nearest | 2.5 time constants after a tenfold drop |
|------------------|-----------------------------|-----------------------------------------|
| 0.95 (600)       | 0.99, 1.24                  | 0.97, 3.88                              |
| 0.99 (1,500)     | 0.99, 1.31                  | 0.96, 3.97                              |
| 0.999 (5,000)    | 0.99, 0.51                  | 0.94, 1.64                              |

So to nearest the root ends too large where it has to come down and, at 0.999, too small where it
starts from 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megaopt.kernels.formats import hopper
from megaopt.kernels.formats.base import Format
from megaopt.kernels.optional_triton import cuda_capability_geq, helper, tl

SMALLEST, LARGEST = 1, 253
"""The least and the largest scale: beyond, a scale or its inverse would be no normal number."""
SMALLEST_SCALE: tl.constexpr = tl.constexpr(SMALLEST)
LARGEST_SCALE: tl.constexpr = tl.constexpr(LARGEST)
SIGNED_NAN, UNSIGNED_NAN = 127, 255
LARGEST_SIGNED: tl.constexpr = tl.constexpr(SIGNED_NAN)
LARGEST_UNSIGNED: tl.constexpr = tl.constexpr(UNSIGNED_NAN)
# the codes as fp32 numbers, 1.875 * 2**-112 and 1.875 * 2**-96
E4M3_NAN: tl.constexpr = tl.constexpr(1.875 * 2.0**-112)
E5M3_NAN: tl.constexpr = tl.constexpr(1.875 * 2.0**-96)
NAN: tl.constexpr = tl.constexpr(0x7FC00000)
# What lies between a value that is scaled and its code's place in fp32: the biases' difference.
SIGNED_SHIFT, UNSIGNED_SHIFT = 113, 97
SIGNED_DOWN: tl.constexpr = tl.constexpr(2.0**-SIGNED_SHIFT)
SIGNED_UP: tl.constexpr = tl.constexpr(2.0**SIGNED_SHIFT)
UNSIGNED_DOWN: tl.constexpr = tl.constexpr(2.0**-UNSIGNED_SHIFT)
UNSIGNED_UP: tl.constexpr = tl.constexpr(2.0**UNSIGNED_SHIFT)


@helper
def finite_key(value):
    """uint32 numbers in the order of magnitudes: at least 2**24 for finite ones, else less."""
    return (value.to(tl.uint32, bitcast=True) << 1) + 0x1000000


@helper
def scale_of_key(key, OFFSET: tl.constexpr):
    """int32, the scale of a block, from its largest key, or 0; OFFSET: the format's."""
    # amax's pattern; negative where the block has no finite value, which gives the least scale
    amax_bits = (key >> 1).to(tl.int32) - 0x800000
    return tl.minimum(tl.maximum((amax_bits + OFFSET) >> 23, SMALLEST_SCALE), LARGEST_SCALE)


@helper
def factor(scale):
    """Returns the factor of a scale, fp32: 2**(scale - 127)."""
    return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@helper
def inverse_factor(scale):
    """Returns the factor that scales values, fp32: 2**(127 - scale)."""
    return ((254 - scale) << 23).to(tl.float32, bitcast=True)


@helper
def half(pattern, DROPPED: tl.constexpr):
    """The summand that rounds a pattern to nearest even when its lower bits are dropped."""
    return ((1 << (DROPPED - 1)) - 1) + ((pattern >> DROPPED) & 1)


@helper
def cut(pattern, rest, LARGEST: tl.constexpr, DROPPED: tl.constexpr):
    """The code: NaN and what is too large are beyond the largest, as numbers without a sign."""
    # unsigned: a NaN's pattern plus `rest` may pass 2**31
    code = (pattern + rest).to(tl.uint32, bitcast=True) >> DROPPED
    return tl.minimum(code, LARGEST).to(tl.int32)


@helper
def some(value):
    """int32: 0 for 0, else 1."""
    return tl.minimum(value.to(tl.uint32, bitcast=True), 1).to(tl.int32)


@helper
def decode_e4m3(code, scale):
    wide = code.to(tl.int32)
    # a byte with a sign: that and the seven bits come to their places
    number = ((wide << 20) & -0x78100000).to(tl.float32, bitcast=True)
    # times 2**113, the difference of the biases, and the block's factor
    value = (number * SIGNED_UP * scale).to(tl.int32, bitcast=True)
    return tl.where(tl.abs(number) == E4M3_NAN, NAN, value).to(tl.float32, bitcast=True)


@helper
def decode_words_e4m3(words, scale):
    # what the hardware reads, NaN too, is 2**7 times as large
    first, second, third, fourth = hopper.decode_e4m3(words)
    scale = scale * 0.0078125
    return first * scale, second * scale, third * scale, fourth * scale


@helper
def signed_code(value, pattern, rest):
    code = cut(pattern, rest, LARGEST_SIGNED, 20)
    # no NaN is less than 0; its sign depends on the processor
    return tl.where(value < 0.0, code | 0x80, code).to(tl.int8)


@helper
def encode_e4m3(value, inverse, bits):
    if cuda_capability_geq(9, 0):
        # four codes at a time
        code = hopper.encode_e4m3(value, inverse, bits)
    else:
        # the magnitude brought down to where its pattern's upper 12 bits are the code
        pattern = (tl.abs(value) * inverse * SIGNED_DOWN).to(tl.int32, bitcast=True)
        # 16 random bits and half of the next, for the 20 bits that are dropped
        code = signed_code(value, pattern, (bits << 4) | 8)
    return code


@helper
def encode_e4m3_nearest(value, inverse):
    if cuda_capability_geq(9, 0):
        code = hopper.encode_e4m3_nearest(value, inverse)
    else:
        pattern = (tl.abs(value) * inverse * SIGNED_DOWN).to(tl.int32, bitcast=True)
        code = signed_code(value, pattern, half(pattern, 20))
    return code


@helper
def decode_e5m3(code, scale):
    wide = code.to(tl.int32)
    # eight bits come to the lower exponent and the upper mantissa
    number = (wide << 20).to(tl.float32, bitcast=True)
    value = (number * UNSIGNED_UP * scale).to(tl.int32, bitcast=True)
    return tl.where(number == E5M3_NAN, NAN, value).to(tl.float32, bitcast=True)


@helper
def decode_words_e5m3(words, scale):
    # four codes a word, fp32 numbers in their true size
    first, second, third, fourth = hopper.decode_e5m3(words)
    return first * scale, second * scale, third * scale, fourth * scale


@helper
def unsigned_code(value, pattern, rest):
    # at least 1 where the value is not 0
    return tl.maximum(cut(pattern, rest, LARGEST_UNSIGNED, 20), some(value)).to(tl.uint8)


@helper
def encode_e5m3(value, inverse, bits):
    if cuda_capability_geq(9, 0):
        # four codes at a time
        code = hopper.encode_e5m3(value, inverse, bits)
    else:
        # the magnitude alone, as these codes have no sign
        pattern = (tl.abs(value) * inverse * UNSIGNED_DOWN).to(tl.int32, bitcast=True)
        code = unsigned_code(value, pattern, (bits << 4) | 8)
    return code


@helper
def encode_e5m3_nearest(value, inverse):
    if cuda_capability_geq(9, 0):
        code = hopper.encode_e5m3_nearest(value, inverse)
    else:
        pattern = (tl.abs(value) * inverse * UNSIGNED_DOWN).to(tl.int32, bitcast=True)
        code = unsigned_code(value, pattern, half(pattern, 20))
    return code


# --- the twins: scale and inverse are those of each element, of the shape of code or value


def scale_of_amax_reference(amax: torch.Tensor, offset: int) -> torch.Tensor:
    """The scales, uint8, of blocks whose largest finite magnitudes, fp32, these are.

    offset: the format's window_offset.
    """
    return ((amax.view(torch.int32) + offset) >> 23).clamp(SMALLEST, LARGEST).to(torch.uint8)


def factor_reference(scale: torch.Tensor) -> torch.Tensor:
    """Returns the factor of a scale, uint8, as fp32: 2**(scale - 127)."""
    return (scale.int() << 23).view(torch.float32)


def inverse_factor_reference(scale: torch.Tensor) -> torch.Tensor:
    """Returns the factor that scales values, fp32: 2**(127 - scale)."""
    return ((254 - scale.int()) << 23).view(torch.float32)


def cut_reference(
    scaled: torch.Tensor, bits: tuple[torch.Tensor, ...], most: int, dropped: int = 20
) -> torch.Tensor:
    """int32, the code of a scaled magnitude, at most `most`; with random bits stochastically."""
    pattern = scaled.view(torch.int32)
    # random bits and half of the next; without them what rounds to nearest even
    if bits:
        rest = (bits[0] << (dropped - 16)) | 1 << (dropped - 17)
    else:
        rest = (1 << (dropped - 1)) - 1 + ((pattern >> dropped) & 1)
    code = (pattern.long() + rest) >> dropped  # a NaN's pattern leaves no room in an int32
    return code.clamp(max=most).int()


def decode_e4m3_reference(code: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The value, shape of `code`, fp32; factor: of each element."""
    pattern = (code.int() & 0x7F) << 20 | (code.int() & 0x80) << 24
    value = pattern.view(torch.float32) * 2.0**SIGNED_SHIFT * factor
    return value.masked_fill((code & 0x7F) == SIGNED_NAN, torch.nan)


def encode_e4m3_reference(
    value: torch.Tensor, inverse: torch.Tensor, *bits: torch.Tensor
) -> torch.Tensor:
    """The code, uint8; infinities, NaNs and what rounds to 1.875 * 2**127 are 127 or 255, NaN.

    -0 has code 0, as +0; what is less than 0 and rounds to 0 has code 0x80, which is read as -0.
    """
    code = cut_reference(value.abs() * inverse * 2.0**-SIGNED_SHIFT, bits, SIGNED_NAN)
    return torch.where(value < 0, code | 0x80, code).to(torch.uint8)


def decode_e5m3_reference(code: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The value, shape of `code`, fp32; factor: of each element."""
    value = (code.int() << 20).view(torch.float32) * 2.0**UNSIGNED_SHIFT * factor
    return value.masked_fill(code == UNSIGNED_NAN, torch.nan)


def encode_e5m3_reference(
    value: torch.Tensor, inverse: torch.Tensor, *bits: torch.Tensor
) -> torch.Tensor:
    """The code of the magnitude, uint8, at least 1 where the value is not +0."""
    code = cut_reference(value.abs() * inverse * 2.0**-UNSIGNED_SHIFT, bits, UNSIGNED_NAN)
    return torch.maximum(code, (value.view(torch.int32) != 0).int()).to(torch.uint8)


def _rows(block: int) -> list[Format]:
    """Makes the formats with so many elements in a block."""
    name = "block" if block == 128 else f"block{block}"
    same: dict[str, Any] = {"block": block, "one_nan": True, "draws": True}
    twins = (decode_e4m3_reference, encode_e4m3_reference)
    codec = (torch.uint8, tl.int8, decode_e4m3, encode_e4m3, *twins)
    # the signed one, for exp_avg: int8 codes in uint8 tensors
    signed = Format(f"{name}_e4m3", *codec, decode_words=decode_words_e4m3, **same)
    twins = (decode_e5m3_reference, encode_e5m3_reference)
    codec = (torch.uint8, tl.uint8, decode_e5m3, encode_e5m3, *twins)
    same |= {"decode_words": decode_words_e5m3, "unsigned": True}
    # the unsigned one, for exp_avg_sq
    unsigned = Format(f"{name}_e5m3", *codec, **same)
    pairs = ((signed, encode_e4m3_nearest), (unsigned, encode_e5m3_nearest))
    return [form for drawn, encode in pairs for form in (drawn, nearest_of(drawn, encode))]


def nearest_of(form: Format, encode: Any) -> Format:
    """The same, rounded to nearest."""
    return replace(form, name=f"{form.name}_nearest", encode=encode, draws=False)


BLOCKS = (*_rows(128), *_rows(64))
