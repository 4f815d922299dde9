"""fp8 weights in blocks: tiles of 128 x 128 elements of a weight, stepped and cast in one pass.

A shard may hold only some elements of a tile. A tile is worked through in pieces of a
two-dimensional shape whose rows are each within one block of scales: 4 x 128, or 16 x 32.
"""

from __future__ import annotations

from megaopt.kernels.optional_triton import INTERPRETED, helper, jit, tl
from megaopt.kernels.quantizers.base import Left, Store
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
from megaopt.kernels.step.blocks import load_block, pointers_of, store_block
from megaopt.kernels.step.draws import block_words, draw_of, line_words
from megaopt.kernels.step.kernel import (
    SKIP,
    controls_of,
    draw_row,
    kept_moment_scale,
    scalars_of,
)
from megaopt.kernels.step.rows import (
    ALIGNED,
    MASTER_SCALE,
    NUMEL,
    WEIGHT_COLUMNS,
    WEIGHT_ROWS,
    WEIGHT_SCALE_STRIDE,
    WEIGHT_START,
)
from megaopt.kernels.step.scales import old_scale
from megaopt.kernels.step.update import loaded_and_updated, stored_block

TILE: tl.constexpr = tl.constexpr(128)
LARGEST_OFFSET: tl.constexpr = tl.constexpr(2**31 - 1)


@helper
def tile_of(table_ptr, tiles_ptr, tensors, tiles):
    """This program's tensor and tile.

    Returns:
        tensor: its number.
        base: int64, the tile's first element in the tensor; negative where a shard starts later.
        tile: the rows and columns that the weight has from the tile's corner on, the weight's
            columns, and the offsets from `base` between which the tensor has elements; int32.
        block: int64, the numbers of the tile's first row and column, the weight's columns, and how
            far apart rows of scale_inv lie.
    """
    program = tl.program_id(0)
    tensor = tl.load(tiles_ptr + program)
    row = tl.load(tiles_ptr + tiles + program).to(tl.int64) * TILE
    column = tl.load(tiles_ptr + 2 * tiles + program).to(tl.int64) * TILE
    rows = tl.load(table_ptr + WEIGHT_ROWS * tensors + tensor)
    columns = tl.load(table_ptr + WEIGHT_COLUMNS * tensors + tensor)
    start = tl.load(table_ptr + WEIGHT_START * tensors + tensor)
    numel = tl.load(table_ptr + NUMEL * tensors + tensor)
    base = row * columns + column - start
    # offsets within a tile fit 32 bits: 128 rows of fewer than 2**24 elements
    lower = tl.minimum(tl.maximum(-base, 0), LARGEST_OFFSET).to(tl.int32)
    upper = tl.minimum(tl.maximum(numel - base, 0), LARGEST_OFFSET).to(tl.int32)
    height = tl.minimum(rows - row, TILE).to(tl.int32)
    width = tl.minimum(columns - column, TILE).to(tl.int32)
    tile = (height, width, columns.to(tl.int32), lower, upper)
    stride = tl.load(table_ptr + WEIGHT_SCALE_STRIDE * tensors + tensor)
    return tensor, base, tile, (row, column, columns, stride)


@helper
def tile_is_whole(tile):
    """Whether the tensor has every element that the weight has of the tile."""
    height, width, columns, lower, upper = tile
    return (lower == 0) & ((height - 1) * columns + width <= upper)


@helper
def piece_of(piece, tile, FORMATS: tl.constexpr, PIECE: tl.constexpr):
    """A piece of a tile: offsets from the tile's first element, which the tensor has, its lines.

    Returns:
        offsets: int32 [lines, columns of a block].
        mask: likewise, whether an offset is in the weight and in the tensor.
        row: int32 [lines], in the tile.
        first: int32 [lines], the line's first column in the tile.
    """
    height, width, columns, lower, upper = tile
    WIDTH: tl.constexpr = FORMATS.cast.quantizer.columns
    LINES: tl.constexpr = PIECE // WIDTH
    ACROSS: tl.constexpr = TILE // WIDTH
    line = piece * LINES + tl.arange(0, LINES)
    row = line // ACROSS
    first = (line % ACROSS) * WIDTH
    column = first[:, None] + tl.arange(0, WIDTH)[None, :]
    offsets = row[:, None] * columns + column
    mask = (row[:, None] < height) & (column < width) & (offsets >= lower) & (offsets < upper)
    return offsets, mask, row, first


