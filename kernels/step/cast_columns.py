"""MXFP8 along columns: codes of blocks of 32 rows of a column, beside those of rows.

Kept in the weight's own order, for products that go along the other dimension; the scales of
blocks along rows do not serve them, so they are made of the masters, once more.
"""

from __future__ import annotations

import torch

from megaopt.kernels.float8 import Float8Recipe
from megaopt.kernels.float8.quantize import amax_reference, multiplied, scales_reference
from megaopt.kernels.float8.scale import magnitude_bits
from megaopt.kernels.optional_triton import jit, tl
from megaopt.kernels.step.blocks import pointer
from megaopt.kernels.step.cast import TILE, rounded, scale_of
from megaopt.kernels.step.kernel import SKIP
from megaopt.kernels.step.rows import MASTER, MASTER_SCALE
from megaopt.kernels.step.scales import old_scale

BAND: tl.constexpr = tl.constexpr(32)


def columns_reference(
    values: torch.Tensor, recipe: Float8Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in the values' shape, and scale_inv, a row for each 32 rows.

    Args:
        values: fp32, (rows, columns), rounded as the recipe says.
        recipe: with scaling "mxfp8".
    """
    turned = values.t()
    scale, scale_inv = scales_reference(amax_reference(turned, recipe), recipe, None)
    codes = recipe.format.encode_reference(multiplied(turned, scale, recipe.block))
    return codes.t(), scale_inv.t()


@jit(do_not_specialize=["tensors", "tiles"])
def cast_columns_kernel(
    table_ptr,  # *int64 [ROWS, tensors], of the step
    tiles_ptr,  # *int32 [3, tiles]: the tensor, the tile's row and column in units of tiles
    columns_ptr,  # *int64 [5, tensors]: addresses of codes and scale_inv; rows, columns, stride
    controls_ptr,  # *fp32 [CONTROLS]; unread unless CONTROLLED
    tensors,
    tiles,
    FORMATS: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """Casts a tile of a whole weight's masters, 32 rows at a time."""
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    program = tl.program_id(0)
    tensor = tl.load(tiles_ptr + program)
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    WEIGHT_FORMAT: tl.constexpr = FORMATS.weight
    master_ptr = pointer(table_ptr, MASTER, tensors, tensor, 0, MASTER_FORMAT)
    master_scale = old_scale(table_ptr, MASTER_SCALE, tensors, tensor, MASTER_FORMAT)
    codes_ptr = pointer(columns_ptr, 0, tensors, tensor, 0, WEIGHT_FORMAT)
    scale_inv_ptr = tl.load(columns_ptr + tensors + tensor).to(tl.pointer_type(tl.uint8))
    rows = tl.load(columns_ptr + 2 * tensors + tensor)
    columns = tl.load(columns_ptr + 3 * tensors + tensor)
    stride = tl.load(columns_ptr + 4 * tensors + tensor)
    first_row = tl.load(tiles_ptr + tiles + program).to(tl.int64) * TILE
    column = tl.load(tiles_ptr + 2 * tiles + program).to(tl.int64) * TILE + tl.arange(0, TILE)
    band = tl.zeros((), tl.int32)
    while band < TILE // BAND:
        row = first_row + band * BAND + tl.arange(0, BAND)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        offsets = row[:, None] * columns + column[None, :]
        code = tl.load(master_ptr + offsets, mask=mask, other=0)
        value = rounded(MASTER_FORMAT.decode(code, master_scale), FORMATS)
        bits = tl.max(magnitude_bits(tl.where(mask, value, 0.0)), 0)
        scale, scale_inv = scale_of(bits, FORMATS)
        code = WEIGHT_FORMAT.encode(value * scale[None, :], 1.0)
        tl.store(codes_ptr + offsets, code, mask=mask)
        block = first_row // BAND + band
        # not & of the two comparisons: a scalar's is no mask in Triton 3.9's interpreter
        inside = column < tl.where(first_row + band * BAND < rows, columns, 0)
        tl.store(scale_inv_ptr + block * stride + column, scale_inv, mask=inside)
        band += 1
