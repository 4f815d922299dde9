"""Fingerprints of sharded tensors, which do not depend on how they are sharded.

A fingerprint is a sum over elements, modulo 2**64, of (bits + 1) times an odd number that is drawn
from the element's place in the whole tensor. Sums of shards add up to that of the whole, so that
ranks add theirs in one collective; the order does not matter, as whole numbers are added. One
element that differs always changes it (its difference is less than 2**64 and is multiplied by an
odd number), several almost surely. Every NaN counts as the same: regression.compare says why.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaopt.commands.bits import compared_integers

BLOCK = 1 << 22
"""Elements at a time: the int64 values between take 8 bytes each."""


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


INCREMENT, FIRST, SECOND = map(
    _signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""The constants of the splitmix64 generator, as int64."""


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifted right with zeros: torch's own shift of an int64 repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def odd_numbers(start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Odd pseudo-random int64 numbers, one for each place from start to stop."""
    x = (torch.arange(start, stop, device=device) + 1) * INCREMENT
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return (x ^ _shifted(x, 31)) | 1


def fingerprint(shards: Sequence[torch.Tensor], start: int) -> torch.Tensor:
    """The shares of shards in their tensors' fingerprints.

    Args:
        shards: any dtypes and shapes, contiguous; as many elements in each.
        start: place of their first element in the whole tensors.

    Returns:
        int64, one for each shard, on their device.
    """
    bits = [compared_integers(shard).view(-1) for shard in shards]
    numel, device = bits[0].numel(), bits[0].device
    total = torch.zeros(len(bits), dtype=torch.int64, device=device)
    for begin in range(0, numel, BLOCK):
        end = min(numel, begin + BLOCK)
        odd = odd_numbers(start + begin, start + end, device)
        for number, each in enumerate(bits):
            total[number] += ((each[begin:end].to(torch.int64) + 1) * odd).sum()
    return total
