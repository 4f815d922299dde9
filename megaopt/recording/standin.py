"""Stands in for megaopt.recording.digest until that is there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaopt.kernels.place import Place

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _odd(place: torch.Tensor, seed: int) -> torch.Tensor:
    x = (place + seed + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    return (x ^ ((x >> 27) & (2**37 - 1))) | 1


def of_places(tensors: Sequence[torch.Tensor], places: Sequence[Place]) -> torch.Tensor:
    """int64 (n, 3): both lanes, and how many elements are not finite."""
    return torch.stack([_digest(t, p) for t, p in zip(tensors, places, strict=True)])


def _digest(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    width = flat.element_size()
    bits = flat.contiguous().view(INTEGERS[width]).long() & (2 ** (8 * min(width, 7)) - 1)
    i = torch.arange(len(flat), device=flat.device)
    if place.stride:
        where = place.first + i // place.run * place.stride + i % place.run
    else:
        where = place.first + i
    lanes = [((bits + 1) * _odd(where, seed)).sum() for seed in (0, 0x51ED270B)]
    bad = (~flat.isfinite()).sum() if flat.is_floating_point() else torch.zeros_like(lanes[0])
    return torch.stack([*lanes, bad])
