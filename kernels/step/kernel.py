"""The step: load, decode, update, encode, store, for any number of tensors in one launch.

A program works through one chunk of one tensor. Where the chunk's whole blocks are aligned it loads
without a mask: a mask whose bound the compiler does not know costs the vectorization, 62% of copy
instead of 95%. The path does not change a bit.

Formats and rules come in as compile-time values (megaopt.kernels.formats, megaopt.kernels.rules).
"""

from __future__ import annotations

from megaopt.kernels.optional_triton import helper, jit, tl

# Rows of the int64 table, one column a tensor: addresses first, in the order of batch.SLOTS.
GRAD: tl.constexpr = tl.constexpr(0)
WEIGHT: tl.constexpr = tl.constexpr(1)
MASTER: tl.constexpr = tl.constexpr(2)
FIRST: tl.constexpr = tl.constexpr(3)
SECOND: tl.constexpr = tl.constexpr(4)
MASTER_SCALE: tl.constexpr = tl.constexpr(5)
FIRST_SCALE: tl.constexpr = tl.constexpr(6)
SECOND_SCALE: tl.constexpr = tl.constexpr(7)
NUMEL: tl.constexpr = tl.constexpr(8)
GROUP: tl.constexpr = tl.constexpr(9)
ALIGNED: tl.constexpr = tl.constexpr(10)
ROWS = 11

# Rows of the int32 scratch of scaled formats: the bits of amaxes, then of the scales before the
# step, each for master, first and second.
AMAX: tl.constexpr = tl.constexpr(0)
OLD_SCALE: tl.constexpr = tl.constexpr(3)
SCRATCH_ROWS = 6

# The smallest normal number: a scale below it would have no finite reciprocal.
SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-126)


@helper
def pointer(table_ptr, row, tensors, tensor, start, FORMAT: tl.constexpr):
    address = tl.load(table_ptr + row * tensors + tensor)
    return address.to(tl.pointer_type(FORMAT.element)) + start


@helper
def pointers_of(
    table_ptr,
    tensors,
    tensor,
    start,
    GRAD_FORMAT: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr,
    MASTER_FORMAT: tl.constexpr,
    FIRST_FORMAT: tl.constexpr,
    SECOND_FORMAT: tl.constexpr,
):
    """To a chunk's first element in each buffer; a null pointer where there is no buffer."""
    return (
        pointer(table_ptr, GRAD, tensors, tensor, start, GRAD_FORMAT),
        pointer(table_ptr, WEIGHT, tensors, tensor, start, WEIGHT_FORMAT),
        pointer(table_ptr, MASTER, tensors, tensor, start, MASTER_FORMAT),
        pointer(table_ptr, FIRST, tensors, tensor, start, FIRST_FORMAT),
        pointer(table_ptr, SECOND, tensors, tensor, start, SECOND_FORMAT),
    )


