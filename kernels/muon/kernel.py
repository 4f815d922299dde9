"""Muon's kernels beside products: factors by norms, casts, second moments of rows."""

from __future__ import annotations

from megaopt.kernels.chunks.blocks import load_block, pointer, store_block
from megaopt.kernels.chunks.chunk import Column, chunk_of, entry, place_of
from megaopt.kernels.chunks.rows import GRAD, WEIGHT
from megaopt.kernels.muon import newton_schulz, normuon
from megaopt.kernels.norm import bins
from megaopt.kernels.norm.kernel import total_of
from megaopt.kernels.optional_triton import helper, jit, tl
from megaopt.kernels.products.epilogue import rounded, widened
from megaopt.kernels.rules.adam_ieee import canonical
from megaopt.kernels.step.controls import COUNT, SKIP

BINS: tl.constexpr = tl.constexpr(bins.BANKS * bins.ROWS * 2)
# Rows of the factors, fp32 [5, matrices], in the order of newton_schulz.MatrixScales.
SQUARE: tl.constexpr = tl.constexpr(0)
INVERSE: tl.constexpr = tl.constexpr(1)
LAST: tl.constexpr = tl.constexpr(2)
ONLY: tl.constexpr = tl.constexpr(3)
POWER: tl.constexpr = tl.constexpr(4)

# what newton_schulz.scales_reference makes a power of two of, as the exponent's bits
SUM_OF_EXPONENTS: tl.constexpr = tl.constexpr(newton_schulz.FP16_EXPONENT + 2 * 127)
INFINITY_BITS: tl.constexpr = tl.constexpr(0x7F800000)


@helper
def power_of(norm):
    """Returns the power of two that brings a norm to [2**14, 2**15); 1 where it is not finite."""
    # above its 23 bits of fraction a positive norm has the exponent alone
    bits = norm.to(tl.int32, bitcast=True)
    exponent = -(bits >> 23) + SUM_OF_EXPONENTS
    power = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.where((bits & INFINITY_BITS) == INFINITY_BITS, 1.0, power)


@jit(do_not_specialize=["matrices", "eps"])
def scales_kernel(
    bins_ptr,  # *int64 [matrices, BANKS, ROWS, 2]
    ratios_ptr,  # *fp32 [matrices]
    scales_ptr,  # *fp32 [5, matrices]
    matrices,
    eps,
    IS_SCALED: tl.constexpr,
):
    """Makes what `newton_schulz.scales_reference` makes: a program a matrix."""
    # the norm of all parts' squares, no less than eps
    matrix = tl.program_id(0)
    norm, _ = total_of(bins_ptr + matrix.to(tl.int64) * BINS)
    norm = tl.where(norm < eps, eps, norm)  # a NaN stays one
    # what is iterated is the direction times the power: its norm is divided out
    power = power_of(norm) if IS_SCALED else 1.0
    ratio = tl.load(ratios_ptr + matrix)
    inverse = tl.math.div_rn(1.0, norm * power)

    # a column of the factors, a row each
    tl.store(scales_ptr + SQUARE * matrices + matrix, inverse * inverse)
    tl.store(scales_ptr + INVERSE * matrices + matrix, inverse)
    tl.store(scales_ptr + LAST * matrices + matrix, ratio)
    tl.store(scales_ptr + ONLY * matrices + matrix, inverse * ratio)
    tl.store(scales_ptr + POWER * matrices + matrix, power)


