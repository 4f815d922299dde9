"""NorMuon's second moment: rows of an update divided by the root of a mean of their squares.

Li et al. 2025, arXiv:2510.05491; the order of operations is that of docs/numbers.md. Sums go by
lanes: those of every LANES-th number in order, then pairs of neighbours, so that a kernel and its
twin add up alike.
"""

from __future__ import annotations

import torch

from megaopt.kernels.chunks.chunk import Column, entry, place_of
from megaopt.kernels.optional_triton import helper, jit, tl
from megaopt.kernels.products.epilogue import rounded, widened
from megaopt.kernels.rules.adam_ieee import canonical, canonical_reference
from megaopt.kernels.step.controls import COUNT, SKIP

SECOND_MOMENT = "variance_neuron"
"""dion's name of what a state keeps, fp32 [rows]."""
BETA2 = 0.95
"""dion's muon_beta2."""
EPS = 1e-8
LANES = 256


def numbers_of(beta2: float) -> tuple[float, float, float]:
    """The part of the mean that stays, the part that is new, and eps."""
    return beta2, 1.0 - beta2, EPS


def added_up(values: torch.Tensor) -> torch.Tensor:
    """The sums of the last dimension, fp32."""
    count = values.shape[-1]
    lanes = values.new_zeros(*values.shape[:-1], LANES)
    for first in range(0, count, LANES):
        part = values[..., first : first + LANES]
        lanes[..., : part.shape[-1]] += part
    while lanes.shape[-1] > 1:
        lanes = lanes[..., ::2] + lanes[..., 1::2]
    return lanes[..., 0]


def normalized(
    update: torch.Tensor, second: torch.Tensor, beta2: float, ratio: float
) -> torch.Tensor:
    """The update [rows, columns] of rows alike, of the same norm, times a ratio; steps `second`."""
    squares = added_up(update.float().square())
    numbers = (update.shape[1], *numbers_of(beta2), ratio)
    count, kept, rest, eps, ratio_32 = squares.new_tensor(numbers).unbind()
    second.copy_(canonical_reference(second * kept + squares / count * rest))
    root = second.double().sqrt().float() + eps
    after = added_up(squares / (root * root)).double().sqrt().float()
    before = added_up(squares).double().sqrt().float()
    factor = before / torch.where(after < eps, eps, after) * ratio_32
    return (update.float() * (factor / root)[:, None]).to(update.dtype)


# --- the launches: of rows, of their matrices, of rows again

# Rows of the int64 table, one column a matrix.
UPDATE: tl.constexpr = tl.constexpr(0)
SECOND: tl.constexpr = tl.constexpr(1)
"""Addresses, of fp32 numbers for each row."""
COLUMNS: tl.constexpr = tl.constexpr(2)
HEIGHT: tl.constexpr = tl.constexpr(3)
GROUP: tl.constexpr = tl.constexpr(4)
FIRST_ROW: tl.constexpr = tl.constexpr(5)
"""Where its rows begin among those of all matrices."""
ROW_COUNT = 6
WIDTH: tl.constexpr = tl.constexpr(LANES)
HALVINGS: tl.constexpr = tl.constexpr(LANES.bit_length() - 1)
CONTROLS: tl.constexpr = tl.constexpr(COUNT)
LEFT_OUT: tl.constexpr = tl.constexpr(SKIP)


@helper
def lanes_added(lanes):
    """`added_up` of [LANES] sums."""
    for _ in tl.static_range(HALVINGS):
        one, other = tl.split(tl.reshape(lanes, (lanes.shape[0] // 2, 2)))
        lanes = one + other
    return tl.sum(lanes, 0)  # of one


@jit(do_not_specialize=["matrices", "kept", "rest", "eps"])
def row_squares_kernel(
    table_ptr,  # *int64 [ROW_COUNT, matrices]
    chunks_ptr,  # *int32 as table.Chunks, a row a chunk
    controls_ptr,  # *fp32 [groups, COUNT]; unread unless CONTROLLED
    squares_ptr,  # *fp32, of each row the sum of squares,
    roots_ptr,  # *fp32, and what it is divided by
    matrices,
    kept,
    rest,
    eps,
    ELEMENT: tl.constexpr,
    CONTROLLED: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The first half of `normalized`, of one row."""
    matrix, row = place_of(chunks_ptr, matrices, tl.program_id(0), SPAN)
    own = Column(table_ptr, matrices, matrix)
    columns = entry(own, COLUMNS)
    update_ptr = entry(own, UPDATE).to(tl.pointer_type(ELEMENT))
    lanes, first = tl.zeros((WIDTH,), tl.float32), tl.zeros((), tl.int64)
    while first < columns:
        offsets = first + tl.arange(0, WIDTH)
        value = tl.load(update_ptr + row * columns + offsets, mask=offsets < columns, other=0.0)
        lanes += widened(value) * widened(value)
        first += WIDTH
    squares = lanes_added(lanes)
    second_ptr = entry(own, SECOND).to(tl.pointer_type(tl.float32)) + row
    mean = tl.math.div_rn(squares, columns.to(tl.float32))
    second = canonical(tl.load(second_ptr) * kept + mean * rest)
    place = entry(own, FIRST_ROW) + row
    tl.store(squares_ptr + place, squares)
    tl.store(roots_ptr + place, tl.math.sqrt_rn(second) + eps)
    is_stepped = True
    if CONTROLLED:
        group = entry(own, GROUP)
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
    matrix = tl.program_id(0)
    own = Column(table_ptr, matrices, matrix)
    height = entry(own, HEIGHT)
    place = entry(own, FIRST_ROW)
    before, after = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    first = tl.zeros((), tl.int64)
    while first < height:
        offsets = first + tl.arange(0, WIDTH)
        mask = offsets < height
        squares = tl.load(squares_ptr + place + offsets, mask=mask, other=0.0)
        root = tl.load(roots_ptr + place + offsets, mask=mask, other=1.0)
        before += squares
        after += tl.math.div_rn(squares, root * root)
        first += WIDTH
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
    matrix, row = place_of(chunks_ptr, matrices, tl.program_id(0), SPAN)
    own = Column(table_ptr, matrices, matrix)
    columns = entry(own, COLUMNS)
    update_ptr = entry(own, UPDATE).to(tl.pointer_type(ELEMENT))
    root = tl.load(roots_ptr + entry(own, FIRST_ROW) + row)
    factor = tl.math.div_rn(tl.load(factors_ptr + matrix), root)
    first = tl.zeros((), tl.int64)
    while first < columns:
        offsets = first + tl.arange(0, WIDTH)
        pointers, mask = update_ptr + row * columns + offsets, offsets < columns
        value = widened(tl.load(pointers, mask=mask, other=0.0)) * factor
        tl.store(pointers, rounded(value, ELEMENT), mask=mask)
        first += WIDTH