@helper
def lines_are_whole(row, first, tile, WIDTH: tl.constexpr):
    """For each line whether the tensor has all that the weight has of it; whether there is any."""
    height, width, columns, lower, upper = tile
    begin = row * columns + first
    end = row * columns + tl.minimum(first + WIDTH, width)
    inside = (row < height) & (first < width)
    return (begin >= lower) & (end <= upper), inside


@helper
def blocks_of(row, first, block, FORMATS: tl.constexpr):
    """int64 [lines], the places of each line's block among the weight's amaxes and in scale_inv."""
    row_0, column_0, columns, stride = block
    if FORMATS.cast.quantizer.rows > 1:
        block_row = row.to(tl.int64) * 0 + row_0 // TILE
        block_column = column_0 // TILE
        across = tl.cdiv(columns, TILE)
    else:
        WIDTH: tl.constexpr = FORMATS.cast.quantizer.columns
        block_row = row_0 + row
        block_column = (column_0 + first) // WIDTH
        across = tl.cdiv(columns, WIDTH)
    return block_row * across + block_column, block_row * stride + block_column


@helper
def piece_words(
    draw, base, piece, tile, DRAWS: tl.constexpr, FORMATS: tl.constexpr, MASKED: tl.constexpr
):
    """The random words of a piece; of one that is not masked lines begin with quads."""
    offsets, _mask, row, first = piece
    if MASKED:
        words = block_words(draw, base, 0, offsets, DRAWS, False, 0, False)
    else:
        words = line_words(
            draw, base + row * tile[2] + first, DRAWS, FORMATS.cast.quantizer.columns
        )
    return words


