"""The norm: squares of any number of gradients into the bins in one launch, and the norm of those.

bins.py says what is computed and why no order shows. All fp64 operations here are exact, up to the
two roundings to bins that are meant and those of `total_of`: a contraction could change no bit.
"""

from __future__ import annotations

from megaopt.kernels.chunks.blocks import load_block, pointer
from megaopt.kernels.chunks.chunk import Column, chunk_of, place_of
from megaopt.kernels.chunks.rows import GRAD
from megaopt.kernels.norm import bins
from megaopt.kernels.optional_triton import helper, jit, tl

WIDTH: tl.constexpr = tl.constexpr(bins.WIDTH)
BINS: tl.constexpr = tl.constexpr(bins.BINS)
NONFINITE: tl.constexpr = tl.constexpr(bins.NONFINITE)
ROWS: tl.constexpr = tl.constexpr(bins.ROWS)
BANKS: tl.constexpr = tl.constexpr(bins.BANKS)
LIMB: tl.constexpr = tl.constexpr(bins.LIMB)
LOW_MASK: tl.constexpr = tl.constexpr(2**bins.LIMB - 1)
LIMB_SCALE: tl.constexpr = tl.constexpr(2.0**bins.LIMB)
BIN_SCALE: tl.constexpr = tl.constexpr(2.0**bins.WIDTH)

# log2 of row 0's unit. Row numbers are computed from it upwards, where Triton's //, which rounds
# towards 0, is a floor.
ROW_0: tl.constexpr = tl.constexpr(bins.WIDTH * bins.LOWEST)
INFINITY_BITS: tl.constexpr = tl.constexpr(0x7F800000)
NAN_BITS: tl.constexpr = tl.constexpr(0x7FC00000)


@helper
def power_bits(exponent):
    """The fp64 pattern, int64, of 2**exponent."""
    return (exponent + 1023).to(tl.int64) << 52


@helper
def magic_bits(row):
    """The pattern of 1.5 * 2**52 units: a number below 2**51 units added to it rounds to units.

    Patterns of one binade count its units: that of the sum less this one is the whole number.
    """
    return power_bits(row * WIDTH + (ROW_0 + 52)) | (1 << 51)


@helper
def top_row(amax_bits):
    """The row of the top bin of a block whose largest |grad| has this pattern, above 0."""
    amax = amax_bits.to(tl.float32, bitcast=True).to(tl.float64)
    pattern = (amax * amax).to(tl.int64, bitcast=True)
    # the square is below 2**above, and no less than half of that
    above = (pattern >> 52).to(tl.int32) - 1022
    return (above - ROW_0) // WIDTH


