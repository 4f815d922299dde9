"""The formats of the two elementwise steps that a step of low rank is made of."""

from __future__ import annotations

from dataclasses import replace

from megaopt.kernels.formats import NONE, WEIGHTS
from megaopt.kernels.lowrank.operands import BF16, IEEE
from megaopt.kernels.step.batch import Formats

FLOAT32 = WEIGHTS["float32"]


def direction_formats(formats: Formats, precision: str = IEEE) -> Formats:
    """Of Adam's step of the projected gradient, fp32: its direction goes where the weight is.

    With precision bf16 the direction is stored in that: the next product takes no more of it.
    """
    weight = WEIGHTS["bfloat16"] if precision == BF16 else FLOAT32
    return replace(formats, grad=FLOAT32, weight=weight, master=NONE, low_rank=None)


def apply_formats(formats: Formats) -> Formats:
    """Of the update of weight and master by the direction, projected back, fp32."""
    return replace(
        formats, grad=FLOAT32, moments=(), moment_names=(), maximize=False, low_rank=None
    )
