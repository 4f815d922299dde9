"""GaLore's two launches over many matrices: project the gradients, project back and update.

The first makes a tile of one matrix's projected gradient, [outer, rank] in these pages; the sum
goes along the gradient's other dimension, of `terms`. They are cut into slabs of one length. A slab
is added up by itself, and slabs are added in their order: by one program, or, where programs are
few, from a workspace. No bit goes by which. The launch can also take Adam's step of the tile, by
the step's own functions; of a workspace the program does that whose slab is the last to arrive.

The last makes a tile of one matrix: the product [m, rank] @ [rank, n], rank by rank in one fixed
order, in fp32; then the step's own load, decode, update, encode and store, in place. The update,
as large as the matrix, is never in memory. Matrices of whole tiles are updated by strips, whose
tiles come by tensor descriptors while those before are computed; at ranks of which a strip would
not have room, by blocks, which take the rank part by part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megaopt.kernels.chunks.blocks import load_block, pointers_of, store_block, stored_moments
from megaopt.kernels.chunks.chunk import (
    Block,
    Chunk,
    ChunkScales,
    Column,
    Pointers,
    entry,
    place_of,
)
from megaopt.kernels.chunks.codes import loaded_moments, loaded_param, param_of_codes
from megaopt.kernels.chunks.draws import block_words, draw_of
from megaopt.kernels.chunks.rows import FIRST_MOMENT_ROW, GRAD, WEIGHT_COLUMNS, WEIGHT_ROWS
from megaopt.kernels.galore.products import added_product, loaded, operand, taken
from megaopt.kernels.optional_triton import helper, jit, loop_bound, tl
from megaopt.kernels.products.chain import chained
from megaopt.kernels.step.kernel import controls_of, draw_row, is_left_out, scalars_of
from megaopt.kernels.step.update import canonical_values, controlled_grad, stored_block, updated

# Where the step's table has moments: addresses of the projection, of it as the first launch and as
# the last one take it, of the projected gradient, and of Adam's direction in its place.
PROJECTION: tl.constexpr = tl.constexpr(FIRST_MOMENT_ROW)
FIRST_FACTOR: tl.constexpr = tl.constexpr(FIRST_MOMENT_ROW + 1)
LAST_FACTOR: tl.constexpr = tl.constexpr(FIRST_MOMENT_ROW + 2)
LOW: tl.constexpr = tl.constexpr(FIRST_MOMENT_ROW + 3)
DIRECTION: tl.constexpr = tl.constexpr(FIRST_MOMENT_ROW + 4)
ROW_COUNT = FIRST_MOMENT_ROW + 5


@helper
def shape_of(column, PRODUCT: tl.constexpr):
    """int32 rows and columns of a matrix; where even, the compiler knows multiples of 16."""
    rows = entry(column, WEIGHT_ROWS).to(tl.int32)
    columns = entry(column, WEIGHT_COLUMNS).to(tl.int32)
    if PRODUCT.even:
        rows, columns = tl.multiple_of(rows, 16), tl.multiple_of(columns, 16)
    return rows, columns


@helper
def operand_tile(
    ptr, row, rows, column, columns, stride, FORMAT: tl.constexpr, ROUNDED: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """[row, column] as a product takes it; 0 where the matrix ends. stride: of its rows."""
    # Triton 3.6 passes no attribute that is a string
    PRECISION: tl.constexpr = "ieee" if ROUNDED else PRODUCT.precision
    # an even product loads without the mask
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    tile = loaded(ptr, row[:, None] * stride + column[None, :], mask, PRODUCT.even)
    return taken(tile, FORMAT, PRECISION)


# --- the projections as products take them


@jit(do_not_specialize=["matrices"])
def round_kernel(
    table_ptr,  # *int64 [ROW_COUNT, matrices], as tables.py has it
    tiles_ptr,  # *int32 as chunks.table.Chunks, of tiles
    matrices,
    PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,  # rows and columns of a tile
    SPAN: tl.constexpr,
):
    """Rounds a tile of a projection; also turns it where its terms lie apart for a launch.

    Tensor cores take TF32 from shared memory only where a sum's terms lie one behind another.
    """
    LEFT: tl.constexpr = PRODUCT.on_left
    PRECISION: tl.constexpr = PRODUCT.precision
    # with tf32 one launch takes the projection as it lies, the other takes it turned
    TURNED: tl.constexpr = LAST_FACTOR if not LEFT else FIRST_FACTOR
    # the program's matrix, and its tile there, counted row by row
    matrix, tile = place_of(tiles_ptr, matrices, tl.program_id(0), SPAN)
    entries = Column(table_ptr, matrices, matrix)
    # the projection is [rows, rank] on the left, [rank, columns] on the right
    rows, columns = shape_of(entries, PRODUCT)
    height, width = (rows, PRODUCT.rank) if LEFT else (PRODUCT.rank, columns)

    # int64 [BLOCK], the tile's rows and columns in the projection
    across = tl.cdiv(width, BLOCK)
    row = (tile // across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = (tile % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (row[:, None] < height) & (column[None, :] < width)

    # fp32 [BLOCK, BLOCK], rounded to the precision of the products
    offsets = row[:, None] * width + column[None, :]
    value = tl.load(entry(entries, PROJECTION).to(tl.pointer_type(tl.float32)) + offsets, mask=mask)
    value = operand(value, PRECISION)
    pointer = tl.pointer_type(value.dtype)

    # one copy lies as the projection does; other precisions than tf32 have this one alone
    STRAIGHT: tl.constexpr = FIRST_FACTOR if not LEFT else LAST_FACTOR
    tl.store(entry(entries, STRAIGHT).to(pointer) + offsets, value, mask=mask)
    # the other copy is the projection turned, [width, height]
    if PRECISION == "tf32":
        turned = column[None, :] * height + row[:, None]
        tl.store(entry(entries, TURNED).to(pointer) + turned, value, mask=mask)


# --- the gradients projected


@helper
def gradient_tile(grad_ptr, outer, outer_end, inner, inner_end, columns, PRODUCT: tl.constexpr):
    """[outer, inner], as a product takes it."""
    FORMAT: tl.constexpr = PRODUCT.form
    if PRODUCT.on_left:  # as it lies in memory, and then turned
        tile = operand_tile(
            grad_ptr, inner, inner_end, outer, outer_end, columns, FORMAT, False, PRODUCT
        )
        tile = tl.trans(tile)
    else:
        tile = operand_tile(
            grad_ptr, outer, outer_end, inner, inner_end, columns, FORMAT, False, PRODUCT
        )
    return tile


@helper
def projection_tile(ptr, inner, inner_end, rank, rank_end, terms, PRODUCT: tl.constexpr):
    """[inner, rank], as a product takes it."""
    FORMAT: tl.constexpr = PRODUCT.projection
    ROUNDED: tl.constexpr = PRODUCT.projection_rounded
    if PRODUCT.on_left and not PRODUCT.turned:
        tile = operand_tile(
            ptr, inner, inner_end, rank, rank_end, PRODUCT.rank, FORMAT, ROUNDED, PRODUCT
        )
    else:
        tile = operand_tile(ptr, rank, rank_end, inner, inner_end, terms, FORMAT, ROUNDED, PRODUCT)
        tile = tl.trans(tile)
    return tile


@helper
def slab_sum(
    pointers, ends, slab, shape, PRODUCT: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """fp32 [OUTER, RANKS], the sum of a slab's terms, from its first to its last.

    Pointers are to the tile's term 0, of gradient and projection; ends: how much of the matrix
    there is from its beginning on; shape: the matrix's terms and columns.
    """
    PRECISION: tl.constexpr = PRODUCT.precision
    grad_ptr, projection_ptr = pointers
    first, last = slab
    terms, columns = shape

    # places within the tile; `ends` masks what lies behind the matrix
    outer, inner, rank = tl.arange(0, OUTER), tl.arange(0, INNER), tl.arange(0, RANKS)
    outer_end, rank_end = ends
    total = tl.zeros((OUTER, RANKS), tl.float32)
    # pointers that move on, so that offsets stay within 32 bits
    STRIDE: tl.constexpr = PRODUCT.rank if PRODUCT.on_left and not PRODUCT.turned else 1
    grad_ptr += first.to(tl.int64) * (columns if PRODUCT.on_left else 1)
    projection_ptr += first.to(tl.int64) * STRIDE
    for start in range(loop_bound(first), loop_bound(last), INNER):
        # [OUTER, INNER] @ [INNER, RANKS]; terms behind the slab's last one are 0
        rest = last - start
        left = gradient_tile(grad_ptr, outer, outer_end, inner, rest, columns, PRODUCT)
        right = projection_tile(projection_ptr, inner, rest, rank, rank_end, terms, PRODUCT)
        total = added_product(left, right, total, PRECISION)
        grad_ptr += INNER * (columns if PRODUCT.on_left else 1)
        projection_ptr += INNER * STRIDE
    return total


@helper
def low_places(first, ends, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of some rows of a tile as they lie in memory, and which of these there are."""
    row, column = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    mask = (row[:, None] < ends[0]) & (column[None, :] < ends[1])
    return row[:, None] * stride + column[None, :], mask


