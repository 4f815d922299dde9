"""The controls of a step: fp32 numbers on the device, and the order in which they lie there."""

from __future__ import annotations

GRAD_SCALE, INVERSE_SCALE, COEFFICIENT, SKIP = range(4)
"""Gradients are so many times too large; its reciprocal; what they are multiplied by; whether the
step is left out."""
COUNT = 4
