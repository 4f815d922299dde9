"""Matrix products of fp32 numbers whose every product and sum is fp32's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megaopt.kernels.lowrank.spec import RIGHT


@contextmanager
def ieee_products() -> Iterator[None]:
    """Without TF32 and bf16 in fp32 products, whatever torch.set_float32_matmul_precision says."""
    backends: Any = torch.backends  # whose types lack some of it
    places = [backends.cuda.matmul, backends.mkldnn.matmul]
    were = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, was in zip(places, were, strict=True):
            place.fp32_precision = was


def product(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The matrix product; fp32 of fp32, fp64 of fp64."""
    with ieee_products():
        return some @ others


def projected(grad: torch.Tensor, projection: torch.Tensor, side: str) -> torch.Tensor:
    """A gradient [m, n] projected: [m, rank] on the right, [rank, n] on the left."""
    return product(grad, projection.mT) if side == RIGHT else product(projection.mT, grad)


def projected_back(low: torch.Tensor, projection: torch.Tensor, side: str) -> torch.Tensor:
    """What was projected, [m, n] again."""
    return product(low, projection) if side == RIGHT else product(projection, low)