@helper
def added_slabs(ptr, offsets, mask, workspace, SLABS: tl.constexpr):
    """Returns the sum of slabs, in their order; ptr: to the first one's tile."""
    total = tl.zeros(offsets.shape, tl.float32)
    # one slab's numbers lie `workspace` numbers behind those of the slab before
    for _ in tl.static_range(SLABS):
        total = total + load_block(ptr, offsets, mask)
        ptr += workspace
    return total


@helper
def step_low(
    chunk, offsets, mask, total, direction, PRODUCT: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Takes Adam's step of a tile's rows; direction: where theirs goes, rounded for a product."""
    FORMATS: tl.constexpr = STEP.formats
    PRECISION: tl.constexpr = PRODUCT.precision
    # moments of formats with scales are not stepped here: all factors are 1
    block, scales = Block(offsets, 0, mask), ChunkScales(1.0, (1.0, 1.0), 1.0, (1.0, 1.0), 1.0)
    # the sum stands in the gradient's place, the moments come from memory
    grad = controlled_grad(total, chunk, block, STEP)
    moments = loaded_moments(chunk, scales.moments, block, FORMATS)
    values = updated(grad, tl.zeros_like(grad), moments, chunk, offsets, STEP)

    # new moments go to memory, Adam's direction goes where the last launch reads it
    words = block_words(chunk.draw, chunk.start, 0, offsets, FORMATS.draws, False, 0, False)
    stored_moments(chunk, block, values[1], scales.moment_inverses, words, FORMATS)
    tl.store(direction, operand(values[0], PRECISION), mask=mask)


@jit(do_not_specialize=["matrices", "workspace", "scalar_count"])
def project_kernel(
    table_ptr,  # *int64 [ROW_COUNT, matrices], as tables.py has it
    tiles_ptr,  # *int32 as chunks.table.Chunks, of tiles
    step_table_ptr,  # *int64 as the step has it, of the projected gradients; as the next, with STEP
    scalars_ptr,  # *fp32 [groups, scalar_count]
    controls_ptr,  # *fp32 [groups, CONTROLS]; unread unless controlled
    arrived_ptr,  # *int32 [tiles]: slabs that are stored, with STEP and APART; zeros before, behind
    matrices,
    workspace,  # numbers of a slab's workspace
    scalar_count,
    PRODUCT: tl.constexpr,
    STEP: tl.constexpr,  # chunks.spec.KernelSpec of Adam's step; None: only the sums are stored
    SLAB: tl.constexpr,  # terms
    SLABS: tl.constexpr,
    APART: tl.constexpr,  # a program for each slab
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    RANKS: tl.constexpr,  # of a tile
    PIECE: tl.constexpr,  # numbers of a tile that are stepped at a time
    SPAN: tl.constexpr,
):
    """Makes a tile of a projected gradient, or of one slab of it; with STEP takes Adam's step.

    A tile is stepped from memory, as its sums and moments would not fit into registers together.
    """
    LEFT: tl.constexpr = PRODUCT.on_left
    RANK: tl.constexpr = PRODUCT.rank
    # the matrix's column in the table of products, and in that of Adam's step
    matrix, tile = place_of(tiles_ptr, matrices, tl.program_id(0), SPAN)
    entries, low = Column(table_ptr, matrices, matrix), Column(step_table_ptr, matrices, matrix)
    if STEP is not None and STEP.controlled:  # noqa: SIM102 at compile time, the other at run time
        if is_left_out(low, controls_ptr):
            return

    # the projected gradient is [length, RANK], its sums have `terms` terms
    rows, columns = shape_of(entries, PRODUCT)
    length, terms = (columns, rows) if LEFT else (rows, columns)

    # SLABS programs follow each other; with APART they share a tile, else each has its own
    BLOCKS: tl.constexpr = (RANK + RANKS - 1) // RANKS
    part, tile = tile % SLABS, tile // SLABS
    if not APART:
        part, tile = 0, tile * SLABS + part
    # tiles of the same outer places, which read the same part of the gradient, follow each other
    outer, rank = tile // BLOCKS * OUTER, tile % BLOCKS * RANKS
    ends = (length - outer, RANK - rank)

    # pointers to term 0 of the tile's first outer place, and of its first rank
    grad_ptr = entry(entries, GRAD).to(tl.pointer_type(PRODUCT.element))
    grad_ptr += outer.to(tl.int64) * (1 if LEFT else columns)
    projection_ptr = entry(entries, FIRST_FACTOR).to(tl.pointer_type(PRODUCT.projection_element))
    projection_ptr += rank.to(tl.int64) * (1 if LEFT and not PRODUCT.turned else terms)

    # fp32 [OUTER, RANKS]; with APART the sum of one slab alone
    total = tl.zeros((OUTER, RANKS), tl.float32)
    for slab in range(1 if APART else SLABS):
        # the last slab of a matrix may be shorter
        first = (part + slab) * SLAB
        last = tl.minimum(first + SLAB, terms)
        slab_total = slab_sum(
            (grad_ptr, projection_ptr), ends, (first, last), (terms, columns),
            PRODUCT, OUTER, INNER, RANKS,
        )  # fmt: skip
        total = slab_total if SLABS == 1 or APART else total + slab_total

    # the tile's rows and columns in memory: [RANK, length] on the left, [length, RANK] else
    ROWS: tl.constexpr = RANKS if LEFT else OUTER
    COLUMNS: tl.constexpr = OUTER if LEFT else RANKS
    if LEFT:  # as it lies in memory
        total, ends = tl.trans(total), (RANK - rank, length - outer)
    # int64, where the tile begins among the matrix's projected numbers
    stride = length if LEFT else RANK
    start = rank.to(tl.int64) * (length if LEFT else 1)
    start += outer.to(tl.int64) * (1 if LEFT else RANK)

    # the sum goes to the projected gradient, or to the workspace of its slab
    low_ptr = entry(entries, LOW).to(tl.pointer_type(tl.float32)) + start
    offsets, inside = low_places(0, ends, stride, ROWS, COLUMNS)
    mask = None if PRODUCT.even else inside
    store_block(low_ptr + part.to(tl.int64) * workspace if APART else low_ptr, offsets, total, mask)
    if STEP is not None:
        tl.debug_barrier()  # every thread has stored its numbers
        # the program whose slab comes last takes the step; the count goes back to 0 for the next
        # launch
        if APART:
            arrived_ptr += tl.program_id(0) // SLABS
            if tl.atomic_add(arrived_ptr, 1) != SLABS - 1:
                return
            tl.atomic_xchg(arrived_ptr, 0)

        # the tile as a chunk of Adam's step: its scalars, controls, random words, moments
        RULE: tl.constexpr = STEP.rule
        FORMATS: tl.constexpr = STEP.formats
        scalars = scalars_of(low, scalars_ptr, scalar_count, RULE)
        controls = controls_of(low, controls_ptr, STEP.controlled)
        draw = draw_of(low, draw_row(low, scalars_ptr, scalar_count, RULE), FORMATS.draws)
        pointers = pointers_of(low, start, FORMATS)
        chunk = Chunk(low, start, 0, pointers, scalars, controls, draw)

        # where the tile's direction begins: [length, RANK] where it is turned
        TURNED: tl.constexpr = LEFT and PRODUCT.turned  # the last launch takes it so
        ELEMENT: tl.constexpr = tl.bfloat16 if PRODUCT.precision == "bf16" else tl.float32
        direction_ptr = entry(entries, DIRECTION).to(tl.pointer_type(ELEMENT))
        direction_ptr += outer.to(tl.int64) * RANK + rank if TURNED else start

        # a few rows of the tile at a time, [AT_ONCE, COLUMNS]
        SUMS: tl.constexpr = SLABS if APART else 1
        AT_ONCE: tl.constexpr = min(ROWS, PIECE // COLUMNS)
        for first in range(0, ROWS, AT_ONCE):
            piece_offsets, piece_inside = low_places(first, ends, stride, AT_ONCE, COLUMNS)
            piece_mask = None if PRODUCT.even else piece_inside
            places = piece_offsets
            # turned directions lie in another order than moments
            if TURNED:
                row, column = first + tl.arange(0, AT_ONCE), tl.arange(0, COLUMNS)
                places = column[None, :] * RANK + row[:, None]
            # apart, the sums of all slabs come from the workspace, in their order
            piece_total = added_slabs(low_ptr, piece_offsets, piece_mask, workspace, SUMS)
            step_low(
                chunk, piece_offsets, piece_mask, piece_total, direction_ptr + places, PRODUCT, STEP
            )


@jit(do_not_specialize=["numel"])
def add_slabs_kernel(
    slabs_ptr,  # *fp32 [SLABS, numel]
    low_ptr,  # *fp32 [numel]
    numel,
    SLABS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds up slabs, in their order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < numel
    total = tl.zeros((BLOCK,), tl.float32)
    for slab in tl.static_range(SLABS):
        total = total + tl.load(slabs_ptr + slab * numel + place, mask=mask, other=0.0)
    tl.store(low_ptr + place, total, mask=mask)


# --- what was projected back


@helper
def left_tile(ptr, row, rows, inner, PRODUCT: tl.constexpr):
    # [row, inner] of the projection on the left, else of the directions; rows are RANK long
    LEFT: tl.constexpr = PRODUCT.on_left
    RANK: tl.constexpr = PRODUCT.rank
    FORMAT: tl.constexpr = PRODUCT.projection if LEFT else PRODUCT.form
    ROUNDED: tl.constexpr = PRODUCT.projection_rounded if LEFT else PRODUCT.form_rounded
    return operand_tile(ptr, row, rows, inner, RANK, RANK, FORMAT, ROUNDED, PRODUCT)


@helper
def right_tile(ptr, inner, column, columns, stride, PRODUCT: tl.constexpr):
    # [inner, column] of the directions where the projection is on the left, else of it
    LEFT: tl.constexpr = PRODUCT.on_left
    RANK: tl.constexpr = PRODUCT.rank
    FORMAT: tl.constexpr = PRODUCT.form if LEFT else PRODUCT.projection
    ROUNDED: tl.constexpr = PRODUCT.form_rounded if LEFT else PRODUCT.projection_rounded
    # in memory [columns, RANK]
    if PRODUCT.turned:
        tile = operand_tile(ptr, column, columns, inner, RANK, RANK, FORMAT, ROUNDED, PRODUCT)
        tile = tl.trans(tile)
    else:
        tile = operand_tile(ptr, inner, RANK, column, columns, stride, FORMAT, ROUNDED, PRODUCT)
    return tile


@helper
def product_tile(
    left_ptr, right_ptr, row, column, ends, stride, whole, PRODUCT: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """fp32 [row, column] of a product; 0 outside the matrix.

    ends: the matrix's rows and columns from the pointers on; stride: of the right factor's rows;
    whole: the left factor's tile, where it has the whole rank.
    """
    PRECISION: tl.constexpr = PRODUCT.precision
    rows, columns = ends
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for first in range(0, PRODUCT.rank, INNER):
        # the sum goes on from part to part of the rank, in their order
        inner = first + tl.arange(0, INNER)
        left = whole if PRODUCT.rank <= INNER else left_tile(left_ptr, row, rows, inner, PRODUCT)
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
    # the update that was projected back stands in the gradient's place
    values = canonical_values(RULE.update(param, (), update, chunk.scalars), FORMATS)
    words = block_words(chunk.draw, chunk.start, 0, offsets, FORMATS.draws, False, 0, False)
    # neither master nor weight has a scale here
    block, scales = Block(offsets, 0, mask), ChunkScales(1.0, (), 1.0, (), 1.0)
    stored_block(chunk, scales, block, values, 0, words, FORMATS)


@jit(do_not_specialize=["matrices", "scalar_count"])
def back_project_kernel(
    table_ptr,  # *int64 [ROW_COUNT, matrices], as tables.py has it
    tiles_ptr,  # *int32 as chunks.table.Chunks, of tiles
    scalars_ptr,  # *fp32 [groups, scalar_count]
    controls_ptr,  # *fp32 [groups, CONTROLS]; unread unless CONTROLLED
    matrices,
    scalar_count,
    FORMATS: tl.constexpr,  # as formats.apply_formats makes them
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile
    COLUMNS: tl.constexpr,
    STRIP: tl.constexpr,  # tiles of a program, one beside another
    INNER: tl.constexpr,  # of the rank, at a time
    SPAN: tl.constexpr,
):
    """Updates a few tiles of one matrix."""
    # here a tile of the table is a strip of STRIP tiles, one beside another
    matrix, tile = place_of(tiles_ptr, matrices, tl.program_id(0), SPAN)
    entries = Column(table_ptr, matrices, matrix)
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if is_left_out(entries, controls_ptr):
            return

    # strips are counted row by row
    rows, columns = shape_of(entries, PRODUCT)
    across = tl.cdiv(columns, COLUMNS * STRIP)
    first_row = tile // across * ROWS
    # the factors [rows, RANK] and [RANK, columns]: one is the projection, one the directions
    direction_ptr = entry(entries, DIRECTION).to(tl.pointer_type(PRODUCT.element))
    projection_ptr = entry(entries, LAST_FACTOR).to(tl.pointer_type(PRODUCT.projection_element))
    # the numbers of the matrix's group, and what its random words are made of
    scalars = scalars_of(entries, scalars_ptr, scalar_count, RULE)
    draw = draw_of(entries, draw_row(entries, scalars_ptr, scalar_count, RULE), FORMATS.draws)

    # the left pointer goes to the strip's first row, the right one to the matrix's begin
    left_ptr = projection_ptr if PRODUCT.on_left else direction_ptr
    right_ptr = direction_ptr if PRODUCT.on_left else projection_ptr
    left_ptr += first_row.to(tl.int64) * PRODUCT.rank
    whole = 0
    if PRODUCT.rank <= INNER:  # once for all tiles of the strip
        row, inner = tl.arange(0, ROWS), tl.arange(0, INNER)
        whole = left_tile(left_ptr, row, rows - first_row, inner, PRODUCT)
    # where the strip's first tile begins in the matrix; `start` is int64
    row, column_offsets = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    column = tile % across * STRIP * COLUMNS
    start = first_row.to(tl.int64) * columns + column
    for _ in range(STRIP):
        # offsets mask what lies behind the matrix
        mask = None
        if not PRODUCT.even:
            mask = (first_row + row[:, None] < rows) & (column + column_offsets[None, :] < columns)
        # pointers to a tile's own first element: offsets stay within 32 bits
        pointers = pointers_of(entries, start, FORMATS)
        # fp32 [ROWS, COLUMNS], loaded ahead of the product
        param = tl.zeros((ROWS, COLUMNS), tl.float32)
        if RULE.reads_param:
            param = param_tile(pointers, columns, mask, FORMATS, ROWS, COLUMNS)

        # fp32 [ROWS, COLUMNS], the tile of the update
        ends = (rows - first_row, columns - column)
        right_at = right_ptr + column.to(tl.int64) * (PRODUCT.rank if PRODUCT.turned else 1)
        update = product_tile(
            left_ptr, right_at, row, column_offsets, ends, columns, whole, PRODUCT, INNER
        )

        # the update is applied and stored; then the next tile to the right
        chunk = Chunk(entries, start, 0, pointers, scalars, (), draw)
        updated_tile(chunk, param, update, columns, mask, FORMATS, RULE)
        column, start = column + COLUMNS, start + COLUMNS


class BackPlaces(NamedTuple):
    """A matrix that is projected back by descriptors."""

    rows: Any
    """int32, of the matrix,"""
    columns: Any
    left: Any
    """Descriptors of the factors,"""
    right: Any
    weight: Any
    """and of those that an update reads; 0 of others."""
    master: Any
    chunk: Any
    """The whole matrix as a chunk, for what is stored."""


@helper
def turns_in(places_ptr, matrix, entries, controls_ptr, CONTROLLED: tl.constexpr):
    """A matrix's first strip or tile among all, the program's first one of them, and their end.

    The program takes none where the end is not behind its first one.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    # strips or tiles of all matrices are counted on, and dealt out to programs in turns
    first, end = tl.load(places_ptr + matrix), tl.load(places_ptr + matrix + 1)
    begin = first + (program + programs - first % programs) % programs
    # a matrix that is left out has none
    if CONTROLLED:
        end = tl.where(is_left_out(entries, controls_ptr), begin, end)
    return first, begin, end


@helper
def described(ptr, rows, columns, stride, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The descriptor of a matrix, of which tiles [HEIGHT, WIDTH] are loaded."""
    return tl.make_tensor_descriptor(ptr, [rows, columns], [stride, 1], [HEIGHT, WIDTH])


@helper
def back_places(
    entries, scalars_ptr, scalar_count, PRODUCT: tl.constexpr, FORMATS: tl.constexpr,
    RULE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Makes BackPlaces: tiles [ROWS, COLUMNS], of factors [ROWS, INNER] and [INNER, COLUMNS]."""
    RANK: tl.constexpr = PRODUCT.rank
    rows, columns = shape_of(entries, PRODUCT)
    stride = columns.to(tl.int64)
    # the factors, [rows, RANK] and [RANK, columns], the right one perhaps turned
    direction = entry(entries, DIRECTION).to(tl.pointer_type(PRODUCT.element))
    projection = entry(entries, LAST_FACTOR).to(tl.pointer_type(PRODUCT.projection_element))
    left_ptr = projection if PRODUCT.on_left else direction
    right_ptr = direction if PRODUCT.on_left else projection
    left = described(left_ptr, rows, RANK, RANK, ROWS, INNER)
    if PRODUCT.turned:
        right = described(right_ptr, columns, RANK, RANK, COLUMNS, INNER)
    else:
        right = described(right_ptr, RANK, columns, stride, INNER, COLUMNS)
    # what an update reads comes by descriptors, what it stores goes by pointers
    pointers, weight, master = pointers_of(entries, 0, FORMATS), 0, 0
    if FORMATS.reads_weight:
        weight = described(pointers.weight, rows, columns, stride, ROWS, COLUMNS)
    if FORMATS.master.present:
        master = described(pointers.master, rows, columns, stride, ROWS, COLUMNS)
    # scalars and draw are the same for all tiles of the matrix
    scalars = scalars_of(entries, scalars_ptr, scalar_count, RULE)
    draw = draw_of(entries, draw_row(entries, scalars_ptr, scalar_count, RULE), FORMATS.draws)
    chunk = Chunk(entries, 0, 0, pointers, scalars, (), draw)
    return BackPlaces(rows, columns, left, right, weight, master, chunk)


@helper
def right_factor(places, inner, column, PRODUCT: tl.constexpr):
    """A tile of the right factor, as a product takes it."""
    LEFT: tl.constexpr = PRODUCT.on_left
    FORM: tl.constexpr = PRODUCT.form if LEFT else PRODUCT.projection
    # directions that were not rounded ahead are rounded here; projections always were
    PRECISION: tl.constexpr = PRODUCT.precision if LEFT and not PRODUCT.form_rounded else "ieee"
    if PRODUCT.turned:
        right = tl.trans(places.right.load([column, inner]))
    else:
        right = places.right.load([inner, column])
    return taken(right, FORM, PRECISION)


@helper
def described_param(places, row, column, FORMATS: tl.constexpr):
    """fp32, a tile as loaded_param has it."""
    weight_code, master_code = 0, 0
    if FORMATS.reads_weight:
        weight_code = places.weight.load([row, column])
    if FORMATS.master.present:
        master_code = places.master.load([row, column])
    return param_of_codes(weight_code, master_code, 1.0, FORMATS)


@helper
def step_back(places, row, column, param, update, FORMATS: tl.constexpr, RULE: tl.constexpr):
    """Stores a tile of a matrix of whole tiles, after its update."""
    start, whole = places.columns.to(tl.int64) * row + column, places.chunk
    here = Pointers(0, whole.pointers.weight + start, whole.pointers.master + start, ())
    chunk = Chunk(whole.column, start, 0, here, whole.scalars, (), whole.draw)
    updated_tile(chunk, param, update, places.columns, None, FORMATS, RULE)


@jit(do_not_specialize=["matrices", "scalar_count", "down"])
def back_strips_kernel(
    table_ptr,  # *int64 [ROW_COUNT, matrices], as tables.py has it
    strips_ptr,  # *int32 as chunks.table.Chunks, of strips
    scalars_ptr,  # *fp32 [groups, scalar_count]
    controls_ptr,  # *fp32 [groups, CONTROLS]; unread unless CONTROLLED
    matrices,
    scalar_count,
    down,  # tiles of a strip, one below another
    FORMATS: tl.constexpr,  # as formats.apply_formats makes them
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    PRODUCT: tl.constexpr,  # even, whose left factor was rounded ahead
    ROWS: tl.constexpr,  # of a tile
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,  # PRODUCT.rank, or the power of two above it
    STAGES: tl.constexpr,  # tiles of which there is room, the one that is computed among them
):
    """Updates matrices of whole tiles: programs take strips in turns, and go down them.

    The right factor of a strip is loaded once.
    """
    programs = tl.num_programs(0)
    for matrix in range(loop_bound(matrices)):
        # every program looks at every matrix, and takes its turns there
        entries = Column(table_ptr, matrices, matrix)
        first, begin, end = turns_in(strips_ptr, matrix, entries, controls_ptr, CONTROLLED)
        if begin < end:
            places = back_places(
                entries, scalars_ptr, scalar_count, PRODUCT, FORMATS, RULE, ROWS, COLUMNS, RANKS
            )
            # strips are counted row by row; each is `down` tiles high, the lowest ones maybe less
            across = places.columns // COLUMNS
            for strip in range(loop_bound(begin), loop_bound(end), loop_bound(programs)):
                top = (strip - first) // across * down * ROWS
                column = (strip - first) % across * COLUMNS
                # [RANKS, COLUMNS], for all tiles of the strip; behind the rank descriptors give
                # zeros
                right = right_factor(places, 0, column, PRODUCT)
                bottom = tl.minimum(top + down * ROWS, places.rows)
                # with the number of stages masters come ahead, too, not only what is multiplied
                for row in tl.range(loop_bound(top), loop_bound(bottom), ROWS, num_stages=STAGES):
                    nothing = tl.zeros((ROWS, COLUMNS), tl.float32)
                    # fp32 [ROWS, COLUMNS]
                    param = nothing
                    if RULE.reads_param:
                        param = described_param(places, row, column, FORMATS)
                    # [ROWS, RANKS] @ [RANKS, COLUMNS], the whole rank at once
                    left = places.left.load([row, 0])
                    update = chained(left, right, nothing)
                    step_back(places, row, column, param, update, FORMATS, RULE)


@jit(do_not_specialize=["matrices", "scalar_count"])
def back_blocks_kernel(
    table_ptr,  # *int64 [ROW_COUNT, matrices], as tables.py has it
    tiles_ptr,  # *int32 as chunks.table.Chunks, of tiles
    scalars_ptr,  # *fp32 [groups, scalar_count]
    controls_ptr,  # *fp32 [groups, CONTROLS]; unread unless CONTROLLED
    matrices,
    scalar_count,
    FORMATS: tl.constexpr,  # as formats.apply_formats makes them
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    PRODUCT: tl.constexpr,  # even, whose left factor was rounded ahead
    ROWS: tl.constexpr,  # of a tile
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,  # of the rank, at a time
):
    """Updates matrices of whole tiles at high ranks: programs take tiles in turns."""
    programs = tl.num_programs(0)
    for matrix in range(loop_bound(matrices)):
        # every program looks at every matrix, and takes its turns there
        entries = Column(table_ptr, matrices, matrix)
        first, begin, end = turns_in(tiles_ptr, matrix, entries, controls_ptr, CONTROLLED)
        if begin < end:
            places = back_places(
                entries, scalars_ptr, scalar_count, PRODUCT, FORMATS, RULE, ROWS, COLUMNS, INNER
            )
            # tiles are counted column by column: those that follow each other share the right
            # factor
            high = places.rows // ROWS
            # one loop with that over the rank: a tile's first loads go out while the last is stored
            for tile in tl.range(
                loop_bound(begin), loop_bound(end), loop_bound(programs), flatten=True
            ):
                row, column = (tile - first) % high * ROWS, (tile - first) // high * COLUMNS
                # fp32 [ROWS, COLUMNS], the sum over the rank, part by part
                total = tl.zeros((ROWS, COLUMNS), tl.float32)
                for inner in range(0, PRODUCT.rank, INNER):
                    left = places.left.load([row, inner])
                    right = right_factor(places, inner, column, PRODUCT)
                    total = chained(left, right, total)
                # what is updated is loaded behind the product, then the tile is stored
                param = tl.zeros((ROWS, COLUMNS), tl.float32)
                if RULE.reads_param:
                    param = described_param(places, row, column, FORMATS)
                step_back(places, row, column, param, total, FORMATS, RULE)
