"""The norm's twin in plain torch: the truth in tests, the CPU backend."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megaopt.kernels.norm.bins import BINS, LIMB, LOWEST, NONFINITE, WIDTH


def unit_of(row: int) -> float:
    """The number that a 1 in this row stands for."""
    return math.ldexp(1.0, WIDTH * (row + LOWEST))


def add_units(row_bins: torch.Tensor, whole: torch.Tensor) -> None:
    """Adds fp64 whole numbers to one row, int64 [2]; limb by limb, as their sum may not fit."""
    units = whole.long()
    low = (units & (2**LIMB - 1)).sum()
    row_bins[0] += low & (2**LIMB - 1)
    row_bins[1] += (units >> LIMB).sum() + (low >> LIMB)


def accumulate_reference(grads: Sequence[torch.Tensor], bins: torch.Tensor) -> None:
    """Adds the squares of all elements to a table; each tensor is a block.

    Args:
        grads: floating-point tensors of 16 or 32 bits on one device, any shapes; may be empty.
        bins: what new_bins gave, on that device. Its two bins that count, and no others, will be
            those of norm_kernel.
    """
    for grad in grads:
        value = grad.detach().flatten().double()
        # a block that is not finite only counts
        if not bool(value.isfinite().all()):
            bins[0, NONFINITE, int(value.isnan().any())] += 1
            continue
        # fp64, exact; zeros add nothing
        square = value * value
        largest = float(square.max()) if len(square) else 0.0
        if largest == 0.0:
            continue
        # the row of the top bin: largest is below 2**above, and no less than half of that
        _, above = math.frexp(largest)
        row = above // WIDTH - LOWEST
        # whole units of the top row, and of the one below: fp64, summed as integers
        upper = torch.round(square / unit_of(row))
        rest = square - upper * unit_of(row)
        lower = torch.round(rest / unit_of(row - 1))
        add_units(bins[0, row], upper)
        add_units(bins[0, row - 1], lower)


def total_reference(bins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of what was added to a table, on its device, without a change to it.

    Returns:
        norm: fp32, shape (). 0 without elements; NaN if there was a NaN, else infinity if there was
            one or if the norm is too large for fp32.
        nonfinite: bool, shape (): whether there was an infinity or a NaN among the elements.
    """
    # banks summed up: [ROWS] pairs of low and high, as Python's integers
    rows = bins.sum(0).tolist()
    infinities, nans = rows[NONFINITE]
    sums = [high * 2**LIMB + low for low, high in rows[:BINS]]
    # the highest row that is not 0; no square reaches row 0, which stands for none
    top = max((row for row in range(BINS) if sums[row]), default=0)
    norm = math.sqrt(total_of_bins(sums[top], sums[top - 1], top) if top else 0.0)
    norm = math.nan if nans else math.inf if infinities else norm
    nonfinite = torch.tensor(infinities + nans > 0, device=bins.device)
    return torch.tensor(norm, dtype=torch.float32, device=bins.device), nonfinite


def total_of_bins(upper: int, lower: int, row: int) -> float:
    """The sum of squares of the two bins that count; each operation is rounded once, to fp64."""
    unit = unit_of(row - 1)
    # each sum by its limbs, with the roundings of the kernel's row_total
    high, low = (float(limb) for limb in divmod(upper, 2**LIMB))
    leading = high * 2.0**LIMB + low
    high, low = (float(limb) for limb in divmod(lower, 2**LIMB))
    trailing = high * 2.0**LIMB + low
    return (leading * 2.0**WIDTH + trailing) * unit
