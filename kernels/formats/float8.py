"""fp8, e4m3fn: plain, and with a scale per tensor.

A code is rounded by an fp32 addition and integers: Triton's interpreter casts to fp8 inexactly, and
the GPU's own instruction is out of reach there. Encoding saturates, infinities included, as the
GPU's cvt.rn.satfinite does; every NaN becomes 0x7F.
"""

from __future__ import annotations

import torch

from megaopt.kernels.formats.base import Format, converted
from megaopt.kernels.optional_triton import helper, tl

# The code of NaN; 0xFF is read as one too.
NAN_CODE: tl.constexpr = tl.constexpr(0x7F)
# As what it is read, in fp32.
NAN: tl.constexpr = tl.constexpr(0x7FC00000)
# The fp32 patterns of the smallest normal and the largest number: 2**-6 and 448.
E4M3_NORMAL: tl.constexpr = tl.constexpr(0x3C800000)
E4M3_LARGEST: tl.constexpr = tl.constexpr(0x43E00000)
# Between the exponents' biases of fp32 and e4m3fn: 127 - 7.
E4M3_UNBIAS: tl.constexpr = tl.constexpr(2.0**120)

# e4m3fn's largest number, as TransformerEngine scales. The tensor's largest magnitude times the
# inverse is 448 up to three roundings, far below 464, where the next code would begin: nothing
# overflows, and if it did, it would saturate to 448.
CODE_MAX = 448.0


@helper
def nearest(value):
    """The code nearest to a number, ties to even, as int32; what it gives for NaN says nothing."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, E4M3_LARGEST)
    # the power of two whose last place is the code's there, in normal and subnormal binades alike:
    # added to it, the magnitude is rounded to whole codes, which then stand in its lowest bits
    DROPPED: tl.constexpr = 20
    power = (tl.maximum(magnitude, E4M3_NORMAL) & 0x7F800000) + (DROPPED << 23)
    total = magnitude.to(tl.float32, bitcast=True) + power.to(tl.float32, bitcast=True)
    # and the binade's own codes: none for the lowest two, which share their last place
    binade = (power >> DROPPED) - ((E4M3_NORMAL + (DROPPED << 23)) >> DROPPED)
    return (total.to(tl.int32, bitcast=True) - power + binade) | ((bits >> 24) & 0x80)


@helper
def encode_e4m3(value, inverse):
    code = nearest(value)
    return tl.where(value == value, code, NAN_CODE).to(tl.int8)


@helper
def decode_e4m3(code, scale):
    wide = code.to(tl.int32)
    # the sign and the seven bits in their places, the exponent too small by the biases' difference;
    # the product is exact, a subnormal code's too
    bits = (wide << 20) & -0x78100000
    value = (bits.to(tl.float32, bitcast=True) * E4M3_UNBIAS).to(tl.int32, bitcast=True)
    # chosen on integers, as all processors agree on these
    return tl.where((wide & 0x7F) == NAN_CODE, NAN, value).to(tl.float32, bitcast=True)


@helper
def encode_scaled_e4m3(value, inverse):
    # an infinity would saturate to a number, and a moment that has overflowed go unnoticed
    code = nearest(value * inverse)
    finite = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    return tl.where(finite, code, NAN_CODE).to(tl.int8)


@helper
def decode_scaled_e4m3(code, scale):
    return decode_e4m3(code, scale) * scale


def encode_e4m3_reference(value: torch.Tensor, inverse: torch.Tensor | None = None) -> torch.Tensor:
    """The nearest e4m3fn, ties to even; beyond 448, infinities too, 448; NaN is 0x7F."""
    # beyond 448 torch's own cast differs by version
    code = value.clamp(-CODE_MAX, CODE_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(value.isnan(), 0x7F, code).view(torch.float8_e4m3fn)


def encode_scaled_e4m3_reference(
    value: torch.Tensor, inverse: torch.Tensor | None = None
) -> torch.Tensor:
    """The nearest e4m3fn of value * inverse, ties to even; infinities and NaNs are NaN, 0x7F."""
    scaled = value if inverse is None else value * inverse.reshape(())
    return encode_e4m3_reference(torch.where(value.isfinite(), scaled, torch.nan))


FLOAT8_E4M3 = Format(
    "float8_e4m3",
    torch.float8_e4m3fn,
    tl.int8,
    decode_e4m3,
    encode_e4m3,
    converted,
    encode_e4m3_reference,
)
SCALED_FLOAT8_E4M3 = Format(
    "scaled_float8_e4m3",
    torch.float8_e4m3fn,
    tl.int8,
    decode_scaled_e4m3,
    encode_scaled_e4m3,
    converted,
    encode_scaled_e4m3_reference,
    code_max=CODE_MAX,
    scale_of_inverse=True,
)
