"""The digest in one launch over any number of tensors, of mixed dtypes.

A thread takes 8 elements that follow each other, which lie in one row: their sum of bits times
factors of columns is made without the row's factor. The factors of columns are the same in all
blocks of a chunk, and stay in registers. Lanes are reduced once a program; the atomics are of whole
numbers, so that their order does not show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaopt.kernels.chunks.blocks import load_block
from megaopt.kernels.chunks.chunk import Column, chunk_of, entry, place_of
from megaopt.kernels.chunks.rows import FIRST_ELEMENT, GRAD, RUN, RUN_STRIDE
from megaopt.kernels.chunks.table import Geometry
from megaopt.kernels.digest import codes
from megaopt.kernels.optional_triton import cuda_capability_geq, helper, jit, tl

ROW: tl.constexpr = tl.constexpr(codes.ROW)
ROW_BITS: tl.constexpr = tl.constexpr(codes.ROW.bit_length() - 1)
WIDTH: tl.constexpr = tl.constexpr(8)
"""Elements that a thread takes at a time: a divisor of ROW."""

# Rows of the table where the step's has what a digest does not need.
OF_KIND: tl.constexpr = tl.constexpr(1)
"""The number of the tensor's kind."""
MASK: tl.constexpr = tl.constexpr(2)
PATTERN: tl.constexpr = tl.constexpr(3)

IN_ROWS: tl.constexpr = tl.constexpr(0)
"""WIDTH elements follow each other in one row, from a tensor's first on."""
IN_RUNS: tl.constexpr = tl.constexpr(1)
"""The same from a place on that WIDTH divides, before the tensor's first or in each of its runs."""
SCATTERED: tl.constexpr = tl.constexpr(2)

ELEMENTS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.int64}
"""The Triton type that a kernel reads, by its size in bytes."""


@dataclass(frozen=True, order=True)
class TensorKind:
    """The properties that tensors share which are read by the same code."""

    size: int
    """Bytes of an element."""
    order: int
    """The way in which the places of WIDTH elements lie."""

    @property
    def number(self) -> int:
        """A number of each kind's own."""
        return self.size + 16 * self.order

    @property
    def element(self) -> Any:
        """The Triton type."""
        return ELEMENTS[self.size]


@dataclass(frozen=True)
class DigestSpec:
    """The case that a launch is compiled for: a kind that is not there would cost registers."""

    kinds: tuple[TensorKind, ...]
    geometry: Geometry
    """Blocks are whole rows."""

    @property
    def count(self) -> int:
        """The number of kinds."""
        return len(self.kinds)


@helper
def factors(number):
    """The odd factors of both lanes of numbers, all uint32."""
    # a hash of 32 bits, by shifts and odd factors
    mixed = number + 0x9E3779B9
    mixed = (mixed ^ (mixed >> 16)) * 0x21F0AAAD
    mixed = (mixed ^ (mixed >> 15)) * 0x735A2D97
    mixed = mixed ^ (mixed >> 15)
    # the second lane's factor, of the first's mixed bits; | 1 makes both odd
    second = mixed * 0x9E3779B1
    return mixed | 1, (second ^ (second >> 16)) | 1


@helper
def column_factors(place):
    """The factors of places' columns; place: any integers, of which the lower bits count."""
    return factors((place.to(tl.uint32) % ROW) + 0x80000000)


@helper
def words_of(bits, ELEMENT: tl.constexpr):
    """uint32, the bits of 4 bytes or fewer, or the lower and upper halves of 8."""
    if ELEMENT.primitive_bitwidth == 64:
        # 8 bytes: lower and upper word
        words = (bits.to(tl.uint32), (bits >> 32).to(tl.uint32))
    else:
        # one word, twice: nonfinite_of looks at the second
        words = (bits.to(tl.uint32), bits.to(tl.uint32))
    return words


@helper
def wide(factor0, factor1):
    """The product of two uint32, int64."""
    if cuda_capability_geq(9, 0):
        # with a sum it is one instruction; of factors that were made int64 before a loop the
        # compiler does not know that their upper halves are 0
        product = tl.inline_asm_elementwise(
            "mul.wide.u32 $0, $1, $2;", "=l,r,r", [factor0, factor1], tl.int64, True, 1
        )
    else:
        product = factor0.to(tl.int64) * factor1.to(tl.int64)
    return product


@helper
def products(words, columns, ELEMENT: tl.constexpr):
    """int64, the bits times the factors of columns, in both lanes."""
    # uint32 by uint32, [rows, WIDTH]
    lane0, lane1 = wide(words[0], columns[0]), wide(words[0], columns[1])
    if ELEMENT.primitive_bitwidth == 64:
        # the upper word takes the other lane's factors, one of them doubled
        lane0 += wide(words[1], columns[1])
        lane1 += 2 * wide(words[1], columns[0])
    return lane0, lane1


