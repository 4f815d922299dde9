"""fp8 weights beyond delayed scaling: blocks in one pass, and casts of masters afterwards.

A tile is 128 x 128 elements of the whole weight; a shard may hold only some of them. It is
worked through in pieces of a two-dimensional shape whose rows are each within one block of scales:
4 x 128, or 16 x 32 for MXFP8.
"""

from __future__ import annotations

from megaopt.kernels.float8.scale import (
    e8m0_from_amax,
    e8m0_multiplier,
    magnitude_bits,
    reciprocal,
    scale_from_amax,
)
from megaopt.kernels.optional_triton import helper, jit, tl
from megaopt.kernels.step.blocks import (
    load_block,
    pointer,
    pointers_of,
    store_block,
    stored_moments,
)
from megaopt.kernels.step.kernel import (
    SKIP,
    chunk_of,
    controls_of,
    place_of,
    scalars_of,
    updated_block,
    weight_scale_of,
)
from megaopt.kernels.step.rows import (
    ALIGNED,
    MASTER,
    MASTER_SCALE,
    NUMEL,
    WEIGHT,
    WEIGHT_AMAX,
    WEIGHT_COLUMNS,
    WEIGHT_ROWS,
    WEIGHT_SCALE_INV,
    WEIGHT_SCALE_STRIDE,
    WEIGHT_START,
)
from megaopt.kernels.step.scales import old_scale

TILE: tl.constexpr = tl.constexpr(128)
LARGEST_OFFSET: tl.constexpr = tl.constexpr(2**31 - 1)


@helper
def rounded(value, FORMATS: tl.constexpr):
    """What is encoded: the value through the weight's dtype, unless the recipe is direct."""
    return FORMATS.rounding.decode(FORMATS.rounding.encode(value, 1.0), 1.0)


@helper
def scale_of(amax_bits, FORMATS: tl.constexpr):
    """What values are multiplied by, and scale_inv as it is stored, from the bits of amaxes."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    if FORMATS.is_e8m0:
        code = e8m0_from_amax(amax, FORMATS.code_max)
        scale, scale_inv = e8m0_multiplier(code), code.to(tl.uint8)
    else:
        scale = scale_from_amax(
            amax, FORMATS.code_max, FORMATS.amax_epsilon, 1.0, FORMATS.power_of_two_scales
        )
        scale_inv = reciprocal(scale)
    return scale, scale_inv


@helper
def scale_inv_pointer(table_ptr, tensors, tensor, FORMATS: tl.constexpr):
    address = tl.load(table_ptr + WEIGHT_SCALE_INV * tensors + tensor)
    if FORMATS.is_e8m0:
        ptr = address.to(tl.pointer_type(tl.uint8))
    else:
        ptr = address.to(tl.pointer_type(tl.float32))
    return ptr


@helper
def amax_pointer(table_ptr, tensors, tensor):
    address = tl.load(table_ptr + WEIGHT_AMAX * tensors + tensor)
    return address.to(tl.pointer_type(tl.int32))


@jit(do_not_specialize=["tensors"])
def cast_kernel(
    table_ptr,  # *int64 [Formats.row_count, tensors]
    chunks_ptr,  # *int32, as table.Chunks
    controls_ptr,  # *fp32 [CONTROLS]; unread unless CONTROLLED
    tensors,
    FORMATS: tl.constexpr,
    CONTROLLED: tl.constexpr,
    ONLY_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Casts masters to weights with a scale per tensor, or only raises the tensors' amaxes."""
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    tensor, number = place_of(chunks_ptr, tensors, tl.program_id(0), SPAN)
    start, elements, unmasked = chunk_of(table_ptr, tensors, tensor, number, BLOCK, ITERATIONS)
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    WEIGHT_FORMAT: tl.constexpr = FORMATS.weight
    master_ptr = pointer(table_ptr, MASTER, tensors, tensor, start, MASTER_FORMAT)
    weight_ptr = pointer(table_ptr, WEIGHT, tensors, tensor, start, WEIGHT_FORMAT)
    master_scale = old_scale(table_ptr, MASTER_SCALE, tensors, tensor, MASTER_FORMAT)
    amax_ptr = amax_pointer(table_ptr, tensors, tensor)
    scale = 1.0
    if not ONLY_AMAX:
        if FORMATS.is_delayed:
            scale = weight_scale_of(table_ptr, tensors, tensor, FORMATS)
            scale_inv = reciprocal(scale)
        else:
            scale, scale_inv = scale_of(tl.load(amax_ptr), FORMATS)
        tl.store(scale_inv_pointer(table_ptr, tensors, tensor, FORMATS), scale_inv, mask=start == 0)
    amax_bits = tl.zeros((BLOCK,), tl.int32)
    block = tl.zeros((), tl.int32)
    while block < unmasked:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        code = load_block(master_ptr, offsets, None, False)
        value = rounded(MASTER_FORMAT.decode(code, master_scale), FORMATS)
        if ONLY_AMAX:
            amax_bits = tl.maximum(amax_bits, magnitude_bits(value))
        else:
            store_block(weight_ptr, offsets, WEIGHT_FORMAT.encode(value * scale, 1.0), None, False)
        block += 1
    while block * BLOCK < elements:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < elements
        code = load_block(master_ptr, offsets, mask, True)
        value = rounded(MASTER_FORMAT.decode(code, master_scale), FORMATS)
        if ONLY_AMAX:
            amax_bits = tl.maximum(amax_bits, magnitude_bits(tl.where(mask, value, 0.0)))
        else:
            store_block(weight_ptr, offsets, WEIGHT_FORMAT.encode(value * scale, 1.0), mask, True)
        block += 1
    if ONLY_AMAX:
        tl.atomic_max(amax_ptr, tl.max(amax_bits, 0))


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
    WIDTH: tl.constexpr = FORMATS.block_columns
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
    if FORMATS.shares_rows:
        block_row = row.to(tl.int64) * 0 + row_0 // TILE
        block_column = column_0 // TILE
        across = tl.cdiv(columns, TILE)
    else:
        WIDTH: tl.constexpr = FORMATS.block_columns
        block_row = row_0 + row
        block_column = (column_0 + first) // WIDTH
        across = tl.cdiv(columns, WIDTH)
    return block_row * across + block_column, block_row * stride + block_column


