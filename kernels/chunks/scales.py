"""The scales per tensor: amaxes found, then waited for, in one launch.

Programs take tickets, and the work is dealt out in the tickets' order: a program that waits for
others knows that they have been started. All counters are zero again when the launch is over.
"""

from __future__ import annotations

from megaopt.kernels.chunks.chunk import entry
from megaopt.kernels.optional_triton import helper, tl

# The int32 scratch has a column a tensor. Rows: the bits of the master's amax and of each moment's,
# then the bits of their scales before the step, then the finished chunks; a rule with `count`
# moments has 2 * (1 + count) + 1. One number follows them all: the ticket.


def scratch_rows(moments: int) -> int:
    """Rows of the scratch for a rule with so many moments."""
    return 2 * (1 + moments) + 1


# What a program does with its chunk.
AMAX_PHASE: tl.constexpr = tl.constexpr(0)
STEP_PHASE: tl.constexpr = tl.constexpr(1)

# The smallest normal number: a scale below it would have no finite reciprocal.
SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-126)


@helper
def cell(scratch_ptr, row, column):
    """Returns a pointer to a tensor's cell in a row of the scratch.

    The rows are the amaxes, then old scales, then the count.
    """
    return scratch_ptr + row * column.tensors + column.tensor


@helper
def take_ticket(scratch_ptr, tensors, chunks, MOMENTS: tl.constexpr):
    """The next place in the table of chunks; the last ticket leaves the counter at zero."""
    # behind the last row of the scratch; whoever takes the last ticket resets the counter
    ticket_ptr = scratch_ptr + (2 * (1 + MOMENTS) + 1) * tensors
    ticket = tl.atomic_add(ticket_ptr, 1)
    if ticket == chunks - 1:
        tl.atomic_xchg(ticket_ptr, 0)
    return ticket


@helper
def wait_for_amaxes(scratch_ptr, column, own_chunks, MOMENTS: tl.constexpr):
    """Returns when every chunk of the tensor has been through the first phase."""
    # finished chunks of the tensor: own_chunks once all have been through the first phase
    finished_ptr = cell(scratch_ptr, 2 * (1 + MOMENTS), column)
    # an atomic, which sees what other processors wrote
    while tl.atomic_add(finished_ptr, 0) < own_chunks:
        pass


@helper
def finish(scratch_ptr, column, own_chunks, MOMENTS: tl.constexpr):
    """Counts a chunk's phase; the tensor's very last leaves its scratch at zero."""
    # every thread has read the amaxes before one of them can be cleared
    tl.debug_barrier()
    # each chunk counts twice, once a phase: the last count clears count and amaxes
    finished_ptr = cell(scratch_ptr, 2 * (1 + MOMENTS), column)
    if tl.atomic_add(finished_ptr, 1) == 2 * own_chunks - 1:
        tl.atomic_xchg(finished_ptr, 0)
        for index in tl.static_range(1 + MOMENTS):
            tl.atomic_xchg(cell(scratch_ptr, index, column), 0)


@helper
def old_scale(column, row, FORMAT: tl.constexpr):
    return tl.load(entry(column, row).to(tl.pointer_type(tl.float32))) if FORMAT.scaled else 1.0


@helper
def kept_scale(scratch_ptr, index, column, FORMAT: tl.constexpr, MOMENTS: tl.constexpr):
    """The scale from before the step, which the first phase put aside."""
    if FORMAT.scaled:
        kept_ptr = cell(scratch_ptr, 1 + MOMENTS + index, column)
        # volatile: another program of this launch wrote it
        bits = tl.load(kept_ptr, volatile=True)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = 1.0
    return scale


@helper
def new_scale(scratch_ptr, index, column, row, start, FORMAT: tl.constexpr):
    """Stores the tensor's new scale (its first chunk does) and gives the scale's reciprocal."""
    if FORMAT.scaled:
        # the tensor's amax, complete by now; every program makes the same scale of it
        bits = tl.load(cell(scratch_ptr, index, column), volatile=True)
        code_max = tl.full((), FORMAT.code_max, tl.float32)
        # amax / code_max, correctly rounded as the twin's scale_reference
        scale = tl.math.div_rn(bits.to(tl.float32, bitcast=True), code_max)
        scale = tl.maximum(scale, SMALLEST_SCALE)
        one = tl.full((), 1.0, tl.float32)
        inverse = tl.math.div_rn(one, scale)
        if FORMAT.scale_of_inverse:
            scale = tl.math.div_rn(one, inverse)
        # the program of the tensor's first chunk stores it for the next step
        address = entry(column, row)
        tl.store(address.to(tl.pointer_type(tl.float32)), scale, mask=start == 0)
    else:
        inverse = 1.0
    return inverse


@helper
def finite_amax_bits(amax_bits, value, FORMAT: tl.constexpr):
    """Element by element the larger of amax_bits and the bits of a finite magnitude.

    As integers the bits of magnitudes order like the numbers.
    """
    if FORMAT.scaled:
        # magnitude; infinities and NaNs do not count
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        amax_bits = tl.maximum(amax_bits, tl.where(bits < 0x7F800000, bits, 0))
    return amax_bits


@helper
def keep_amax(
    scratch_ptr, index, chunk, amax_bits, scale, FORMAT: tl.constexpr, MOMENTS: tl.constexpr
):
    """Adds a chunk's amax to the tensor's; its first chunk puts the old scale aside.

    Atomics throughout: one thread does them in this order, before it counts the chunk as finished.
    """
    if FORMAT.scaled:
        # int32 [block] to one number, raised in the tensor's cell
        tl.atomic_max(cell(scratch_ptr, index, chunk.column), tl.max(amax_bits, 0))
        # the old scale: the second phase overwrites the one in memory while others read
        bits = scale.to(tl.int32, bitcast=True)
        old_ptr = cell(scratch_ptr, 1 + MOMENTS + index, chunk.column)
        tl.atomic_xchg(old_ptr, bits, mask=chunk.start == 0)
