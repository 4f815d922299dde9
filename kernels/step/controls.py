"""The controls of a step: fp32 numbers on the device, a row of them for each row of scalars."""

from __future__ import annotations

GRAD_SCALE, INVERSE_SCALE, COEFFICIENT, SKIP, UNSCALED = range(5)
"""Gradients are so many times too large; its reciprocal; what they are multiplied by; whether the
step is left out; whether a gradient scale was given at all."""
COUNT = 5
