"""Philox4x32: random bits that are a function of a key and a counter, and of nothing else.

Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". Seven rounds are
the fewest that pass BigCrush there; a step takes these.
"""

from __future__ import annotations

import torch

from megaopt.kernels.optional_triton import helper, tl

MASK = 0xFFFFFFFF
OWN_ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""What each round adds to the key."""

ROUNDS: tl.constexpr = tl.constexpr(OWN_ROUNDS)
MULTIPLIER_0: tl.constexpr = tl.constexpr(MULTIPLIERS[0])
MULTIPLIER_2: tl.constexpr = tl.constexpr(MULTIPLIERS[1])
WEYL_0: tl.constexpr = tl.constexpr(WEYL[0])
WEYL_1: tl.constexpr = tl.constexpr(WEYL[1])


@helper
def philox(counter_0, counter_1, counter_2, counter_3, key_0, key_1):
    """Four uint32 words of random bits from a counter of four and a key of two.

    The counter's words have one shape; the key's are single numbers.
    """
    for _ in tl.static_range(ROUNDS):
        product_0 = counter_0.to(tl.uint64) * MULTIPLIER_0
        product_2 = counter_2.to(tl.uint64) * MULTIPLIER_2
        counter_0 = (product_2 >> 32).to(tl.uint32) ^ counter_1 ^ key_0
        counter_2 = (product_0 >> 32).to(tl.uint32) ^ counter_3 ^ key_1
        counter_1, counter_3 = product_2.to(tl.uint32), product_0.to(tl.uint32)
        key_0 = (key_0 + WEYL_0).to(tl.uint32)
        key_1 = (key_1 + WEYL_1).to(tl.uint32)
    return counter_0, counter_1, counter_2, counter_3


def philox_reference(
    counter: tuple[torch.Tensor, ...], key: tuple[int, int], rounds: int = OWN_ROUNDS
) -> tuple[torch.Tensor, ...]:
    """The twin: four words as int64 tensors, each from 0 to 2**32 - 1.

    Args:
        counter: four int64 tensors of one shape, with numbers of 32 bits.
        key: two numbers of 32 bits.
        rounds: for known answers; a step takes ROUNDS.
    """
    first, second, third, fourth = counter
    key_0, key_1 = key
    for _ in range(rounds):
        # int64 products wrap: their bits are those of the unsigned ones
        product_0, product_2 = first * MULTIPLIERS[0], third * MULTIPLIERS[1]
        first = ((product_2 >> 32) & MASK) ^ second ^ key_0
        third = ((product_0 >> 32) & MASK) ^ fourth ^ key_1
        second, fourth = product_2 & MASK, product_0 & MASK
        key_0, key_1 = (key_0 + WEYL[0]) & MASK, (key_1 + WEYL[1]) & MASK
    return first, second, third, fourth
