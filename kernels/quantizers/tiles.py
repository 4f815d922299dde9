"""fp8 weights in blocks: tiles of 128 x 128 elements of a weight, stepped and cast in one pass.

A shard may hold only some elements of a tile. A tile is worked through in pieces of a
two-dimensional shape whose rows are each within one block of scales: 4 x 128, or 16 x 32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megaopt.kernels.chunks.blocks import load_block, pointers_of, store_block
from megaopt.kernels.chunks.chunk import Block, Chunk, ChunkScales, Column, entry
from megaopt.kernels.chunks.draws import block_words, draw_of, line_words
from megaopt.kernels.chunks.rows import (
    ALIGNED,
    MASTER_SCALE,
    NUMEL,
    WEIGHT_COLUMNS,
    WEIGHT_ROWS,
    WEIGHT_SCALE_STRIDE,
    WEIGHT_START,
)
from megaopt.kernels.chunks.scales import old_scale
from megaopt.kernels.chunks.store import Left, Store
from megaopt.kernels.optional_triton import INTERPRETED, helper, jit, tl
from megaopt.kernels.quantizers.cast import (
    amax_pointer,
    cast_draw,
    loaded_values,
    remainder_pointer,
    rounded,
    scale_inv_pointer,
    store_codes,
)
from megaopt.kernels.quantizers.scale import magnitude_bits
from megaopt.kernels.step.kernel import (
    controls_of,
    draw_row,
    is_left_out,
    kept_moment_scale,
    scalars_of,
)
from megaopt.kernels.step.update import loaded_and_updated, stored_block

TILE: tl.constexpr = tl.constexpr(128)
LARGEST_OFFSET: tl.constexpr = tl.constexpr(2**31 - 1)


class WeightTile(NamedTuple):
    """A tile of a weight, of which a tensor may have a part only."""

    rows: Any
    """int32, how many rows and columns the weight has from the tile's corner on, at most TILE."""
    columns: Any
    stride: Any
    """int32, the weight's columns."""
    lower: Any
    """int32, the offsets from the tile's first element between which the tensor has elements."""
    upper: Any
    first_row: Any
    """int64, the tile's first row and column in the weight."""
    first_column: Any
    across: Any
    """int64, the weight's columns."""
    scale_stride: Any
    """int64, how far apart rows of scale_inv lie."""
    amax_ptr: Any
    scale_inv_ptr: Any


class TileLines(NamedTuple):
    """A piece of a tile: so many of its lines, each within one block of scales."""

    offsets: Any
    """int32 [lines, columns of a block], from the tile's first element."""
    mask: Any
    """Likewise, whether an offset is in the weight and in the tensor."""
    row: Any
    """int32 [lines], in the tile."""
    first: Any
    """int32 [lines], the line's first column in the tile."""


@helper
def tile_of(column, tiles_ptr, tiles):
    """This program's tile but for its pointers, and int64, its first element in the tensor.

    That is negative where a shard starts later.
    """
    # int64, the tile's first row and column in the weight
    program = tl.program_id(0)
    row = tl.load(tiles_ptr + tiles + program).to(tl.int64) * TILE
    first_column = tl.load(tiles_ptr + 2 * tiles + program).to(tl.int64) * TILE
    # of the weight rows and columns, of the tensor where in the weight it starts and its size
    rows = entry(column, WEIGHT_ROWS)
    columns = entry(column, WEIGHT_COLUMNS)
    start = entry(column, WEIGHT_START)
    numel = entry(column, NUMEL)
    base = row * columns + first_column - start
    # offsets within a tile fit 32 bits: 128 rows of fewer than 2**24 elements
    lower = tl.minimum(tl.maximum(-base, 0), LARGEST_OFFSET).to(tl.int32)
    upper = tl.minimum(tl.maximum(numel - base, 0), LARGEST_OFFSET).to(tl.int32)
    # tiles at the weight's edges are smaller
    height = tl.minimum(rows - row, TILE).to(tl.int32)
    width = tl.minimum(columns - first_column, TILE).to(tl.int32)
    stride = entry(column, WEIGHT_SCALE_STRIDE)
    across = columns.to(tl.int32)
    return (height, width, across, lower, upper, row, first_column, columns, stride), base


@helper
def with_pointers(tile, column, FORMATS: tl.constexpr):
    amax_ptr, inv_ptr = amax_pointer(column), scale_inv_pointer(column, FORMATS)
    return WeightTile(*tile, amax_ptr, inv_ptr)  # type: ignore[call-arg]


@helper
def tile_is_whole(tile):
    """Returns whether the tensor has every element that the weight has of the tile."""
    return (tile.lower == 0) & ((tile.rows - 1) * tile.stride + tile.columns <= tile.upper)


