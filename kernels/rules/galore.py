"""The rules of GaLore's step, all three of one row: docs/numbers.md lists their operations.

GALORE_ADAMW steps parameters as they are. For a matrix of low rank GALORE_DIRECTION makes Adam's
direction of the projected gradient, and GALORE_APPLY takes it, projected back, from the weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.rules import adam_ieee
from megaopt.kernels.rules.adam_ieee import Moments, Scalars
from megaopt.kernels.rules.adam_numbers import (
    BETA1,
    BETA2,
    BIAS_CORRECTION,
    MOMENTS,
    WEIGHT_DECAY,
)
from megaopt.kernels.rules.adam_numbers import hyper as adam_hyper
from megaopt.kernels.rules.base import Rule, power, round_row, round_to_fp32
from megaopt.kernels.rules.loading import number

SCALE: tl.constexpr = tl.constexpr(5)


def hyper(group: Mapping[str, Any]) -> tuple[float, ...]:
    """AdamW's numbers, and GaLore's scale."""
    return (*adam_hyper(group), float(group["scale"]))


def numbers(group: Mapping[str, Any]) -> Scalars:
    """One row of fp64 numbers for a parameter group: AdamW's nine, step_size and decay.

    scale: by which the update of a matrix of low rank is multiplied.
    """
    beta1, beta2 = map(float, group["betas"])
    lr = float(group["lr"])
    step_size = lr * float(group["scale"])
    if group["bias_correction"]:
        root = math.sqrt(1.0 - power(beta2, group["step"]))
        step_size = step_size * root / (1.0 - power(beta1, group["step"]))
    return (*adam_ieee.numbers(group), step_size, lr * float(group["weight_decay"]))


def scalars(group: Mapping[str, Any]) -> Scalars:
    """The row of `numbers`, of lr as it is on a device, each rounded to fp32 once."""
    return round_row(numbers({**group, "lr": round_to_fp32(float(group["lr"]))}))


@helper
def prepare(hyper_ptr, lr, step):
    one = tl.full((), 1.0, tl.float64)
    beta1, beta2 = number(hyper_ptr, BETA1), number(hyper_ptr, BETA2)
    # 1 - beta**step of both, fp64
    rest1 = one - adam_ieee.power_on_device(beta1, step)
    rest2 = one - adam_ieee.power_on_device(beta2, step)
    wide = lr.to(tl.float64)
    # lr * scale, with bias correction times root / rest, as on the host
    step_size = wide * number(hyper_ptr, SCALE)
    corrected = step_size * tl.sqrt(rest2) / rest1
    step_size = tl.where(number(hyper_ptr, BIAS_CORRECTION) != 0, corrected, step_size)
    decay = wide * number(hyper_ptr, WEIGHT_DECAY)
    # AdamW's nine numbers, and behind them these two
    numbers = (step_size.to(tl.float32), decay.to(tl.float32))
    return adam_ieee.prepare(hyper_ptr, lr, step) + numbers


@helper
def adams(scalars):
    """AdamW's numbers, the first nine of the row."""
    beta1, rest1, beta2, rest2, correction1, correction2, eps, weight_decay, lr, _, _ = scalars
    return beta1, rest1, beta2, rest2, correction1, correction2, eps, weight_decay, lr


@helper
def adamw(param, moments, grad, scalars):
    return adam_ieee.updated(param, moments, grad, adams(scalars), True, False)


@helper
def direction(param, moments, grad, scalars):
    _, _, _, _, _, _, eps, _, _, _, _ = scalars
    exp_avg, exp_avg_sq = adam_ieee.averages(moments, grad, adams(scalars))
    # without bias correction, which step_size has
    quotient = tl.math.div_rn(exp_avg, tl.math.sqrt_rn(exp_avg_sq) + eps)
    return quotient, (exp_avg, exp_avg_sq)


@helper
def apply(param, moments, grad, scalars):
    _, _, _, _, _, _, _, _, _, step_size, decay = scalars
    # the update first; the decay is of what that leaves
    param = param - step_size * grad
    param = param - decay * param
    return param, ()


@helper
def keep(param, moments, grad, scalars):
    return grad, ()


def adamw_reference(
    param: torch.Tensor, moments: Moments, grad: torch.Tensor, scalars: Scalars
) -> tuple[torch.Tensor, Moments]:
    """AdamW's update, by the first nine numbers of the row."""
    return adam_ieee.ADAMW_IEEE.update_reference(param, moments, grad, scalars[:9])


def direction_reference(
    param: torch.Tensor, moments: Moments, grad: torch.Tensor, scalars: Scalars
) -> tuple[torch.Tensor, Moments]:
    """Adam's direction of a projected gradient, without bias correction; fp32 or fp64."""
    exp_avg, exp_avg_sq = adam_ieee.averages_reference(moments, grad, scalars)
    root = exp_avg_sq.double().sqrt().to(exp_avg_sq.dtype)
    return exp_avg / (root + scalars[6]), (exp_avg, exp_avg_sq)


def apply_reference(
    param: torch.Tensor, moments: Moments, grad: torch.Tensor, scalars: Scalars
) -> tuple[torch.Tensor, Moments]:
    """The weight after an update, `grad`, and the decay of what it has become; fp32 or fp64."""
    step_size, decay = scalars[9:]
    param = param - grad * step_size
    return param - param * decay, ()


def keep_reference(
    param: torch.Tensor, moments: Moments, grad: torch.Tensor, scalars: Scalars
) -> tuple[torch.Tensor, Moments]:
    """The update itself."""
    return grad, ()


_ROW = (scalars, 11, hyper, prepare)

GALORE_ADAMW = Rule("galore_adamw", "ieee", MOMENTS, *_ROW, adamw, adamw_reference)
GALORE_DIRECTION = Rule(
    "galore_direction", "ieee", MOMENTS, *_ROW, direction, direction_reference, reads_param=False
)
GALORE_APPLY = Rule("galore_apply", "ieee", (), *_ROW, apply, apply_reference)
GALORE_KEEP = Rule("galore_keep", "ieee", (), *_ROW, keep, keep_reference, reads_param=False)
"""Leaves an update in the weight's place, for ranks that apply its parts."""
