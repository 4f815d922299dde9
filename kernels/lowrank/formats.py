"""The formats of the two elementwise steps that a step of low rank is made of."""

from __future__ import annotations

from dataclasses import replace

from megaopt.kernels.formats import NONE, WEIGHTS
from megaopt.kernels.step.batch import Formats

FLOAT32 = WEIGHTS["float32"]


def direction_formats(formats: Formats) -> Formats:
    """Of Adam's step of the projected gradient, fp32: its direction takes the gradient's place."""
    return replace(formats, grad=FLOAT32, weight=FLOAT32, master=NONE, low_rank=None)


def apply_formats(formats: Formats) -> Formats:
    """Of the update of weight and master by the direction, projected back, fp32."""
    return replace(
        formats, grad=FLOAT32, moments=(), moment_names=(), maximize=False, low_rank=None
    )
