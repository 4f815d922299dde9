"""Blocks: a scale for 128 x 128 elements, from their own amax."""

from __future__ import annotations

from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.quantizers.base import Quantizer
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
from megaopt.kernels.step.blocks import load_block


@helper
def tile_as_one(
    table_ptr, place, pointers, outputs, numbers, controls, tile, block, FORMATS: tl.constexpr,
    RULE: tl.constexpr, CONTROLLED: tl.constexpr, MASKED: tl.constexpr, SHARDED: tl.constexpr,
    PIECE: tl.constexpr, PIECE_AGAIN: tl.constexpr,
):  # fmt: skip
    """Step and cast of a tile that is one block: its masters are read again, from the cache."""
    amax_ptr, scale_inv_ptr = outputs
    WIDTH: tl.constexpr = FORMATS.cast.quantizer.columns
    LINES: tl.constexpr = PIECE // WIDTH
    bits = tl.zeros((LINES, WIDTH), tl.int32)
    index = tl.zeros((), tl.int32)
    while index < TILE * TILE // PIECE:
        piece = piece_of(index, tile, FORMATS, PIECE)
        value, _words = step_piece(
            table_ptr, place, pointers, numbers, controls, piece, tile, 1.0,
            FORMATS, RULE, CONTROLLED, MASKED,
        )  # fmt: skip
        bits = tl.maximum(bits, magnitude_bits(value))
        index += 1
    amax_bits = tl.max(tl.max(bits, 1), 0)
    if SHARDED:
        number = (block[0] // TILE) * tl.cdiv(block[2], TILE) + block[1] // TILE
        tl.atomic_max(amax_ptr + number, amax_bits)
    if tile_is_whole(tile):
        # what other threads of the program have stored is there
        tl.debug_barrier()
        scale, scale_inv = FORMATS.cast.quantizer.scale(table_ptr, place, amax_bits, FORMATS)
        stored = (block[0] // TILE) * block[3] + block[1] // TILE
        tl.store(scale_inv_ptr + stored, scale_inv)
        remainder_ptr = remainder_pointer(table_ptr, place[0], place[1], place[2], FORMATS)
        index = tl.zeros((), tl.int32)
        while index < TILE * TILE // PIECE_AGAIN:
            piece = piece_of(index, tile, FORMATS, PIECE_AGAIN)
            code = load_block(pointers[2], piece[0], piece[1], MASKED)
            value = rounded(FORMATS.master.decode(code, 1.0), FORMATS)
            words = piece_words(
                numbers[1], place[2], piece, tile, FORMATS.cast_draws, FORMATS, MASKED
            )
            store_codes(
                pointers[1], remainder_ptr, value * scale, words, piece[0], piece[1], FORMATS,
                MASKED,
            )  # fmt: skip
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