@helper
def step_piece(
    table_ptr, place, pointers, numbers, controls, piece, tile, scale_inv,
    FORMATS: tl.constexpr, RULE: tl.constexpr, CONTROLLED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The step of a piece but for its weights.

    Returns the weights' values, rounded, fp32, and random words.

    numbers: the group's scalars, and what random words are made from.
    scale_inv: of the weights' codes, where these are read.
    """
    scalars, draw = numbers
    offsets, mask, row, first = piece
    COUNT: tl.constexpr = FORMATS.moment_count
    scales = ()  # pointers to those of blocks; there are no others here
    for index in tl.static_range(COUNT):
        scales += (kept_moment_scale(table_ptr, table_ptr, place, 0, FORMATS, index),)
    lines, elements = row * tile[2] + first, tile[4]
    values = loaded_and_updated(
        table_ptr, place, pointers, (scale_inv, scales), scalars, controls, offsets, lines,
        elements, mask, FORMATS, RULE, CONTROLLED, MASKED, True, FORMATS.writes_grad,
    )  # fmt: skip
    words = piece_words(draw, place[2], piece, tile, FORMATS.draws, FORMATS, MASKED)
    stored_block(
        pointers, (1.0, scales), values, 1.0, 0, words, offsets, lines, elements, mask, FORMATS,
        MASKED,
    )  # fmt: skip
    value = rounded(values[0], FORMATS)
    if MASKED:
        value = tl.where(mask, value, 0.0)
    return value, words


@helper
def scale_invs_of(
    scale_inv_ptr, piece, tile, block, FORMATS: tl.constexpr, READS_CODES: tl.constexpr
):
    """What the codes of a piece's lines are multiplied by, fp32 [lines, 1]; 1 of masters."""
    if READS_CODES:
        _offsets, _mask, row, first = piece
        _blocks, stored = blocks_of(row, first, block, FORMATS)
        _whole, inside = lines_are_whole(row, first, tile, FORMATS.cast.quantizer.columns)
        found = tl.load(scale_inv_ptr + stored, mask=inside, other=0)
        scale_inv = FORMATS.cast.quantizer.value(found)[:, None]
    else:
        scale_inv = 1.0
    return scale_inv


@helper
def cast_lines(
    table_ptr, place, weight_ptr, outputs, value, words, piece, tile, block,
    FORMATS: tl.constexpr, MASKED: tl.constexpr, SHARDED: tl.constexpr,
):  # fmt: skip
    """Encodes a piece whose lines are blocks of their own; those that others have parts of wait."""
    amax_ptr, scale_inv_ptr = outputs
    offsets, mask, row, first = piece
    blocks, stored = blocks_of(row, first, block, FORMATS)
    amax_bits = tl.max(magnitude_bits(value), 1)
    scale, scale_inv = FORMATS.cast.quantizer.scale(table_ptr, place, amax_bits, FORMATS)
    product = value * scale[:, None]
    whole, inside = lines_are_whole(row, first, tile, FORMATS.cast.quantizer.columns)
    remainder_ptr = remainder_pointer(table_ptr, place[0], place[1], place[2], FORMATS)
    if SHARDED:
        tl.atomic_max(amax_ptr + blocks, amax_bits, mask=inside)
    if MASKED:
        mask = mask & whole[:, None]
        store_codes(weight_ptr, remainder_ptr, product, words, offsets, mask, FORMATS, True)
        tl.store(scale_inv_ptr + stored, scale_inv, mask=inside & whole)
    else:
        store_codes(weight_ptr, remainder_ptr, product, words, offsets, None, FORMATS, False)
        tl.store(scale_inv_ptr + stored, scale_inv)


@helper
def tile_in_lines(
    table_ptr, place, pointers, outputs, numbers, controls, tile, block, FORMATS: tl.constexpr,
    RULE: tl.constexpr, CONTROLLED: tl.constexpr, MASKED: tl.constexpr, SHARDED: tl.constexpr,
    PIECE: tl.constexpr, PIECE_AGAIN: tl.constexpr,
):  # fmt: skip
    """Step and cast of a tile whose blocks lie in one row each."""
    index = tl.zeros((), tl.int32)
    while index < TILE * TILE // PIECE:
        piece = piece_of(index, tile, FORMATS, PIECE)
        scale_inv = scale_invs_of(outputs[1], piece, tile, block, FORMATS, FORMATS.in_place)
        value, words = step_piece(
            table_ptr, place, pointers, numbers, controls, piece, tile, scale_inv,
            FORMATS, RULE, CONTROLLED, MASKED,
        )  # fmt: skip
        cast_lines(
            table_ptr, place, pointers[1], outputs, value, words, piece, tile, block,
            FORMATS, MASKED, SHARDED,
        )  # fmt: skip
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
    controls_ptr,  # *fp32 [CONTROLS]; unread unless CONTROLLED
    tensors,
    tiles,
    scalar_count,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    SHARDED: tl.constexpr,
    PIECE: tl.constexpr,
    PIECE_AGAIN: tl.constexpr,
):
    """The step of one tile, and the cast of its blocks of which no other rank has a part.

    SHARDED: the amaxes of all blocks go to the buffer in which the ranks put them together.
    """
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    tensor, base, tile, block = tile_of(table_ptr, tiles_ptr, tensors, tiles)
    place = (tensors, tensor, base)
    scalars = scalars_of(table_ptr, scalars_ptr, scalar_count, tensors, tensor, RULE)
    row_ptr = draw_row(table_ptr, scalars_ptr, scalar_count, tensors, tensor, RULE)
    numbers = (scalars, draw_of(table_ptr, tensors, tensor, row_ptr, FORMATS.draws))
    controls = controls_of(controls_ptr, CONTROLLED)
    pointers = pointers_of(table_ptr, tensors, tensor, base, FORMATS)
    amax_ptr = amax_pointer(table_ptr, tensors, tensor)
    outputs = (amax_ptr, scale_inv_pointer(table_ptr, tensors, tensor, FORMATS))
    full = tile_is_whole(tile) & (tile[0] == TILE) & (tile[1] == TILE)
    aligned = tl.load(table_ptr + ALIGNED * tensors + tensor) != 0
    if full & aligned & (base % 16 == 0) & (tile[2] % 16 == 0):
        FORMATS.store.tile(
            table_ptr, place, pointers, outputs, numbers, controls, tile, block,
            FORMATS, RULE, CONTROLLED, False, SHARDED, PIECE, PIECE_AGAIN,
        )  # fmt: skip
    else:
        FORMATS.store.tile(
            table_ptr, place, pointers, outputs, numbers, controls, tile, block,
            FORMATS, RULE, CONTROLLED, True, SHARDED, PIECE, PIECE_AGAIN,
        )  # fmt: skip


