"""Products of matrices of all shapes in one launch, tile by tile; a product's sum is never split.

Every result is one chain over K (docs/numbers.md), so that neither the tile nor the program that it
lies in shows in a bit: edges of tiles are filled up with zeros, which change no chain.

A symmetric product is made by its lower tiles alone, each stored twice. That of a matrix with its
own transposed one is symmetric to the bit: a block's sum is exact before it is cut, whatever the
order of its terms, and the products of element [i, j] are those of [j, i] with their factors
swapped. Of two others the elements below the diagonal count, also within a tile on it.

Tensor cores wait for operands, not for sums: an H100 made 128 x 128 tiles at 0.89 of the rate of
128 x 256 ones, which load three quarters as much. So symmetric results have tiles of two squares
too, of which one above the diagonal is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from megaopt.kernels.chunks.chunk import Column, entry
from megaopt.kernels.optional_triton import helper, jit, loop_bound, tl
from megaopt.kernels.products.chain import chained
from megaopt.kernels.products.epilogue import finished

# Rows of the int64 table, one column a run: products of one shape, equally far apart in memory,
# left [m, k] @ right [k, n] each.
COUNT: tl.constexpr = tl.constexpr(0)
M: tl.constexpr = tl.constexpr(1)
N: tl.constexpr = tl.constexpr(2)
K: tl.constexpr = tl.constexpr(3)
# of the table of tiles: the run's first, and the one behind its last
FIRST_TILE: tl.constexpr = tl.constexpr(4)
END_TILE: tl.constexpr = tl.constexpr(5)
# addresses, and behind each how far apart the matrix's rows lie in memory, and the run's matrices,
# in elements
LEFT: tl.constexpr = tl.constexpr(6)
RIGHT: tl.constexpr = tl.constexpr(9)
ADDED: tl.constexpr = tl.constexpr(12)
OUT: tl.constexpr = tl.constexpr(15)
# likewise of the products' factors, fp32, without rows
SCALE: tl.constexpr = tl.constexpr(18)
ROW_COUNT = 21
# Rows of the int32 table of tiles, one column a tile: its product's place in the run, and where it
# begins there.
PRODUCT_OF_TILE: tl.constexpr = tl.constexpr(0)
ROW_OF_TILE: tl.constexpr = tl.constexpr(1)
COLUMN_OF_TILE: tl.constexpr = tl.constexpr(2)


@dataclass(frozen=True)
class ProductKind:
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
    """The results are symmetric: squares are below the diagonal, or on it, and stored twice."""
    described: bool
    """Tiles are loaded and stored by tensor descriptors: whole 16 bytes everywhere."""
    squared: bool = False
    """The right matrices are the left ones, turned."""
    diagonal: bool = False
    """Something is added to the results' diagonals."""
    scaled: bool = False
    """Each product has a factor in memory."""


class RowMajorMatrices(NamedTuple):
    """A run's matrices as they lie in memory, row by row."""

    ptr: Any
    rows: Any
    columns: Any
    stride: Any
    """int64, elements from a row to the next,"""
    apart: Any
    """and from a matrix to the next."""


class Places(NamedTuple):
    """A run's matrices, as tiles are loaded and stored: descriptors, or RowMajorMatrices."""

    left: Any
    right: Any
    added: Any
    out: Any
    end: Any
    """int32, the rows of the results."""


class TilePosition(NamedTuple):
    """The place at which a tile begins."""

    product: Any
    """Its product's place in the run."""
    row: Any
    column: Any


