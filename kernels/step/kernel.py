"""The step: load, decode, update, encode, store, for any number of tensors in one launch.

A program works through one chunk of one tensor. Where the chunk's whole blocks are aligned it loads
without a mask: a mask whose bound the compiler does not know costs the vectorization, 62% of copy
instead of 95%. The path does not change a bit.

Formats with a scale per tensor need the new values' amax before a code can be stored, so their
tensors are worked through twice in the same launch: first for the amaxes, then for the step, whose
programs wait for all of their tensor's first ones (megaopt.kernels.step.scales).

Formats and rules come in as compile-time values (megaopt.kernels.formats, megaopt.kernels.rules).
"""

from __future__ import annotations

from megaopt.kernels.float8.scale import magnitude_bits, reciprocal
from megaopt.kernels.optional_triton import helper, jit, tl
from megaopt.kernels.rules.adam_ieee import canonical
from megaopt.kernels.rules.loading import load_row
from megaopt.kernels.step import controls as order
from megaopt.kernels.step.blocks import (
    load_block,
    loaded_moment,
    loaded_param,
    pointers_of,
    store_block,
    store_where,
    stored_moments,
)
from megaopt.kernels.step.rows import (
    ALIGNED,
    GROUP,
    MASTER_SCALE,
    MOMENT,
    NUMEL,
    VECTORIZED,
    WEIGHT_AMAX,
    WEIGHT_SCALE,
    WEIGHT_SCALE_INV,
)
from megaopt.kernels.step.scales import (
    AMAX_PHASE,
    finish,
    finite_amax_bits,
    keep_amax,
    kept_scale,
    new_scale,
    old_scale,
    take_ticket,
    wait_for_amaxes,
)

# Places in the fp32 controls, as in controls.py.
GRAD_SCALE: tl.constexpr = tl.constexpr(order.GRAD_SCALE)
INVERSE_SCALE: tl.constexpr = tl.constexpr(order.INVERSE_SCALE)
COEFFICIENT: tl.constexpr = tl.constexpr(order.COEFFICIENT)
SKIP: tl.constexpr = tl.constexpr(order.SKIP)
UNSCALED: tl.constexpr = tl.constexpr(order.UNSCALED)


@helper
def controlled_grad(
    grad_ptr,
    grad,
    controls,
    offsets,
    mask,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
    WRITES_GRAD: tl.constexpr,
):
    """The gradient unscaled and clipped, each with one rounding, or with a second one."""
    if CONTROLLED:
        grad_scale, inverse_scale, coefficient, unscaled = controls
        grad = RULE.unscale(grad, grad_scale, inverse_scale)
        if WRITES_GRAD:
            code = FORMATS.grad.encode(canonical(grad), 1.0)
            # a mask, as a branch takes 90 registers where this takes 64
            store_where(unscaled.to(tl.int32), grad_ptr, offsets, code, mask, MASKED)
        grad = rounded_grad(rounded_grad(grad, FORMATS) * coefficient, FORMATS)
    return grad


@helper
def rounded_grad(grad, FORMATS: tl.constexpr):
    if FORMATS.rounds_grad:
        grad = FORMATS.grad.decode(FORMATS.grad.encode(grad, 1.0), 1.0)
    return grad


