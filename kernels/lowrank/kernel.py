"""The last stage of a step of low rank: project Adam's direction back, update weight and master.

A program makes a tile of one matrix: the product [m, rank] @ [rank, n], rank by rank in one fixed
order, in fp32; then the step's own load, decode, update, encode and store, in place. The update,
as large as the matrix, is never in memory.
"""

from __future__ import annotations

from megaopt.kernels.lowrank.operands import added_product, loaded, taken
from megaopt.kernels.lowrank.tables import DIRECTION, PROJECTION, address
from megaopt.kernels.optional_triton import helper, jit, tl
from megaopt.kernels.step.blocks import pointers_of
from megaopt.kernels.step.codes import loaded_param
from megaopt.kernels.step.draws import block_words, draw_of
from megaopt.kernels.step.kernel import (
    SKIP,
    draw_row,
    place_of,
    scalars_of,
)
from megaopt.kernels.step.rows import WEIGHT_COLUMNS, WEIGHT_ROWS
from megaopt.kernels.step.update import canonical_values, stored_block


@helper
def product_tile(
    left_ptr, right_ptr, row, column, rows, columns, stride, LEFT_FORMAT: tl.constexpr,
    RIGHT_FORMAT: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """fp32 [row, column] of a product; 0 outside the matrix, which ends at rows and columns.

    stride: of the right factor's rows.
    """
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for first in range(0, RANK, INNER):
        inner = first + tl.arange(0, INNER)
        mask = (row[:, None] < rows) & (inner[None, :] < RANK)
        left = loaded(left_ptr, row[:, None] * RANK + inner[None, :], mask, EVEN)
        mask = (inner[:, None] < RANK) & (column[None, :] < columns)
        right = loaded(right_ptr, inner[:, None] * stride + column[None, :], mask, EVEN)
        left, right = taken(left, LEFT_FORMAT, PRECISION), taken(right, RIGHT_FORMAT, PRECISION)
        total = added_product(left, right, total, PRECISION)
    return total


@helper
def update_tile(
    pointers, left_ptr, right_ptr, rows, rest, columns, start, draw, scalars,
    FORMATS: tl.constexpr, RULE: tl.constexpr, LEFT_FORMAT: tl.constexpr,
    RIGHT_FORMAT: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Updates a tile; all pointers: to its first element.

    rows, rest: of the matrix from there on; columns: of the whole one; start: the tile's first
    element in it.
    """
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    offsets = row[:, None] * columns + column[None, :]
    mask = (row[:, None] < rows) & (column[None, :] < rest)
    _, weight_ptr, master_ptr, _ = pointers
    param = loaded_param(weight_ptr, master_ptr, 1.0, offsets, mask, FORMATS, not EVEN)
    update = product_tile(
        left_ptr, right_ptr, row, column, rows, rest, columns,
        LEFT_FORMAT, RIGHT_FORMAT, PRECISION, EVEN, RANK, INNER,
    )  # fmt: skip
    values = canonical_values(RULE.update(param, (), update, scalars), FORMATS)
    words = block_words(draw, start, 0, offsets, FORMATS.draws, False, 0, False)
    stored_block(
        pointers, (1.0, ()), values, 1.0, 0, words, offsets, 0, 0, mask, FORMATS, not EVEN,
    )  # fmt: skip


@jit(do_not_specialize=["matrices", "scalar_count"])
def back_project_kernel(
    table_ptr,  # *int64 [ROW_COUNT, matrices], as tables.py has it
    tiles_ptr,  # *int32 as step.table.Chunks, of tiles
    scalars_ptr,  # *fp32 [groups, scalar_count]
    controls_ptr,  # *fp32 [CONTROLS]; unread unless CONTROLLED
    matrices,
    scalar_count,
    FORMATS: tl.constexpr,  # as formats.apply_formats makes them
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    DIRECTION_FORMAT: tl.constexpr,
    DIRECTION_ELEMENT: tl.constexpr,  # as which it is loaded
    PROJECTION_FORMAT: tl.constexpr,
    PROJECTION_ELEMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    LEFT: tl.constexpr,
    EVEN: tl.constexpr,  # only whole tiles, rows of which begin at multiples of 16 bytes
    RANK: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile
    COLUMNS: tl.constexpr,
    STRIP: tl.constexpr,  # tiles of a program, one beside another
    INNER: tl.constexpr,  # of the rank, at a time
    SPAN: tl.constexpr,
):
    """The update of a few tiles of one matrix."""
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    matrix, tile = place_of(tiles_ptr, matrices, tl.program_id(0), SPAN)
    rows = tl.load(table_ptr + WEIGHT_ROWS * matrices + matrix).to(tl.int32)
    columns = tl.load(table_ptr + WEIGHT_COLUMNS * matrices + matrix).to(tl.int32)
    if EVEN:
        rows, columns = tl.multiple_of(rows, 16), tl.multiple_of(columns, 16)
    across = tl.cdiv(columns, COLUMNS * STRIP)
    first_row = tile // across * ROWS
    direction_ptr = address(table_ptr, DIRECTION, matrices, matrix)
    direction_ptr = direction_ptr.to(tl.pointer_type(DIRECTION_ELEMENT))
    projection_ptr = address(table_ptr, PROJECTION, matrices, matrix)
    projection_ptr = projection_ptr.to(tl.pointer_type(PROJECTION_ELEMENT))
    scalars = scalars_of(table_ptr, scalars_ptr, scalar_count, matrices, matrix, RULE)
    row_ptr = draw_row(table_ptr, scalars_ptr, scalar_count, matrices, matrix, RULE)
    draw = draw_of(table_ptr, matrices, matrix, row_ptr, FORMATS.draws)
    before = first_row.to(tl.int64) * RANK
    for part in range(STRIP):
        column = (tile % across * STRIP + part) * COLUMNS
        # pointers to the tile's own first element: offsets stay within 32 bits
        start = first_row.to(tl.int64) * columns + column
        pointers = pointers_of(table_ptr, matrices, matrix, start, FORMATS)
        if LEFT:
            update_tile(
                pointers, projection_ptr + before, direction_ptr + column, rows - first_row,
                columns - column, columns, start, draw, scalars, FORMATS, RULE, PROJECTION_FORMAT,
                DIRECTION_FORMAT, PRECISION, EVEN, RANK, ROWS, COLUMNS, INNER,
            )  # fmt: skip
        else:
            update_tile(
                pointers, direction_ptr + before, projection_ptr + column, rows - first_row,
                columns - column, columns, start, draw, scalars, FORMATS, RULE, DIRECTION_FORMAT,
                PROJECTION_FORMAT, PRECISION, EVEN, RANK, ROWS, COLUMNS, INNER,
            )  # fmt: skip
