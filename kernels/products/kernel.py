"""Products of matrices of all shapes in one launch, tile by tile; a product's sum is never split.

Every result is one chain over K (docs/numbers.md), so that neither the tile nor the program that it
lies in shows in a bit: edges of tiles are filled up with zeros, which change no chain.

A symmetric product is made by its lower tiles alone, each stored twice. That of a matrix with its
own transposed one is symmetric to the bit: a block's sum is exact before it is cut, whatever the
order of its terms, and the products of element [i, j] are those of [j, i] with their factors
swapped. Of two others the elements below the diagonal count, also within a tile on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from megaopt.kernels.chunks.chunk import Column, entry
from megaopt.kernels.optional_triton import helper, jit, loop_bound, tl
from megaopt.kernels.products.chain import chained
from megaopt.kernels.products.epilogue import finished

# Rows of the int64 table, one column a product: left [m, k] @ right [k, n].
M: tl.constexpr = tl.constexpr(0)
N: tl.constexpr = tl.constexpr(1)
K: tl.constexpr = tl.constexpr(2)
# addresses, and behind each how far apart the matrix's rows lie in memory, in elements
LEFT: tl.constexpr = tl.constexpr(3)
RIGHT: tl.constexpr = tl.constexpr(5)
ADDED: tl.constexpr = tl.constexpr(7)
OUT: tl.constexpr = tl.constexpr(9)
# the address of the product's factor, fp32
SCALE: tl.constexpr = tl.constexpr(11)
ROW_COUNT = 12
ADDRESSES = tuple(row.value for row in (LEFT, RIGHT, ADDED, OUT, SCALE))
"""The rows of addresses; 0 where there is nothing."""
# Rows of the int32 table of tiles, one column a tile: its product, and where it begins there.
PRODUCT_OF_TILE: tl.constexpr = tl.constexpr(0)
ROW_OF_TILE: tl.constexpr = tl.constexpr(1)
COLUMN_OF_TILE: tl.constexpr = tl.constexpr(2)


@dataclass(frozen=True)
class Kind:
    """The settings that all products of a launch share."""

    operand: Any
    """The Triton types of elements: of left and right,"""
    added: Any
    """of what is added, None where nothing is,"""
    out: Any
    """and of the results."""
    left_turned: bool
    """The left matrices lie in memory as [k, m],"""
    right_turned: bool
    """and the right ones as [n, k]."""
    mirrored: bool
    """The results are symmetric: tiles are below the diagonal, or on it, and stored twice."""
    described: bool
    """Tiles are loaded and stored by tensor descriptors: whole 16 bytes everywhere."""
    squared: bool = False
    """The right matrices are the left ones, turned."""
    diagonal: bool = False
    """Something is added to the results' diagonals."""
    scaled: bool = False
    """Each product has a factor in memory."""


class Memory(NamedTuple):
    """A matrix as it lies in memory, row by row."""

    ptr: Any
    rows: Any
    columns: Any
    stride: Any
    """int64, elements from a row to the next."""


class Places(NamedTuple):
    """A product's matrices, as tiles are loaded and stored: descriptors, or Memory."""

    left: Any
    right: Any
    added: Any
    out: Any


