"""The digests of what a step has in registers: the gradient that it read, and what it stored.

As in kernel.py a thread's elements that follow each other, 4 here, lie in one row. All quantities
share the factors. Codes are encoded again after they were stored: the compiler sees that they are
the same.
"""

from __future__ import annotations

from megaopt.kernels.chunks.blocks import load_block, offsets_of, pointer
from megaopt.kernels.chunks.chunk import entry
from megaopt.kernels.chunks.codes import in_order
from megaopt.kernels.chunks.draws import moment_bits
from megaopt.kernels.chunks.rows import FIRST_ELEMENT, GRAD, MOMENT, WEIGHT
from megaopt.kernels.chunks.store import drawn_code, joined_codes
from megaopt.kernels.digest.kernel import ROW, ROW_BITS, column_factors, factors, wide
from megaopt.kernels.optional_triton import helper, tl

WIDTH: tl.constexpr = tl.constexpr(4)


@helper
def marks_of(column, start, SPEC: tl.constexpr):
    """Returns a chunk's marks: first row, each thread's place from there, factors of columns."""
    marks = ()
    if SPEC.digest_count:
        # the chunk's first place in the whole tensor, int64
        place = entry(column, FIRST_ELEMENT) + start
        rows = tl.arange(0, SPEC.block // WIDTH) * WIDTH
        # [rows, WIDTH]; blocks are whole rows of places, so that all have the same columns
        columns = column_factors(place + rows[:, None] + tl.arange(0, WIDTH)[None, :])
        within = (rows + (place % ROW).to(tl.int32)).to(tl.uint32)
        marks = ((place >> ROW_BITS).to(tl.uint32), within, columns)
    return marks


@helper
def no_sums(SPEC: tl.constexpr):
    """Each thread's sums: of each quantity both lanes, int64 [rows]."""
    sums = ()
    COUNT: tl.constexpr = 2 * SPEC.digest_count
    for _ in tl.static_range(COUNT):
        sums += (tl.zeros((SPEC.block // WIDTH,), tl.int64),)
    return sums


@helper
def words_of(code, mask, FORMAT: tl.constexpr):
    """The codes of a block, uint32 [rows, WIDTH]; 0 where there is no element."""
    BITS: tl.constexpr = FORMAT.element.primitive_bitwidth
    if BITS == 32:
        word = code.to(tl.uint32, bitcast=True)
    elif BITS == 16:
        word = code.to(tl.uint16, bitcast=True)
    else:
        word = code.to(tl.uint8, bitcast=True)
    if mask is not None:
        word = tl.where(mask, word, 0)
    return tl.reshape(word, (word.shape[0] // WIDTH, WIDTH)).to(tl.uint32)


@helper
def with_codes(sums, code, mask, marks, index, SPEC: tl.constexpr, INDEX: tl.constexpr):
    """The two sums of one quantity with those of a block's codes."""
    FORMAT: tl.constexpr = SPEC.digest_formats[INDEX]
    first_row, within, columns = marks
    # both lanes' factors of each thread's row, uint32 [rows]
    factor0, factor1 = factors(first_row + ((within + index * SPEC.block) >> ROW_BITS))
    words = words_of(code, mask, FORMAT)
    # int64 [rows]: sums of codes times columns, times the row's factor
    lane0 = sums[2 * INDEX] + tl.sum(wide(words, columns[0]), 1) * factor0.to(tl.int64)
    lane1 = sums[2 * INDEX + 1] + tl.sum(wide(words, columns[1]), 1) * factor1.to(tl.int64)
    return lane0, lane1


@helper
def read_code(chunk, block, SPEC: tl.constexpr):
    """The codes of the gradient, which a step may write; 0 where nobody asks for their digest."""
    code = 0
    if SPEC.digests_grad:
        code = load_block(chunk.pointers.grad, block.offsets, block.mask)
    return code


@helper
def stored_moment_code(values, words, SPEC: tl.constexpr, INDEX: tl.constexpr):
    FORMAT: tl.constexpr = SPEC.formats.moments[INDEX]
    if FORMAT.draws:
        code = FORMAT.encode(values[1][INDEX], 1.0, moment_bits(words, INDEX))
    else:
        code = FORMAT.encode(values[1][INDEX], 1.0)
    return code


@helper
def stored_code(grad_code, values, words, SPEC: tl.constexpr, INDEX: tl.constexpr):
    """The codes of one quantity, as they are stored."""
    SLOT: tl.constexpr = SPEC.digest_rows[INDEX]
    WEIGHT_FORMAT: tl.constexpr = SPEC.formats.weight
    MASTER_FORMAT: tl.constexpr = SPEC.formats.master
    if SLOT == GRAD:
        # read before the step; all other codes are made from the new fp32 values
        code = grad_code
    elif SLOT >= MOMENT:
        code = stored_moment_code(values, words, SPEC, (SLOT - MOMENT) // 2)
    elif MASTER_FORMAT.joined:
        # weight and master by one encoding
        weight_code, master_code = joined_codes(values[0], words, MASTER_FORMAT)
        code = weight_code if SLOT == WEIGHT else master_code
    elif SLOT == WEIGHT:
        # with the bits that the stored code was drawn with
        code = drawn_code(values[0], words, WEIGHT_FORMAT)
    else:
        code = MASTER_FORMAT.encode(values[0], 1.0)
    return code


@helper
def with_block(sums, grad_code, block, values, words, marks, index, SPEC: tl.constexpr):
    """The sums with those of a block that was stepped."""
    new_sums = ()
    COUNT: tl.constexpr = SPEC.digest_count
    for i in tl.static_range(COUNT):
        code = stored_code(grad_code, values, words, SPEC, i)
        new_sums += with_codes(sums, code, block.mask, marks, index, SPEC, i)
    return new_sums


@helper
def code_at(column, start, offsets, mask, SPEC: tl.constexpr, INDEX: tl.constexpr):
    SLOT: tl.constexpr = SPEC.digest_rows[INDEX]
    FORMAT: tl.constexpr = SPEC.digest_formats[INDEX]
    return load_block(pointer(column, SLOT, start, FORMAT), offsets, mask)


@helper
def side_by_side(parts, COUNT: tl.constexpr):
    """Blocks of one dimension as the columns of one of two; COUNT: 2, 4, 8 or 16 of them."""
    if COUNT == 16:
        pairs = ()
        for i in tl.static_range(8):
            pairs += (tl.join(parts[i], parts[i + 8]),)
        tile = in_order(pairs, 8, 16)
    else:
        tile = in_order(parts, COUNT, COUNT)
    return tile


@helper
def add_sums(digests_ptr, column, sums, SPEC: tl.constexpr):
    """Adds the program's sums to the tensor's row; integers, so that no order shows."""
    COUNT: tl.constexpr = 2 * SPEC.digest_count
    PLACES: tl.constexpr = SPEC.digest_places
    # zeros up to a power of two, for joins
    padded = sums
    for _ in tl.static_range(PLACES - COUNT):
        padded += (tl.zeros_like(sums[0]),)
    # all are reduced at once: each reduction waits at barriers
    totals = tl.sum(side_by_side(padded, PLACES), 0)
    # int64 [PLACES], both lanes of each quantity side by side
    place = tl.arange(0, PLACES)
    own_ptr = digests_ptr + column.tensor * COUNT
    tl.atomic_add(own_ptr + place, totals, mask=place < COUNT, sem="relaxed")


@helper
def add_memory(digests_ptr, column, start, elements, SPEC: tl.constexpr):
    """Adds the sums of a chunk that the step leaves as it is."""
    sums, marks = no_sums(SPEC), marks_of(column, start, SPEC)
    COUNT: tl.constexpr = SPEC.digest_count
    index = tl.zeros((), tl.int32)
    while index * SPEC.block < elements:
        offsets = offsets_of(index, SPEC)
        mask = offsets < elements
        new_sums = ()
        for i in tl.static_range(COUNT):
            # from memory, as nothing was stepped; all blocks masked
            code = code_at(column, start, offsets, mask, SPEC, i)
            new_sums += with_codes(sums, code, mask, marks, index, SPEC, i)
        sums = new_sums
        index += 1
    add_sums(digests_ptr, column, sums, SPEC)
