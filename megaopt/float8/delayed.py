"""Delayed scaling: how a weight's scale follows its amaxes."""

from __future__ import annotations

import torch

from megaopt.float8.weight import Float8Weight
from megaopt.kernels.float8.scale import magnitude_reference, scale_from_amax_reference


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
        raise ValueError(f"scaling={recipe.scaling!r} is not allowed: only 'delayed'")
    newest = recipe.amax_compute_algo == "most_recent"
    # the largest passes NaNs over, the newest is taken as it is
    amax = history[:1] if newest else magnitude_reference(history).amax().reshape(1)
    new_scale = scale_from_amax_reference(amax, recipe.code_max, 0.0, scale)
    new_history = history.roll(-1)
    new_history[:1] = 0.0
    if skip is not None:
        new_scale = torch.where(skip, scale, new_scale)
        new_history = torch.where(skip, history, new_history)
    scale.copy_(new_scale)
    history.copy_(new_history)
