"""The numbers of a group that every Adam has, and their order on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaopt.kernels.optional_triton import tl
from megaopt.kernels.rules.base import Moment

BETA1: tl.constexpr = tl.constexpr(0)
BETA2: tl.constexpr = tl.constexpr(1)
EPS: tl.constexpr = tl.constexpr(2)
WEIGHT_DECAY: tl.constexpr = tl.constexpr(3)
BIAS_CORRECTION: tl.constexpr = tl.constexpr(4)
TABLES: tl.constexpr = tl.constexpr(5)
TABLE_LENGTHS: tl.constexpr = tl.constexpr(7)

MOMENTS = (Moment("exp_avg"), Moment("exp_avg_sq"))
AMSGRAD_MOMENTS = (*MOMENTS, Moment("max_exp_avg_sq"))


def hyper(group: Mapping[str, Any]) -> tuple[float, ...]:
    """beta1, beta2, eps, weight_decay, and bias_correction as 0 or 1."""
    numbers = (*group["betas"], group["eps"], group["weight_decay"], bool(group["bias_correction"]))
    return tuple(map(float, numbers))
