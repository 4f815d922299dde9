"""Kahan compensation: a bf16 beside a bf16 or fp16 weight keeps what the weight's rounding lost.

The value is weight + compensation (Kahan 1965; for weights Zamirai et al. 2020, arXiv:2010.06192).
The weight is the value rounded to nearest even, the compensation the difference, which fp32 holds
exactly, rounded to nearest or stochastically. It is a bf16 beside fp16 weights too: fp16 would
round what a weight below 1/8 lost to multiples of 2**-24.

A compensation may be rounded to half of the weight's last place, and the sum then be a tie, which
is its neighbour's where that is even: there the neighbour and what the sum has beside it stand for
the value, so that weight and compensation are what their sum gives again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megaopt.kernels.formats import bfloat16, float16
from megaopt.kernels.formats.base import Format
from megaopt.kernels.optional_triton import helper, tl


@helper
def lost(value, weight):
    """Returns what the weight lacks; a 0 of its sign where that is 0, or the weight no number.

    The sign keeps the value -0: -0 + 0 would be 0.
    """
    difference = value - weight
    zero = (weight.to(tl.int32, bitcast=True) & -2147483648).to(tl.float32, bitcast=True)
    # infinity less infinity is NaN, which equals nothing
    is_some = (tl.abs(difference) > 0.0) & (tl.abs(weight) < float("inf"))
    return tl.where(is_some, difference, zero)


@helper
def added(weight, compensation):
    # the sum's NaN has a sign and payload that depend on the processor
    value = weight + compensation
    bits = tl.where(value == value, value.to(tl.int32, bitcast=True), 0x7FC00000)
    return bits.to(tl.float32, bitcast=True)


@helper
def nearest(value):
    """The bf16 of what is no NaN, as bfloat16.encode."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@helper
def drawn(value, bits):
    """The bf16 of what is no NaN, as bfloat16.encode_stochastic."""
    return ((value.to(tl.int32, bitcast=True) + bits) >> 16).to(tl.int16)


@helper
def is_finite(pattern):
    return (pattern & 0x7FFFFFFF) < 0x7F800000


@helper
def settled_bfloat16(weight, code):
    # what is NaN or infinite here, or becomes it, stays as it is
    weight, code = weight.to(tl.int32) << 16, code.to(tl.int32) << 16
    # what the pair would be read as, and what encoding that again gives
    total = weight.to(tl.float32, bitcast=True) + code.to(tl.float32, bitcast=True)
    again = nearest(total).to(tl.int32) << 16
    rest = nearest(lost(total, again.to(tl.float32, bitcast=True))).to(tl.int32) << 16
    # another weight: that one and its rest are what is stored
    moved = (again != weight) & is_finite(again) & is_finite(weight)
    weight, code = tl.where(moved, again, weight), tl.where(moved, rest, code)
    return (weight >> 16).to(tl.int16), (code >> 16).to(tl.int16)


@helper
def settled_float16(weight, code):
    # the same with an fp16 weight, whose patterns have other infinities
    total = float16.decode(weight, 1.0) + bfloat16.decode(code, 1.0)
    again = float16.encode(total, 1.0)
    rest = nearest(lost(total, float16.decode(again, 1.0)))
    are_numbers = ((again & 0x7FFF) < 0x7C00) & ((weight & 0x7FFF) < 0x7C00)
    moved = (again != weight) & are_numbers
    return tl.where(moved, again, weight), tl.where(moved, rest, code)


def lost_reference(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns what an fp32 weight lacks of an fp32 value; a 0 of its sign where that is nothing."""
    difference = value - weight
    is_some = (difference.abs() > 0) & (weight.abs() < torch.inf)
    zero = torch.copysign(torch.zeros_like(weight), weight)
    return torch.where(is_some, difference, zero)


def decode_reference(weight: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """The fp32 value of a weight and its compensation, all of one shape; NaN is 0x7FC00000."""
    value = weight.float() + code.float()
    return torch.where(value.isnan(), 0x7FC00000, value.view(torch.int32)).view(torch.float32)


def _encoded(
    nearest: Callable[[torch.Tensor], torch.Tensor],
    value: torch.Tensor,
    bits: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and its compensation, to nearest, or with random bits stochastically.

    nearest: rounds values to weights.
    """
    # the weight to nearest, and what it lost, bf16
    weight = nearest(value)
    rest = lost_reference(value, weight.float())
    if bits:
        code = bfloat16.encode_stochastic_reference(rest, None, *bits)
    else:
        code = bfloat16.encode_reference(rest)
    # read again and encoded again, as `settled` does it in the kernel
    total = decode_reference(weight, code)
    again = nearest(total)
    rest = bfloat16.encode_reference(lost_reference(total, again.float()))
    moved = (again != weight) & again.isfinite()
    return torch.where(moved, again, weight), torch.where(moved, rest, code)


def _rows(name: str, of: Any, settled: Any) -> tuple[Format, Format]:
    """Makes the formats beside weights of a format's module; to nearest, and stochastically."""
    decode_weight, encode_weight = of.decode, of.encode

    @helper
    def decode(weight_code, code):  # noqa: ANN202
        return added(decode_weight(weight_code, 1.0), bfloat16.decode(code, 1.0))

    @helper
    def encode(value):  # noqa: ANN202
        weight = encode_weight(value, 1.0)
        return settled(weight, nearest(lost(value, decode_weight(weight, 1.0))))

    @helper
    def encode_stochastic(value, bits):  # noqa: ANN202
        weight = encode_weight(value, 1.0)
        return settled(weight, drawn(lost(value, decode_weight(weight, 1.0)), bits))

    def twin(value: torch.Tensor, *bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight of an fp32 value, and its compensation; with bits stochastically."""
        return _encoded(of.encode_reference, value, bits)

    codec = (torch.bfloat16, tl.int16, decode, encode, decode_reference, twin)
    weight = torch.float16 if of is float16 else torch.bfloat16
    form = Format(name, *codec, joined=True, requires_weight=weight)
    return form, form.drawn(encode_stochastic, twin)


KAHAN_BFLOAT16, KAHAN_BFLOAT16_STOCHASTIC = _rows("kahan", bfloat16, settled_bfloat16)
KAHAN_FLOAT16, KAHAN_FLOAT16_STOCHASTIC = _rows("kahan_float16", float16, settled_float16)
