"""Addresses of a chunk's buffers, and reads and writes of their blocks.

Where moments share scales by blocks (megaopt.kernels.formats.block8), what a program loads at once
is a tile, a row for each thread with the elements that it takes: a scale is one number in each
thread, a block's largest value is found by shuffles, and nothing goes through shared memory.
"""

from __future__ import annotations

from megaopt.kernels.chunks.chunk import Pointers, entry
from megaopt.kernels.chunks.draws import moment_bits
from megaopt.kernels.chunks.rows import FIRST_ELEMENT, GRAD, MASTER, MOMENT, WEIGHT
from megaopt.kernels.formats import hopper
from megaopt.kernels.formats.block8 import finite_key, inverse_factor, scale_of_key
from megaopt.kernels.optional_triton import cuda_capability_geq, helper, tl


@helper
def pointer(column, row, start, FORMAT: tl.constexpr):
    return entry(column, row).to(tl.pointer_type(FORMAT.element)) + start


# Moments come as tuples, which tl.static_range grows. What it calls takes the moment's index, and
# finds the format itself: Triton 3.6 does not pass an element of a constexpr tuple on as constexpr.


@helper
def moment_pointer(column, start, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    # two codes a byte: the pointer counts bytes
    if FORMAT.packed == 2:
        # a shard starts at an even element of its block
        start = start // 2
    return pointer(column, MOMENT + 2 * INDEX, start, FORMAT)


@helper
def pointers_of(column, start, FORMATS: tl.constexpr):
    """Returns pointers to a chunk's first element in each buffer."""
    GRAD_FORMAT: tl.constexpr = FORMATS.grad
    WEIGHT_FORMAT: tl.constexpr = FORMATS.weight
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    COUNT: tl.constexpr = FORMATS.moment_count
    # one pointer a moment, in the rule's order
    moments = ()
    for index in tl.static_range(COUNT):
        moments += (moment_pointer(column, start, FORMATS, index),)
    return Pointers(
        pointer(column, GRAD, start, GRAD_FORMAT),
        pointer(column, WEIGHT, start, WEIGHT_FORMAT),
        pointer(column, MASTER, start, MASTER_FORMAT),
        moments,
    )


@helper
def load_block(ptr, offsets, mask):
    """mask: None where all elements are there, and aligned."""
    # offsets: int32 [block] or [rows, width]; codes: the pointer's element type
    pointers = ptr + offsets
    if mask is not None:
        # masked elements are code 0
        code = tl.load(pointers, mask=mask, other=0)
    else:
        # on the sum: a hint on a function's argument would be lost
        code = tl.load(tl.multiple_of(pointers, [16, 16] if len(offsets.shape) == 2 else 16))
    return code


@helper
def store_block(ptr, offsets, code, mask):
    pointers = ptr + offsets
    if mask is not None:
        tl.store(pointers, code, mask=mask)
    else:
        # the hint of 16 lets a thread store its codes in one instruction
        tl.store(tl.multiple_of(pointers, [16, 16] if len(offsets.shape) == 2 else 16), code)


@helper
def pair_offsets(offsets, rows):
    """The offsets of the bytes of a tile's codes of 4 bits, [rows, width // 2]."""
    HALF: tl.constexpr = offsets.shape[1] // 2
    return rows[:, None] // 2 + tl.arange(0, HALF)[None, :]


@helper
def halves(tile):
    """Returns a tile's elements at even places and those at odd ones, each [rows, width // 2]."""
    return tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2)))


@helper
def load_pairs(ptr, offsets, rows, mask):
    """int32, the codes of 4 bits of a tile, of which two lie in each byte."""
    pointers = ptr + pair_offsets(offsets, rows)
    if mask is not None:
        # a tensor has both of a byte's elements, or none
        inner, _ = halves(mask)
        pair = tl.load(pointers, mask=inner, other=0)
    else:
        HALF: tl.constexpr = offsets.shape[1] // 2
        pair = tl.load(tl.multiple_of(pointers, [1, HALF]))
    # the byte's lower half is the even element
    pair = pair.to(tl.int32)
    # [rows, width // 2, 2], flattened to [rows, width]
    return tl.reshape(tl.join(pair & 15, pair >> 4), offsets.shape)