@helper
def first_lane(table_ptr, tensors, tensor, start, offsets):
    """Whether torch's kernel takes an element as the first of a thread's four (adam_torch)."""
    vectorized = tl.load(table_ptr + VECTORIZED * tensors + tensor)
    index = (start % 65536).to(tl.int32) + offsets
    return tl.where(vectorized != 0, index, index // 512) % 4 == 0


@helper
def updated_block(
    table_ptr,
    place,
    pointers,
    scales,
    scalars,
    controls,
    offsets,
    mask,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
    WITH_PARAM: tl.constexpr,
    WRITES_GRAD: tl.constexpr,
):
    """The new fp32 param and moments of one block; of these nothing is stored.

    Without WITH_PARAM param is neither loaded nor meant: the moments of a rule that do not need it.
    With WRITES_GRAD a gradient that is unscaled is stored so.
    """
    tensors, tensor, start = place
    grad_ptr, weight_ptr, master_ptr, moment_ptrs = pointers
    master_scale, moment_scales = scales
    COUNT: tl.constexpr = FORMATS.moment_count
    grad = FORMATS.grad.decode(load_block(grad_ptr, offsets, mask, MASKED), 1.0)
    grad = controlled_grad(
        grad_ptr, grad, controls, offsets, mask, FORMATS, RULE, CONTROLLED, MASKED, WRITES_GRAD
    )
    if FORMATS.maximize:
        grad = grad * -1.0
    moments = ()
    for index in tl.static_range(COUNT):
        moments += (
            loaded_moment(
                moment_ptrs[index], moment_scales[index], offsets, mask, FORMATS, index, MASKED
            ),
        )
    if WITH_PARAM:
        param = loaded_param(weight_ptr, master_ptr, master_scale, offsets, mask, FORMATS, MASKED)
    else:
        param = tl.zeros_like(grad)
    if RULE.lanes:
        is_rounded = first_lane(table_ptr, tensors, tensor, start, offsets)
        if FORMATS.maximize:
            is_rounded = offsets >= 0
        if CONTROLLED:
            is_rounded = is_rounded & (controls[3] + tl.zeros_like(grad) == 0)
        values = RULE.update(param, moments, grad, scalars, is_rounded)
    else:
        values = RULE.update(param, moments, grad, scalars)
    return values


@helper
def stored_block(
    pointers,
    inverses,
    values,
    weight_scale,
    amax_bits,
    offsets,
    mask,
    FORMATS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encodes and stores what updated_block gave; of fp8 weights also raises the bits of amaxes."""
    _, weight_ptr, master_ptr, moment_ptrs = pointers
    master_inverse, moment_inverses = inverses
    param, moments = values
    if FORMATS.master.joined:
        weight_code, master_code = FORMATS.master.encode(param)
        store_block(master_ptr, offsets, master_code, mask, MASKED)
        store_block(weight_ptr, offsets, weight_code, mask, MASKED)
    elif FORMATS.master.present:
        master_code = FORMATS.master.encode(param, master_inverse)
        store_block(master_ptr, offsets, master_code, mask, MASKED)
    if FORMATS.casts_along:
        value = FORMATS.rounding.decode(FORMATS.rounding.encode(param, 1.0), 1.0)
        if MASKED:
            value = tl.where(mask, value, 0.0)
        amax_bits = tl.maximum(amax_bits, magnitude_bits(value))
        if FORMATS.is_delayed:
            weight_code = FORMATS.weight.encode(value * weight_scale, 1.0)
            store_block(weight_ptr, offsets, weight_code, mask, MASKED)
    elif not (FORMATS.master.joined or FORMATS.cast):
        store_block(weight_ptr, offsets, FORMATS.weight.encode(param, 1.0), mask, MASKED)
    stored_moments(moment_ptrs, moments, moment_inverses, offsets, mask, FORMATS, MASKED)
    return amax_bits


@helper
def weight_scale_of(table_ptr, tensors, tensor, FORMATS: tl.constexpr):
    """What values of fp8 weights are multiplied by under delayed scaling."""
    if FORMATS.is_delayed:
        address = tl.load(table_ptr + WEIGHT_SCALE * tensors + tensor)
        scale = tl.load(address.to(tl.pointer_type(tl.float32)))
    else:
        scale = 1.0
    return scale


@helper
def finish_cast(table_ptr, place, weight_scale, amax_bits, FORMATS: tl.constexpr):
    """Raises the tensor's amax; its first chunk stores scale_inv, which delayed scaling knows."""
    if FORMATS.casts_along:
        tensors, tensor, start = place
        address = tl.load(table_ptr + WEIGHT_AMAX * tensors + tensor)
        tl.atomic_max(address.to(tl.pointer_type(tl.int32)), tl.max(amax_bits, 0))
        if FORMATS.is_delayed:
            address = tl.load(table_ptr + WEIGHT_SCALE_INV * tensors + tensor)
            scale_inv_ptr = address.to(tl.pointer_type(tl.float32))
            tl.store(scale_inv_ptr, reciprocal(weight_scale), mask=start == 0)


@helper
def place_of(chunks_ptr, tensors, chunk, SPAN):
    """A chunk's tensor, and its place there in chunks; chunks_ptr: as table.Chunks has it."""
    tensor = tl.load(chunks_ptr + tensors + 1 + chunk // SPAN)
    while tl.load(chunks_ptr + tensor + 1) <= chunk:
        tensor += 1
    return tensor, chunk - tl.load(chunks_ptr + tensor)


@helper
def chunk_of(table_ptr, tensors, tensor, number, BLOCK, ITERATIONS):
    """Of a tensor's chunk: first element, elements, and the blocks that go unmasked."""
    start = number.to(tl.int64) * (BLOCK * ITERATIONS)
    numel = tl.load(table_ptr + NUMEL * tensors + tensor)
    elements = tl.minimum(numel - start, BLOCK * ITERATIONS).to(tl.int32)
    aligned = tl.load(table_ptr + ALIGNED * tensors + tensor).to(tl.int32)
    return start, elements, (elements // BLOCK) * aligned


@helper
def scalars_of(table_ptr, scalars_ptr, scalar_count, tensors, tensor, RULE: tl.constexpr):
    group = tl.load(table_ptr + GROUP * tensors + tensor)
    return load_row(scalars_ptr + group * scalar_count, RULE.row_length)


@helper
def controls_of(controls_ptr, CONTROLLED: tl.constexpr):
    if CONTROLLED:
        controls = (
            tl.load(controls_ptr + GRAD_SCALE),
            tl.load(controls_ptr + INVERSE_SCALE),
            tl.load(controls_ptr + COEFFICIENT),
            tl.load(controls_ptr + UNSCALED),
        )
    else:
        controls = (1.0, 1.0, 1.0, 0.0)
    return controls


@helper
def old_moment_scale(table_ptr, tensors, tensor, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    return old_scale(table_ptr, MOMENT + 2 * INDEX + 1, tensors, tensor, FORMAT)


@helper
def kept_moment_scale(scratch_ptr, tensors, tensor, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    return kept_scale(scratch_ptr, 1 + INDEX, tensors, tensor, FORMAT, FORMATS.moment_count)


@helper
def new_moment_scale(table_ptr, scratch_ptr, place, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    tensors, tensor, start = place
    row = MOMENT + 2 * INDEX + 1
    return new_scale(table_ptr, row, scratch_ptr, 1 + INDEX, tensors, tensor, start, FORMAT)


@helper
def keep_moment_amax(
    scratch_ptr, place, amax_bits, scale, FORMATS: tl.constexpr, INDEX: tl.constexpr
):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    tensors, tensor, start = place
    keep_amax(
        scratch_ptr, 1 + INDEX, tensors, tensor, start, amax_bits, scale, FORMAT,
        FORMATS.moment_count,
    )  # fmt: skip


@helper
def raised_amax(
    amax_bits, value, mask, FORMATS: tl.constexpr, INDEX: tl.constexpr, MASKED: tl.constexpr
):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    if MASKED:
        value = tl.where(mask, value, 0.0)
    return finite_amax_bits(amax_bits, value, FORMAT)


@helper
def raised_amaxes(amaxes, moments, mask, FORMATS: tl.constexpr, MASKED: tl.constexpr):
    """The amaxes of the moments, raised to those of a block."""
    COUNT: tl.constexpr = FORMATS.moment_count
    raised = ()
    for index in tl.static_range(COUNT):
        raised += (raised_amax(amaxes[index], moments[index], mask, FORMATS, index, MASKED),)
    return raised


@helper
def find_amaxes(
    table_ptr,
    scratch_ptr,
    place,
    pointers,
    scalars,
    controls,
    elements,
    unmasked,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A chunk's part in what the new scales must cover: the update, of which nothing is stored.

    Computing the update twice moves fewer bytes than an fp32 scratch copy of it would.
    """
    tensors, tensor, start = place
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    COUNT: tl.constexpr = FORMATS.moment_count
    moment_scales, moment_amaxes = (), ()
    for index in tl.static_range(COUNT):
        moment_scales += (old_moment_scale(table_ptr, tensors, tensor, FORMATS, index),)
        moment_amaxes += (tl.zeros((BLOCK,), tl.int32),)
    master_scale = old_scale(table_ptr, MASTER_SCALE, tensors, tensor, MASTER_FORMAT)
    scales = (master_scale, moment_scales)
    WITH_PARAM: tl.constexpr = RULE.moments_use_param or FORMATS.master.scaled
    master_amax = tl.zeros((BLOCK,), tl.int32)
    block = tl.zeros((), tl.int32)
    while block < unmasked:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        param, moments = updated_block(
            table_ptr, place, pointers, scales, scalars, controls, offsets, None,
            FORMATS, RULE, CONTROLLED, False, WITH_PARAM, False,
        )  # fmt: skip
        master_amax = finite_amax_bits(master_amax, param, MASTER_FORMAT)
        moment_amaxes = raised_amaxes(moment_amaxes, moments, None, FORMATS, False)
        block += 1
    while block * BLOCK < elements:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < elements
        param, moments = updated_block(
            table_ptr, place, pointers, scales, scalars, controls, offsets, mask,
            FORMATS, RULE, CONTROLLED, True, WITH_PARAM, False,
        )  # fmt: skip
        master_amax = finite_amax_bits(master_amax, tl.where(mask, param, 0.0), MASTER_FORMAT)
        moment_amaxes = raised_amaxes(moment_amaxes, moments, mask, FORMATS, True)
        block += 1
    keep_amax(
        scratch_ptr, 0, tensors, tensor, start, master_amax, master_scale, MASTER_FORMAT, COUNT
    )
    for index in tl.static_range(COUNT):
        keep_moment_amax(
            scratch_ptr, place, moment_amaxes[index], moment_scales[index], FORMATS, index
        )


@helper
def step_chunk(
    table_ptr,
    scratch_ptr,
    place,
    pointers,
    scalars,
    controls,
    elements,
    unmasked,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The step of one chunk."""
    tensors, tensor, start = place
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    COUNT: tl.constexpr = FORMATS.moment_count
    moment_scales, moment_inverses = (), ()
    for index in tl.static_range(COUNT):
        moment_scales += (kept_moment_scale(scratch_ptr, tensors, tensor, FORMATS, index),)
        moment_inverses += (new_moment_scale(table_ptr, scratch_ptr, place, FORMATS, index),)
    scales = (kept_scale(scratch_ptr, 0, tensors, tensor, MASTER_FORMAT, COUNT), moment_scales)
    master_inverse = new_scale(
        table_ptr, MASTER_SCALE, scratch_ptr, 0, tensors, tensor, start, MASTER_FORMAT
    )
    inverses = (master_inverse, moment_inverses)
    weight_scale = weight_scale_of(table_ptr, tensors, tensor, FORMATS)
    amax_bits = tl.zeros((BLOCK,), tl.int32)
    # while, not range: the interpreter cannot range over a loaded bound under numpy >= 2.4
    block = tl.zeros((), tl.int32)
    while block < unmasked:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        values = updated_block(
            table_ptr, place, pointers, scales, scalars, controls, offsets, None,
            FORMATS, RULE, CONTROLLED, False, True, FORMATS.writes_grad,
        )  # fmt: skip
        amax_bits = stored_block(
            pointers, inverses, values, weight_scale, amax_bits, offsets, None, FORMATS, False
        )
        block += 1
    while block * BLOCK < elements:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < elements
        values = updated_block(
            table_ptr, place, pointers, scales, scalars, controls, offsets, mask,
            FORMATS, RULE, CONTROLLED, True, True, FORMATS.writes_grad,
        )  # fmt: skip
        amax_bits = stored_block(
            pointers, inverses, values, weight_scale, amax_bits, offsets, mask, FORMATS, True
        )
        block += 1
    finish_cast(table_ptr, place, weight_scale, amax_bits, FORMATS)


@jit(do_not_specialize=["tensors", "chunks", "scalar_count"])
def step_kernel(
    table_ptr,  # *int64 [Formats.row_count, tensors]
    chunks_ptr,  # *int32 as table.Chunks; if scaled [3, chunks]: tensor, place in chunks, phase
    scalars_ptr,  # *fp32 [groups, scalar_count]
    controls_ptr,  # *fp32 [CONTROLS]; unread unless CONTROLLED
    scratch_ptr,  # *int32 as scales.py lays it out, zero; unread without scales
    tensors,
    chunks,
    scalar_count,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """One optimizer step of one chunk, or, for a scale per tensor, what has to come before it."""
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    program = tl.program_id(0)
    if FORMATS.scaled:
        program = take_ticket(scratch_ptr, tensors, chunks, FORMATS.moment_count)
        tensor = tl.load(chunks_ptr + program)
        number = tl.load(chunks_ptr + chunks + program)
    else:
        tensor, number = place_of(chunks_ptr, tensors, program, SPAN)
    start, elements, unmasked = chunk_of(table_ptr, tensors, tensor, number, BLOCK, ITERATIONS)
    place = (tensors, tensor, start)
    scalars = scalars_of(table_ptr, scalars_ptr, scalar_count, tensors, tensor, RULE)
    controls = controls_of(controls_ptr, CONTROLLED)
    pointers = pointers_of(table_ptr, tensors, tensor, start, FORMATS)
    if FORMATS.scaled:
        numel = tl.load(table_ptr + NUMEL * tensors + tensor)
        own_chunks = tl.cdiv(numel, BLOCK * ITERATIONS).to(tl.int32)
        if tl.load(chunks_ptr + 2 * chunks + program) == AMAX_PHASE:
            find_amaxes(
                table_ptr, scratch_ptr, place, pointers, scalars, controls, elements, unmasked,
                FORMATS, RULE, CONTROLLED, BLOCK,
            )  # fmt: skip
        else:
            wait_for_amaxes(scratch_ptr, tensors, tensor, own_chunks, FORMATS.moment_count)
            step_chunk(
                table_ptr, scratch_ptr, place, pointers, scalars, controls, elements, unmasked,
                FORMATS, RULE, CONTROLLED, BLOCK,
            )  # fmt: skip
        finish(scratch_ptr, tensors, tensor, own_chunks, FORMATS.moment_count)
    else:
        step_chunk(
            table_ptr, scratch_ptr, place, pointers, scalars, controls, elements, unmasked,
            FORMATS, RULE, CONTROLLED, BLOCK,
        )  # fmt: skip
