"""The twin of a product on tensor cores: docs/numbers.md has its specification.

It is in torch, and in C++ (product.h) where that is built: the same bits, some 60 times as fast.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megaopt.kernels import native

FRACTION = 25
"""Bits behind the binary point that a term keeps, once it is aligned to the block's largest."""
LEAST = -133
"""The exponent to which terms are aligned at the least."""
NAN = 0x7FFFFFFF
"""The bits of every NaN that a product makes."""
NO_EXPONENT = -(2**20)
"""The exponent of a zero, which does not take part in the alignment."""
NUMBERS_AT_ONCE = 2**18
"""Numbers of a result that are made at once, so that what is in between stays in caches."""
WORTH_BUILDING = 2**21
"""The number of products of two numbers from which on C++ is worth building: 128^3.

They take 17 ms in torch and 0.3 ms in C++. Building takes one core some 30 s, once on a
machine: as long as 2,000 such products.
"""


class Operand(NamedTuple):
    """The way in which a tensor core adds up products of numbers of a type."""

    terms: int
    """The number of products that are summed up at once."""
    least: int
    """The exponent of its smallest normal number, and of subnormal ones."""


OPERANDS = {
    torch.bfloat16: Operand(16, -126),
    torch.float16: Operand(16, -14),
    torch.float32: Operand(8, -126),  # cut to TF32
}


def product_reference(
    left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None
) -> torch.Tensor:
    """`total + left @ right` with the bits of tensor cores, fp32.

    left, right: [m, k] and [k, n], both bf16, both fp16, or both fp32, which are cut to TF32.
    total: fp32 [m, n], with which the chain begins; None: zeros.

    Raises ValueError for other dtypes or shapes.
    """
    if left.dtype not in OPERANDS or right.dtype != left.dtype:
        allowed = ", ".join(map(str, OPERANDS))
        raise ValueError(
            f"left and right must be of one of the dtypes {allowed}, got {left.dtype} and "
            f"{right.dtype}"
        )
    if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
        shapes = f"{list(left.shape)} and {list(right.shape)}"
        raise ValueError(f"left and right must be [m, k] and [k, n], got {shapes}")
    operand = OPERANDS[left.dtype]
    if left.dtype == torch.float32:
        left, right = cut_to_tf32(left), cut_to_tf32(right)
    shape = left.shape[0], right.shape[1]
    if total is None:
        out = left.new_zeros(shape, dtype=torch.float32)
    elif total.dtype != torch.float32 or total.shape != shape:
        description = f"{total.dtype} {list(total.shape)}"
        raise ValueError(f"total must be torch.float32 {list(shape)}, got {description}")
    else:
        out = total.clone(memory_format=torch.contiguous_format)
    # C++ where it is built; `worth` says whether to begin building it
    worth = left.numel() * shape[1] >= WORTH_BUILDING
    extension = native.get(worth) if left.device.type == "cpu" else None
    if extension is not None:
        extension.add_product(left.float(), right.float(), out, *operand)
        return out
    # some rows of the result at a time, each of which takes one block of K after another
    rows = max(1, NUMBERS_AT_ONCE // max(1, shape[1]))
    parts = []
    for part, begun in zip(torch.split(left, rows), torch.split(out, rows), strict=True):
        for first in range(0, part.shape[1], operand.terms):
            last = first + operand.terms
            begun = _block(part[:, first:last], right[first:last], begun, operand)
        parts.append(begun)
    return torch.cat(parts)


def products_reference(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`product_reference` of each of some matrices of one shape: [n, m, k] and [n, k, columns]."""
    count, rows, columns = len(left), left.shape[1], right.shape[2]
    worth = left[0].numel() * columns >= WORTH_BUILDING
    extension = native.get(worth) if left.device.type == "cpu" else None
    if extension is None:
        return torch.stack([product_reference(left[i], right[i]) for i in range(count)])
    operand = OPERANDS[left.dtype]
    if left.dtype == torch.float32:
        left, right = cut_to_tf32(left), cut_to_tf32(right)
    out = left.new_zeros((count, rows, columns), dtype=torch.float32)
    for matrices in zip(left.float(), right.float(), out, strict=True):
        extension.add_product(*matrices, *operand)
    return out


def cut_to_tf32(value: torch.Tensor) -> torch.Tensor:
    """fp32 numbers without the last 13 bits of their fractions."""
    return (value.view(torch.int32) & -0x2000).view(torch.float32)


def _block(
    left: torch.Tensor, right: torch.Tensor, total: torch.Tensor, operand: Operand
) -> torch.Tensor:
    """Makes one instruction's sums: terms are cut, added up exactly, and the sum is cut to fp32."""
    left_64, right_64, total_64 = left.double(), right.double(), total.double()
    # int exponents of all numbers; of zeros one so low that it never counts
    left_exponents, right_exponents = (
        _exponents(left_64, operand.least),
        _exponents(right_64, operand.least),
    )
    # [m, n], the largest exponent among the sum so far and the block's products
    top = _exponents(total_64, -126).clamp(min=LEAST)
    for k in range(left_64.shape[1]):
        top = torch.maximum(top, left_exponents[:, k, None] + right_exponents[None, k])
    # in units of the last place that is kept, terms are cut to whole numbers
    scale = torch.ldexp(torch.ones_like(total_64), FRACTION - top)
    sums = torch.trunc(total_64 * scale)
    for k in range(left_64.shape[1]):
        sums += torch.trunc(left_64[:, k, None] * right_64[None, k] * scale)
    # fp64 adds those up exactly, then the sum is cut, not rounded, to fp32: to 24 bits, or a
    # multiple of 2**-149; no zero has a sign
    value = sums / scale
    cut = (value.view(torch.int64) & -(2**29)).view(torch.float64)
    small = torch.trunc(value * 2.0**149) * 2.0**-149
    finite = torch.where(value.abs() < 2.0**-126, small, cut).float() + 0.0
    if all(bool(matrix.isfinite().all()) for matrix in (left_64, right_64, total_64)):
        return finite
    # of what is finite only the sign counts beside infinities
    signs = _signs(total_64)
    for k in range(left_64.shape[1]):
        signs = signs + _signs(left_64[:, k, None]) * _signs(right_64[None, k])
    nan = torch.tensor(NAN, dtype=torch.int32, device=total.device).view(torch.float32)
    sums = torch.where(signs.isfinite(), finite, signs.float())
    return torch.where(signs.isnan(), nan, sums)


def _exponents(value: torch.Tensor, least: int) -> torch.Tensor:
    exponents = (torch.frexp(value).exponent - 1).clamp(min=least)
    return torch.where((value == 0) | ~value.isfinite(), NO_EXPONENT, exponents)


def _signs(value: torch.Tensor) -> torch.Tensor:
    return torch.where(value.isfinite(), value.sign(), value)