@helper
def piece_of(number, tile, FORMATS: tl.constexpr, PIECE: tl.constexpr):
    """A tile's piece with this number, of so many elements."""
    WIDTH: tl.constexpr = FORMATS.cast.quantizer.columns
    # LINES lines of WIDTH elements; ACROSS lines beside each other fill a row of the tile
    LINES: tl.constexpr = PIECE // WIDTH
    ACROSS: tl.constexpr = TILE // WIDTH
    line = number * LINES + tl.arange(0, LINES)
    # int32 [LINES]
    row = line // ACROSS
    first = (line % ACROSS) * WIDTH
    # int32 [LINES, WIDTH]
    column = first[:, None] + tl.arange(0, WIDTH)[None, :]
    offsets = row[:, None] * tile.stride + column
    # what the weight has of the tile, then what the tensor has of the weight
    mask = (row[:, None] < tile.rows) & (column < tile.columns)
    mask = mask & (offsets >= tile.lower) & (offsets < tile.upper)
    return TileLines(offsets, mask, row, first)


@helper
def lines_are_whole(piece, tile, WIDTH: tl.constexpr):
    """Returns masks of lines: the tensor has all that the weight has of it; the weight has any."""
    # offsets between which each line lies, up to the weight's edge
    begin = piece.row * tile.stride + piece.first
    end = piece.row * tile.stride + tl.minimum(piece.first + WIDTH, tile.columns)
    inside = (piece.row < tile.rows) & (piece.first < tile.columns)
    return (begin >= tile.lower) & (end <= tile.upper), inside


@helper
def blocks_of(piece, tile, FORMATS: tl.constexpr):
    """int64 [lines], the places of each line's block among the weight's amaxes and in scale_inv."""
    # a whole tile is one block, or each line is
    if FORMATS.cast.quantizer.rows > 1:
        block_row = piece.row.to(tl.int64) * 0 + tile.first_row // TILE
        block_column = tile.first_column // TILE
        across = tl.cdiv(tile.across, TILE)
    else:
        WIDTH: tl.constexpr = FORMATS.cast.quantizer.columns
        block_row = tile.first_row + piece.row
        block_column = (tile.first_column + piece.first) // WIDTH
        across = tl.cdiv(tile.across, WIDTH)
    return block_row * across + block_column, block_row * tile.scale_stride + block_column


@helper
def piece_words(chunk, tile, piece, DRAWS: tl.constexpr, MASKED: tl.constexpr):
    """The random words of a piece; of one that is not masked lines begin with quads."""
    if MASKED:
        words = block_words(chunk.draw, chunk.start, 0, piece.offsets, DRAWS, False, 0, False)
    else:
        # int64 [lines], each line's first element in the tensor
        begins = chunk.start + piece.row * tile.stride + piece.first
        words = line_words(chunk.draw, begins, DRAWS, piece.offsets.shape[1])
    return words


@helper
def step_piece(chunk, tile, piece, scale_inv, SPEC: tl.constexpr, MASKED: tl.constexpr):
    """The step of a piece but for its weights: returns their rounded values, and random words.

    scale_inv: of the weights' codes, where these are read.
    """
    FORMATS: tl.constexpr = SPEC.formats
    COUNT: tl.constexpr = FORMATS.moment_count
    pointers = ()  # to scales of blocks; there are no others here
    for index in tl.static_range(COUNT):
        # there is no scratch, which only other scales need
        pointers += (kept_moment_scale(None, chunk.column, chunk.start, 0, FORMATS, index),)
    scales = ChunkScales(scale_inv, pointers, 1.0, pointers, 1.0)
    # the step itself: loads, the rule, and stores of all but weights
    rows = piece.row * tile.stride + piece.first
    block = Block(piece.offsets, rows, piece.mask if MASKED else None)
    values = loaded_and_updated(chunk, scales, block, SPEC)
    words = piece_words(chunk, tile, piece, FORMATS.draws, MASKED)
    stored_block(chunk, scales, block, values, 0, words, FORMATS)
    # fp32 [lines, columns], what codes are made of; 0 outside, so that amaxes do not see it
    value = rounded(values[0], FORMATS)
    if block.mask is not None:
        value = tl.where(block.mask, value, 0.0)
    return value, words


@helper
def scale_invs_of(piece, tile, FORMATS: tl.constexpr, READS_CODES: tl.constexpr):
    """Returns the factors of the codes of a piece's lines, fp32 [lines, 1]; 1 for masters."""
    if READS_CODES:
        _blocks, stored = blocks_of(piece, tile, FORMATS)
        _whole, inside = lines_are_whole(piece, tile, FORMATS.cast.quantizer.columns)
        # fp32 or E8M0 codes, one a line
        code = tl.load(tile.scale_inv_ptr + stored, mask=inside, other=0)
        scale_inv = FORMATS.cast.quantizer.value(code)[:, None]
    else:
        scale_inv = 1.0
    return scale_inv


