"""bf16: the upper half of an fp32 pattern, rounded to nearest even, or stochastically."""

from __future__ import annotations

import torch

from megaopt.kernels.formats import hopper
from megaopt.kernels.formats.base import Format
from megaopt.kernels.optional_triton import cuda_capability_geq, helper, tl


@helper
def decode(code, scale):
    return (code.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@helper
def decode_words(words, scale):
    # two codes a word: the first is the lower half, the second the upper half
    lower = (words << 16).to(tl.float32, bitcast=True)
    return lower, (words & -0x10000).to(tl.float32, bitcast=True)


@helper
def encode(value, inverse):
    # integers, because the interpreter's cast truncates; adding half of the last place less one,
    # plus the last place's own bit, carries exactly where nearest-even rounds up. Infinity's lower
    # half is 0 and gains no carry; a NaN keeps its upper half, made quiet.
    bits = value.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (tl.where(value == value, rounded, bits | 0x400000) >> 16).to(tl.int16)


@helper
def encode_stochastic(value, inverse, bits):
    # up with the probability that the lower half is of the last place's distance; infinity's lower
    # half is 0, and so is that of every number that bf16 has
    pattern = value.to(tl.int32, bitcast=True)
    # int32 pattern plus 16 random bits: the carry rounds up
    pattern = tl.where(value == value, pattern + bits, 0x7FC00000)
    if cuda_capability_geq(9, 0) and value.shape[-1] == 8:  # a tile of the step
        code = hopper.upper_halves(pattern)
    else:
        code = (pattern >> 16).to(tl.int16)
    return code


def decode_reference(code: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The value, shape of `code`, fp32."""
    return code.float()


def encode_reference(value: torch.Tensor, inverse: torch.Tensor | None = None) -> torch.Tensor:
    """The nearest bf16, ties to even; a NaN keeps its upper half, made quiet."""
    # torch rounds to nearest even; only NaNs are set by hand
    code = value.to(torch.bfloat16).view(torch.int16)
    upper = ((value.view(torch.int32) | 0x400000) >> 16).to(torch.int16)
    return torch.where(value.isnan(), upper, code).view(torch.bfloat16)


def encode_stochastic_reference(
    value: torch.Tensor, inverse: torch.Tensor | None, bits: torch.Tensor
) -> torch.Tensor:
    """One of the two bf16 around a number, in the mean the number; every NaN is 0x7FC0."""
    rounded = torch.where(value.isnan(), 0x7FC00000, value.view(torch.int32) + bits)
    return (rounded >> 16).to(torch.int16).view(torch.bfloat16)


BFLOAT16 = Format(
    "bfloat16",
    torch.bfloat16,
    tl.int16,
    decode,
    encode,
    decode_reference,
    encode_reference,
    decode_words=decode_words,
)
BFLOAT16_STOCHASTIC = BFLOAT16.drawn(encode_stochastic, encode_stochastic_reference, one_nan=True)
