"""fp16: plain, rounded stochastically, and with a scale per tensor."""

from __future__ import annotations

import torch

from megaopt.kernels.formats.base import Format, converted
from megaopt.kernels.optional_triton import helper, tl

# Half of fp16's largest number, as TransformerEngine scales: the tensor's largest magnitude lands
# here, and rounding cannot overflow.
CODE_MAX = 32752.0
# fp16's smallest normal number, 2**-14, as fp32 has it, and its code of infinity.
NORMAL, INFINITE = 0x38800000, 0x7C00
SMALLEST_NORMAL: tl.constexpr = tl.constexpr(NORMAL)
INFINITY: tl.constexpr = tl.constexpr(INFINITE)


@helper
def decode(code, scale):
    return code.to(tl.float16, bitcast=True).to(tl.float32)


@helper
def encode(value, inverse):
    code = value.to(tl.float16).to(tl.int16, bitcast=True)
    # processors convert a NaN differently: keep the upper bits of its mantissa, made quiet
    nan = ((value.to(tl.int32, bitcast=True) >> 13) & 0x3FF) | 0x7E00
    return tl.where(value == value, code, nan).to(tl.int16)


@helper
def encode_stochastic(value, inverse, bits):
    # Normal numbers drop 13 bits. Those below 2**-14 are whole multiples of 2**-24: 16 bits of the
    # fraction of such a multiple count, what is less than 2**-16 of it does not.
    pattern = value.to(tl.int32, bitcast=True)
    magnitude = pattern & 0x7FFFFFFF
    # 13 of 16 random bits; the exponent's bias goes from 127 to 15
    normal = ((magnitude + (bits >> 3)) >> 13) - ((127 - 15) << 10)
    small = tl.minimum(magnitude, SMALLEST_NORMAL).to(tl.float32, bitcast=True)
    multiples = (small * 2.0**40).to(tl.int32)
    code = tl.where(magnitude < SMALLEST_NORMAL, (multiples + bits) >> 16, normal)
    # overflow is infinity; then the sign
    code = tl.minimum(code, INFINITY) | ((pattern >> 16) & 0x8000)
    nan = ((pattern >> 13) & 0x3FF) | 0x7E00
    return tl.where(value == value, code, nan).to(tl.int16)


@helper
def decode_scaled(code, scale):
    return decode(code, scale) * scale


@helper
def encode_scaled(value, inverse):
    # times the inverse only where there is a number: a product changes a NaN's payload
    return encode(tl.where(value == value, value * inverse, value), inverse)


def encode_reference(value: torch.Tensor, inverse: torch.Tensor | None = None) -> torch.Tensor:
    """The nearest fp16 (of value * inverse), ties to even; a NaN keeps its upper mantissa."""
    scaled = value if inverse is None else value * inverse.reshape(())
    code = scaled.to(torch.float16).view(torch.int16)
    nan = ((value.view(torch.int32) >> 13) & 0x3FF | 0x7E00).to(torch.int16)
    return torch.where(value.isnan(), nan, code).view(torch.float16)


def encode_stochastic_reference(
    value: torch.Tensor, inverse: torch.Tensor | None, bits: torch.Tensor
) -> torch.Tensor:
    """One of the two fp16 around a number; beyond 65504 infinity may be the upper one.

    In the mean it is the number, but for what a number below 2**-14 has beside whole multiples of
    2**-40. A NaN is encode_reference's.
    """
    pattern = value.view(torch.int32)
    magnitude = pattern & 0x7FFFFFFF
    # as the kernel: normal numbers by their pattern, small ones in fixed point
    normal = ((magnitude + (bits >> 3)) >> 13) - ((127 - 15) << 10)
    small = magnitude.clamp(max=NORMAL).view(torch.float32)
    multiples = (small * 2.0**40).int()
    code = torch.where(magnitude < NORMAL, (multiples + bits) >> 16, normal)
    code = code.clamp(max=INFINITE) | ((pattern >> 16) & 0x8000)
    nan = ((pattern >> 13) & 0x3FF) | 0x7E00
    return torch.where(value.isnan(), nan, code).to(torch.int16).view(torch.float16)


FLOAT16 = Format("float16", torch.float16, tl.int16, decode, encode, converted, encode_reference)
SCALED_FLOAT16 = Format(
    "scaled_float16",
    torch.float16,
    tl.int16,
    decode_scaled,
    encode_scaled,
    converted,
    encode_reference,
    code_max=CODE_MAX,
)
FLOAT16_STOCHASTIC = FLOAT16.drawn(encode_stochastic, encode_stochastic_reference)
