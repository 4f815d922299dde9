"""Delayed scaling: how a weight's scale follows its amaxes."""

from __future__ import annotations

import torch

from megaopt.float8.weight import Float8Weight
from megaopt.kernels.quantizers.delayed import move_scales_reference


@torch.no_grad()
def update_scales(weight: Float8Weight, skip: torch.Tensor | None = None) -> None:
    """Delayed scaling, once a step: the next scale from the amaxes so far, which move on by one.

    As TransformerEngine: the first of the history, the amax since the last call, becomes its last,
    all others move towards the front, and the first is 0. The scale becomes the recipe's code_max /
    amax; where amax is 0, infinity or NaN it stays. Codes and `scale_inv` belong together and stay,
    too. On the device; nothing waits.

    Args:
        weight: with delayed scaling.
        skip: one boolean on the weight's device; where it is true nothing moves.

    Raises:
        ValueError: another recipe: its scales come from the values.
    """
    history, scale, recipe = weight.amax_history, weight.scale, weight.recipe
    if history is None or scale is None:
        raise ValueError(f"scaling must be 'delayed', got {recipe.scaling!r}")
    move_scales_reference(history, scale, recipe, skip)