@helper
def cast_lines(
    chunk, tile, piece, value, words, FORMATS: tl.constexpr, MASKED: tl.constexpr,
    SHARDED: tl.constexpr,
):  # fmt: skip
    """Encodes a piece whose lines are blocks of their own; those that others have parts of wait."""
    # [lines], amax, scale and inverse of each line
    blocks, stored = blocks_of(piece, tile, FORMATS)
    amax_bits = tl.max(magnitude_bits(value), 1)
    scale, scale_inv = FORMATS.cast.quantizer.scale(chunk.column, amax_bits, FORMATS)
    product = value * scale[:, None]
    whole, inside = lines_are_whole(piece, tile, FORMATS.cast.quantizer.columns)
    remainder_ptr = remainder_pointer(chunk.column, chunk.start, FORMATS)
    # ranks that have parts of a block put their amaxes together after the step
    if SHARDED:
        tl.atomic_max(tile.amax_ptr + blocks, amax_bits, mask=inside)
    # lines that are not whole are cast later, when their amaxes are known
    mask = piece.mask & whole[:, None] if MASKED else None
    block = Block(piece.offsets, 0, mask)
    store_codes(chunk.pointers.weight, remainder_ptr, block, product, words, FORMATS)
    if MASKED:
        tl.store(tile.scale_inv_ptr + stored, scale_inv, mask=inside & whole)
    else:
        tl.store(tile.scale_inv_ptr + stored, scale_inv)


@helper
def tile_in_lines(
    chunk, tile, SPEC: tl.constexpr, MASKED: tl.constexpr, SHARDED: tl.constexpr,
    PIECE: tl.constexpr, PIECE_AGAIN: tl.constexpr,
):  # fmt: skip
    """Step and cast of a tile whose blocks lie in one row each."""
    FORMATS: tl.constexpr = SPEC.formats
    index = tl.zeros((), tl.int32)
    while index < TILE * TILE // PIECE:
        # a line's amax needs this piece alone: step and cast in one go
        piece = piece_of(index, tile, FORMATS, PIECE)
        scale_inv = scale_invs_of(piece, tile, FORMATS, FORMATS.in_place)
        value, words = step_piece(chunk, tile, piece, scale_inv, SPEC, MASKED)
        cast_lines(chunk, tile, piece, value, words, FORMATS, MASKED, SHARDED)
        index += 1


def store_of_tiles(name: str, tile: object, in_place: bool = False, **options: int) -> Store:
    """A store whose pass goes by tiles; options: of the launch."""
    if INTERPRETED:  # an interpreted operation costs some 15 microseconds whatever its size
        options = {"PIECE": 8192, "PIECE_AGAIN": 8192}
    return Store(name, Left.SHARED, tile=tile, tile_options=options, in_place=in_place)


@jit(do_not_specialize=["tensors", "tiles", "scalar_count"])
def tile_kernel(
    table_ptr,  # *int64 [Formats.row_count, tensors]
    tiles_ptr,  # *int32 [3, tiles]: the tensor, the tile's row and column in units of tiles
    scalars_ptr,  # *fp32 [groups, scalar_count]
    controls_ptr,  # *fp32 [groups, CONTROLS]; unread unless controlled
    tensors,
    tiles,
    scalar_count,
    SPEC: tl.constexpr,
    SHARDED: tl.constexpr,
    PIECE: tl.constexpr,
    PIECE_AGAIN: tl.constexpr,
):
    """The step of one tile, and the cast of its blocks of which no other rank has a part.

    SHARDED: the amaxes of all blocks go to the buffer in which the ranks put them together.
    """
    FORMATS: tl.constexpr = SPEC.formats
    RULE: tl.constexpr = SPEC.rule
    # the tensor of the program's tile
    column = Column(table_ptr, tensors, tl.load(tiles_ptr + tl.program_id(0)))
    if SPEC.controlled:  # noqa: SIM102 at compile time, the other at run time
        if is_left_out(column, controls_ptr):
            return

    # what the step needs: tile, scalars, controls, random words, pointers to the tile's corner
    tile, base = tile_of(column, tiles_ptr, tiles)
    scalars = scalars_of(column, scalars_ptr, scalar_count, RULE)
    draw = draw_of(column, draw_row(column, scalars_ptr, scalar_count, RULE), FORMATS.draws)
    controls = controls_of(column, controls_ptr, SPEC.controlled)
    pointers = pointers_of(column, base, FORMATS)
    tile = with_pointers(tile, column, FORMATS)
    chunk = Chunk(column, base, tile.upper, pointers, scalars, controls, draw)
    # whole tiles of aligned rows go without masks
    full = tile_is_whole(tile) & (tile.rows == TILE) & (tile.columns == TILE)
    aligned = entry(column, ALIGNED) != 0
    if full & aligned & (base % 16 == 0) & (tile.stride % 16 == 0):
        FORMATS.store.tile(chunk, tile, SPEC, False, SHARDED, PIECE, PIECE_AGAIN)
    else:
        FORMATS.store.tile(chunk, tile, SPEC, True, SHARDED, PIECE, PIECE_AGAIN)