@helper
def nonfinite_of(word, patterns):
    """int32 [rows], how many of each row's elements are not finite; word: the upper of 8 bytes."""
    mask, pattern = patterns
    # what differs is below 2**31: only 0 less 1 has the highest bit
    return tl.sum((((word & mask) ^ pattern) - 1 >> 31).to(tl.int32), 1)


@helper
def add_rows(sums, bits, row, columns, patterns, ELEMENT: tl.constexpr):
    """The sums of threads with those of a tile; row: uint32 [rows]."""
    lane0, lane1, count = sums
    words = words_of(bits, ELEMENT)
    # WIDTH elements lie in one row: its factor is applied once to their sum
    product0, product1 = products(words, columns, ELEMENT)
    factor0, factor1 = factors(row)
    lane0 += tl.sum(product0, 1) * factor0.to(tl.int64)
    lane1 += tl.sum(product1, 1) * factor1.to(tl.int64)
    return lane0, lane1, count + nonfinite_of(words[1], patterns)


@helper
def add_scattered(sums, bits, place, patterns, ELEMENT: tl.constexpr):
    """The same where each element has a place of its own; place: int64 [rows, WIDTH]."""
    lane0, lane1, count = sums
    words = words_of(bits, ELEMENT)
    # each element has a row of its own: its factor goes to each product
    product0, product1 = products(words, column_factors(place), ELEMENT)
    factor0, factor1 = factors((place >> ROW_BITS).to(tl.uint32))
    lane0 += tl.sum(product0 * factor0.to(tl.int64), 1)
    lane1 += tl.sum(product1 * factor1.to(tl.int64), 1)
    return lane0, lane1, count + nonfinite_of(words[1], patterns)


@helper
def patterns_of(column):
    """A mask and a pattern, uint32: masked bits that are the pattern are not finite."""
    return entry(column, MASK).to(tl.uint32), entry(column, PATTERN).to(tl.uint32)


@helper
def runs_of(column, start, lead):
    """The place of a chunk's first run, what of that lies before the chunk, and run and stride."""
    run, stride = entry(column, RUN), entry(column, RUN_STRIDE)
    start += lead  # in a tensor that begins where a row of threads does
    first = entry(column, FIRST_ELEMENT) - lead + start // run * stride
    return first, (start % run).to(tl.uint32), run.to(tl.uint32), stride


@helper
def places_of(runs, offsets):
    """int64, the places of a chunk's elements; divides 32 bits, as 64 take ten times as long."""
    first, before, run, stride = runs
    offsets = before + offsets.to(tl.uint32)
    # how many runs on, and how far into that run
    whole = offsets // run
    return first + whole.to(tl.int64) * stride + (offsets - whole * run).to(tl.int64)


