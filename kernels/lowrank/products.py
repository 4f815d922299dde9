"""Matrix products of a stated precision, whatever torch's global settings say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megaopt.kernels.lowrank.operands import BF16, IEEE, TF32, operand_reference
from megaopt.kernels.lowrank.spec import RIGHT


@contextmanager
def ieee_products() -> Iterator[None]:
    """Without TF32 and bf16 in fp32 products, whatever torch.set_float32_matmul_precision says."""
    with _fp32_products(IEEE):
        yield


@contextmanager
def _without_autocast() -> Iterator[None]:
    """torch.autocast would make the products of fp32 numbers in 16 bits."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    try:
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)
        yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)


@contextmanager
def _fp32_products(precision: str) -> Iterator[None]:
    """precision: IEEE, or TF32 for CUDA's products."""
    backends: Any = torch.backends  # whose types lack some of it
    places = [(backends.cuda.matmul, precision), (backends.mkldnn.matmul, IEEE)]
    were = [place.fp32_precision for place, _ in places]
    try:
        for place, wanted in places:
            place.fp32_precision = wanted
        yield
    finally:
        for (place, _), was in zip(places, were, strict=True):
            place.fp32_precision = was


@contextmanager
def _bf16_products() -> Iterator[None]:
    """Of bf16 numbers on CUDA: partial sums are never rounded to bf16."""
    place: Any = torch.backends.cuda.matmul
    name = "allow_bf16_reduced_precision_reduction"
    was = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
    try:
        setattr(place, name, False)
        yield
    finally:
        setattr(place, name, was)


@_without_autocast()
def product(some: torch.Tensor, others: torch.Tensor, precision: str = IEEE) -> torch.Tensor:
    """The matrix product of fp32 tensors, fp32; or of fp64 ones, fp64.

    Args:
        some: [m, k]; with precision bf16 it may be of bf16.
        others: [k, n]; likewise.
        precision: of fp32 numbers in products, of operands.PRECISIONS; sums are fp32's. On a CPU
            they are rounded to it; CUDA's own TF32 rounds or cuts off.
    """
    some, others = _aligned(some), _aligned(others)
    if some.is_cuda and some.dtype != torch.float64 and precision != IEEE:
        if precision == BF16:
            with _bf16_products():
                return torch.mm(some.bfloat16(), others.bfloat16(), out_dtype=torch.float32)
        with _fp32_products(TF32):
            return some @ others
    with ieee_products():
        return operand_reference(some, precision) @ operand_reference(others, precision)


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """Where torch's own allocations lie: libraries choose how to multiply by the address, too."""
    return matrix.clone() if matrix.data_ptr() % (16 if matrix.is_cuda else 64) else matrix


def projected(
    grad: torch.Tensor, projection: torch.Tensor, side: str, precision: str = IEEE
) -> torch.Tensor:
    """A gradient [m, n] projected: [m, rank] on the right, [rank, n] on the left."""
    if side == RIGHT:
        return product(grad, projection.mT, precision)
    return product(projection.mT, grad, precision)


def projected_back(
    low: torch.Tensor, projection: torch.Tensor, side: str, precision: str = IEEE
) -> torch.Tensor:
    """What was projected, [m, n] again."""
    if side == RIGHT:
        return product(low, projection, precision)
    return product(projection, low, precision)