@jit(do_not_specialize=["tensors", "tiles"])
def values_tiles_kernel(
    table_ptr, tiles_ptr, tensors, tiles, FORMATS: tl.constexpr, PIECE: tl.constexpr
):
    """Stores what a tile's codes stand for where a step's masters are."""
    tensor, base, tile, block = tile_of(table_ptr, tiles_ptr, tensors, tiles)
    pointers = pointers_of(table_ptr, tensors, tensor, base, FORMATS)
    remainder_ptr = remainder_pointer(table_ptr, tensors, tensor, base, FORMATS)
    scale_inv_ptr = scale_inv_pointer(table_ptr, tensors, tensor, FORMATS)
    index = tl.zeros((), tl.int32)
    while index < TILE * TILE // PIECE:
        piece = piece_of(index, tile, FORMATS, PIECE)
        scale_inv = scale_invs_of(scale_inv_ptr, piece, tile, block, FORMATS, True)
        value = loaded_values(
            pointers[1], remainder_ptr, scale_inv, piece[0], piece[1], FORMATS, True
        )
        store_block(pointers[2], piece[0], value, piece[1], True)
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
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    tensor, base, tile, block = tile_of(table_ptr, tiles_ptr, tensors, tiles)
    place = (tensors, tensor, base)
    pointers = pointers_of(table_ptr, tensors, tensor, base, FORMATS)
    amax_ptr = amax_pointer(table_ptr, tensors, tensor)
    remainder_ptr = remainder_pointer(table_ptr, tensors, tensor, base, FORMATS)
    draw = cast_draw(table_ptr, scalars_ptr, scalar_count, tensors, tensor, FORMATS, RULE)
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    master_scale = old_scale(table_ptr, MASTER_SCALE, tensors, tensor, MASTER_FORMAT)
    index = tl.zeros((), tl.int32)
    while index < TILE * TILE // PIECE:
        offsets, mask, row, first = piece_of(index, tile, FORMATS, PIECE)
        blocks, _stored = blocks_of(row, first, block, FORMATS)
        whole, inside = lines_are_whole(row, first, tile, FORMATS.cast.quantizer.columns)
        if FORMATS.cast.quantizer.rows > 1:
            whole = (row >= 0) & tile_is_whole(tile)
        code = load_block(pointers[2], offsets, mask, True)
        value = rounded(MASTER_FORMAT.decode(code, master_scale), FORMATS)
        if ONLY_AMAX:
            amax_bits = tl.max(magnitude_bits(tl.where(mask, value, 0.0)), 1)
            tl.atomic_max(amax_ptr + blocks, amax_bits, mask=inside)
        else:
            amax_bits = tl.load(amax_ptr + blocks, mask=inside, other=0)
            scale, _scale_inv = FORMATS.cast.quantizer.scale(table_ptr, place, amax_bits, FORMATS)
            product = value * scale[:, None]
            if not ALL:
                mask = mask & (whole == 0)[:, None]
            words = block_words(draw, base, 0, offsets, FORMATS.cast_draws, False, 0, False)
            store_codes(pointers[1], remainder_ptr, product, words, offsets, mask, FORMATS, True)
        index += 1
