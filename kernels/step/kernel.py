"""The step: load, decode, update, encode, store, for any number of tensors in one launch.

A program works through one chunk of one tensor. Where the chunk's whole blocks are aligned it loads
without a mask: a mask whose bound the compiler does not know costs the vectorization, 62% of copy
instead of 95%. The path does not change a bit.

Formats with a scale per tensor need the new values' amax before a code can be stored, so their
tensors are worked through twice in the same launch: first for the amaxes, then for the step, whose
programs wait for all of their tensor's first ones (megaopt.kernels.step.scales).

Formats, rules, and what stores weights come in as compile-time values (megaopt.kernels.formats,
megaopt.kernels.rules, megaopt.kernels.quantizers).
"""

from __future__ import annotations

from megaopt.kernels.optional_triton import helper, jit, tl
from megaopt.kernels.rules.loading import load_row
from megaopt.kernels.step import controls as order
from megaopt.kernels.step.blocks import (
    first_block,
    first_masked,
    inside,
    lead_of,
    next_masked,
    offsets_of,
    pointers_of,
    rows_of,
)
from megaopt.kernels.step.draws import block_words, draw_of
from megaopt.kernels.step.rows import (
    ALIGNED,
    GROUP,
    MASTER_SCALE,
    MOMENT,
    NUMEL,
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
from megaopt.kernels.step.update import loaded_and_updated, step_grad, stored_block, updated
from megaopt.kernels.step.words import load_words, numbers_of

# Places in the fp32 controls, as in controls.py.
GRAD_SCALE: tl.constexpr = tl.constexpr(order.GRAD_SCALE)
INVERSE_SCALE: tl.constexpr = tl.constexpr(order.INVERSE_SCALE)
COEFFICIENT: tl.constexpr = tl.constexpr(order.COEFFICIENT)
SKIP: tl.constexpr = tl.constexpr(order.SKIP)
UNSCALED: tl.constexpr = tl.constexpr(order.UNSCALED)


@helper
def place_of(chunks_ptr, tensors, chunk, SPAN):
    """A chunk's tensor, and its place there in chunks; chunks_ptr: as table.Chunks has it."""
    tensor = tl.load(chunks_ptr + tensors + 1 + chunk // SPAN)
    while tl.load(chunks_ptr + tensor + 1) <= chunk:
        tensor += 1
    return tensor, chunk - tl.load(chunks_ptr + tensor)


@helper
def chunk_of(table_ptr, tensors, tensor, number, lead, BLOCK, ITERATIONS):
    """Of a tensor's chunk: first element, elements, and the blocks that go unmasked.

    lead: elements before the tensor, from which on its first chunk is counted.
    """
    start = number.to(tl.int64) * (BLOCK * ITERATIONS) - lead
    numel = tl.load(table_ptr + NUMEL * tensors + tensor)
    elements = tl.minimum(numel - start, BLOCK * ITERATIONS).to(tl.int32)
    aligned = tl.load(table_ptr + ALIGNED * tensors + tensor).to(tl.int32)
    return start, elements, (elements // BLOCK) * aligned


@helper
def scalars_of(table_ptr, scalars_ptr, scalar_count, tensors, tensor, RULE: tl.constexpr):
    group = tl.load(table_ptr + GROUP * tensors + tensor)
    return load_row(scalars_ptr + group * scalar_count, RULE.row_length)


@helper
def draw_row(table_ptr, scalars_ptr, scalar_count, tensors, tensor, RULE: tl.constexpr):
    """To what a tensor's group has for random bits, behind the rule's own numbers."""
    group = tl.load(table_ptr + GROUP * tensors + tensor)
    return scalars_ptr + group * scalar_count + RULE.row_length


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
def param_scale(table_ptr, tensors, tensor, master_scale, FORMATS: tl.constexpr):
    """What the codes of what is updated are multiplied by: a master's, or an fp8 weight's."""
    scale = master_scale
    if FORMATS.in_place:
        address = tl.load(table_ptr + WEIGHT_SCALE_INV * tensors + tensor)
        scale = tl.load(address.to(tl.pointer_type(tl.float32)))
    return scale


@helper
def kept_moment_scale(
    table_ptr, scratch_ptr, place, lead, FORMATS: tl.constexpr, INDEX: tl.constexpr
):
    """The scale from before the step; of moments in blocks a pointer to the chunk's scales."""
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    tensors, tensor, start = place
    if FORMAT.block:
        address = tl.load(table_ptr + (MOMENT + 2 * INDEX + 1) * tensors + tensor)
        scale = address.to(tl.pointer_type(tl.uint8)) + (start + lead) // FORMAT.block
    else:
        scale = kept_scale(scratch_ptr, 1 + INDEX, tensors, tensor, FORMAT, FORMATS.moment_count)
    return scale


@helper
def new_moment_scale(
    table_ptr, scratch_ptr, place, kept, FORMATS: tl.constexpr, INDEX: tl.constexpr
):
    """The reciprocal of the new scale; of moments in blocks where the new ones go, `kept`."""
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    tensors, tensor, start = place
    row = MOMENT + 2 * INDEX + 1
    if FORMAT.block:
        inverse = kept
    else:
        inverse = new_scale(table_ptr, row, scratch_ptr, 1 + INDEX, tensors, tensor, start, FORMAT)
    return inverse


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
    scales = (param_scale(table_ptr, tensors, tensor, master_scale, FORMATS), moment_scales)
    WITH_PARAM: tl.constexpr = RULE.moments_use_param or FORMATS.master.scaled
    master_amax = tl.zeros((BLOCK,), tl.int32)
    block = tl.zeros((), tl.int32)
    while block < unmasked:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        param, moments = loaded_and_updated(
            table_ptr, place, pointers, scales, scalars, controls, offsets, 0, elements, None,
            FORMATS, RULE, CONTROLLED, False, WITH_PARAM, False,
        )  # fmt: skip
        master_amax = finite_amax_bits(master_amax, param, MASTER_FORMAT)
        moment_amaxes = raised_amaxes(moment_amaxes, moments, None, FORMATS, False)
        block += 1
    while block * BLOCK < elements:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < elements
        param, moments = loaded_and_updated(
            table_ptr, place, pointers, scales, scalars, controls, offsets, 0, elements, mask,
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
def store_step(
    place,
    pointers,
    inverses,
    values,
    draw,
    weight_scale,
    amax_bits,
    block,
    rows,
    elements,
    mask,
    offsets,
    FORMATS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encodes and stores a block's new values; the amaxes raised to its own."""
    words = block_words(
        draw, place[2], block * BLOCK, offsets, FORMATS.draws, SPLIT, BLOCK, not MASKED
    )
    return stored_block(
        pointers, inverses, values, weight_scale, amax_bits, words, offsets, rows, elements, mask,
        FORMATS, MASKED,
    )  # fmt: skip


@helper
def step_block(
    table_ptr,
    place,
    pointers,
    scales,
    inverses,
    scalars,
    controls,
    draw,
    weight_scale,
    amax_bits,
    block,
    elements,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The step of one block; the amaxes raised to its own."""
    offsets = offsets_of(block, FORMATS, BLOCK, WIDTH)
    rows = rows_of(block, FORMATS, BLOCK, WIDTH)
    mask = inside(offsets, place[2], elements, FORMATS) if MASKED else None
    values = loaded_and_updated(
        table_ptr, place, pointers, scales, scalars, controls, offsets, rows, elements, mask,
        FORMATS, RULE, CONTROLLED, MASKED, RULE.reads_param, FORMATS.writes_grad,
    )  # fmt: skip
    return store_step(
        place, pointers, inverses, values, draw, weight_scale, amax_bits, block, rows, elements,
        mask, offsets, FORMATS, SPLIT, BLOCK, MASKED,
    )  # fmt: skip


@helper
def step_ahead(
    table_ptr,
    place,
    pointers,
    scales,
    inverses,
    scalars,
    controls,
    draw,
    weight_scale,
    amax_bits,
    block,
    elements,
    unmasked,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The unmasked blocks from `block` on, each with the next one's codes on their way.

    Where arithmetic takes as long as memory, few warps find room on a multiprocessor, and waiting
    for loads was a third of their time. Returns the amaxes, raised to theirs, and the block behind.
    """
    if block < unmasked:
        rows = rows_of(block, FORMATS, BLOCK, WIDTH)
        words = load_words(pointers, scales[1], rows, FORMATS, WIDTH, RULE.reads_param)
        while block < unmasked:
            # the last one's again, which nobody takes
            behind = rows_of(tl.minimum(block + 1, unmasked - 1), FORMATS, BLOCK, WIDTH)
            following = load_words(pointers, scales[1], behind, FORMATS, WIDTH, RULE.reads_param)
            offsets = offsets_of(block, FORMATS, BLOCK, WIDTH)
            grad, param, moments = numbers_of(words, scales, FORMATS, WIDTH, RULE.reads_param)
            grad = step_grad(
                pointers[0], grad, controls, offsets, None,
                FORMATS, RULE, CONTROLLED, False, FORMATS.writes_grad,
            )  # fmt: skip
            values = updated(
                table_ptr, place, grad, param, moments, scalars, controls, offsets,
                FORMATS, RULE, CONTROLLED,
            )  # fmt: skip
            rows = rows_of(block, FORMATS, BLOCK, WIDTH)
            amax_bits = store_step(
                place, pointers, inverses, values, draw, weight_scale, amax_bits, block, rows,
                elements, None, offsets, FORMATS, SPLIT, BLOCK, False,
            )  # fmt: skip
            words = following
            block += 1
    return amax_bits, block


@helper
def step_chunk(
    table_ptr,
    scratch_ptr,
    place,
    lead,
    pointers,
    scalars,
    controls,
    draw,
    elements,
    unmasked,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The step of one chunk."""
    tensors, tensor, start = place
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    COUNT: tl.constexpr = FORMATS.moment_count
    moment_scales, moment_inverses = (), ()
    for index in tl.static_range(COUNT):
        kept = kept_moment_scale(table_ptr, scratch_ptr, place, lead, FORMATS, index)
        moment_scales += (kept,)
        moment_inverses += (new_moment_scale(table_ptr, scratch_ptr, place, kept, FORMATS, index),)
    kept = kept_scale(scratch_ptr, 0, tensors, tensor, MASTER_FORMAT, COUNT)
    scales = (param_scale(table_ptr, tensors, tensor, kept, FORMATS), moment_scales)
    master_inverse = new_scale(
        table_ptr, MASTER_SCALE, scratch_ptr, 0, tensors, tensor, start, MASTER_FORMAT
    )
    inverses = (master_inverse, moment_inverses)
    weight_scale = FORMATS.store.begin(table_ptr, place, FORMATS)
    amax_bits = tl.zeros_like(offsets_of(0, FORMATS, BLOCK, WIDTH))
    # while, not range: the interpreter cannot range over a loaded bound under numpy >= 2.4
    block = first_block(start, FORMATS)
    if FORMATS.loads_ahead and WIDTH == 8:
        amax_bits, block = step_ahead(
            table_ptr, place, pointers, scales, inverses, scalars, controls, draw, weight_scale,
            amax_bits, block, elements, unmasked, FORMATS, RULE, CONTROLLED, SPLIT, BLOCK, WIDTH,
        )  # fmt: skip
    else:
        while block < unmasked:
            amax_bits = step_block(
                table_ptr, place, pointers, scales, inverses, scalars, controls, draw, weight_scale,
                amax_bits, block, elements, FORMATS, RULE, CONTROLLED, SPLIT, BLOCK, WIDTH, False,
            )  # fmt: skip
            block += 1
    masked = first_masked(block, start, FORMATS)
    while masked * BLOCK < elements:
        amax_bits = step_block(
            table_ptr, place, pointers, scales, inverses, scalars, controls, draw, weight_scale,
            amax_bits, masked, elements, FORMATS, RULE, CONTROLLED, SPLIT, BLOCK, WIDTH, True,
        )  # fmt: skip
        masked = next_masked(masked, block, FORMATS)
    FORMATS.store.finish(table_ptr, place, weight_scale, amax_bits, FORMATS)


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
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,  # elements that a thread takes; where moments are in blocks
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
    lead = lead_of(table_ptr, tensors, tensor, FORMATS)
    start, elements, unmasked = chunk_of(
        table_ptr, tensors, tensor, number, lead, BLOCK, ITERATIONS
    )
    place = (tensors, tensor, start)
    scalars = scalars_of(table_ptr, scalars_ptr, scalar_count, tensors, tensor, RULE)
    controls = controls_of(controls_ptr, CONTROLLED)
    pointers = pointers_of(table_ptr, tensors, tensor, start, FORMATS)
    row_ptr = draw_row(table_ptr, scalars_ptr, scalar_count, tensors, tensor, RULE)
    draw = draw_of(table_ptr, tensors, tensor, row_ptr, FORMATS.draws)
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
                table_ptr, scratch_ptr, place, lead, pointers, scalars, controls, draw, elements,
                unmasked, FORMATS, RULE, CONTROLLED, SPLIT, BLOCK, WIDTH,
            )  # fmt: skip
        finish(scratch_ptr, tensors, tensor, own_chunks, FORMATS.moment_count)
    else:
        step_chunk(
            table_ptr, scratch_ptr, place, lead, pointers, scalars, controls, draw, elements,
            unmasked, FORMATS, RULE, CONTROLLED, SPLIT, BLOCK, WIDTH,
        )  # fmt: skip
