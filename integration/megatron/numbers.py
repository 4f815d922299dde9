"""The numbers by which Megatron's parameters draw random bits, the same on all ranks that must."""

from __future__ import annotations

from typing import Any

import torch

EXPERTS = 1 << 30
"""Added for parameters of experts, which an optimizer of their own numbers from 0 again."""
SHARED_EMBEDDING = 1 << 31
"""The word embeddings: copies on the first and the last pipeline stage have to stay equal."""


def numbers_of(optimizer: Any) -> dict[torch.Tensor, int]:
    """The place of each parameter in the buffers of a distributed optimizer.

    All data-parallel ranks lay out their buffers alike, and so do tensor-parallel ranks, which keep
    copies of norms and biases. Parts of one weight on tensor-parallel ranks, and parameters of
    different pipeline stages, draw the same bits for other elements.
    """
    params = [param for buffer in optimizer.buffers for param in buffer.params]
    return {param: _number(param, place) for place, param in enumerate(params)}


def _number(param: Any, place: int) -> int:
    if getattr(param, "shared_embedding", False):
        return SHARED_EMBEDDING
    return place if getattr(param, "allreduce", True) else place + EXPERTS
