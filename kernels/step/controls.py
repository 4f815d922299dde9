"""The controls of a step: fp32 numbers on the device, a row of them for each row of scalars."""

from __future__ import annotations

GRAD_SCALE, INVERSE_SCALE, COEFFICIENT, SKIP, UNSCALED = range(5)
"""The places of the loss scale that gradients were multiplied by; its reciprocal; the factor of
the unscaled gradients; whether the step is left out; whether there is a loss scale at all."""
COUNT = 5
