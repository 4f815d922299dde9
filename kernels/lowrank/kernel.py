"""The last stage of a step of low rank: project Adam's direction back, update weight and master.

A program makes a tile of one matrix: the product [m, rank] @ [rank, n], rank by rank in one fixed
order, in fp32; then the step's own load, decode, update, encode and store, in place. The update,
as large as the matrix, is never in memory.
"""

from __future__ import annotations

from megaopt.kernels.optional_triton import helper, jit, tl
from megaopt.kernels.step.blocks import pointers_of
from megaopt.kernels.step.codes import load_param, param_of
from megaopt.kernels.step.draws import block_words, draw_of
from megaopt.kernels.step.kernel import (
    SKIP,
    draw_row,
    place_of,
    scalars_of,
)
from megaopt.kernels.step.rows import FIRST_MOMENT_ROW, WEIGHT_COLUMNS, WEIGHT_ROWS
from megaopt.kernels.step.update import canonical_values, stored_block

# Rows of the step's table, where it has moments: addresses of the product's two factors, fp32.
LEFT_FACTOR: tl.constexpr = tl.constexpr(FIRST_MOMENT_ROW)
RIGHT_FACTOR: tl.constexpr = tl.constexpr(FIRST_MOMENT_ROW + 1)
ROW_COUNT = FIRST_MOMENT_ROW + 2


@helper
def factor_of(table_ptr, row, matrices, matrix):
    return tl.load(table_ptr + row * matrices + matrix).to(tl.pointer_type(tl.float32))


@helper
def product_tile(
    left_ptr, right_ptr, row, column, rows, columns, RANK: tl.constexpr, INNER: tl.constexpr
):
    """fp32 [row, column] of the product; 0 outside the matrix."""
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for first in range(0, RANK, INNER):
        inner = first + tl.arange(0, INNER)
        left_mask = (row[:, None] < rows) & (inner[None, :] < RANK)
        right_mask = (inner[:, None] < RANK) & (column[None, :] < columns)
        left_places = row[:, None] * RANK + inner[None, :]
        left = tl.load(left_ptr + left_places, mask=left_mask, other=0.0)
        right_places = inner[:, None] * columns + column[None, :]
        right = tl.load(right_ptr + right_places, mask=right_mask, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@jit(do_not_specialize=["matrices", "scalar_count"])
def back_project_kernel(
    table_ptr,  # *int64 [ROW_COUNT, matrices]
    tiles_ptr,  # *int32 as step.table.Chunks, of tiles
    scalars_ptr,  # *fp32 [groups, scalar_count]
    controls_ptr,  # *fp32 [CONTROLS]; unread unless CONTROLLED
    matrices,
    scalar_count,
    FORMATS: tl.constexpr,  # as formats.apply_formats makes them
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,  # of the rank, at a time
    SPAN: tl.constexpr,
):
    """The update of one tile of one matrix."""
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    matrix, tile = place_of(tiles_ptr, matrices, tl.program_id(0), SPAN)
    rows = tl.load(table_ptr + WEIGHT_ROWS * matrices + matrix)
    columns = tl.load(table_ptr + WEIGHT_COLUMNS * matrices + matrix)
    across = tl.cdiv(columns, COLUMNS)
    row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tile % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    offsets = row[:, None] * columns + column[None, :]
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    pointers = pointers_of(table_ptr, matrices, matrix, 0, FORMATS)
    _, weight_ptr, master_ptr, _ = pointers
    weight, master = load_param(weight_ptr, master_ptr, offsets, mask, FORMATS, True)
    param = param_of(weight, master, 1.0, FORMATS)
    left_ptr = factor_of(table_ptr, LEFT_FACTOR, matrices, matrix)
    right_ptr = factor_of(table_ptr, RIGHT_FACTOR, matrices, matrix)
    update = product_tile(left_ptr, right_ptr, row, column, rows, columns, RANK, INNER)
    scalars = scalars_of(table_ptr, scalars_ptr, scalar_count, matrices, matrix, RULE)
    values = canonical_values(RULE.update(param, (), update, scalars), FORMATS)
    row_ptr = draw_row(table_ptr, scalars_ptr, scalar_count, matrices, matrix, RULE)
    draw = draw_of(table_ptr, matrices, matrix, row_ptr, FORMATS.draws)
    words = block_words(draw, 0, 0, offsets, FORMATS.draws, False, 0, False)
    stored_block(
        pointers, (1.0, ()), values, 1.0, 0, words, offsets, 0, 0, mask, FORMATS, True,
    )  # fmt: skip