@helper
def no_sums(BLOCK: tl.constexpr):
    """Each thread's sums: int64 [rows] of both lanes, int32 [rows] of what is not finite."""
    zero = tl.zeros((BLOCK // WIDTH,), tl.int64)
    return zero, zero, zero.to(tl.int32)


@helper
def sums_of_rows(column, number, ELEMENT: tl.constexpr, BLOCK: tl.constexpr, ITERATIONS):
    """The sums of a chunk in which all WIDTH elements lie in one row, and are aligned."""
    # the chunk's first element: its pointer, and its place in the whole tensor, int64
    start, elements, unmasked = chunk_of(column, number, 0, BLOCK, ITERATIONS)
    patterns = patterns_of(column)
    ptr = entry(column, GRAD).to(tl.pointer_type(ELEMENT)) + start
    place = entry(column, FIRST_ELEMENT) + start
    first_row = (place >> ROW_BITS).to(tl.uint32)
    # int32 [BLOCK // WIDTH], first elements of the threads' rows; tile: [BLOCK // WIDTH, WIDTH]
    rows = tl.arange(0, BLOCK // WIDTH) * WIDTH
    tile = rows[:, None] + tl.arange(0, WIDTH)[None, :]
    # from the beginning of the chunk's first row, where they are 32-bit
    rows = (rows + (place % ROW).to(tl.int32)).to(tl.uint32)
    # blocks are whole rows: the same columns in each, made once
    columns = column_factors(place + tile)
    sums = no_sums(BLOCK)
    index = tl.zeros((), tl.int32)
    # whole blocks, without a mask
    while index < unmasked:
        bits = load_block(ptr, index * BLOCK + tile, None)
        row = first_row + ((rows + index * BLOCK) >> ROW_BITS)
        sums = add_rows(sums, bits, row, columns, patterns, ELEMENT)
        index += 1
    # the rest; masked elements are bits 0, which add nothing
    while index * BLOCK < elements:
        offsets = index * BLOCK + tile
        bits = load_block(ptr, offsets, offsets < elements)
        row = first_row + ((rows + index * BLOCK) >> ROW_BITS)
        sums = add_rows(sums, bits, row, columns, patterns, ELEMENT)
        index += 1
    return sums


@helper
def sums_anywhere(
    column,
    number,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SCATTERED: tl.constexpr,
):
    """The sums of a chunk of a tensor that begins anywhere, or has a stride."""
    # from a place that WIDTH divides on, so that WIDTH elements lie in one row
    lead = tl.zeros((), tl.int64) if SCATTERED else entry(column, FIRST_ELEMENT) % WIDTH
    start, elements, unmasked = chunk_of(column, number, lead, BLOCK, ITERATIONS)
    # with a lead addresses are not aligned: all blocks go masked
    unmasked *= (lead == 0).to(tl.int32)
    runs = runs_of(column, start, lead)
    patterns = patterns_of(column)
    ptr = entry(column, GRAD).to(tl.pointer_type(ELEMENT)) + start
    rows = tl.arange(0, BLOCK // WIDTH) * WIDTH
    within = tl.arange(0, WIDTH)[None, :]
    sums = no_sums(BLOCK)
    index = tl.zeros((), tl.int32)
    while index * BLOCK < elements:
        offsets = index * BLOCK + rows[:, None] + within
        if index < unmasked:
            bits = load_block(ptr, offsets, None)
        else:
            # the mask leaves out what lies before the tensor, and behind it
            bits = load_block(ptr, offsets, (offsets < elements) & (offsets >= -start))
        if SCATTERED:
            # int64 [rows, WIDTH]: a place for each element
            place = places_of(runs, offsets)
            sums = add_scattered(sums, bits, place, patterns, ELEMENT)
        else:
            # int64 [rows]: the place of each thread's first; the others follow in its row
            place = places_of(runs, index * BLOCK + rows)
            columns = column_factors(place[:, None] + within)
            row = (place >> ROW_BITS).to(tl.uint32)
            sums = add_rows(sums, bits, row, columns, patterns, ELEMENT)
        index += 1
    return sums


@helper
def chunk_sums(column, number, SPEC: tl.constexpr, INDEX: tl.constexpr):
    KIND: tl.constexpr = SPEC.kinds[INDEX]
    BLOCK: tl.constexpr = SPEC.geometry.block
    ITERATIONS: tl.constexpr = SPEC.geometry.iterations
    if KIND.order == IN_ROWS:
        sums = sums_of_rows(column, number, KIND.element, BLOCK, ITERATIONS)
    else:
        scattered: tl.constexpr = KIND.order == SCATTERED
        sums = sums_anywhere(column, number, KIND.element, BLOCK, ITERATIONS, scattered)
    return sums


@helper
def is_of_kind(column, SPEC: tl.constexpr, INDEX: tl.constexpr):
    KIND: tl.constexpr = SPEC.kinds[INDEX]
    return entry(column, OF_KIND) == KIND.number


@jit(do_not_specialize=["tensors"])
def digest_kernel(
    table_ptr,  # *int64 [rows, tensors]
    chunks_ptr,  # *int32 as table.Chunks
    out_ptr,  # *int64 [tensors, 3]: both lanes, the count of what is not finite
    tensors,
    SPEC: tl.constexpr,
):
    """Adds a chunk's sums to its tensor's."""
    # a program takes one chunk of one tensor
    tensor, number = place_of(chunks_ptr, tensors, tl.program_id(0), SPEC.geometry.span)
    column = Column(table_ptr, tensors, tensor)
    COUNT: tl.constexpr = SPEC.count
    # one branch for each kind of the launch; only the tensor's runs
    for index in tl.static_range(COUNT):
        if is_of_kind(column, SPEC, index):
            lane0, lane1, count = chunk_sums(column, number, SPEC, index)
            # threads' sums become one each; whole numbers, added in any order
            own_ptr = out_ptr + 3 * tensor
            tl.atomic_add(own_ptr, tl.sum(lane0, 0), sem="relaxed")
            tl.atomic_add(own_ptr + 1, tl.sum(lane1, 0), sem="relaxed")
            tl.atomic_add(own_ptr + 2, tl.sum(count, 0).to(tl.int64), sem="relaxed")