@helper
def place_in(
    entries, row, ELEMENT: tl.constexpr, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Makes a run's descriptor, or RowMajorMatrices; row: of the matrices' address in the table."""
    ptr = entry(entries, row).to(tl.pointer_type(ELEMENT))
    # in elements: from a row to the next, and from a matrix to the next
    stride, apart = entry(entries, row + 1), entry(entries, row + 2)
    if KIND.described:
        # [count, rows, columns]: the run's matrices as one tensor, of which tiles are of one each
        count = entry(entries, COUNT).to(tl.int32)
        place = tl.make_tensor_descriptor(
            ptr, [count, rows, columns], [apart, stride, 1], [1, HEIGHT, WIDTH]
        )
    else:
        place = RowMajorMatrices(ptr, rows, columns, stride, apart)
    return place


@helper
def pointers_in(place, product, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """A tile's pointers, and which of them are the matrix's."""
    rows, columns = row + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
    # int64 offsets, as matrices of a run may lie far apart
    ptr = place.ptr + product.to(tl.int64) * place.apart
    pointers = ptr + rows.to(tl.int64)[:, None] * place.stride + columns[None, :]
    return pointers, (rows[:, None] < place.rows) & (columns[None, :] < place.columns)


@helper
def loaded(
    place, product, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr
):
    """[HEIGHT, WIDTH] at a row and a column of memory, 0 behind the matrix's ends."""
    if KIND.described:
        tile = place.load([product, row, column]).reshape(HEIGHT, WIDTH)
    else:
        pointers, mask = pointers_in(place, product, row, column, HEIGHT, WIDTH)
        tile = tl.load(pointers, mask=mask, other=0.0)
    return tile


@helper
def store(place, product, row, column, tile, KIND: tl.constexpr):
    """Stores a tile, but for what is behind the matrix's ends."""
    if KIND.described:
        place.store([product, row, column], tile.reshape(1, tile.shape[0], tile.shape[1]))
    else:
        pointers, mask = pointers_in(place, product, row, column, tile.shape[0], tile.shape[1])
        tl.store(pointers, tile, mask=mask)


@helper
def operand_place(
    entries, row, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Makes the place of operands [rows, columns]; TURNED: in memory they are [columns, rows]."""
    if TURNED:
        place = place_in(entries, row, KIND.operand, columns, rows, WIDTH, HEIGHT, KIND)
    else:
        place = place_in(entries, row, KIND.operand, rows, columns, HEIGHT, WIDTH, KIND)
    return place


@helper
def operand_tile(
    place, product, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """[HEIGHT, WIDTH] of an operand."""
    if TURNED:  # as it lies in memory, and then turned
        tile = tl.trans(loaded(place, product, column, row, WIDTH, HEIGHT, KIND))
    else:
        tile = loaded(place, product, row, column, HEIGHT, WIDTH, KIND)
    return tile


@helper
def places_of(
    entries, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Makes the Places of a run."""
    # the products are [m, k] @ [k, n]
    m, n, k = (
        entry(entries, M).to(tl.int32),
        entry(entries, N).to(tl.int32),
        entry(entries, K).to(tl.int32),
    )
    # operands come whole, results and what is added part by part
    left = operand_place(entries, LEFT, m, k, ROWS, INNER, KIND.left_turned, KIND)
    right = operand_place(entries, RIGHT, k, n, INNER, COLUMNS, KIND.right_turned, KIND)
    out = place_in(entries, OUT, KIND.out, m, n, ROWS, COLUMNS // PARTS, KIND)
    # something has to stand there; it is not read
    added = out
    if KIND.added is not None:
        added = place_in(entries, ADDED, KIND.added, m, n, ROWS, COLUMNS // PARTS, KIND)
    return Places(left, right, added, out, m)


@helper
def chain_of(
    places, tile, k, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS, COLUMNS], a tile's sums."""
    product, row, column = tile
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for inner in range(0, loop_bound(k), INNER):
        # [ROWS, INNER] @ [INNER, COLUMNS]; terms behind k are zeros
        left = operand_tile(places.left, product, row, inner, ROWS, INNER, KIND.left_turned, KIND)
        right = operand_tile(
            places.right, product, inner, column, INNER, COLUMNS, KIND.right_turned, KIND
        )
        total = chained(left, right, total)
    return total


@helper
def below(value, tile):
    """Returns negative numbers above the diagonal of a part of a tile, 0 on it, positive below."""
    rows, columns = tl.arange(0, value.shape[0])[:, None], tl.arange(0, value.shape[1])[None, :]
    return tile.row - tile.column + rows - columns


@helper
def finish(entries, places, tile, total, numbers, KIND: tl.constexpr):
    """Stores the results of a part of a tile; of symmetric ones also turned, those below."""
    product, row, column = tile
    alpha, beta, diagonal = numbers
    # what the kind lacks is None, and costs nothing
    added, scale, is_diagonal = None, None, None
    if KIND.added is not None:
        added = loaded(places.added, product, row, column, total.shape[0], total.shape[1], KIND)
    if KIND.diagonal:
        is_diagonal = below(total, tile) == 0
    # one fp32 number for the product
    if KIND.scaled:
        scales = entry(entries, SCALE).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + product * entry(entries, SCALE + 2))
    # [rows, columns] of the part, in the dtype of the results
    value = finished(total, alpha, added, beta, diagonal, is_diagonal, scale, KIND.out)
    if KIND.mirrored:
        turned = tl.trans(value)
        # on the diagonal the numbers below it count, also for those above it
        if not KIND.squared:
            value = tl.where((row != column) | (below(value, tile) >= 0), value, turned)
        # nothing is stored behind the end: with a branch the loops would not be one
        store(places.out, product, tl.where(row > column, column, places.end), row, turned, KIND)
        # a part above the diagonal is dropped: a row behind the end stores nothing
        row = tl.where(row < column, places.end, row)
    store(places.out, product, row, column, value, KIND)


@jit(do_not_specialize=["runs", "tiles", "alpha", "beta", "diagonal"])
def products_kernel(
    table_ptr,  # *int64 [ROW_COUNT, runs]
    tiles_ptr,  # *int32 [3, tiles]
    runs,
    tiles,
    alpha,
    beta,
    diagonal,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,  # of K, at a time
    PARTS: tl.constexpr,  # in which a tile is stored, one beside another: 1 or 2
):
    """Makes scale (alpha left @ right + beta added + diagonal I) of every product.

    Programs take tiles in turns.
    """
    numbers = (alpha, beta, diagonal)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for run in range(loop_bound(runs)):
        # tiles of all runs are counted on; this program's first one in the run
        entries = Column(table_ptr, runs, run)
        first, end = entry(entries, FIRST_TILE).to(tl.int32), entry(entries, END_TILE).to(tl.int32)
        first += (program + programs - first % programs) % programs
        if first < end:
            places = places_of(entries, KIND, ROWS, COLUMNS, INNER, PARTS)
            k = entry(entries, K).to(tl.int32)
            # one loop with that over K: a tile's first loads go out while the last one is stored
            for number in tl.range(
                loop_bound(first), loop_bound(end), loop_bound(programs), flatten=True
            ):
                # int32, which product of the run the tile is of, and where it begins there
                product = tl.load(tiles_ptr + PRODUCT_OF_TILE * tiles + number)
                row = tl.load(tiles_ptr + ROW_OF_TILE * tiles + number)
                column = tl.load(tiles_ptr + COLUMN_OF_TILE * tiles + number)
                tile = TilePosition(product, row, column)
                # fp32 [ROWS, COLUMNS], the sums over K
                total = chain_of(places, tile, k, KIND, ROWS, COLUMNS, INNER)
                # stored at once, or the left half and then the right one
                if PARTS == 1:
                    finish(entries, places, tile, total, numbers, KIND)
                else:
                    WIDTH: tl.constexpr = COLUMNS // 2
                    # [ROWS, WIDTH, 2]: the last dimension says which half
                    both = tl.permute(tl.reshape(total, (ROWS, 2, WIDTH)), (0, 2, 1))
                    first_half, second_half = tl.split(both)
                    finish(entries, places, tile, first_half, numbers, KIND)
                    second_tile = TilePosition(product, row, column + WIDTH)
                    finish(entries, places, second_tile, second_half, numbers, KIND)