@jit(do_not_specialize=["matrices"])
def cast_kernel(
    table_ptr,  # *int64 as a step's: GRAD is the direction, fp32, WEIGHT where its cast goes
    chunks_ptr,  # *int32 as table.Chunks
    scales_ptr,  # *fp32 [5, matrices]
    matrices,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Casts a chunk of a direction, times its matrix's power of two."""
    # this program's chunk of a matrix: number is its place among the matrix's chunks
    matrix, number = place_of(chunks_ptr, matrices, tl.program_id(0), SPAN)
    column = Column(table_ptr, matrices, matrix)
    start, elements, unmasked = chunk_of(column, number, 0, BLOCK, ITERATIONS)

    # pointers to the chunk's first numbers, and the one factor of all of them
    source, target = pointer(column, GRAD, start, SOURCE), pointer(column, WEIGHT, start, TARGET)
    power = tl.load(scales_ptr + POWER * matrices + matrix)

    # index counts blocks: whole and aligned ones come first, and go without a mask
    index = tl.zeros((), tl.int32)
    while index * BLOCK < elements:
        offsets = index * BLOCK + tl.arange(0, BLOCK)
        if index < unmasked:
            value = SOURCE.decode(load_block(source, offsets, None), 1.0)
            store_block(target, offsets, TARGET.encode(value * power, 1.0), None)
        else:
            mask = offsets < elements
            value = SOURCE.decode(load_block(source, offsets, mask), 1.0)
            store_block(target, offsets, TARGET.encode(value * power, 1.0), mask)
        index += 1


# --- NorMuon's second moments: launches of rows, of their matrices, of rows again

# Rows of the int64 table, one column a matrix.
UPDATE: tl.constexpr = tl.constexpr(0)
SECOND: tl.constexpr = tl.constexpr(1)
"""Addresses, of fp32 numbers for each row."""
COLUMNS: tl.constexpr = tl.constexpr(2)
HEIGHT: tl.constexpr = tl.constexpr(3)
GROUP: tl.constexpr = tl.constexpr(4)
FIRST_ROW: tl.constexpr = tl.constexpr(5)
"""The place where its rows begin among those of all matrices."""
ROW_COUNT = 6
WIDTH: tl.constexpr = tl.constexpr(normuon.LANES)
HALVINGS: tl.constexpr = tl.constexpr(normuon.LANES.bit_length() - 1)
CONTROLS: tl.constexpr = tl.constexpr(COUNT)
LEFT_OUT: tl.constexpr = tl.constexpr(SKIP)


@helper
def lanes_added(lanes):
    """Adds up normuon.LANES sums, as `normuon.added_up`."""
    for _ in tl.static_range(HALVINGS):
        evens, odds = tl.split(tl.reshape(lanes, (lanes.shape[0] // 2, 2)))
        lanes = evens + odds
    return tl.sum(lanes, 0)  # of one


@jit(do_not_specialize=["matrices", "decay", "rest", "eps"])
def row_squares_kernel(
    table_ptr,  # *int64 [ROW_COUNT, matrices]
    chunks_ptr,  # *int32 as table.Chunks, a row a chunk
    controls_ptr,  # *fp32 [groups, COUNT]; unread unless CONTROLLED
    squares_ptr,  # *fp32, of each row the sum of squares,
    roots_ptr,  # *fp32, and what it is divided by
    matrices,
    decay,
    rest,
    eps,
    ELEMENT: tl.constexpr,
    CONTROLLED: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Makes the first half of `normuon.normalized`, of one row."""
    # a program has a row of an update [HEIGHT, COLUMNS]
    matrix, row = place_of(chunks_ptr, matrices, tl.program_id(0), SPAN)
    entries = Column(table_ptr, matrices, matrix)
    columns = entry(entries, COLUMNS)
    update_ptr = entry(entries, UPDATE).to(tl.pointer_type(ELEMENT))

    # the sum of squares by lanes: number i of the row goes to lane i % WIDTH, in order
    lanes, first = tl.zeros((WIDTH,), tl.float32), tl.zeros((), tl.int64)
    while first < columns:
        offsets = first + tl.arange(0, WIDTH)
        value = tl.load(update_ptr + row * columns + offsets, mask=offsets < columns, other=0.0)
        lanes += widened(value) * widened(value)
        first += WIDTH
    # fp32, in the twin's order
    squares = lanes_added(lanes)

    # the mean of this row's squares goes into the mean over steps
    second_ptr = entry(entries, SECOND).to(tl.pointer_type(tl.float32)) + row
    mean = tl.math.div_rn(squares, columns.to(tl.float32))
    second = canonical(tl.load(second_ptr) * decay + mean * rest)

    # the next launches read both by the row's place among those of all matrices
    place = entry(entries, FIRST_ROW) + row
    tl.store(squares_ptr + place, squares)
    tl.store(roots_ptr + place, tl.math.sqrt_rn(second) + eps)

    # a group that is left out keeps its second moment
    is_stepped = True
    if CONTROLLED:
        group = entry(entries, GROUP)
        is_stepped = tl.load(controls_ptr + group * CONTROLS + LEFT_OUT) == 0
    tl.store(second_ptr, second, mask=is_stepped)


@jit(do_not_specialize=["matrices", "eps"])
def row_factors_kernel(
    table_ptr,  # *int64 [ROW_COUNT, matrices]
    ratios_ptr,  # *fp32 [matrices]
    squares_ptr,  # *fp32, as row_squares_kernel left them
    roots_ptr,
    factors_ptr,  # *fp32 [matrices]
    matrices,
    eps,
):
    """Makes the factor of a matrix that its norm stays, times its ratio."""
    # a program has all rows of a matrix
    matrix = tl.program_id(0)
    entries = Column(table_ptr, matrices, matrix)
    height = entry(entries, HEIGHT)
    place = entry(entries, FIRST_ROW)

    # sums of squares of the whole matrix: as it is, and with each row divided by its root
    before, after = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    first = tl.zeros((), tl.int64)
    while first < height:
        # rows behind the last have squares of 0, over roots of 1
        offsets = first + tl.arange(0, WIDTH)
        mask = offsets < height
        squares = tl.load(squares_ptr + place + offsets, mask=mask, other=0.0)
        root = tl.load(roots_ptr + place + offsets, mask=mask, other=1.0)
        before += squares
        after += tl.math.div_rn(squares, root * root)
        first += WIDTH

    # the norm before over the norm after: the divided matrix times this has the norm it had
    norm = tl.math.sqrt_rn(lanes_added(after))
    norm = tl.where(norm < eps, eps, norm)
    factor = tl.math.div_rn(tl.math.sqrt_rn(lanes_added(before)), norm)
    tl.store(factors_ptr + matrix, factor * tl.load(ratios_ptr + matrix))


@jit(do_not_specialize=["matrices"])
def row_scale_kernel(
    table_ptr,  # *int64 [ROW_COUNT, matrices]
    chunks_ptr,  # *int32 as table.Chunks, a row a chunk
    roots_ptr,  # *fp32
    factors_ptr,  # *fp32 [matrices]
    matrices,
    ELEMENT: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Multiplies a row of an update by its matrix's factor over its root."""
    # a program has a row of an update
    matrix, row = place_of(chunks_ptr, matrices, tl.program_id(0), SPAN)
    entries = Column(table_ptr, matrices, matrix)
    columns = entry(entries, COLUMNS)
    update_ptr = entry(entries, UPDATE).to(tl.pointer_type(ELEMENT))

    # one factor for all numbers of the row
    root = tl.load(roots_ptr + entry(entries, FIRST_ROW) + row)
    factor = tl.math.div_rn(tl.load(factors_ptr + matrix), root)

    # the row is written over itself, rounded once from fp32
    first = tl.zeros((), tl.int64)
    while first < columns:
        offsets = first + tl.arange(0, WIDTH)
        pointers, mask = update_ptr + row * columns + offsets, offsets < columns
        value = widened(tl.load(pointers, mask=mask, other=0.0)) * factor
        tl.store(pointers, rounded(value, ELEMENT), mask=mask)
        first += WIDTH
