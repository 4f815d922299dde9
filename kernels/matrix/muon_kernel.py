"""What Muon's launches make beside products: factors of matrices by their norms, and casts."""

from __future__ import annotations

from megaopt.kernels.chunks.blocks import load_block, pointer, store_block
from megaopt.kernels.chunks.chunk import Column, chunk_of, place_of
from megaopt.kernels.chunks.rows import GRAD, WEIGHT
from megaopt.kernels.matrix import muon
from megaopt.kernels.norm import bins
from megaopt.kernels.norm.kernel import total_of
from megaopt.kernels.optional_triton import helper, jit, tl

BINS: tl.constexpr = tl.constexpr(bins.BANKS * bins.ROWS * 2)
# Rows of the factors, fp32 [5, matrices], in the order of muon.Scales.
SQUARE: tl.constexpr = tl.constexpr(0)
INVERSE: tl.constexpr = tl.constexpr(1)
LAST: tl.constexpr = tl.constexpr(2)
ONLY: tl.constexpr = tl.constexpr(3)
POWER: tl.constexpr = tl.constexpr(4)

# what muon.scales_reference makes a power of two of, as the exponent's bits
SUM_OF_EXPONENTS: tl.constexpr = tl.constexpr(muon.FP16_EXPONENT + 2 * 127)
INFINITY_BITS: tl.constexpr = tl.constexpr(0x7F800000)


@helper
def power_of(norm):
    """The power of two that brings a norm to [2**14, 2**15); 1 where it is not finite."""
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
    """`muon.scales_reference`: a program a matrix."""
    matrix = tl.program_id(0)
    norm, _ = total_of(bins_ptr + matrix.to(tl.int64) * BINS)
    norm = tl.where(norm < eps, eps, norm)  # a NaN stays one
    power = power_of(norm) if IS_SCALED else 1.0
    ratio = tl.load(ratios_ptr + matrix)
    inverse = tl.math.div_rn(1.0, norm * power)
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
    matrix, number = place_of(chunks_ptr, matrices, tl.program_id(0), SPAN)
    column = Column(table_ptr, matrices, matrix)
    start, elements, unmasked = chunk_of(column, number, 0, BLOCK, ITERATIONS)
    source, target = pointer(column, GRAD, start, SOURCE), pointer(column, WEIGHT, start, TARGET)
    power = tl.load(scales_ptr + POWER * matrices + matrix)
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