@helper
def store_pairs(ptr, offsets, rows, code, mask):
    """Stores a tile's codes of 4 bits, int32, two in each byte."""
    pointers = ptr + pair_offsets(offsets, rows)
    # the even element in the lower half of each byte
    even, odd = halves(code)
    pair = (even | (odd << 4)).to(tl.uint8)
    if mask is not None:
        # a tensor has both of a byte's elements, or none
        inner, _ = halves(mask)
        tl.store(pointers, pair, mask=inner)
    else:
        HALF: tl.constexpr = offsets.shape[1] // 2
        tl.store(tl.multiple_of(pointers, [1, HALF]), pair)


@helper
def store_where(condition, ptr, offsets, code, mask):
    """Stores as store_block does where `condition`, an int32 for all elements, is not 0."""
    pointers = ptr + offsets
    # a block from the beginning: the interpreter spreads bools as what was compared
    chosen = tl.zeros_like(offsets) + condition != 0
    if mask is not None:
        tl.store(pointers, code, mask=mask & chosen)
    else:
        hinted = tl.multiple_of(pointers, [16, 16] if len(offsets.shape) == 2 else 16)
        tl.store(hinted, code, mask=chosen)


@helper
def lead_of(column, FORMATS: tl.constexpr):
    """Returns the number of elements of the tensor's first block before the tensor; int64."""
    lead = tl.full((), 0, tl.int64)
    if FORMATS.block:
        lead = entry(column, FIRST_ELEMENT) % FORMATS.block
    return lead


@helper
def offsets_of(index, SPEC: tl.constexpr):
    """The offsets of a block's elements in the chunk: [block], or in rows of `width`."""
    if SPEC.formats.block:
        offsets = rows_of(index, SPEC)[:, None] + tl.arange(0, SPEC.width)[None, :]
    else:
        offsets = index * SPEC.block + tl.arange(0, SPEC.block)
    return offsets


