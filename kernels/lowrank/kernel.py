"""The last stage of a step of low rank: project Adam's direction back, update weight and master.

A program makes a tile of one matrix: the product [m, rank] @ [rank, n], rank by rank in one fixed
order, in fp32; then the step's own load, decode, update, encode and store, in place. The update,
as large as the matrix, is never in memory.
"""

from __future__ import annotations

from megaopt.kernels.lowrank.operands import added_product, loaded, taken
from megaopt.kernels.lowrank.tables import DIRECTION, PROJECTION
from megaopt.kernels.optional_triton import helper, jit, tl
from megaopt.kernels.step.blocks import pointers_of
from megaopt.kernels.step.chunk import Block, Chunk, Column, Scales, entry
from megaopt.kernels.step.codes import loaded_param
from megaopt.kernels.step.draws import block_words, draw_of
from megaopt.kernels.step.kernel import SKIP, draw_row, place_of, scalars_of
from megaopt.kernels.step.rows import WEIGHT_COLUMNS, WEIGHT_ROWS
from megaopt.kernels.step.update import canonical_values, stored_block


@helper
def left_tile(ptr, row, rows, inner, PRODUCT: tl.constexpr):
    """[row, inner] of the left factor, as a product takes it; 0 where the matrix ends."""
    FORMAT: tl.constexpr = PRODUCT.left
    PRECISION: tl.constexpr = PRODUCT.precision
    mask = (row[:, None] < rows) & (inner[None, :] < PRODUCT.rank)
    tile = loaded(ptr, row[:, None] * PRODUCT.rank + inner[None, :], mask, PRODUCT.even)
    return taken(tile, FORMAT, PRECISION)


@helper
def right_tile(ptr, inner, column, columns, stride, PRODUCT: tl.constexpr):
    """[inner, column] of the right factor, likewise; stride: of its rows."""
    FORMAT: tl.constexpr = PRODUCT.right
    PRECISION: tl.constexpr = PRODUCT.precision
    mask = (inner[:, None] < PRODUCT.rank) & (column[None, :] < columns)
    tile = loaded(ptr, inner[:, None] * stride + column[None, :], mask, PRODUCT.even)
    return taken(tile, FORMAT, PRECISION)


@helper
def product_tile(
    left_ptr, right_ptr, row, column, ends, stride, whole, PRODUCT: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """fp32 [row, column] of a product; 0 outside the matrix.

    ends: the matrix's rows and columns from the pointers on; stride: of the right factor's rows;
    whole: the left factor's tile, where it has the whole rank.
    """
    PRECISION: tl.constexpr = PRODUCT.precision  # Triton 3.6 passes no attribute that is a string
    rows, columns = ends
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for first in range(0, PRODUCT.rank, INNER):
        inner = first + tl.arange(0, INNER)
        if PRODUCT.rank <= INNER:  # noqa: SIM108 at compile time
            left = whole
        else:
            left = left_tile(left_ptr, row, rows, inner, PRODUCT)
        right = right_tile(right_ptr, inner, column, columns, stride, PRODUCT)
        total = added_product(left, right, total, PRECISION)
    return total


@helper
def param_tile(
    pointers, columns, mask, FORMATS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """fp32 [ROWS, COLUMNS] of the master, or of the weight where there is none.

    Pointers are to the tile's first element; columns: of the whole matrix; mask: None of a tile
    that is whole and aligned.
    """
    offsets = tl.arange(0, ROWS)[:, None] * columns + tl.arange(0, COLUMNS)[None, :]
    return loaded_param(pointers, 1.0, offsets, mask, FORMATS)


@helper
def updated_tile(chunk, param, update, columns, mask, FORMATS: tl.constexpr, RULE: tl.constexpr):
    """Stores a tile after its update; the chunk starts where the tile does."""
    row, column = tl.arange(0, param.shape[0]), tl.arange(0, param.shape[1])
    offsets = row[:, None] * columns + column[None, :]
    values = canonical_values(RULE.update(param, (), update, chunk.scalars), FORMATS)
    words = block_words(chunk.draw, chunk.start, 0, offsets, FORMATS.draws, False, 0, False)
    block, scales = Block(offsets, 0, mask), Scales(1.0, (), 1.0, (), 1.0)
    stored_block(chunk, scales, block, values, 0, words, FORMATS)


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
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile
    COLUMNS: tl.constexpr,
    STRIP: tl.constexpr,  # tiles of a program, one beside another
    AHEAD: tl.constexpr,  # where even: a tile's values are loaded while the one before is computed
    INNER: tl.constexpr,  # of the rank, at a time
    SPAN: tl.constexpr,
):
    """The update of a few tiles of one matrix."""
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    matrix, tile = place_of(tiles_ptr, matrices, tl.program_id(0), SPAN)
    own = Column(table_ptr, matrices, matrix)
    rows = entry(own, WEIGHT_ROWS).to(tl.int32)
    columns = entry(own, WEIGHT_COLUMNS).to(tl.int32)
    if PRODUCT.even:
        rows, columns = tl.multiple_of(rows, 16), tl.multiple_of(columns, 16)
    across = tl.cdiv(columns, COLUMNS * STRIP)
    first_row = tile // across * ROWS
    direction_ptr = entry(own, DIRECTION).to(tl.pointer_type(PRODUCT.element))
    projection_ptr = entry(own, PROJECTION).to(tl.pointer_type(PRODUCT.projection_element))
    scalars = scalars_of(own, scalars_ptr, scalar_count, RULE)
    draw = draw_of(own, draw_row(own, scalars_ptr, scalar_count, RULE), FORMATS.draws)
    left_ptr = projection_ptr if PRODUCT.on_left else direction_ptr
    right_ptr = direction_ptr if PRODUCT.on_left else projection_ptr
    left_ptr += first_row.to(tl.int64) * PRODUCT.rank
    whole = 0
    if PRODUCT.rank <= INNER:  # once for all tiles of the strip
        row, inner = tl.arange(0, ROWS), tl.arange(0, INNER)
        whole = left_tile(left_ptr, row, rows - first_row, inner, PRODUCT)
    row, beside = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    column = tile % across * STRIP * COLUMNS
    # pointers to a tile's own first element: offsets stay within 32 bits
    start = first_row.to(tl.int64) * columns + column
    pointers = pointers_of(own, start, FORMATS)
    if AHEAD:
        following = param_tile(pointers, columns, None, FORMATS, ROWS, COLUMNS)
    for part in range(STRIP):
        mask = None
        if not PRODUCT.even:
            mask = (first_row + row[:, None] < rows) & (column + beside[None, :] < columns)
        # of the last tile its own again, since a mask would cut the loads into single numbers
        start_after = start + (COLUMNS if part + 1 < STRIP else 0)
        after = pointers_of(own, start_after, FORMATS)
        if AHEAD:
            param = following
            following = param_tile(after, columns, None, FORMATS, ROWS, COLUMNS)
        else:
            param = param_tile(pointers, columns, mask, FORMATS, ROWS, COLUMNS)
        ends = (rows - first_row, columns - column)
        update = product_tile(
            left_ptr, right_ptr + column, row, beside, ends, columns, whole, PRODUCT, INNER
        )
        chunk = Chunk(own, start, 0, pointers, scalars, (), draw)
        updated_tile(chunk, param, update, columns, mask, FORMATS, RULE)
        column, start, pointers = column + COLUMNS, start_after, after
