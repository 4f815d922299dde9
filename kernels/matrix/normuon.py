"""NorMuon's second moment: rows of an update divided by the root of a mean of their squares.

Li et al. 2025, arXiv:2510.05491; the order of operations is that of docs/numbers.md. Sums go by
lanes: those of every LANES-th number in order, then pairs of neighbours, so that a kernel and its
twin add up alike.
"""

from __future__ import annotations

import torch

from megaopt.kernels.rules.adam_ieee import canonical_reference

SECOND_MOMENT = "variance_neuron"
"""dion's name of what a state keeps, fp32 [rows]."""
BETA2 = 0.95
"""dion's muon_beta2."""
EPS = 1e-8
LANES = 256


def numbers_of(beta2: float) -> tuple[float, float, float]:
    """Returns the part of the mean that stays, the part that is new, and eps."""
    return beta2, 1.0 - beta2, EPS


def added_up(values: torch.Tensor) -> torch.Tensor:
    """Returns the sums of the last dimension, fp32."""
    count = values.shape[-1]
    lanes = values.new_zeros(*values.shape[:-1], LANES)
    for first in range(0, count, LANES):
        part = values[..., first : first + LANES]
        lanes[..., : part.shape[-1]] += part
    while lanes.shape[-1] > 1:
        lanes = lanes[..., ::2] + lanes[..., 1::2]
    return lanes[..., 0]


def normalized(
    update: torch.Tensor, second: torch.Tensor, beta2: float, ratio: float
) -> torch.Tensor:
    """Makes the rows of an update alike and keeps its norm, times a ratio; steps `second`.

    update: [rows, columns]; second: [rows].
    """
    squares = added_up(update.float().square())
    numbers = (update.shape[1], *numbers_of(beta2), ratio)
    count, decay, rest, eps, ratio_32 = squares.new_tensor(numbers).unbind()
    second.copy_(canonical_reference(second * decay + squares / count * rest))
    root = second.double().sqrt().float() + eps
    after = added_up(squares / (root * root)).double().sqrt().float()
    before = added_up(squares).double().sqrt().float()
    factor = before / torch.where(after < eps, eps, after) * ratio_32
    return (update.float() * (factor / root)[:, None]).to(update.dtype)
