"""The digest of docs/numbers.md in numpy, a multiplier for each place."""

import numpy as np
import torch

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
LENGTHS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)


def factors(numbers):
    x = np.asarray(numbers).astype(np.uint32)
    with np.errstate(over="ignore"):
        x = x + np.uint32(0x9E3779B9)
        x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
        x = (x ^ (x >> 15)) * np.uint32(0x735A2D97)
        x = x ^ (x >> 15)
        y = x * np.uint32(0x9E3779B1)
    return [(x | 1).astype(np.uint64), ((y ^ (y >> 16)) | 1).astype(np.uint64)]


def multipliers(places):
    """For each lane R * C of every place, uint64."""
    return [
        r * c for r, c in zip(factors(places // 512), factors(2**31 + places % 512), strict=True)
    ]


def places_of(place, count):
    index = np.arange(count, dtype=np.int64)
    if not place.stride:
        return place.first + index
    return place.first + index // place.run * place.stride + index % place.run


def oracle(tensor, place):
    """Both lanes as whole numbers from 0 to 2**64 - 1, and how many elements are not finite."""
    parts = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor.flatten()
    raw = parts.contiguous().view(torch.uint8).numpy()
    places = places_of(place, tensor.numel())
    if tensor.is_complex():
        places = np.stack([2 * places, 2 * places + 1], 1).flatten()
    (r0, r1), (c0, c1) = factors(places // 512), factors(2**31 + places % 512)
    with np.errstate(over="ignore"):
        if parts.itemsize == 8:
            lower, upper = raw.view(np.uint32).astype(np.uint64).reshape(-1, 2).T
            added = r0 * (c0 * lower + c1 * upper), r1 * (c1 * lower + np.uint64(2) * c0 * upper)
        else:
            bits = raw.view(WORDS[parts.itemsize]).astype(np.uint64)
            added = r0 * c0 * bits, r1 * c1 * bits
    lanes = [
        (int(each.sum(dtype=np.uint64)) + len(places) * length) % 2**64
        for each, length in zip(added, LENGTHS, strict=True)
    ]
    finite = parts.double().isfinite() if parts.is_floating_point() else torch.ones(len(parts))
    return (*lanes, len(parts) - int(finite.sum()))