@helper
def place_in(
    own, row, ELEMENT: tl.constexpr, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Makes the descriptor, or Memory, of a matrix; row: of its address in the table."""
    ptr = entry(own, row).to(tl.pointer_type(ELEMENT))
    stride = entry(own, row + 1)
    if KIND.described:
        place = tl.make_tensor_descriptor(ptr, [rows, columns], [stride, 1], [HEIGHT, WIDTH])
    else:
        place = Memory(ptr, rows, columns, stride)
    return place


@helper
def pointers_in(place, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """A tile's pointers, and which of them are the matrix's."""
    rows, columns = row + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
    pointers = place.ptr + rows.to(tl.int64)[:, None] * place.stride + columns[None, :]
    return pointers, (rows[:, None] < place.rows) & (columns[None, :] < place.columns)


@helper
def loaded(place, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """[HEIGHT, WIDTH] at a row and a column of memory, 0 behind the matrix's ends."""
    if KIND.described:
        tile = place.load([row, column])
    else:
        pointers, mask = pointers_in(place, row, column, HEIGHT, WIDTH)
        tile = tl.load(pointers, mask=mask, other=0.0)
    return tile


@helper
def store(place, row, column, tile, KIND: tl.constexpr):
    """Stores a tile, but for what is behind the matrix's ends."""
    if KIND.described:
        place.store([row, column], tile)
    else:
        pointers, mask = pointers_in(place, row, column, tile.shape[0], tile.shape[1])
        tl.store(pointers, tile, mask=mask)


@helper
def operand_place(
    own, row, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Makes that of an operand [rows, columns]; TURNED: in memory it is [columns, rows]."""
    if TURNED:
        place = place_in(own, row, KIND.operand, columns, rows, WIDTH, HEIGHT, KIND)
    else:
        place = place_in(own, row, KIND.operand, rows, columns, HEIGHT, WIDTH, KIND)
    return place


@helper
def operand_tile(
    place, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """[HEIGHT, WIDTH] of an operand."""
    if TURNED:  # as it lies in memory, and then turned
        tile = tl.trans(loaded(place, column, row, WIDTH, HEIGHT, KIND))
    else:
        tile = loaded(place, row, column, HEIGHT, WIDTH, KIND)
    return tile


@helper
def places_of(
    own, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr
):
    """Makes the Places of a product."""
    m, n, k = entry(own, M).to(tl.int32), entry(own, N).to(tl.int32), entry(own, K).to(tl.int32)
    left = operand_place(own, LEFT, m, k, ROWS, INNER, KIND.left_turned, KIND)
    out = place_in(own, OUT, KIND.out, m, n, ROWS, COLUMNS, KIND)
    right, added = left, out
    if not KIND.squared:  # otherwise left's own memory, and square tiles
        right = operand_place(own, RIGHT, k, n, INNER, COLUMNS, KIND.right_turned, KIND)
    if KIND.added is not None:
        added = place_in(own, ADDED, KIND.added, m, n, ROWS, COLUMNS, KIND)
    return Places(left, right, added, out)


@helper
def on_diagonal(row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Which numbers of a tile are on the result's diagonal."""
    return row + tl.arange(0, ROWS)[:, None] == column + tl.arange(0, COLUMNS)[None, :]


@helper
def mirrored(tile):
    """A square tile on the diagonal, what is above its diagonal as what is below."""
    rows, columns = tl.arange(0, tile.shape[0])[:, None], tl.arange(0, tile.shape[1])[None, :]
    return tl.where(rows >= columns, tile, tl.trans(tile))


@jit(do_not_specialize=["products", "tiles", "alpha", "beta", "diagonal"])
def products_kernel(
    table_ptr,  # *int64 [ROW_COUNT, products]
    tiles_ptr,  # *int32 [3, tiles]
    products,
    tiles,
    alpha,
    beta,
    diagonal,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,  # of K, at a time
):
    """Makes scale (alpha left @ right + beta added + diagonal I) of every product.

    Programs take tiles in turns.
    """
    first = tl.program_id(0)
    made = tl.load(tiles_ptr + PRODUCT_OF_TILE * tiles + first)
    places = places_of(Column(table_ptr, products, made), KIND, ROWS, COLUMNS, INNER)
    for number in range(loop_bound(first), loop_bound(tiles), loop_bound(tl.num_programs(0))):
        product = tl.load(tiles_ptr + PRODUCT_OF_TILE * tiles + number)
        row = tl.load(tiles_ptr + ROW_OF_TILE * tiles + number)
        column = tl.load(tiles_ptr + COLUMN_OF_TILE * tiles + number)
        own = Column(table_ptr, products, product)
        if product != made:  # a descriptor takes long to make
            made = product
            places = places_of(own, KIND, ROWS, COLUMNS, INNER)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for inner in range(0, loop_bound(entry(own, K).to(tl.int32)), INNER):
            left = operand_tile(places.left, row, inner, ROWS, INNER, KIND.left_turned, KIND)
            right = operand_tile(
                places.right, inner, column, INNER, COLUMNS, KIND.right_turned, KIND
            )
            total = chained(left, right, total)
        added, scale, is_diagonal = None, None, None
        if KIND.added is not None:
            added = loaded(places.added, row, column, ROWS, COLUMNS, KIND)
        if KIND.diagonal:
            is_diagonal = on_diagonal(row, column, ROWS, COLUMNS)
        if KIND.scaled:
            scale = tl.load(entry(own, SCALE).to(tl.pointer_type(tl.float32)))
        value = finished(total, alpha, added, beta, diagonal, is_diagonal, scale, KIND.out)
        if KIND.mirrored and not KIND.squared:  # noqa: SIM102 as below
            if row == column:
                value = mirrored(value)
        store(places.out, row, column, value, KIND)
        if KIND.mirrored:  # noqa: SIM102 at compile time, the other at run time
            if row != column:
                store(places.out, column, row, tl.trans(value), KIND)
