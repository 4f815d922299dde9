"""Blocks: a scale for 128 x 128 elements, from their own amax."""

from __future__ import annotations

from megaopt.kernels.chunks.blocks import load_block
from megaopt.kernels.chunks.chunk import Block
from megaopt.kernels.chunks.store import Quantizer
from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.quantizers.cast import remainder_pointer, rounded, store_codes
from megaopt.kernels.quantizers.current import OPTIONS, scale_of_amax, scales_of_amax_reference
from megaopt.kernels.quantizers.scale import magnitude_bits
from megaopt.kernels.quantizers.tiles import (
    TILE,
    piece_of,
    piece_words,
    step_piece,
    store_of_tiles,
    tile_is_whole,
)


@helper
def tile_as_one(
    chunk, tile, SPEC: tl.constexpr, MASKED: tl.constexpr, SHARDED: tl.constexpr,
    PIECE: tl.constexpr, PIECE_AGAIN: tl.constexpr,
):  # fmt: skip
    """Step and cast of a tile that is one block: its masters are read again, from the cache."""
    FORMATS: tl.constexpr = SPEC.formats
    WIDTH: tl.constexpr = FORMATS.cast.quantizer.columns
    LINES: tl.constexpr = PIECE // WIDTH
    # int32 [LINES, WIDTH], the largest pattern of a magnitude so far
    bits = tl.zeros((LINES, WIDTH), tl.int32)
    index = tl.zeros((), tl.int32)
    # first the step of all pieces: masters are stored, codes wait for the amax
    while index < TILE * TILE // PIECE:
        piece = piece_of(index, tile, FORMATS, PIECE)
        value, _words = step_piece(chunk, tile, piece, 1.0, SPEC, MASKED)
        bits = tl.maximum(bits, magnitude_bits(value))
        index += 1
    # one number for the tile
    amax_bits = tl.max(tl.max(bits, 1), 0)
    # for ranks that have other parts of the tile
    if SHARDED:
        number = (tile.first_row // TILE) * tl.cdiv(tile.across, TILE) + tile.first_column // TILE
        tl.atomic_max(tile.amax_ptr + number, amax_bits)
    # no other rank has a part: the amax is final, and the codes can be made now
    if tile_is_whole(tile):
        # what other threads of the program have stored is there
        tl.debug_barrier()
        scale, scale_inv = FORMATS.cast.quantizer.scale(chunk.column, amax_bits, FORMATS)
        stored = (tile.first_row // TILE) * tile.scale_stride + tile.first_column // TILE
        tl.store(tile.scale_inv_ptr + stored, scale_inv)
        remainder_ptr = remainder_pointer(chunk.column, chunk.start, FORMATS)
        # then the cast: masters are read once more, in larger pieces
        index = tl.zeros((), tl.int32)
        while index < TILE * TILE // PIECE_AGAIN:
            piece = piece_of(index, tile, FORMATS, PIECE_AGAIN)
            block = Block(piece.offsets, 0, piece.mask if MASKED else None)
            code = load_block(chunk.pointers.master, block.offsets, block.mask)
            value = rounded(FORMATS.master.decode(code, 1.0), FORMATS) * scale
            words = piece_words(chunk, tile, piece, FORMATS.cast_draws, MASKED)
            store_codes(chunk.pointers.weight, remainder_ptr, block, value, words, FORMATS)
            index += 1


# On an H200, percent of copy on set B for 27 bytes a parameter, by elements of a piece in the step
# and again in the cast, warps, and registers at most (fewer let more programs work at a time):
# 512 512 4 -: 72.9; 512 2048 4 -: 78.9; 512 2048 4 96: 82.5; 1024 4096 8 -: 80.9;
# 1024 4096 8 80: 86.3; 1024 4096 8 64: 83.8; 1024 8192 8 64: 83.9; 2048 4096 8 -: 63.3
SQUARES = store_of_tiles(
    "block_128x128", tile_as_one, PIECE=1024, PIECE_AGAIN=4096, num_warps=8, maxnreg=80
)
SCALES = (scale_of_amax, scales_of_amax_reference)
BLOCK_128X128 = Quantizer("block_128x128", OPTIONS, SQUARES, *SCALES, 128, 128)
