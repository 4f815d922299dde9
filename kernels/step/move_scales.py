"""Delayed scaling: the next step's scales and histories of amaxes."""

from __future__ import annotations

import torch

from megaopt.kernels.float8.recipe import Float8Recipe
from megaopt.kernels.float8.scale import (
    magnitude_bits,
    magnitude_reference,
    scale_from_amax,
    scale_from_amax_reference,
)
from megaopt.kernels.optional_triton import jit, tl
from megaopt.kernels.step.kernel import SKIP


@jit(do_not_specialize=["weights", "length"])
def move_scales_kernel(
    table_ptr,  # *int64 [3, weights], addresses: amax histories, scales, amaxes of this step
    controls_ptr,  # *fp32 [CONTROLS]; unread unless CONTROLLED
    weights,
    length,
    CODE_MAX: tl.constexpr,
    MOST_RECENT: tl.constexpr,
    CONTROLLED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Delayed scaling, a weight a program: move_scales_reference after a step."""
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    weight = tl.program_id(0)
    history_ptr = tl.load(table_ptr + weight).to(tl.pointer_type(tl.float32))
    scale_ptr = tl.load(table_ptr + weights + weight).to(tl.pointer_type(tl.float32))
    amax_ptr = tl.load(table_ptr + 2 * weights + weight).to(tl.pointer_type(tl.float32))
    place = tl.arange(0, PADDED)
    history = tl.load(history_ptr + place, mask=place < length, other=0.0)
    latest = tl.maximum(tl.load(history_ptr), tl.load(amax_ptr), propagate_nan=tl.PropagateNan.ALL)
    history = tl.where(place == 0, latest, history)
    if MOST_RECENT:
        amax = latest
    else:
        amax = tl.max(magnitude_bits(history), 0).to(tl.float32, bitcast=True)
    scale = scale_from_amax(amax, CODE_MAX, 0.0, tl.load(scale_ptr), False)
    # all has been read before anything is written
    tl.debug_barrier()
    tl.store(scale_ptr, scale)
    tl.store(history_ptr + place - 1, history, mask=(place >= 2) & (place < length))
    # a scalar's comparison is no mask in Triton 3.9's interpreter, a block's is
    tl.store(history_ptr + place, latest, mask=(place >= 1) & (place == length - 1))
    tl.store(history_ptr, 0.0)


def move_scales_reference(
    history: torch.Tensor,
    scale: torch.Tensor,
    recipe: Float8Recipe,
    skip: torch.Tensor | None = None,
) -> None:
    """The twin for one weight, whose amax of this step is the history's first; nothing waits.

    Args:
        history: fp32, (amax_history_len,).
        scale: fp32, (1,).
        recipe: with delayed scaling.
        skip: one boolean on the device; where it is true nothing moves.
    """
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
