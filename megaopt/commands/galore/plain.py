"""GaLore's step in torch's own operations: of the kernels' twin it has only the products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from megaopt.kernels.matrix.galore import projected, projected_back
from megaopt.kernels.matrix.products import IEEE

__all__ = ["UNIT", "derived_update_error", "plain_step"]

UNIT = 2.0**-24
"""fp32's largest relative error of one rounding."""


def plain_step(
    before: Mapping[str, torch.Tensor],
    projection: torch.Tensor,
    side: str,
    group: Mapping[str, Any],
    step: int,
    precision: str = IEEE,
) -> dict[str, torch.Tensor]:
    """One step without a refresh, in the dtype of the tensors.

    Args:
        before: grad and param [m, n]; exp_avg and exp_avg_sq of the projected gradient's shape.
            All of one dtype, fp32 or fp64.
        projection: of that dtype; [rank, n] on the right, [m, rank] on the left.
        side: "right" or "left".
        group: lr, betas, eps, weight_decay, scale; with bias correction.
        step: the number of this update, from 1.
        precision: of the two products of fp32 numbers.

    Returns:
        The new exp_avg, exp_avg_sq and param; and step, what was taken from param before decay.
    """
    (beta1, beta2), grad = group["betas"], before["grad"]
    low = projected(grad, projection, side, precision)
    exp_avg = beta1 * before["exp_avg"] + (1 - beta1) * low
    exp_avg_sq = beta2 * before["exp_avg_sq"] + (1 - beta2) * (low * low)
    low = exp_avg / (exp_avg_sq.sqrt() + group["eps"])
    back = projected_back(low, projection, side, precision)
    correction = math.sqrt(1 - beta2**step) / (1 - beta1**step)
    taken = group["lr"] * group["scale"] * correction * back
    param = before["param"] - taken
    param = param - group["lr"] * group["weight_decay"] * param
    return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "param": param, "step": taken}


def derived_update_error(exact: Mapping[str, torch.Tensor], rank: int) -> float:
    """The norm of an fp32 update's error in the mean, where the product's sums have any order.

    Args:
        exact: what `plain_step` gives in fp64.
        rank: numbers in a sum.
    """
    # Roundings are taken as independent, each evenly spread over at most +-UNIT of its result, so
    # that its square is UNIT**2 / 3 in the mean (Higham and Mary 2019, SIAM J. Sci. Comput. 41).
    # Of a sum of r products N_ij P_jk, of signs that are random as those of the gradient, a partial
    # sum's square is in the mean at most that of all products together, sum_j (N_ij P_jk)**2.
    # There are r partial sums in any order, and one more of that size for the products' own
    # roundings. Over the matrix that is (r + 1) |N|**2, as a row of P has the length 1; and as rows
    # are orthogonal, |N| = |N P|. Root, eps, quotient and step_size round four times more, relative
    # to the same. Then two subtractions round numbers of the weight's size.
    step, param = (float(exact[name].norm()) for name in ("step", "param"))
    return UNIT * math.sqrt(((rank + 5) * step**2 + 2 * param**2) / 3)
