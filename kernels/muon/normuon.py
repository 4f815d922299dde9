"""NorMuon's second moment: rows of an update divided by the root of a mean of their squares.

Li et al. 2025, arXiv:2510.05491; the order of operations is that of docs/numbers.md. Sums go by
lanes: those of every LANES-th number in order, then pairs of neighbours, so that a kernel and its
twin add up alike.
"""

from __future__ import annotations

import torch

from megaopt.kernels.rules.adam_ieee import canonical_reference

BETA2 = 0.95
"""dion's muon_beta2."""
EPS = 1e-8
LANES = 256


def numbers_of(beta2: float) -> tuple[float, float, float]:
    """Returns the part of the mean that stays, the part that is new, and eps."""
    return beta2, 1.0 - beta2, EPS


def added_up(values: torch.Tensor) -> torch.Tensor:
    """Returns the sums of the last dimension, fp32."""
    # fp32 [..., LANES]: number i goes to lane i % LANES, in order
    count = values.shape[-1]
    lanes = values.new_zeros(*values.shape[:-1], LANES)
    for first in range(0, count, LANES):
        part = values[..., first : first + LANES]
        lanes[..., : part.shape[-1]] += part
    # neighbours are added until one is left; LANES is a power of two
    while lanes.shape[-1] > 1:
        lanes = lanes[..., ::2] + lanes[..., 1::2]
    return lanes[..., 0]


def normalized(
    update: torch.Tensor, second: torch.Tensor, beta2: float, ratio: float
) -> torch.Tensor:
    """Makes the rows of an update alike and keeps its norm, times a ratio; steps `second`.

    update: [rows, columns]; second: [rows].
    """
    # fp32 [rows]
    squares = added_up(update.float().square())
    # as fp32 numbers on the device, as a kernel has them
    numbers = (update.shape[1], *numbers_of(beta2), ratio)
    count, decay, rest, eps, ratio_32 = squares.new_tensor(numbers).unbind()

    # the mean over steps of the mean of a row's squares; every NaN has one pattern
    second.copy_(canonical_reference(second * decay + squares / count * rest))
    # rounding the fp64 root again is exact
    root = second.double().sqrt().float() + eps

    # the norms of the whole matrix, with its rows divided and as it is
    after = added_up(squares / (root * root)).double().sqrt().float()
    before = added_up(squares).double().sqrt().float()
    # one number: it keeps the norm, and brings the ratio in
    factor = before / torch.where(after < eps, eps, after) * ratio_32
    # rounded once, to the update's dtype
    return (update.float() * (factor / root)[:, None]).to(update.dtype)
