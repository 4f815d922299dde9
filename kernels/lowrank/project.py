"""The first stage of a step of low rank: the gradients of many matrices projected by one launch.

A program makes a tile of one matrix's projected gradient, [outer, rank] in these pages; the sum
goes along the gradient's other dimension, of `terms`. They are cut into slabs, whose number goes by
the matrix's shape alone. A slab is added up by itself, and slabs are added in their order: by one
program, or, where programs are few, by a launch over a workspace. No bit goes by which.
"""

from __future__ import annotations

from megaopt.kernels.lowrank.operands import added_product, loaded, taken
from megaopt.kernels.lowrank.tables import LOW, PROJECTION
from megaopt.kernels.optional_triton import helper, jit, loop_bound, tl
from megaopt.kernels.step.chunk import Column, entry
from megaopt.kernels.step.kernel import place_of
from megaopt.kernels.step.rows import GRAD, WEIGHT_COLUMNS, WEIGHT_ROWS

SLAB_UNIT: tl.constexpr = tl.constexpr(128)
"""Slabs but the last have a multiple of so many terms: tiles of any size add up the same."""


@helper
def gradient_tile(grad_ptr, outer, outer_end, inner, inner_end, columns, PRODUCT: tl.constexpr):
    """[outer, inner], as a product takes it."""
    FORMAT: tl.constexpr = PRODUCT.form
    PRECISION: tl.constexpr = PRODUCT.precision
    if PRODUCT.on_left:  # as it lies in memory, and then turned
        mask = (inner[:, None] < inner_end) & (outer[None, :] < outer_end)
        tile = loaded(grad_ptr, inner[:, None] * columns + outer[None, :], mask, PRODUCT.even)
    else:
        mask = (outer[:, None] < outer_end) & (inner[None, :] < inner_end)
        tile = loaded(grad_ptr, outer[:, None] * columns + inner[None, :], mask, PRODUCT.even)
    tile = taken(tile, FORMAT, PRECISION)
    if PRODUCT.on_left:
        tile = tl.trans(tile)
    return tile


@helper
def projection_tile(projection_ptr, inner, inner_end, rank, rank_end, terms, PRODUCT: tl.constexpr):
    """[inner, rank], as a product takes it."""
    FORMAT: tl.constexpr = PRODUCT.projection
    PRECISION: tl.constexpr = PRODUCT.precision
    if PRODUCT.on_left:
        mask = (inner[:, None] < inner_end) & (rank[None, :] < rank_end)
        offsets = inner[:, None] * PRODUCT.rank + rank[None, :]
        tile = loaded(projection_ptr, offsets, mask, PRODUCT.even)
    else:
        mask = (rank[:, None] < rank_end) & (inner[None, :] < inner_end)
        tile = loaded(projection_ptr, rank[:, None] * terms + inner[None, :], mask, PRODUCT.even)
    tile = taken(tile, FORMAT, PRECISION)
    if not PRODUCT.on_left:
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
    outer, inner, rank = tl.arange(0, OUTER), tl.arange(0, INNER), tl.arange(0, RANKS)
    outer_end, rank_end = ends
    total = tl.zeros((OUTER, RANKS), tl.float32)
    # pointers that move on, so that offsets stay within 32 bits
    grad_ptr += first.to(tl.int64) * (columns if PRODUCT.on_left else 1)
    projection_ptr += first.to(tl.int64) * (PRODUCT.rank if PRODUCT.on_left else 1)
    for start in range(loop_bound(first), loop_bound(last), INNER):
        rest = last - start
        left = gradient_tile(grad_ptr, outer, outer_end, inner, rest, columns, PRODUCT)
        right = projection_tile(projection_ptr, inner, rest, rank, rank_end, terms, PRODUCT)
        total = added_product(left, right, total, PRECISION)
        grad_ptr += INNER * (columns if PRODUCT.on_left else 1)
        projection_ptr += INNER * (PRODUCT.rank if PRODUCT.on_left else 1)
    return total