@jit(do_not_specialize=["tensors", "tiles"])
def values_tiles_kernel(
    table_ptr, tiles_ptr, tensors, tiles, FORMATS: tl.constexpr, PIECE: tl.constexpr
):
    """Stores what a tile's codes stand for where a step's masters are."""
    column = Column(table_ptr, tensors, tl.load(tiles_ptr + tl.program_id(0)))
    # the tile, and pointers to its corner
    tile, base = tile_of(column, tiles_ptr, tiles)
    pointers = pointers_of(column, base, FORMATS)
    remainder_ptr = remainder_pointer(column, base, FORMATS)
    tile = with_pointers(tile, column, FORMATS)
    index = tl.zeros((), tl.int32)
    while index < TILE * TILE // PIECE:
        # codes times scale_inv of their lines, fp32 [lines, columns], to the masters' place
        piece = piece_of(index, tile, FORMATS, PIECE)
        scale_inv = scale_invs_of(piece, tile, FORMATS, True)
        value = loaded_values(
            pointers.weight, remainder_ptr, scale_inv, piece.offsets, piece.mask, FORMATS
        )
        store_block(pointers.master, piece.offsets, value, piece.mask)
        index += 1


@jit(do_not_specialize=["tensors", "tiles", "scalar_count"])
def cast_tiles_kernel(
    table_ptr,
    tiles_ptr,
    controls_ptr,
    scalars_ptr,  # *fp32 [groups, scalar_count], of the step; unread unless the cast draws
    tensors,
    tiles,
    scalar_count,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    ONLY_AMAX: tl.constexpr,
    ALL: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Casts masters of a tile with the amaxes that are known now, or only raises those.

    Without ALL only blocks of which other ranks have a part: the others were cast with the step.
    """
    column = Column(table_ptr, tensors, tl.load(tiles_ptr + tl.program_id(0)))
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if is_left_out(column, controls_ptr):
            return

    # the tile, pointers to its corner, and what its random words are made of
    tile, base = tile_of(column, tiles_ptr, tiles)
    pointers = pointers_of(column, base, FORMATS)
    tile = with_pointers(tile, column, FORMATS)
    remainder_ptr = remainder_pointer(column, base, FORMATS)
    draw = cast_draw(column, scalars_ptr, scalar_count, FORMATS, RULE)
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    master_scale = old_scale(column, MASTER_SCALE, MASTER_FORMAT)
    index = tl.zeros((), tl.int32)
    while index < TILE * TILE // PIECE:
        # where the amaxes of the piece's lines are, and which lines this tensor has whole
        piece = piece_of(index, tile, FORMATS, PIECE)
        blocks, _stored = blocks_of(piece, tile, FORMATS)
        whole, inside = lines_are_whole(piece, tile, FORMATS.cast.quantizer.columns)
        # blocks of several rows are whole where the tile is; an expression of [lines]
        if FORMATS.cast.quantizer.rows > 1:
            whole = (piece.row >= 0) & tile_is_whole(tile)
        # fp32 [lines, columns], rounded masters
        code = load_block(pointers.master, piece.offsets, piece.mask)
        value = rounded(MASTER_FORMAT.decode(code, master_scale), FORMATS)
        if ONLY_AMAX:
            amax_bits = tl.max(magnitude_bits(tl.where(piece.mask, value, 0.0)), 1)
            tl.atomic_max(tile.amax_ptr + blocks, amax_bits, mask=inside)
        else:
            # amaxes of all ranks, and the scales that follow from them
            amax_bits = tl.load(tile.amax_ptr + blocks, mask=inside, other=0)
            scale, _scale_inv = FORMATS.cast.quantizer.scale(column, amax_bits, FORMATS)
            product = value * scale[:, None]
            # what the step has cast already stays
            mask = piece.mask if ALL else piece.mask & (whole == 0)[:, None]
            block = Block(piece.offsets, 0, mask)
            words = block_words(draw, base, 0, piece.offsets, FORMATS.cast_draws, False, 0, False)
            store_codes(pointers.weight, remainder_ptr, block, product, words, FORMATS)
        index += 1