@helper
def rows_of(index, SPEC: tl.constexpr):
    """The offsets of the rows' first elements; 0 where there are no rows."""
    if SPEC.formats.block:
        rows = index * SPEC.block + tl.arange(0, SPEC.block // SPEC.width) * SPEC.width
    else:
        rows = 0
    return rows


@helper
def first_block(start, FORMATS: tl.constexpr):
    """The first that may go unmasked: not the one that begins before the tensor."""
    block = tl.zeros((), tl.int32)
    if FORMATS.block:
        # the chunk begins before the tensor: its block 0 is masked, and comes last
        block += (start < 0).to(tl.int32)
    return block


@helper
def first_masked(behind, start, FORMATS: tl.constexpr):
    """The first masked block; behind: what follows the unmasked ones."""
    block = behind
    if FORMATS.block:
        # block 0, if it begins before the tensor; next_masked then leaps over the unmasked ones
        block = tl.where(start < 0, 0, behind)
    return block


@helper
def next_masked(block, behind, FORMATS: tl.constexpr):
    block += 1
    if FORMATS.block:
        # from block 0 over the unmasked ones, which are done
        block = tl.maximum(block, behind)
    return block


@helper
def inside(offsets, start, elements, FORMATS: tl.constexpr):
    """Returns a mask of a block's elements that are the tensor's: not before it, nor behind it."""
    mask = offsets < elements
    if FORMATS.block:
        # start is negative where the chunk begins before the tensor
        mask = mask & (offsets >= -start)
    return mask


@helper
def load_scale(
    scale_ptr, rows, elements, FORMATS: tl.constexpr, INDEX: tl.constexpr, MASKED: tl.constexpr
):
    """The scales of the rows' blocks, [rows]; 0 of a moment that is not in blocks."""
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    code = 0
    if FORMAT.block:
        # unsigned: no row begins before its chunk
        pointers = scale_ptr + rows.to(tl.uint32) // FORMAT.block
        code = tl.load(pointers, mask=rows < elements, other=1) if MASKED else tl.load(pointers)
    return code


@helper
def row_key(value, mask):
    """The key of the largest finite magnitude of each row of a tile; uint32 [rows]."""
    key = finite_key(value)
    if mask is not None:
        key = tl.where(mask, key, 0)
    return tl.max(key, 1)


@helper
def shared_scale(value, mask, FORMAT: tl.constexpr):
    """The new scale of each row's block; int32 [rows]."""
    SIZE: tl.constexpr = FORMAT.block
    ROWS: tl.constexpr = value.shape[0]
    SHAPE: tl.constexpr = (ROWS * value.shape[1] // SIZE, SIZE // value.shape[1])
    # uint32 [rows], then the largest of the rows that make up a block: [blocks, rows a block]
    key = row_key(value, mask)
    largest = tl.max(tl.reshape(key, SHAPE), 1)
    # back to each of the rows that share it
    largest = tl.reshape(tl.broadcast_to(largest[:, None], SHAPE), (ROWS,))
    return scale_of_key(largest, FORMAT.window_offset)


@helper
def shared_scales(first, second, mask, FORMATS: tl.constexpr):
    """The new scales of two moments, found by half as many shuffles; each int32 [rows]."""
    SIZE: tl.constexpr = FORMATS.block
    FIRST: tl.constexpr = FORMATS.moments[0]
    SECOND: tl.constexpr = FORMATS.moments[1]
    ROWS: tl.constexpr = first.shape[0]
    SHAPE: tl.constexpr = (ROWS * first.shape[1] // SIZE, SIZE // first.shape[1])
    # the two moments' scales side by side in an int32: the first in the lower half
    one = scale_of_key(row_key(first, mask), FIRST.window_offset)
    both = one | (scale_of_key(row_key(second, mask), SECOND.window_offset) << 16)
    # halves are compared apart, by one instruction for both
    largest = tl.reduce(tl.reshape(both, SHAPE), 1, hopper.larger_halves)
    # back to each of the rows that share a block, int32 [rows]
    both = tl.reshape(tl.broadcast_to(largest[:, None], SHAPE), (ROWS,))
    return both & 0xFFFF, both >> 16


@helper
def new_scale_of(moments, mask, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    return shared_scale(moments[INDEX], mask, FORMAT) if FORMAT.block else 0


@helper
def new_scales(moments, mask, FORMATS: tl.constexpr):
    """The new scales of the rows' blocks, int32 [rows]; 0 of moments that are not in blocks."""
    if cuda_capability_geq(9, 0) and FORMATS.block_pair:
        # both moments in blocks, where a GPU compares halves of a register
        scales = shared_scales(moments[0], moments[1], mask, FORMATS)
    else:
        COUNT: tl.constexpr = FORMATS.moment_count
        scales = ()
        for index in tl.static_range(COUNT):
            scales += (new_scale_of(moments, mask, FORMATS, index),)
    return scales


@helper
def store_scale(scale_ptr, scale, rows, elements, SIZE: tl.constexpr, MASKED: tl.constexpr):
    # one row of each block stores the byte
    chosen = rows % SIZE == 0
    if MASKED:
        chosen = chosen & (rows < elements)
    tl.store(scale_ptr + rows.to(tl.uint32) // SIZE, scale.to(tl.uint8), mask=chosen)


@helper
def stored_moment(
    chunk, block, values, inverses, scales, words, FORMATS: tl.constexpr, INDEX: tl.constexpr
):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    value, inverse = values[INDEX], inverses[INDEX]
    if FORMAT.block:
        MASKED: tl.constexpr = block.mask is not None
        # `inverse` is the pointer to the chunk's scales, and then the rows' factors, fp32 [rows, 1]
        store_scale(inverse, scales[INDEX], block.rows, chunk.elements, FORMAT.block, MASKED)
        inverse = inverse_factor(scales[INDEX])[:, None]
    # this moment's 16 bits of each element's word
    if FORMAT.draws:
        code = FORMAT.encode(value, inverse, moment_bits(words, INDEX))
    else:
        code = FORMAT.encode(value, inverse)
    # codes of 4 bits in pairs, all others one by one
    if FORMAT.packed == 2:
        store_pairs(chunk.pointers.moments[INDEX], block.offsets, block.rows, code, block.mask)
    else:
        store_block(chunk.pointers.moments[INDEX], block.offsets, code, block.mask)


@helper
def stored_moments(chunk, block, values, inverses, words, FORMATS: tl.constexpr):
    """inverses: of moments in blocks pointers to their scales."""
    COUNT: tl.constexpr = FORMATS.moment_count
    # scales first: no code of a block can be made before the block's largest value is known
    scales = new_scales(values, block.mask, FORMATS)
    for index in tl.static_range(COUNT):
        stored_moment(chunk, block, values, inverses, scales, words, FORMATS, index)
