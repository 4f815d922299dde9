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
def left_tile(
    ptr, row, rows, inner, FORMAT: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    RANK: tl.constexpr,
):  # fmt: skip
    """[row, inner] of the left factor, as a product takes it; 0 where the matrix ends."""
    mask = (row[:, None] < rows) & (inner[None, :] < RANK)
    tile = loaded(ptr, row[:, None] * RANK + inner[None, :], mask, EVEN)
    return taken(tile, FORMAT, PRECISION)


@helper
def right_tile(
    ptr, inner, column, columns, stride, FORMAT: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """[inner, column] of the right factor, likewise; stride: of its rows."""
    mask = (inner[:, None] < RANK) & (column[None, :] < columns)
    tile = loaded(ptr, inner[:, None] * stride + column[None, :], mask, EVEN)
    return taken(tile, FORMAT, PRECISION)


@helper
def product_tile(
    left_ptr, right_ptr, row, column, rows, columns, stride, whole, LEFT_FORMAT: tl.constexpr,
    RIGHT_FORMAT: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """fp32 [row, column] of a product; 0 outside the matrix, which ends at rows and columns.

    stride: of the right factor's rows; whole: the left factor's tile, where it has the whole rank.
    """
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for first in range(0, RANK, INNER):
        inner = first + tl.arange(0, INNER)
        if INNER >= RANK:
            left = whole
        else:
            left = left_tile(left_ptr, row, rows, inner, LEFT_FORMAT, PRECISION, EVEN, RANK)
        right = right_tile(
            right_ptr, inner, column, columns, stride, RIGHT_FORMAT, PRECISION, EVEN, RANK
        )
        total = added_product(left, right, total, PRECISION)
    return total


@helper
def param_tile(
    pointers, columns, mask, FORMATS: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS, COLUMNS] of the master, or of the weight where there is none.

    Pointers are to the tile's first element; columns: of the whole matrix; mask: read where MASKED.
    """
    _, weight_ptr, master_ptr, _ = pointers
    offsets = tl.arange(0, ROWS)[:, None] * columns + tl.arange(0, COLUMNS)[None, :]
    return loaded_param(weight_ptr, master_ptr, 1.0, offsets, mask, FORMATS, MASKED)


@helper
def updated_tile(
    pointers, param, update, columns, start, draw, scalars, mask, FORMATS: tl.constexpr,
    RULE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Stores a tile after its update; start: the tile's first element in the matrix."""
    row, column = tl.arange(0, param.shape[0]), tl.arange(0, param.shape[1])
    offsets = row[:, None] * columns + column[None, :]
    values = canonical_values(RULE.update(param, (), update, scalars), FORMATS)
    words = block_words(draw, start, 0, offsets, FORMATS.draws, False, 0, False)
    stored_block(
        pointers, (1.0, ()), values, 1.0, 0, words, offsets, 0, 0, mask, FORMATS, MASKED,
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
    AHEAD: tl.constexpr,  # with EVEN: a tile's values are loaded while the one before is computed
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
    LEFT_FORMAT: tl.constexpr = PROJECTION_FORMAT if LEFT else DIRECTION_FORMAT
    RIGHT_FORMAT: tl.constexpr = DIRECTION_FORMAT if LEFT else PROJECTION_FORMAT
    left_ptr = projection_ptr if LEFT else direction_ptr
    right_ptr = direction_ptr if LEFT else projection_ptr
    left_ptr += first_row.to(tl.int64) * RANK
    whole = 0
    if INNER >= RANK:  # once for all tiles of the strip
        row, inner = tl.arange(0, ROWS), tl.arange(0, INNER)
        rest = rows - first_row
        whole = left_tile(left_ptr, row, rest, inner, LEFT_FORMAT, PRECISION, EVEN, RANK)
    row, beside = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    column = tile % across * STRIP * COLUMNS
    # pointers to a tile's own first element: offsets stay within 32 bits
    start = first_row.to(tl.int64) * columns + column
    pointers = pointers_of(table_ptr, matrices, matrix, start, FORMATS)
    if AHEAD:
        following = param_tile(pointers, columns, 0, FORMATS, False, ROWS, COLUMNS)
    for part in range(STRIP):
        mask = (first_row + row[:, None] < rows) & (column + beside[None, :] < columns)
        # of the last tile its own again, since a mask would cut the loads into single numbers
        start_after = start + (COLUMNS if part + 1 < STRIP else 0)
        after = pointers_of(table_ptr, matrices, matrix, start_after, FORMATS)
        if AHEAD:
            param = following
            following = param_tile(after, columns, 0, FORMATS, False, ROWS, COLUMNS)
        else:
            param = param_tile(pointers, columns, mask, FORMATS, not EVEN, ROWS, COLUMNS)
        update = product_tile(
            left_ptr, right_ptr + column, row, beside, rows - first_row, columns - column, columns,
            whole, LEFT_FORMAT, RIGHT_FORMAT, PRECISION, EVEN, RANK, INNER,
        )  # fmt: skip
        updated_tile(
            pointers, param, update, columns, start, draw, scalars, mask, FORMATS, RULE, not EVEN,
        )  # fmt: skip
        column, start, pointers = column + COLUMNS, start_after, after
