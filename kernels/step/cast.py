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
from megaopt.kernels.step.kernel import (
    ALIGNED,
    MASTER,
    MASTER_SCALE,
    NUMEL,
    SKIP,
    WEIGHT,
    WEIGHT_AMAX,
    WEIGHT_COLUMNS,
    WEIGHT_ROWS,
    WEIGHT_SCALE_INV,
    WEIGHT_START,
    chunk_of,
    controls_of,
    load_block,
    pointer,
    pointers_of,
    scalars_of,
    store_block,
    updated_block,
    weight_scale_of,
)
from megaopt.kernels.step.scales import old_scale

TILE: tl.constexpr = tl.constexpr(128)
# Elements of a piece.
PIECE: tl.constexpr = tl.constexpr(512)


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


@jit(do_not_specialize=["tensors", "chunks"])
def cast_kernel(
    table_ptr,  # *int64 [ROWS, tensors]
    chunks_ptr,  # *int32 [3, chunks], every chunk once
    controls_ptr,  # *fp32 [CONTROLS]; unread unless CONTROLLED
    tensors,
    chunks,
    FORMATS: tl.constexpr,
    CONTROLLED: tl.constexpr,
    ONLY_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """Casts masters to weights with a scale per tensor, or only raises the tensors' amaxes."""
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    tensor, start, elements, unmasked = chunk_of(
        table_ptr, chunks_ptr, tensors, chunks, tl.program_id(0), BLOCK, ITERATIONS
    )
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
def piece_of(piece, corner, shape, numel, FORMATS: tl.constexpr):
    """A piece of a tile: offsets in the tensor, which of them it has, and its rows' blocks.

    Returns:
        offsets: int64 [rows of the piece, columns].
        mask: whether an offset is in the weight and in the tensor.
        blocks: int64 [rows of the piece], the number of each one's block.
        whole: whether the tensor has all of the block's row.
        inside: whether the weight has it.
    """
    row_0, column_0 = corner
    rows, columns, start = shape
    WIDTH: tl.constexpr = FORMATS.block_columns
    LINES: tl.constexpr = PIECE // WIDTH
    ACROSS: tl.constexpr = TILE // WIDTH
    line = piece * LINES + tl.arange(0, LINES)
    row = row_0 + line // ACROSS
    first = column_0 + (line % ACROSS) * WIDTH
    column = first[:, None] + tl.arange(0, WIDTH)[None, :]
    begin = row * columns + first - start
    end = row * columns + tl.minimum(first + WIDTH, columns) - start
    offsets = begin[:, None] + tl.arange(0, WIDTH)[None, :]
    mask = (row[:, None] < rows) & (column < columns) & (offsets >= 0) & (offsets < numel)
    blocks = row * tl.cdiv(columns, WIDTH) + first // WIDTH
    inside = (row < rows) & (first < columns)
    return offsets, mask, blocks, (begin >= 0) & (end <= numel), inside


@helper
def cast_lines(
    weight_ptr,
    amax_ptr,
    scale_inv_ptr,
    value,
    piece,
    FORMATS: tl.constexpr,
    MASKED: tl.constexpr,
    SHARDED: tl.constexpr,
):
    """Encodes a piece whose rows are blocks of their own; those of which others have parts wait."""
    offsets, mask, blocks, whole, inside = piece
    amax_bits = tl.max(magnitude_bits(tl.where(mask, value, 0.0)), 1)
    if SHARDED:
        tl.atomic_max(amax_ptr + blocks, amax_bits, mask=inside)
    scale, scale_inv = scale_of(amax_bits, FORMATS)
    code = FORMATS.weight.encode(value * scale[:, None], 1.0)
    if MASKED:
        store_block(weight_ptr, offsets, code, mask & whole[:, None], True)
    else:
        store_block(weight_ptr, offsets, code, None, False)
    tl.store(scale_inv_ptr + blocks, scale_inv, mask=inside & whole)


@helper
def tile_of(table_ptr, tiles_ptr, tensors, tiles):
    """This program's tensor, the tile's first row and column, the weight's shape and start."""
    program = tl.program_id(0)
    tensor = tl.load(tiles_ptr + program)
    row_0 = tl.load(tiles_ptr + tiles + program).to(tl.int64) * TILE
    column_0 = tl.load(tiles_ptr + 2 * tiles + program).to(tl.int64) * TILE
    rows = tl.load(table_ptr + WEIGHT_ROWS * tensors + tensor)
    columns = tl.load(table_ptr + WEIGHT_COLUMNS * tensors + tensor)
    start = tl.load(table_ptr + WEIGHT_START * tensors + tensor)
    return tensor, (row_0, column_0), (rows, columns, start)


@helper
def tile_is_whole(corner, shape, numel):
    """Whether the tensor has every element that the weight has of the tile; and all 128 x 128."""
    row_0, column_0 = corner
    rows, columns, start = shape
    last_row = tl.minimum(row_0 + TILE, rows) - 1
    begin = row_0 * columns + column_0 - start
    end = last_row * columns + tl.minimum(column_0 + TILE, columns) - start
    whole = (begin >= 0) & (end <= numel)
    full = whole & (row_0 + TILE <= rows) & (column_0 + TILE <= columns)
    return whole, full


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
    _, _, master_ptr, first_ptr, second_ptr = pointers
    param, first, second = updated_block(
        table_ptr, place, pointers, (1.0, 1.0, 1.0), scalars, controls, offsets, mask,
        FORMATS, RULE, CONTROLLED, MASKED, True,
    )  # fmt: skip
    store_block(master_ptr, offsets, FORMATS.master.encode(param, 1.0), mask, MASKED)
    store_block(first_ptr, offsets, FORMATS.first.encode(first, 1.0), mask, MASKED)
    store_block(second_ptr, offsets, FORMATS.second.encode(second, 1.0), mask, MASKED)
    return rounded(param, FORMATS)


@jit(do_not_specialize=["tensors", "tiles", "scalar_count"])
def tile_kernel(
    table_ptr,  # *int64 [ROWS, tensors]
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
):
    """The step of one tile, and the cast of its blocks of which no other rank has a part.

    SHARDED: the amaxes of all blocks go to the buffer in which the ranks put them together.
    """
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    tensor, corner, shape = tile_of(table_ptr, tiles_ptr, tensors, tiles)
    numel = tl.load(table_ptr + NUMEL * tensors + tensor)
    whole, full = tile_is_whole(corner, shape, numel)
    aligned = (tl.load(table_ptr + ALIGNED * tensors + tensor) != 0) & full
    aligned = aligned & (shape[1] % 16 == 0) & (shape[2] % 16 == 0)
    start = tl.zeros((), tl.int64)
    place = (tensors, tensor, start)
    scalars = scalars_of(table_ptr, scalars_ptr, scalar_count, tensors, tensor, RULE)
    controls = controls_of(controls_ptr, CONTROLLED)
    pointers = pointers_of(table_ptr, tensors, tensor, start, FORMATS)
    amax_ptr = amax_pointer(table_ptr, tensors, tensor)
    scale_inv_ptr = scale_inv_pointer(table_ptr, tensors, tensor, FORMATS)
    WIDTH: tl.constexpr = FORMATS.block_columns
    LINES: tl.constexpr = PIECE // WIDTH
    amax_bits = tl.zeros((LINES, WIDTH), tl.int32)
    for index in range(TILE * TILE // PIECE):
        piece = piece_of(index, corner, shape, numel, FORMATS)
        offsets, mask, _blocks, _whole, _inside = piece
        if aligned:
            value = step_piece(
                table_ptr, place, pointers, scalars, controls, offsets, None,
                FORMATS, RULE, CONTROLLED, False,
            )  # fmt: skip
            if not FORMATS.shares_rows:
                cast_lines(
                    pointers[1], amax_ptr, scale_inv_ptr, value, piece, FORMATS, False, SHARDED
                )
        else:
            value = step_piece(
                table_ptr, place, pointers, scalars, controls, offsets, mask,
                FORMATS, RULE, CONTROLLED, True,
            )  # fmt: skip
            value = tl.where(mask, value, 0.0)
            if not FORMATS.shares_rows:
                cast_lines(
                    pointers[1], amax_ptr, scale_inv_ptr, value, piece, FORMATS, True, SHARDED
                )
        if FORMATS.shares_rows:
            amax_bits = tl.maximum(amax_bits, magnitude_bits(value))
    if FORMATS.shares_rows:
        tile_bits = tl.max(tl.max(amax_bits, 1), 0)
        block = (corner[0] // TILE) * tl.cdiv(shape[1], TILE) + corner[1] // TILE
        if SHARDED:
            tl.atomic_max(amax_ptr + block, tile_bits)
        if whole:
            # every thread reads what it stored itself, but for the compiler's order
            tl.debug_barrier()
            cast_tile(pointers, scale_inv_ptr, tile_bits, corner, shape, numel, aligned, FORMATS)


@helper
def cast_tile(
    pointers, scale_inv_ptr, amax_bits, corner, shape, numel, aligned, FORMATS: tl.constexpr
):
    """Casts a tile with one scale; its masters have just been stored, and come from the cache."""
    scale, scale_inv = scale_of(amax_bits, FORMATS)
    block = (corner[0] // TILE) * tl.cdiv(shape[1], TILE) + corner[1] // TILE
    tl.store(scale_inv_ptr + block, scale_inv)
    for index in range(TILE * TILE // PIECE):
        offsets, mask, _blocks, _whole, _inside = piece_of(index, corner, shape, numel, FORMATS)
        if aligned:
            value = FORMATS.master.decode(load_block(pointers[2], offsets, None, False), 1.0)
            code = FORMATS.weight.encode(rounded(value, FORMATS) * scale, 1.0)
            store_block(pointers[1], offsets, code, None, False)
        else:
            value = FORMATS.master.decode(load_block(pointers[2], offsets, mask, True), 1.0)
            code = FORMATS.weight.encode(rounded(value, FORMATS) * scale, 1.0)
            store_block(pointers[1], offsets, code, mask, True)


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
):
    """Casts masters of a tile with the amaxes that are known now, or only raises those.

    Without ALL only blocks of which other ranks have a part: the others were cast with the step.
    """
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    tensor, corner, shape = tile_of(table_ptr, tiles_ptr, tensors, tiles)
    numel = tl.load(table_ptr + NUMEL * tensors + tensor)
    tile_whole, _full = tile_is_whole(corner, shape, numel)
    start = tl.zeros((), tl.int64)
    pointers = pointers_of(table_ptr, tensors, tensor, start, FORMATS)
    amax_ptr = amax_pointer(table_ptr, tensors, tensor)
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    master_scale = old_scale(table_ptr, MASTER_SCALE, tensors, tensor, MASTER_FORMAT)
    for index in range(TILE * TILE // PIECE):
        offsets, mask, blocks, whole, inside = piece_of(index, corner, shape, numel, FORMATS)
        if FORMATS.shares_rows:
            tile = (corner[0] // TILE) * tl.cdiv(shape[1], TILE) + corner[1] // TILE
            blocks = blocks * 0 + tile
            whole = (blocks >= 0) & tile_whole
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
