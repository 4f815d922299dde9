"""What a product's numbers are rounded to: not at all (ieee), to 10 bits (tf32), or to bf16.

Products of two numbers that are rounded so are exact in fp32, and sums are fp32's. Rounding is to
nearest, ties to even. Tensor cores alone would cut tf32 off, with twice the error and a bias.
"""

from __future__ import annotations

from typing import Any

import torch

from megaopt.kernels.formats import Format, bfloat16
from megaopt.kernels.optional_triton import INTERPRETED, helper, tl

IEEE, TF32, BF16 = "ieee", "tf32", "bf16"
PRECISIONS = (IEEE, TF32, BF16)

AS_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
"""The interpreter has no product of bf16: it takes fp32 numbers that bf16 has."""


@helper
def rounded_to_tf32(value):
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000
    # a NaN could be carried into another number
    return tl.where(value == value, rounded.to(tl.float32, bitcast=True), value)


@helper
def operand(value, PRECISION: tl.constexpr):
    """fp32 values as a product takes them."""
    if PRECISION == "bf16":
        if AS_INTERPRETED:
            value = bfloat16.decode(bfloat16.encode(value, 1.0), 1.0)
        else:
            value = value.to(tl.bfloat16)
    elif PRECISION == "tf32":
        value = rounded_to_tf32(value)
    return value


@helper
def loaded(ptr, offsets, mask, EVEN: tl.constexpr):
    """A tile; EVEN: whole, of rows that begin at multiples of 16 bytes."""
    if EVEN:
        # on the sum: a hint on a function's argument would be lost
        tile = tl.load(tl.multiple_of(ptr + offsets, (1, 16)))
    else:
        tile = tl.load(ptr + offsets, mask=mask, other=0)
    return tile


@helper
def taken(tile, FORMAT: tl.constexpr, PRECISION: tl.constexpr):
    """A loaded tile as a product takes it."""
    if tile.dtype != tl.bfloat16:
        tile = operand(FORMAT.decode(tile, 1.0), PRECISION)
    return tile


@helper
def added_product(left, right, total, PRECISION: tl.constexpr):
    """Total + left @ right, of operands; fp32."""
    if PRECISION == "tf32":
        total = tl.dot(left, right, total, input_precision="tf32")
    elif PRECISION == "ieee":
        # a sum for each tile: one long one, a number at a time, was up to 4 times as far from fp64
        # as torch's. Minus, because Triton would take a plus into the product's own sum.
        total -= tl.dot(-left, right, input_precision="ieee")
    else:
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


def element_of(form: Format, precision: str) -> Any:
    """The Triton type as which a product's tiles are loaded."""
    exact = precision == BF16 and form.dtype == torch.bfloat16 and not INTERPRETED
    return tl.bfloat16 if exact else form.element


def operand_reference(value: torch.Tensor, precision: str) -> torch.Tensor:
    """fp32 values as a product takes them, in fp32; fp64 ones stay.

    Args:
        value: fp32 or fp64, or bf16, which every precision has.
        precision: of PRECISIONS.
    """
    if value.dtype == torch.bfloat16:
        return value.float()
    if value.dtype != torch.float32 or precision == IEEE:
        return value
    if precision == BF16:
        return value.bfloat16().float()
    bits = value.view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000
    return torch.where(value.isnan(), value, rounded.view(torch.float32))