@helper
def block_amax(grad_ptr, elements, FORMAT: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The pattern of the largest |grad|: as integers they order like the numbers, NaNs on top."""
    mask = tl.arange(0, BLOCK) < elements if MASKED else None
    # fp32 [BLOCK]; masked elements are 0, which is never above the largest
    grad = FORMAT.decode(load_block(grad_ptr, tl.arange(0, BLOCK), mask), 1.0)
    return tl.max(grad.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@helper
def block_sums(
    grad_ptr,
    elements,
    row,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The block's sums of whole numbers in row - 1 and in row.

    Read again, from the cache, a tile at a time: the whole block at once takes 230 registers.
    """
    # int64 patterns of the two magic numbers, and these as fp64
    upper_bits, lower_bits = magic_bits(row), magic_bits(row - 1)
    upper_magic = upper_bits.to(tl.float64, bitcast=True)
    lower_magic = lower_bits.to(tl.float64, bitcast=True)
    # sums are modulo 2**64: the magic numbers are taken away once, not from every element
    upper_sums = tl.zeros((TILE,), tl.int64)
    lower_sums = tl.zeros((TILE,), tl.int64)
    offset = tl.zeros((), tl.int32)
    while offset < BLOCK:
        mask = offset + tl.arange(0, TILE) < elements if MASKED else None
        # fp32 [TILE], of which the squares are exact in fp64
        grad = FORMAT.decode(load_block(grad_ptr, offset + tl.arange(0, TILE), mask), 1.0)
        value = grad.to(tl.float64)
        # 1.5 * 2**52 units + q units: the square rounded to whole units of `row`
        upper = tl.fma(value, value, upper_magic)
        # the square less its q units, exact
        rest = tl.fma(value, value, upper_magic - upper)
        # the rest rounded to whole units of row - 1 in the same way
        lower = rest + lower_magic
        # patterns are added, int64 [TILE]; masked elements add a magic number like all others
        upper_sums += upper.to(tl.int64, bitcast=True)
        lower_sums += lower.to(tl.int64, bitcast=True)
        offset += TILE
    # q' of row - 1, and q of row: whole numbers, int64
    lower_sum = tl.sum(lower_sums, 0) - lower_bits * BLOCK
    upper_sum = tl.sum(upper_sums, 0) - upper_bits * BLOCK
    return lower_sum, upper_sum


@helper
def add_block(
    bank_ptr,
    grad_ptr,
    elements,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the squares of one block to a bank of the table."""
    amax_bits = block_amax(grad_ptr, elements, FORMAT, BLOCK, MASKED)
    if amax_bits >= INFINITY_BITS:
        # row NONFINITE: low counts blocks with infinities, high those with a NaN
        counter = (amax_bits > INFINITY_BITS).to(tl.int32) + 2 * NONFINITE
        tl.atomic_add(bank_ptr + counter, tl.full((), 1, tl.int64), sem="relaxed")
    elif amax_bits > 0:
        # a block of zeros adds nothing; of others the largest says which two rows count
        row = top_row(amax_bits)
        lower_sum, upper_sum = block_sums(grad_ptr, elements, row, FORMAT, BLOCK, TILE, MASKED)
        # both limbs of both rows lie side by side: one atomic instruction
        place = tl.arange(0, 4)
        sums = tl.where(place < 2, lower_sum, upper_sum)
        # low and high of row - 1, then of row; >> keeps the sign of the sum
        limbs = tl.where(place % 2 == 0, sums & LOW_MASK, sums >> LIMB)
        tl.atomic_add(bank_ptr + 2 * (row - 1) + place, limbs, sem="relaxed")


@jit(do_not_specialize=["tensors", "chunks"])
def norm_kernel(
    table_ptr,  # *int64 [rows, tensors], as the step's
    chunks_ptr,  # *int32, as the step's
    bins_ptr,  # *int64 [BANKS, ROWS, 2], or, APART, [tensors, BANKS, ROWS, 2]
    tensors,
    chunks,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SPAN: tl.constexpr,
    APART: tl.constexpr,
):
    """Adds the squares of all tensors to the table; a program takes chunks evenly spaced."""
    # programs spread over BANKS tables, so that few atomics meet
    bank_ptr = bins_ptr + (tl.program_id(0) % BANKS) * (2 * ROWS)
    chunk = tl.program_id(0)
    while chunk < chunks:
        # the chunk's tensor, and its elements there
        tensor, number = place_of(chunks_ptr, tensors, chunk, SPAN)
        column = Column(table_ptr, tensors, tensor)
        start, elements, unmasked = chunk_of(column, number, 0, BLOCK, ITERATIONS)
        grad_ptr = pointer(column, GRAD, start, FORMAT)
        if APART:
            # a table for each tensor, behind those of the tensors before
            bank = tensor.to(tl.int64) * BANKS + tl.program_id(0) % BANKS
            bank_ptr = bins_ptr + bank * (2 * ROWS)
        # whole blocks unmasked, then the rest masked
        block = tl.zeros((), tl.int32)
        while block < unmasked:
            add_block(bank_ptr, grad_ptr + block * BLOCK, BLOCK, FORMAT, BLOCK, TILE, False)
            block += 1
        while block * BLOCK < elements:
            rest = elements - block * BLOCK
            add_block(bank_ptr, grad_ptr + block * BLOCK, rest, FORMAT, BLOCK, TILE, True)
            block += 1
        # the next chunk of this program: all programs lie between
        chunk += tl.num_programs(0)


@helper
def row_total(low, high, row):
    """The total of one row, fp64; its limbs are [ROWS], low from 0 to 2**LIMB - 1."""
    chosen = tl.arange(0, ROWS) == row
    row_low = tl.sum(tl.where(chosen, low, 0), 0)
    row_high = tl.sum(tl.where(chosen, high, 0), 0)
    return row_high.to(tl.float64) * LIMB_SCALE + row_low.to(tl.float64)


@helper
def total_of(bins_ptr):
    """The norm of what is in the table, fp32, and whether an element was not finite, int1.

    For a kernel launched after norm_kernel. Leaves the table as it is: the caller resets it.
    """
    # int64 [BANKS, ROWS] of both limbs, banks summed up
    rows = tl.arange(0, ROWS)
    places = bins_ptr + 2 * (tl.arange(0, BANKS)[:, None] * ROWS + rows[None, :])
    low = tl.sum(tl.load(places), 0)
    high = tl.sum(tl.load(places + 1), 0)
    # the counters are no limbs: read before the carry
    infinities = tl.sum(tl.where(rows == NONFINITE, low, 0), 0)
    nans = tl.sum(tl.where(rows == NONFINITE, high, 0), 0)
    # how a total is shared between its limbs depends on the blocks: carry, and it does no more
    high += low >> LIMB
    low &= LOW_MASK
    # the highest row that is not 0, and the one below, make the total
    filled = (rows < BINS) & ((high | low) != 0)
    top = tl.max(tl.where(filled, rows, 0), 0)
    # fp64: (S_I * 2**WIDTH + S_{I-1}) * u_{I-1}, as bins.py has it
    unit = power_bits((top - 1) * WIDTH + ROW_0).to(tl.float64, bitcast=True)
    total = (row_total(low, high, top) * BIN_SCALE + row_total(low, high, top - 1)) * unit
    # fp64 root, rounded to fp32 once; NaN goes before infinity
    norm_bits = tl.sqrt(total).to(tl.float32).to(tl.int32, bitcast=True)
    norm_bits = tl.where(infinities > 0, INFINITY_BITS, norm_bits)
    norm_bits = tl.where(nans > 0, NAN_BITS, norm_bits)
    return norm_bits.to(tl.float32, bitcast=True), infinities + nans > 0


@jit
def total_kernel(bins_ptr, norm_ptr, nonfinite_ptr):
    """One program: stores the norm, fp32, and the flag, int8."""
    norm, nonfinite = total_of(bins_ptr)
    tl.store(norm_ptr, norm)
    tl.store(nonfinite_ptr, nonfinite.to(tl.int8))