@helper
def step_piece(
    table_ptr,
    place,
    pointers,
    scalars,
    controls,
    offsets,
    mask,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The step of a piece but for its weights, whose values are given: rounded, fp32."""
    _, _, master_ptr, moment_ptrs = pointers
    COUNT: tl.constexpr = FORMATS.moment_count
    ones = ()  # no scales here
    for _index in tl.static_range(COUNT):
        ones += (1.0,)
    param, moments = updated_block(
        table_ptr, place, pointers, (1.0, ones), scalars, controls, offsets, mask,
        FORMATS, RULE, CONTROLLED, MASKED, True, FORMATS.writes_grad,
    )  # fmt: skip
    store_block(master_ptr, offsets, FORMATS.master.encode(param, 1.0), mask, MASKED)
    stored_moments(moment_ptrs, moments, ones, offsets, mask, FORMATS, MASKED)
    return rounded(param, FORMATS)


@helper
def cast_lines(
    weight_ptr,
    amax_ptr,
    scale_inv_ptr,
    value,
    piece,
    tile,
    block,
    FORMATS: tl.constexpr,
    MASKED: tl.constexpr,
    SHARDED: tl.constexpr,
):
    """Encodes a piece whose lines are blocks of their own; those that others have parts of wait."""
    offsets, mask, row, first = piece
    blocks, stored = blocks_of(row, first, block, FORMATS)
    amax_bits = tl.max(magnitude_bits(value), 1)
    scale, scale_inv = scale_of(amax_bits, FORMATS)
    code = FORMATS.weight.encode(value * scale[:, None], 1.0)
    whole, inside = lines_are_whole(row, first, tile, FORMATS.block_columns)
    if SHARDED:
        tl.atomic_max(amax_ptr + blocks, amax_bits, mask=inside)
    if MASKED:
        store_block(weight_ptr, offsets, code, mask & whole[:, None], True)
        tl.store(scale_inv_ptr + stored, scale_inv, mask=inside & whole)
    else:
        store_block(weight_ptr, offsets, code, None, False)
        tl.store(scale_inv_ptr + stored, scale_inv)


@helper
def tile_in_lines(
    table_ptr,
    place,
    pointers,
    outputs,
    scalars,
    controls,
    tile,
    block,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
    SHARDED: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Step and cast of a tile whose blocks lie in one row each."""
    amax_ptr, scale_inv_ptr = outputs
    index = tl.zeros((), tl.int32)
    while index < TILE * TILE // PIECE:
        piece = piece_of(index, tile, FORMATS, PIECE)
        value = step_piece(
            table_ptr, place, pointers, scalars, controls, piece[0], piece[1],
            FORMATS, RULE, CONTROLLED, MASKED,
        )  # fmt: skip
        if MASKED:
            value = tl.where(piece[1], value, 0.0)
        cast_lines(
            pointers[1], amax_ptr, scale_inv_ptr, value, piece, tile, block,
            FORMATS, MASKED, SHARDED,
        )  # fmt: skip
        index += 1


@helper
def tile_as_one(
    table_ptr,
    place,
    pointers,
    outputs,
    scalars,
    controls,
    tile,
    block,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
    SHARDED: tl.constexpr,
    PIECE: tl.constexpr,
    PIECE_AGAIN: tl.constexpr,
):
    """Step and cast of a tile that is one block: its masters are read again, from the cache."""
    amax_ptr, scale_inv_ptr = outputs
    WIDTH: tl.constexpr = FORMATS.block_columns
    LINES: tl.constexpr = PIECE // WIDTH
    bits = tl.zeros((LINES, WIDTH), tl.int32)
    index = tl.zeros((), tl.int32)
    while index < TILE * TILE // PIECE:
        piece = piece_of(index, tile, FORMATS, PIECE)
        value = step_piece(
            table_ptr, place, pointers, scalars, controls, piece[0], piece[1],
            FORMATS, RULE, CONTROLLED, MASKED,
        )  # fmt: skip
        if MASKED:
            value = tl.where(piece[1], value, 0.0)
        bits = tl.maximum(bits, magnitude_bits(value))
        index += 1
    amax_bits = tl.max(tl.max(bits, 1), 0)
    if SHARDED:
        number = (block[0] // TILE) * tl.cdiv(block[2], TILE) + block[1] // TILE
        tl.atomic_max(amax_ptr + number, amax_bits)
    if tile_is_whole(tile):
        # what other threads of the program have stored is there
        tl.debug_barrier()
        scale, scale_inv = scale_of(amax_bits, FORMATS)
        stored = (block[0] // TILE) * block[3] + block[1] // TILE
        tl.store(scale_inv_ptr + stored, scale_inv)
        index = tl.zeros((), tl.int32)
        while index < TILE * TILE // PIECE_AGAIN:
            piece = piece_of(index, tile, FORMATS, PIECE_AGAIN)
            code = load_block(pointers[2], piece[0], piece[1], MASKED)
            value = rounded(FORMATS.master.decode(code, 1.0), FORMATS)
            code = FORMATS.weight.encode(value * scale, 1.0)
            store_block(pointers[1], piece[0], code, piece[1], MASKED)
            index += 1


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
    controls = controls_of(controls_ptr, CONTROLLED)
    pointers = pointers_of(table_ptr, tensors, tensor, base, FORMATS)
    amax_ptr = amax_pointer(table_ptr, tensors, tensor)
    outputs = (amax_ptr, scale_inv_pointer(table_ptr, tensors, tensor, FORMATS))
    full = tile_is_whole(tile) & (tile[0] == TILE) & (tile[1] == TILE)
    aligned = tl.load(table_ptr + ALIGNED * tensors + tensor) != 0
    if full & aligned & (base % 16 == 0) & (tile[2] % 16 == 0):
        if FORMATS.shares_rows:
            tile_as_one(
                table_ptr, place, pointers, outputs, scalars, controls, tile, block,
                FORMATS, RULE, CONTROLLED, False, SHARDED, PIECE, PIECE_AGAIN,
            )  # fmt: skip
        else:
            tile_in_lines(
                table_ptr, place, pointers, outputs, scalars, controls, tile, block,
                FORMATS, RULE, CONTROLLED, False, SHARDED, PIECE,
            )  # fmt: skip
    elif FORMATS.shares_rows:
        tile_as_one(
            table_ptr, place, pointers, outputs, scalars, controls, tile, block,
            FORMATS, RULE, CONTROLLED, True, SHARDED, PIECE, PIECE_AGAIN,
        )  # fmt: skip
    else:
        tile_in_lines(
            table_ptr, place, pointers, outputs, scalars, controls, tile, block,
            FORMATS, RULE, CONTROLLED, True, SHARDED, PIECE,
        )  # fmt: skip


@jit(do_not_specialize=["tensors", "tiles"])
def cast_tiles_kernel(
    table_ptr,
    tiles_ptr,
    controls_ptr,
    tensors,
    tiles,
    FORMATS: tl.constexpr,
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
    pointers = pointers_of(table_ptr, tensors, tensor, base, FORMATS)
    amax_ptr = amax_pointer(table_ptr, tensors, tensor)
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    master_scale = old_scale(table_ptr, MASTER_SCALE, tensors, tensor, MASTER_FORMAT)
    index = tl.zeros((), tl.int32)
    while index < TILE * TILE // PIECE:
        offsets, mask, row, first = piece_of(index, tile, FORMATS, PIECE)
        blocks, _stored = blocks_of(row, first, block, FORMATS)
        whole, inside = lines_are_whole(row, first, tile, FORMATS.block_columns)
        if FORMATS.shares_rows:
            whole = (row >= 0) & tile_is_whole(tile)
        code = load_block(pointers[2], offsets, mask, True)
        value = rounded(MASTER_FORMAT.decode(code, master_scale), FORMATS)
        if ONLY_AMAX:
            amax_bits = tl.max(magnitude_bits(tl.where(mask, value, 0.0)), 1)
            tl.atomic_max(amax_ptr + blocks, amax_bits, mask=inside)
        else:
            amax_bits = tl.load(amax_ptr + blocks, mask=inside, other=0)
            scale, _scale_inv = scale_of(amax_bits, FORMATS)
            code = FORMATS.weight.encode(value * scale[:, None], 1.0)
            if not ALL:
                mask = mask & (whole == 0)[:, None]
            store_block(pointers[1], offsets, code, mask, True)
        index += 1
