"""An exponential moving average of the weights, for evaluation: it follows any rule.

ema = ema_decay * ema + (1 - ema_decay) * param, of the new fp32 param, each operation rounded once.
It starts as the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.rules.base import PARAM, Moment, Rule, round_row
from megaopt.kernels.rules.loading import number


def hyper(group: Mapping[str, Any]) -> tuple[float, ...]:
    """The decay, from 0 to 1."""
    return (float(group["ema_decay"]),)


def scalars(group: Mapping[str, Any]) -> tuple[float, ...]:
    """The decay and what it leaves, fp32."""
    (decay,) = hyper(group)
    return round_row((decay, 1.0 - decay))


@helper
def prepare(hyper_ptr, lr, step):
    decay = number(hyper_ptr, 0)
    rest = tl.full((), 1.0, tl.float64) - decay
    return decay.to(tl.float32), rest.to(tl.float32)


@helper
def ema(param, moments, grad, scalars):
    decay, rest = scalars
    return param, (decay * moments[0] + rest * param,)


def ema_reference(
    param: torch.Tensor,
    moments: tuple[torch.Tensor, ...],
    grad: torch.Tensor,
    scalars: tuple[float, ...],
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Param as it is, and the new average; fp32 of one shape."""
    decay, rest = scalars
    return param, (moments[0] * decay + param * rest,)


EMA = Rule(
    "ema", "ieee", (Moment("ema", PARAM),), scalars, 2, hyper, prepare, ema, ema_reference,
    moments_use_param=True, hyper_length=1,
)  # fmt: skip
