"""MXFP8: blocks of 32 in a row, whose scale is a power of two that is kept as its exponent.

Codes along columns, of blocks of 32 rows, may stand beside: for products that go along the other
dimension, in the weight's own order. They are made of the masters, once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megaopt.kernels.chunks.blocks import pointer
from megaopt.kernels.chunks.chunk import Column, entry
from megaopt.kernels.chunks.draws import block_words
from megaopt.kernels.chunks.rows import MASTER, MASTER_SCALE
from megaopt.kernels.chunks.scales import old_scale
from megaopt.kernels.chunks.store import Quantizer, Recipe, drawn_code
from megaopt.kernels.optional_triton import helper, jit, tl
from megaopt.kernels.quantizers.cast import cast_draw, rounded
from megaopt.kernels.quantizers.scale import (
    amax_reference,
    e8m0_from_amax,
    e8m0_from_amax_reference,
    e8m0_multiplier,
    e8m0_multiplier_reference,
    e8m0_value,
    e8m0_value_reference,
    magnitude_bits,
    multiplied,
)
from megaopt.kernels.quantizers.tiles import TILE, store_of_tiles, tile_in_lines
from megaopt.kernels.step.kernel import is_left_out

BAND: tl.constexpr = tl.constexpr(32)


@helper
def value_of_exponent(scale_inv):
    return e8m0_value(scale_inv.to(tl.int32))


@helper
def scale_of_exponent(column, amax_bits, FORMATS: tl.constexpr):
    amax = amax_bits.to(tl.float32, bitcast=True)
    code = e8m0_from_amax(amax, FORMATS.cast.recipe.code_max_inverse)
    return e8m0_multiplier(code), code.to(tl.uint8)


def scales_of_exponent_reference(
    amax: torch.Tensor, recipe: Recipe, scale: None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale, fp32, and the E8M0 code of its inverse, uint8, of amax's shape."""
    code = e8m0_from_amax_reference(amax, recipe.code_max)
    return e8m0_multiplier_reference(code), code


@jit(do_not_specialize=["tensors", "tiles", "scalar_count"])
def cast_columns_kernel(
    table_ptr,  # *int64 [ROWS, tensors], of the step
    tiles_ptr,  # *int32 [3, tiles]: the tensor, the tile's row and column in units of tiles
    columns_ptr,  # *int64 [5, tensors]: addresses of codes and scale_inv; rows, columns, stride
    controls_ptr,  # *fp32 [groups, CONTROLS]; unread unless CONTROLLED
    scalars_ptr,  # *fp32 [groups, scalar_count], of the step; unread unless the cast draws
    tensors,
    tiles,
    scalar_count,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """Casts a tile of a whole weight's masters, 32 rows at a time."""
    # the weight, in the step's table and in that of its codes along columns
    program = tl.program_id(0)
    tensor = tl.load(tiles_ptr + program)
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    WEIGHT_FORMAT: tl.constexpr = FORMATS.weight
    source, target = Column(table_ptr, tensors, tensor), Column(columns_ptr, tensors, tensor)
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if is_left_out(source, controls_ptr):
            return
    # masters [rows, columns] of a whole weight are read, codes of the same shape are written
    master_ptr = pointer(source, MASTER, 0, MASTER_FORMAT)
    master_scale = old_scale(source, MASTER_SCALE, MASTER_FORMAT)
    draw = cast_draw(source, scalars_ptr, scalar_count, FORMATS, RULE)
    codes_ptr = pointer(target, 0, 0, WEIGHT_FORMAT)
    scale_inv_ptr = entry(target, 1).to(tl.pointer_type(tl.uint8))
    # int64, the weight's shape, and how far apart rows of scale_inv lie
    rows = entry(target, 2)
    columns = entry(target, 3)
    stride = entry(target, 4)
    # the tile's first row, and its TILE columns
    first_row = tl.load(tiles_ptr + tiles + program).to(tl.int64) * TILE
    column = tl.load(tiles_ptr + 2 * tiles + program).to(tl.int64) * TILE + tl.arange(0, TILE)
    band = tl.zeros((), tl.int32)
    while band < TILE // BAND:
        # a band of 32 rows: one block in each column
        row = first_row + band * BAND + tl.arange(0, BAND)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        offsets = row[:, None] * columns + column[None, :]
        # fp32 [BAND, TILE], rounded masters
        code = tl.load(master_ptr + offsets, mask=mask, other=0)
        value = rounded(MASTER_FORMAT.decode(code, master_scale), FORMATS)
        # [TILE], amax, scale and E8M0 code of each column
        bits = tl.max(magnitude_bits(tl.where(mask, value, 0.0)), 0)
        scale, scale_inv = scale_of_exponent(source, bits, FORMATS)
        # the words of an element are those of its code along the row
        words = block_words(draw, 0, 0, offsets, FORMATS.weight.draws, False, 0, False)
        code = drawn_code(value * scale[None, :], words, WEIGHT_FORMAT)
        tl.store(codes_ptr + offsets, code, mask=mask)
        # a row of scale_inv for each band
        block = first_row // BAND + band
        # not & of the two comparisons: a scalar's is no mask in Triton 3.9's interpreter
        inside = column < tl.where(first_row + band * BAND < rows, columns, 0)
        tl.store(scale_inv_ptr + block * stride + column, scale_inv, mask=inside)
        band += 1


def columns_reference(
    values: torch.Tensor, recipe: Recipe, encode: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in the values' shape, and scale_inv, a row for each 32 rows.

    The values are rounded as the recipe says; encode: makes codes of values times scales.
    """
    turned = values.t()
    amax = amax_reference(turned, recipe)
    scale, scale_inv = scales_of_exponent_reference(amax, recipe, None)
    return encode(multiplied(turned, scale, recipe.block).t()), scale_inv.t()


# on an H200, as in blocks.py: 512 4 -: 90.7; 1024 4 -: 91.7; 512 4 80: 90.7; 512 8 -: 63.2
STORE = store_of_tiles("mxfp8", tile_in_lines, True, PIECE=1024, PIECE_AGAIN=1024, num_warps=4)
SCALES = (scale_of_exponent, scales_of_exponent_reference)
OPTIONS = ("power_of_two_scales",)
KEPT: dict[str, Any] = {"scale_dtype": torch.uint8, "scale_element": tl.uint8}
KEPT |= {"value_reference": e8m0_value_reference, "value": value_of_exponent}
MXFP8 = Quantizer("mxfp8", OPTIONS, STORE, *SCALES, 1, 32, **KEPT)
