"""The twin of a product on tensor cores: docs/numbers.md has its specification.

In torch, and in C++ (product.h) with the same bits, some 60 times as fast, where it is built.
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
"""So many products of two numbers, 128^3, take 17 ms in torch and 0.3 ms in C++.

Building takes one core some 30 s, once on a machine: 2,000 such products.
"""


class Operand(NamedTuple):
    """What a tensor core does with numbers of a type."""

    terms: int
    """So many products are summed up at once."""
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
    own = OPERANDS[left.dtype]
    if left.dtype == torch.float32:
        left, right = cut_to_tf32(left), cut_to_tf32(right)
    shape = left.shape[0], right.shape[1]
    if total is None:
        out = left.new_zeros(shape, dtype=torch.float32)
    elif total.dtype != torch.float32 or total.shape != shape:
        own_total = f"{total.dtype} {list(total.shape)}"
        raise ValueError(f"total must be torch.float32 {list(shape)}, got {own_total}")
    else:
        out = total.clone(memory_format=torch.contiguous_format)
    worth = left.numel() * shape[1] >= WORTH_BUILDING
    extension = native.get(worth) if left.device.type == "cpu" else None
    if extension is not None:
        extension.add_product(left.float(), right.float(), out, *own)
        return out
    rows = max(1, NUMBERS_AT_ONCE // max(1, shape[1]))
    parts = zip(torch.split(left, rows), torch.split(out, rows), strict=True)
    return torch.cat([_chain(part, right, begun, own) for part, begun in parts])


def products_reference(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`product_reference` of each of some matrices of one shape: [n, m, k] and [n, k, columns]."""
    count, rows, columns = len(left), left.shape[1], right.shape[2]
    worth = left[0].numel() * columns >= WORTH_BUILDING
    extension = native.get(worth) if left.device.type == "cpu" else None
    if extension is None:
        return torch.stack([product_reference(left[i], right[i]) for i in range(count)])
    own = OPERANDS[left.dtype]
    if left.dtype == torch.float32:
        left, right = cut_to_tf32(left), cut_to_tf32(right)
    out = left.new_zeros((count, rows, columns), dtype=torch.float32)
    for each in zip(left.float(), right.float(), out, strict=True):
        extension.add_product(*each, *own)
    return out


def cut_to_tf32(value: torch.Tensor) -> torch.Tensor:
    """fp32 numbers without the last 13 bits of their fractions."""
    return (value.view(torch.int32) & -0x2000).view(torch.float32)


def _chain(
    left: torch.Tensor, right: torch.Tensor, total: torch.Tensor, own: Operand
) -> torch.Tensor:
    for first in range(0, left.shape[1], own.terms):
        last = first + own.terms
        total = _block(left[:, first:last], right[first:last], total, own)
    return total


def _block(
    left: torch.Tensor, right: torch.Tensor, total: torch.Tensor, own: Operand
) -> torch.Tensor:
    """One instruction: a sum that is exact of terms that are cut, and is cut to fp32."""
    some, others, begun = left.double(), right.double(), total.double()
    of_some, of_others = _exponents(some, own.least), _exponents(others, own.least)
    top = _exponents(begun, -126).clamp(min=LEAST)
    for k in range(some.shape[1]):
        top = torch.maximum(top, of_some[:, k, None] + of_others[None, k])
    scale = torch.ldexp(torch.ones_like(begun), FRACTION - top)
    found = torch.trunc(begun * scale)
    for k in range(some.shape[1]):
        found += torch.trunc(some[:, k, None] * others[None, k] * scale)
    finite = _cut_to_fp32(found / scale)
    if all(bool(each.isfinite().all()) for each in (some, others, begun)):
        return finite
    # of what is finite only the sign counts beside infinities
    beside = _signs(begun)
    for k in range(some.shape[1]):
        beside = beside + _signs(some[:, k, None]) * _signs(others[None, k])
    nan = torch.tensor(NAN, dtype=torch.int32, device=total.device).view(torch.float32)
    found = torch.where(beside.isfinite(), finite, beside.float())
    return torch.where(beside.isnan(), nan, found)


def _exponents(value: torch.Tensor, least: int) -> torch.Tensor:
    own = (torch.frexp(value).exponent - 1).clamp(min=least)
    return torch.where((value == 0) | ~value.isfinite(), NO_EXPONENT, own)


def _signs(value: torch.Tensor) -> torch.Tensor:
    return torch.where(value.isfinite(), value.sign(), value)


def _cut_to_fp32(value: torch.Tensor) -> torch.Tensor:
    """fp64 numbers, cut: 24 bits, or a multiple of 2**-149; no zero has a sign."""
    cut = (value.view(torch.int64) & -(2**29)).view(torch.float64)
    small = torch.trunc(value * 2.0**149) * 2.0**-149
    return torch.where(value.abs() < 2.0**-126, small, cut).float() + 0.0
