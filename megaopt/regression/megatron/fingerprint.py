"""Fingerprints of sharded tensors, which do not depend on how they are sharded.

A fingerprint is a sum over elements, modulo 2**64, of (bits + 1) times an odd number that is drawn
from the element's place in the whole tensor. Sums of shards add up to that of the whole, so that
ranks add theirs in one collective; the order does not matter, as whole numbers are added. One
element that differs always changes it (its difference is less than 2**64 and is multiplied by an
odd number), several almost surely.
"""

from __future__ import annotations

import torch

from megaopt.regression.compare import as_integers

BLOCK = 1 << 22
"""Elements at a time: the int64 values between take 8 bytes each."""


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


INCREMENT, FIRST, SECOND = map(
    _signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""Of the splitmix64 generator, as int64."""


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifted right with zeros: torch's own shift of an int64 repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def odd_numbers(start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Odd pseudo-random int64 numbers, one for each place from start to stop."""
    x = (torch.arange(start, stop, device=device) + 1) * INCREMENT
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return (x ^ _shifted(x, 31)) | 1


def fingerprint(shard: torch.Tensor, start: int) -> torch.Tensor:
    """The share of a shard in its tensor's fingerprint.

    Args:
        shard: any dtype and shape, contiguous.
        start: place of its first element in the whole tensor.

    Returns:
        int64, 0-dim, on the shard's device.
    """
    bits = as_integers(shard).view(-1)
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    for begin in range(0, bits.numel(), BLOCK):
        block = bits[begin : begin + BLOCK].to(torch.int64) + 1
        place = start + begin
        total += (block * odd_numbers(place, place + block.numel(), shard.device)).sum()
    return total


def hexadecimal(number: int) -> str:
    """An int64 as 16 hexadecimal digits."""
    return f"0x{number % (1 << 64):016x}"
