"""GaLore's two launches over many matrices: project the gradients, project back and update.

The first makes a tile of one matrix's projected gradient, [outer, rank] in these pages; the sum
goes along the gradient's other dimension, of `terms`. They are cut into slabs, whose number goes by
the matrix's shape alone. A slab is added up by itself, and slabs are added in their order: by one
program, or, where programs are few, by a launch over a workspace. No bit goes by which.

The last makes a tile of one matrix: the product [m, rank] @ [rank, n], rank by rank in one fixed
order, in fp32; then the step's own load, decode, update, encode and store, in place. The update,
as large as the matrix, is never in memory.
"""

from __future__ import annotations

from megaopt.kernels.matrix.products import added_product, loaded, taken
from megaopt.kernels.optional_triton import helper, jit, loop_bound, tl
from megaopt.kernels.step.blocks import pointers_of
from megaopt.kernels.step.codes import loaded_param
from megaopt.kernels.step.draws import block_words, draw_of
from megaopt.kernels.step.kernel import SKIP, draw_row, place_of, scalars_of
from megaopt.kernels.step.rows import FIRST_MOMENT_ROW, GRAD, WEIGHT_COLUMNS, WEIGHT_ROWS
from megaopt.kernels.step.update import canonical_values, stored_block

# Where the step's table has moments: addresses of the projection, of the projected gradient, and of
# Adam's direction in its place.
PROJECTION: tl.constexpr = tl.constexpr(FIRST_MOMENT_ROW)
LOW: tl.constexpr = tl.constexpr(FIRST_MOMENT_ROW + 1)
DIRECTION: tl.constexpr = tl.constexpr(FIRST_MOMENT_ROW + 2)
ROW_COUNT = FIRST_MOMENT_ROW + 3
SLAB_UNIT: tl.constexpr = tl.constexpr(128)
"""Slabs but the last have a multiple of so many terms: tiles of any size add up the same."""


@helper
def address(table_ptr, row, matrices, matrix):
    return tl.load(table_ptr + row * matrices + matrix)