@helper
def load_block(ptr, offset, mask, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    pointers = ptr + (offset + tl.arange(0, BLOCK))
    if MASKED:
        code = tl.load(pointers, mask=mask, other=0)
    else:
        # on the sum: a hint on a function's argument would be lost
        code = tl.load(tl.multiple_of(pointers, 16))
    return code


@helper
def store_block(ptr, offset, code, mask, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    pointers = ptr + (offset + tl.arange(0, BLOCK))
    if MASKED:
        tl.store(pointers, code, mask=mask)
    else:
        tl.store(tl.multiple_of(pointers, 16), code)


@helper
def updated_block(
    pointers,
    scales,
    scalars,
    offset,
    mask,
    GRAD_FORMAT: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr,
    MASTER_FORMAT: tl.constexpr,
    FIRST_FORMAT: tl.constexpr,
    SECOND_FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The new fp32 (param, first, second) of one block; nothing is stored."""
    grad_ptr, weight_ptr, master_ptr, first_ptr, second_ptr = pointers
    master_scale, first_scale, second_scale = scales
    grad = GRAD_FORMAT.decode(load_block(grad_ptr, offset, mask, BLOCK, MASKED), 1.0)
    first = FIRST_FORMAT.decode(load_block(first_ptr, offset, mask, BLOCK, MASKED), first_scale)
    second = SECOND_FORMAT.decode(load_block(second_ptr, offset, mask, BLOCK, MASKED), second_scale)
    if MASTER_FORMAT.joined:
        weight_code = load_block(weight_ptr, offset, mask, BLOCK, MASKED)
        master_code = load_block(master_ptr, offset, mask, BLOCK, MASKED)
        param = MASTER_FORMAT.decode(weight_code, master_code)
    elif MASTER_FORMAT.present:
        master_code = load_block(master_ptr, offset, mask, BLOCK, MASKED)
        param = MASTER_FORMAT.decode(master_code, master_scale)
    else:
        param = WEIGHT_FORMAT.decode(load_block(weight_ptr, offset, mask, BLOCK, MASKED), 1.0)
    return RULE.update(param, first, second, grad, scalars)


@helper
def stored_block(
    pointers,
    inverses,
    values,
    offset,
    mask,
    WEIGHT_FORMAT: tl.constexpr,
    MASTER_FORMAT: tl.constexpr,
    FIRST_FORMAT: tl.constexpr,
    SECOND_FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encodes and stores what updated_block gave."""
    _, weight_ptr, master_ptr, first_ptr, second_ptr = pointers
    master_inverse, first_inverse, second_inverse = inverses
    param, first, second = values
    if MASTER_FORMAT.joined:
        weight_code, master_code = MASTER_FORMAT.encode(param)
        store_block(master_ptr, offset, master_code, mask, BLOCK, MASKED)
    else:
        weight_code = WEIGHT_FORMAT.encode(param, 1.0)
        if MASTER_FORMAT.present:
            master_code = MASTER_FORMAT.encode(param, master_inverse)
            store_block(master_ptr, offset, master_code, mask, BLOCK, MASKED)
    store_block(weight_ptr, offset, weight_code, mask, BLOCK, MASKED)
    first_code = FIRST_FORMAT.encode(first, first_inverse)
    store_block(first_ptr, offset, first_code, mask, BLOCK, MASKED)
    second_code = SECOND_FORMAT.encode(second, second_inverse)
    store_block(second_ptr, offset, second_code, mask, BLOCK, MASKED)


@helper
def old_scale(table_ptr, row, tensors, tensor, FORMAT: tl.constexpr):
    if FORMAT.scaled:
        address = tl.load(table_ptr + row * tensors + tensor)
        scale = tl.load(address.to(tl.pointer_type(tl.float32)))
    else:
        scale = 1.0
    return scale


@helper
def kept_scale(scratch_ptr, index, tensors, tensor, FORMAT: tl.constexpr):
    """The scale from before the step, which amax_kernel put aside."""
    if FORMAT.scaled:
        bits = tl.load(scratch_ptr + (OLD_SCALE + index) * tensors + tensor)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = 1.0
    return scale


@helper
def new_scale(table_ptr, row, scratch_ptr, index, tensors, tensor, start, FORMAT: tl.constexpr):
    """Stores the tensor's new scale (its first chunk does) and gives the scale's reciprocal."""
    if FORMAT.scaled:
        bits = tl.load(scratch_ptr + (AMAX + index) * tensors + tensor)
        code_max = tl.full((), FORMAT.code_max, tl.float32)
        scale = tl.math.div_rn(bits.to(tl.float32, bitcast=True), code_max)
        scale = tl.maximum(scale, SMALLEST_SCALE)
        one = tl.full((), 1.0, tl.float32)
        inverse = tl.math.div_rn(one, scale)
        if FORMAT.scale_of_inverse:
            scale = tl.math.div_rn(one, inverse)
        address = tl.load(table_ptr + row * tensors + tensor)
        tl.store(address.to(tl.pointer_type(tl.float32)), scale, mask=start == 0)
    else:
        inverse = 1.0
    return inverse


@helper
def keep_amax(scratch_ptr, index, tensors, tensor, start, amax_bits, scale, FORMAT: tl.constexpr):
    if FORMAT.scaled:
        tl.atomic_max(scratch_ptr + (AMAX + index) * tensors + tensor, amax_bits)
        bits = scale.to(tl.int32, bitcast=True)
        tl.store(scratch_ptr + (OLD_SCALE + index) * tensors + tensor, bits, mask=start == 0)


@helper
def finite_amax_bits(value, mask):
    """The bits of the largest finite magnitude: as integers they order like the numbers."""
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.where(mask & (bits < 0x7F800000), bits, 0), 0)


@helper
def chunk_of(table_ptr, chunks_ptr, tensors, chunks, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr):
    """This program's tensor, first element there, elements, and the blocks that go unmasked."""
    program = tl.program_id(0)
    tensor = tl.load(chunks_ptr + program)
    start = tl.load(chunks_ptr + chunks + program).to(tl.int64) * (BLOCK * ITERATIONS)
    numel = tl.load(table_ptr + NUMEL * tensors + tensor)
    elements = tl.minimum(numel - start, BLOCK * ITERATIONS).to(tl.int32)
    aligned = tl.load(table_ptr + ALIGNED * tensors + tensor).to(tl.int32)
    return tensor, start, elements, (elements // BLOCK) * aligned


@helper
def scalars_of(table_ptr, scalars_ptr, scalar_count, tensors, tensor, RULE: tl.constexpr):
    group = tl.load(table_ptr + GROUP * tensors + tensor)
    return RULE.load(scalars_ptr + group * scalar_count)


@jit(do_not_specialize=["tensors", "chunks", "scalar_count"])
def amax_kernel(
    table_ptr,  # *int64 [ROWS, tensors]
    chunks_ptr,  # *int32 [2, chunks]: the chunk's tensor, its place there in units of chunks
    scalars_ptr,  # *fp32 [groups, scalar_count]
    scratch_ptr,  # *int32 [SCRATCH_ROWS, tensors], zero
    tensors,
    chunks,
    scalar_count,
    GRAD_FORMAT: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr,
    MASTER_FORMAT: tl.constexpr,
    FIRST_FORMAT: tl.constexpr,
    SECOND_FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """What the scales of this step's codes must cover: computes the update and stores only amaxes.

    Computing the update twice moves fewer bytes than an fp32 scratch copy of it would.
    """
    tensor, start, elements, _ = chunk_of(table_ptr, chunks_ptr, tensors, chunks, BLOCK, ITERATIONS)
    scalars = scalars_of(table_ptr, scalars_ptr, scalar_count, tensors, tensor, RULE)
    pointers = pointers_of(
        table_ptr, tensors, tensor, start,
        GRAD_FORMAT, WEIGHT_FORMAT, MASTER_FORMAT, FIRST_FORMAT, SECOND_FORMAT,
    )  # fmt: skip
    master_scale = old_scale(table_ptr, MASTER_SCALE, tensors, tensor, MASTER_FORMAT)
    first_scale = old_scale(table_ptr, FIRST_SCALE, tensors, tensor, FIRST_FORMAT)
    second_scale = old_scale(table_ptr, SECOND_SCALE, tensors, tensor, SECOND_FORMAT)
    scales = (master_scale, first_scale, second_scale)
    master_amax = tl.zeros((), tl.int32)
    first_amax = tl.zeros((), tl.int32)
    second_amax = tl.zeros((), tl.int32)
    block = tl.zeros((), tl.int32)
    while block * BLOCK < elements:
        offset = block * BLOCK
        mask = offset + tl.arange(0, BLOCK) < elements
        param, first, second = updated_block(
            pointers, scales, scalars, offset, mask,
            GRAD_FORMAT, WEIGHT_FORMAT, MASTER_FORMAT, FIRST_FORMAT, SECOND_FORMAT, RULE,
            BLOCK, True,
        )  # fmt: skip
        master_amax = tl.maximum(master_amax, finite_amax_bits(param, mask))
        first_amax = tl.maximum(first_amax, finite_amax_bits(first, mask))
        second_amax = tl.maximum(second_amax, finite_amax_bits(second, mask))
        block += 1
    keep_amax(scratch_ptr, 0, tensors, tensor, start, master_amax, master_scale, MASTER_FORMAT)
    keep_amax(scratch_ptr, 1, tensors, tensor, start, first_amax, first_scale, FIRST_FORMAT)
    keep_amax(scratch_ptr, 2, tensors, tensor, start, second_amax, second_scale, SECOND_FORMAT)


@jit(do_not_specialize=["tensors", "chunks", "scalar_count"])
def step_kernel(
    table_ptr,
    chunks_ptr,
    scalars_ptr,
    scratch_ptr,  # *int32 [SCRATCH_ROWS, tensors] as amax_kernel left it; unread without scales
    tensors,
    chunks,
    scalar_count,
    GRAD_FORMAT: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr,
    MASTER_FORMAT: tl.constexpr,
    FIRST_FORMAT: tl.constexpr,
    SECOND_FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """One optimizer step of one chunk."""
    tensor, start, elements, unmasked = chunk_of(
        table_ptr, chunks_ptr, tensors, chunks, BLOCK, ITERATIONS
    )
    scalars = scalars_of(table_ptr, scalars_ptr, scalar_count, tensors, tensor, RULE)
    pointers = pointers_of(
        table_ptr, tensors, tensor, start,
        GRAD_FORMAT, WEIGHT_FORMAT, MASTER_FORMAT, FIRST_FORMAT, SECOND_FORMAT,
    )  # fmt: skip
    scales = (
        kept_scale(scratch_ptr, 0, tensors, tensor, MASTER_FORMAT),
        kept_scale(scratch_ptr, 1, tensors, tensor, FIRST_FORMAT),
        kept_scale(scratch_ptr, 2, tensors, tensor, SECOND_FORMAT),
    )
    inverses = (
        new_scale(table_ptr, MASTER_SCALE, scratch_ptr, 0, tensors, tensor, start, MASTER_FORMAT),
        new_scale(table_ptr, FIRST_SCALE, scratch_ptr, 1, tensors, tensor, start, FIRST_FORMAT),
        new_scale(table_ptr, SECOND_SCALE, scratch_ptr, 2, tensors, tensor, start, SECOND_FORMAT),
    )
    # while, not range: the interpreter cannot range over a loaded bound under numpy >= 2.4
    block = tl.zeros((), tl.int32)
    while block < unmasked:
        offset = block * BLOCK
        values = updated_block(
            pointers, scales, scalars, offset, None,
            GRAD_FORMAT, WEIGHT_FORMAT, MASTER_FORMAT, FIRST_FORMAT, SECOND_FORMAT, RULE,
            BLOCK, False,
        )  # fmt: skip
        stored_block(
            pointers, inverses, values, offset, None,
            WEIGHT_FORMAT, MASTER_FORMAT, FIRST_FORMAT, SECOND_FORMAT, BLOCK, False,
        )  # fmt: skip
        block += 1
    while block * BLOCK < elements:
        offset = block * BLOCK
        mask = offset + tl.arange(0, BLOCK) < elements
        values = updated_block(
            pointers, scales, scalars, offset, mask,
            GRAD_FORMAT, WEIGHT_FORMAT, MASTER_FORMAT, FIRST_FORMAT, SECOND_FORMAT, RULE,
            BLOCK, True,
        )  # fmt: skip
        stored_block(
            pointers, inverses, values, offset, mask,
            WEIGHT_FORMAT, MASTER_FORMAT, FIRST_FORMAT, SECOND_FORMAT, BLOCK, True,
        )  # fmt: skip
        block += 1
