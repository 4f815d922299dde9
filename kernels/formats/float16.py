"""fp16, plain and with a scale per tensor."""

from __future__ import annotations

import torch

from megaopt.kernels.formats.base import Format
from megaopt.kernels.optional_triton import helper, tl

# Half of fp16's largest number, as TransformerEngine scales: the tensor's largest magnitude lands
# here, and rounding cannot overflow.
CODE_MAX = 32752.0


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
def decode_scaled(code, scale):
    return decode(code, scale) * scale


@helper
def encode_scaled(value, inverse):
    # times the inverse only where there is a number: a product changes a NaN's payload
    return encode(tl.where(value == value, value * inverse, value), inverse)


def decode_reference(code: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The value, shape of `code`, fp32; times the scale where there is one."""
    return code.float() if scale is None else code.float() * scale.reshape(())


def encode_reference(value: torch.Tensor, inverse: torch.Tensor | None = None) -> torch.Tensor:
    """The nearest fp16 (of value * inverse), ties to even; a NaN keeps its upper mantissa."""
    scaled = value if inverse is None else value * inverse.reshape(())
    code = scaled.to(torch.float16).view(torch.int16)
    nan = ((value.view(torch.int32) >> 13) & 0x3FF | 0x7E00).to(torch.int16)
    return torch.where(value.isnan(), nan, code).view(torch.float16)


FLOAT16 = Format(
    "float16", torch.float16, tl.int16, decode, encode, decode_reference, encode_reference
)
SCALED_FLOAT16 = Format(
    "scaled_float16",
    torch.float16,
    tl.int16,
    decode_scaled,
    encode_scaled,
    decode_reference,
    encode_reference,
    code_max=CODE_MAX,
)