@helper
def tile_of(
    ptr, row, rows, column, columns, stride, FORMAT: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """[row, column] as a product takes it; 0 where the matrix ends, at rows and columns.

    ptr: to the tile's matrix; stride: of its rows; EVEN: whole tiles alone.
    """
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    return taken(
        loaded(ptr, row[:, None] * stride + column[None, :], mask, EVEN), FORMAT, PRECISION
    )


# --- the gradients projected


@helper
def slab_sum(
    grad_ptr, projection_ptr, ends, first, last, terms, columns, FORMAT: tl.constexpr,
    BASIS_FORMAT: tl.constexpr, PRECISION: tl.constexpr, LEFT: tl.constexpr,
    EVEN: tl.constexpr, RANK: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """fp32 [OUTER, RANKS], the sum of the terms from first to last.

    Pointers are to the tile's term 0; ends: how much of the matrix there is from its beginning on.
    """
    outer, inner, rank = tl.arange(0, OUTER), tl.arange(0, INNER), tl.arange(0, RANKS)
    outer_end, rank_end = ends
    total = tl.zeros((OUTER, RANKS), tl.float32)
    # pointers that move on, so that offsets stay within 32 bits
    grad_ptr += first.to(tl.int64) * (columns if LEFT else 1)
    projection_ptr += first.to(tl.int64) * (RANK if LEFT else 1)
    for start in range(loop_bound(first), loop_bound(last), INNER):
        rest = last - start
        # as they lie in memory; one of them is turned
        if LEFT:
            grads = tile_of(
                grad_ptr, inner, rest, outer, outer_end, columns, FORMAT, PRECISION, EVEN
            )
            basis = tile_of(
                projection_ptr, inner, rest, rank, rank_end, RANK, BASIS_FORMAT, PRECISION, EVEN
            )
            grads = tl.trans(grads)
        else:
            grads = tile_of(
                grad_ptr, outer, outer_end, inner, rest, columns, FORMAT, PRECISION, EVEN
            )
            basis = tile_of(
                projection_ptr, rank, rank_end, inner, rest, terms, BASIS_FORMAT, PRECISION, EVEN
            )
            basis = tl.trans(basis)
        total = added_product(grads, basis, total, PRECISION)
        grad_ptr += INNER * (columns if LEFT else 1)
        projection_ptr += INNER * (RANK if LEFT else 1)
    return total


@helper
def stored(
    low_ptr, total, ends, length, LEFT: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr
):
    """Stores a tile, on the left turned; low_ptr: to its first number."""
    outer, rank = tl.arange(0, total.shape[0]), tl.arange(0, total.shape[1])
    outer_end, rank_end = ends
    if LEFT:
        total = tl.trans(total)
        mask = (rank[:, None] < rank_end) & (outer[None, :] < outer_end)
        pointers = low_ptr + rank[:, None] * length + outer[None, :]
    else:
        mask = (outer[:, None] < outer_end) & (rank[None, :] < rank_end)
        pointers = low_ptr + outer[:, None] * RANK + rank[None, :]
    if EVEN:
        tl.store(tl.multiple_of(pointers, (1, 16)), total)
    else:
        tl.store(pointers, total, mask=mask)


@jit(do_not_specialize=["matrices", "workspace"])
def project_kernel(
    table_ptr,  # *int64 [ROW_COUNT, matrices], as above
    tiles_ptr,  # *int32 as step.table.Chunks, of tiles
    matrices,
    workspace,  # numbers of a slab's workspace
    FORMAT: tl.constexpr,  # of gradients
    ELEMENT: tl.constexpr,  # of gradients, as they are loaded
    PROJECTION_FORMAT: tl.constexpr,
    PROJECTION_ELEMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    LEFT: tl.constexpr,
    EVEN: tl.constexpr,  # only whole tiles, rows of which begin at multiples of 16 bytes
    RANK: tl.constexpr,
    SLABS: tl.constexpr,
    APART: tl.constexpr,  # a program for each slab
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    RANKS: tl.constexpr,  # of a tile
    SPAN: tl.constexpr,
):
    """One tile of one matrix's projected gradient, or of one slab of it."""
    matrix, tile = place_of(tiles_ptr, matrices, tl.program_id(0), SPAN)
    rows = tl.load(table_ptr + WEIGHT_ROWS * matrices + matrix).to(tl.int32)
    columns = tl.load(table_ptr + WEIGHT_COLUMNS * matrices + matrix).to(tl.int32)
    if EVEN:
        rows, columns = tl.multiple_of(rows, 16), tl.multiple_of(columns, 16)
    length, terms = (columns, rows) if LEFT else (rows, columns)
    BLOCKS: tl.constexpr = (RANK + RANKS - 1) // RANKS
    part, tile = tile % SLABS, tile // SLABS
    if not APART:
        part, tile = 0, tile * SLABS + part
    outer, rank = tile // BLOCKS * OUTER, tile % BLOCKS * RANKS
    ends = (length - outer, RANK - rank)
    grad_ptr = address(table_ptr, GRAD, matrices, matrix).to(tl.pointer_type(ELEMENT))
    grad_ptr += outer.to(tl.int64) * (1 if LEFT else columns)
    projection_ptr = address(table_ptr, PROJECTION, matrices, matrix)
    projection_ptr = projection_ptr.to(tl.pointer_type(PROJECTION_ELEMENT))
    projection_ptr += rank.to(tl.int64) * (1 if LEFT else terms)
    per_slab = tl.cdiv(tl.cdiv(terms, SLABS), SLAB_UNIT) * SLAB_UNIT
    total = tl.zeros((OUTER, RANKS), tl.float32)
    for slab in range(1 if APART else SLABS):
        first = (part + slab) * per_slab
        last = tl.minimum(first + per_slab, terms)
        found = slab_sum(
            grad_ptr, projection_ptr, ends, first, last, terms, columns,
            FORMAT, PROJECTION_FORMAT, PRECISION, LEFT, EVEN, RANK, OUTER, INNER, RANKS,
        )  # fmt: skip
        total = found if SLABS == 1 or APART else total + found
    low_ptr = address(table_ptr, LOW, matrices, matrix).to(tl.pointer_type(tl.float32))
    low_ptr += part.to(tl.int64) * workspace if APART else 0
    low_ptr += rank.to(tl.int64) * (length if LEFT else 1)
    low_ptr += outer.to(tl.int64) * (1 if LEFT else RANK)
    stored(low_ptr, total, ends, length, LEFT, EVEN, RANK)


@jit(do_not_specialize=["numel"])
def add_slabs_kernel(
    slabs_ptr,  # *fp32 [SLABS, numel]
    low_ptr,  # *fp32 [numel]
    numel,
    SLABS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of slabs, in their order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < numel
    total = tl.zeros((BLOCK,), tl.float32)
    for slab in tl.static_range(SLABS):
        total = total + tl.load(slabs_ptr + slab * numel + place, mask=mask, other=0.0)
    tl.store(low_ptr + place, total, mask=mask)


# --- what was projected back


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
            left = tile_of(left_ptr, row, rows, inner, RANK, RANK, LEFT_FORMAT, PRECISION, EVEN)
        right = tile_of(
            right_ptr, inner, RANK, column, columns, stride, RIGHT_FORMAT, PRECISION, EVEN
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
    table_ptr,  # *int64 [ROW_COUNT, matrices], as above
    tiles_ptr,  # *int32 as step.table.Chunks, of tiles
    scalars_ptr,  # *fp32 [groups, scalar_count]
    controls_ptr,  # *fp32 [CONTROLS]; unread unless CONTROLLED
    matrices,
    scalar_count,
    FORMATS: tl.constexpr,  # as plan.apply_formats makes them
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
        whole = tile_of(left_ptr, row, rest, inner, RANK, RANK, LEFT_FORMAT, PRECISION, EVEN)
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
