"""Delayed scaling: a scale per tensor from the amaxes of earlier steps, which move on after each.

The step knows the scale before its first block, so that it stores codes at once.
"""

from __future__ import annotations

import torch

from megaopt.kernels.calling import call
from megaopt.kernels.chunks.blocks import store_block
from megaopt.kernels.chunks.chunk import entry
from megaopt.kernels.chunks.rows import WEIGHT_SCALE
from megaopt.kernels.chunks.store import Left, Quantizer, Recipe, Store
from megaopt.kernels.optional_triton import helper, jit, tl
from megaopt.kernels.quantizers.cast import noted, raise_amax, scale_inv_pointer, store_codes
from megaopt.kernels.quantizers.scale import (
    magnitude_bits,
    magnitude_reference,
    reciprocal,
    reciprocal_reference,
    scale_from_amax,
    scale_from_amax_reference,
)
from megaopt.kernels.step.kernel import CONTROLS, SKIP


@helper
def begin(column, FORMATS: tl.constexpr):
    """Returns the scale that values are multiplied by."""
    return tl.load(entry(column, WEIGHT_SCALE).to(tl.pointer_type(tl.float32)))


@helper
def put(pointers, block, param, scale, amax_bits, words, FORMATS: tl.constexpr):
    value, amax_bits = noted(param, amax_bits, block.mask, FORMATS)
    # codes are masters, too: what lies beside them is the joined master
    if FORMATS.in_place:
        store_codes(pointers.weight, pointers.master, block, value * scale, words, FORMATS)
    else:
        code = FORMATS.weight.encode(value * scale, 1.0)
        store_block(pointers.weight, block.offsets, code, block.mask)
    return amax_bits


@helper
def finish(column, start, scale, amax_bits, FORMATS: tl.constexpr):
    """Raises the tensor's amax; its first chunk stores scale_inv, unless others still read it."""
    raise_amax(column, start, scale, amax_bits, FORMATS)
    if not FORMATS.in_place:
        tl.store(scale_inv_pointer(column, FORMATS), reciprocal(scale), mask=start == 0)


@helper
def scale_there_is(column, amax_bits, FORMATS: tl.constexpr):
    scale = begin(column, FORMATS)
    return scale, reciprocal(scale)


def scale_there_is_reference(
    amax: torch.Tensor, recipe: Recipe, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale that the weight keeps, and its inverse; fp32, (1,)."""
    scale = scale.reshape(1).clone()
    return scale, reciprocal_reference(scale)


@jit(do_not_specialize=["weights", "length"])
def move_scales_kernel(
    table_ptr,  # *int64 [4, weights]: addresses of histories, scales, this step's amaxes; group
    controls_ptr,  # *fp32 [groups, CONTROLS]; unread unless CONTROLLED
    weights,
    length,
    CODE_MAX: tl.constexpr,
    MOST_RECENT: tl.constexpr,
    CONTROLLED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Delayed scaling, a weight a program: move_scales_reference after a step."""
    weight = tl.program_id(0)
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + tl.load(table_ptr + 3 * weights + weight) * CONTROLS + SKIP) != 0:
            return
    # fp32: history [length], scale [1], this step's amax [1]
    history_ptr = tl.load(table_ptr + weight).to(tl.pointer_type(tl.float32))
    scale_ptr = tl.load(table_ptr + weights + weight).to(tl.pointer_type(tl.float32))
    amax_ptr = tl.load(table_ptr + 2 * weights + weight).to(tl.pointer_type(tl.float32))
    # fp32 [PADDED]; the first place is this step's
    place = tl.arange(0, PADDED)
    history = tl.load(history_ptr + place, mask=place < length, other=0.0)
    latest = tl.maximum(tl.load(history_ptr), tl.load(amax_ptr), propagate_nan=tl.PropagateNan.ALL)
    history = tl.where(place == 0, latest, history)
    # the amax that the next scale is made of
    if MOST_RECENT:
        amax = latest
    else:
        amax = tl.max(magnitude_bits(history), 0).to(tl.float32, bitcast=True)
    scale = scale_from_amax(amax, CODE_MAX, 0.0, tl.load(scale_ptr), False)
    # all has been read before anything is written
    tl.debug_barrier()
    tl.store(scale_ptr, scale)
    # the history moves by one: the first goes to the last place, a new first begins at 0
    tl.store(history_ptr + place - 1, history, mask=(place >= 2) & (place < length))
    # a scalar's comparison is no mask in Triton 3.9's interpreter, a block's is
    tl.store(history_ptr + place, latest, mask=(place >= 1) & (place == length - 1))
    tl.store(history_ptr, 0.0)


def move_scales_reference(
    history: torch.Tensor,
    scale: torch.Tensor,
    recipe: Recipe,
    skip: torch.Tensor | None = None,
) -> None:
    """The twin for one weight, whose amax of this step is the history's first; nothing waits.

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


def move_scales(table: torch.Tensor, recipe: Recipe, controls: torch.Tensor | None) -> None:
    """Launches the kernel over weights; table: int64 [4, weights], as the kernel has it."""
    count, length = table.shape[1], recipe.amax_history_len
    options: dict[str, object] = {
        "CODE_MAX": recipe.code_max,
        "MOST_RECENT": recipe.amax_compute_algo == "most_recent",
        "CONTROLLED": controls is not None,
        "PADDED": 1 << (length - 1).bit_length(),
        "num_warps": 4,
    }
    call(move_scales_kernel, count, (table, controls, count, length), options)


OPTIONS = ("margin", "amax_history_len", "amax_compute_algo")
STORE = Store("delayed", Left.NOTHING, begin, put, finish, in_place=True)
SCALES = (scale_there_is, scale_there_is_reference)
DELAYED = Quantizer(
    "delayed", OPTIONS, STORE, *SCALES, move=move_scales, move_reference=move_scales_reference
)