@helper
def stored(low_ptr, total, ends, length, PRODUCT: tl.constexpr):
    """Stores a tile, on the left turned; low_ptr: to its first number."""
    outer, rank = tl.arange(0, total.shape[0]), tl.arange(0, total.shape[1])
    outer_end, rank_end = ends
    if PRODUCT.on_left:
        total = tl.trans(total)
        mask = (rank[:, None] < rank_end) & (outer[None, :] < outer_end)
        pointers = low_ptr + rank[:, None] * length + outer[None, :]
    else:
        mask = (outer[:, None] < outer_end) & (rank[None, :] < rank_end)
        pointers = low_ptr + outer[:, None] * PRODUCT.rank + rank[None, :]
    if PRODUCT.even:
        tl.store(tl.multiple_of(pointers, (1, 16)), total)
    else:
        tl.store(pointers, total, mask=mask)


@jit(do_not_specialize=["matrices", "workspace"])
def project_kernel(
    table_ptr,  # *int64 [ROW_COUNT, matrices], as tables.py has it
    tiles_ptr,  # *int32 as step.table.Chunks, of tiles
    matrices,
    workspace,  # numbers of a slab's workspace
    PRODUCT: tl.constexpr,
    SLABS: tl.constexpr,
    APART: tl.constexpr,  # a program for each slab
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    RANKS: tl.constexpr,  # of a tile
    SPAN: tl.constexpr,
):
    """One tile of one matrix's projected gradient, or of one slab of it."""
    LEFT: tl.constexpr = PRODUCT.on_left
    RANK: tl.constexpr = PRODUCT.rank
    matrix, tile = place_of(tiles_ptr, matrices, tl.program_id(0), SPAN)
    own = Column(table_ptr, matrices, matrix)
    rows = entry(own, WEIGHT_ROWS).to(tl.int32)
    columns = entry(own, WEIGHT_COLUMNS).to(tl.int32)
    if PRODUCT.even:
        rows, columns = tl.multiple_of(rows, 16), tl.multiple_of(columns, 16)
    length, terms = (columns, rows) if LEFT else (rows, columns)
    BLOCKS: tl.constexpr = (RANK + RANKS - 1) // RANKS
    part, tile = tile % SLABS, tile // SLABS
    if not APART:
        part, tile = 0, tile * SLABS + part
    outer, rank = tile // BLOCKS * OUTER, tile % BLOCKS * RANKS
    ends = (length - outer, RANK - rank)
    grad_ptr = entry(own, GRAD).to(tl.pointer_type(PRODUCT.element))
    grad_ptr += outer.to(tl.int64) * (1 if LEFT else columns)
    projection_ptr = entry(own, PROJECTION).to(tl.pointer_type(PRODUCT.projection_element))
    projection_ptr += rank.to(tl.int64) * (1 if LEFT else terms)
    per_slab = tl.cdiv(tl.cdiv(terms, SLABS), SLAB_UNIT) * SLAB_UNIT
    total = tl.zeros((OUTER, RANKS), tl.float32)
    for slab in range(1 if APART else SLABS):
        first = (part + slab) * per_slab
        last = tl.minimum(first + per_slab, terms)
        found = slab_sum(
            (grad_ptr, projection_ptr), ends, (first, last), (terms, columns),
            PRODUCT, OUTER, INNER, RANKS,
        )  # fmt: skip
        total = found if SLABS == 1 or APART else total + found
    low_ptr = entry(own, LOW).to(tl.pointer_type(tl.float32))
    low_ptr += part.to(tl.int64) * workspace if APART else 0
    low_ptr += rank.to(tl.int64) * (length if LEFT else 1)
    low_ptr += outer.to(tl.int64) * (1 if LEFT else RANK)
    stored(low_ptr, total, ends, length, PRODUCT)


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
