"""Lion under contract ieee: docs/numbers.md lists these operations by number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.rules.base import Moment, Rule, round_row
from megaopt.kernels.rules.loading import number

BETA1: tl.constexpr = tl.constexpr(0)
BETA2: tl.constexpr = tl.constexpr(1)
WEIGHT_DECAY: tl.constexpr = tl.constexpr(2)


def hyper(group: Mapping[str, Any]) -> tuple[float, ...]:
    """beta1, beta2, weight_decay."""
    beta1, beta2 = map(float, group["betas"])
    return beta1, beta2, float(group["weight_decay"])


def scalars(group: Mapping[str, Any]) -> tuple[float, ...]:
    """One row of fp32 numbers for a parameter group, computed in fp64 and rounded once.

    lr in units of the parameter: each element moves by it; weight_decay per unit of lr.
    """
    beta1, beta2, weight_decay = hyper(group)
    row = (beta1, 1.0 - beta1, beta2, 1.0 - beta2, weight_decay, float(group["lr"]))
    return round_row(row)


@helper
def prepare(hyper_ptr, lr, step):
    one = tl.full((), 1.0, tl.float64)
    beta1, beta2 = number(hyper_ptr, BETA1), number(hyper_ptr, BETA2)
    return (
        beta1.to(tl.float32),
        (one - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (one - beta2).to(tl.float32),
        number(hyper_ptr, WEIGHT_DECAY).to(tl.float32),
        lr,
    )


@helper
def sign(value):
    """1 or -1; of zeros and NaN the value itself."""
    return tl.where(value > 0.0, 1.0, tl.where(value < 0.0, -1.0, value))


@helper
def lion(param, moments, grad, scalars):
    beta1, one_minus_beta1, beta2, one_minus_beta2, weight_decay, lr = scalars
    exp_avg = moments[0]
    # the sign of a mixture of moment and gradient, with decoupled decay
    update = sign(beta1 * exp_avg + one_minus_beta1 * grad) + weight_decay * param
    param = param - lr * update
    # beta2 mixes moment and gradient, without the decay
    exp_avg = beta2 * exp_avg + one_minus_beta2 * grad
    return param, (exp_avg,)


def lion_reference(
    param: torch.Tensor,
    moments: tuple[torch.Tensor, ...],
    grad: torch.Tensor,
    scalars: tuple[float, ...],
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """One Lion update (Chen et al. 2023, arXiv:2302.06675) of fp32 tensors of one shape."""
    beta1, one_minus_beta1, beta2, one_minus_beta2, weight_decay, lr = scalars
    (exp_avg,) = moments
    mixed = exp_avg * beta1 + grad * one_minus_beta1
    update = torch.where(mixed > 0, 1.0, torch.where(mixed < 0, -1.0, mixed))
    param = param - (update + param * weight_decay) * lr
    exp_avg = exp_avg * beta2 + grad * one_minus_beta2
    return param, (exp_avg,)


LION = Rule("lion", "ieee", (Moment("exp_avg"),), scalars, 6, hyper, prepare, lion, lion_reference)
