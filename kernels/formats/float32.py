"""fp32: the value itself."""

from __future__ import annotations

import torch

from megaopt.kernels.formats.base import Format
from megaopt.kernels.optional_triton import helper, tl


@helper
def decode(code, scale):
    return code


@helper
def encode(value, inverse):
    return value


def decode_reference(code: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The value, shape of `code`, fp32."""
    return code


def encode_reference(value: torch.Tensor, inverse: torch.Tensor | None = None) -> torch.Tensor:
    """The value, fp32: a NaN was made canonical by the rule."""
    return value


FLOAT32 = Format(
    "float32", torch.float32, tl.float32, decode, encode, decode_reference, encode_reference
)
