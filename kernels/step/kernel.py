"""The step: load, decode, update, encode, store, for any number of tensors in one launch.

A program works through one chunk of one tensor. Where the chunk's whole blocks are aligned it loads
without a mask: a mask whose bound the compiler does not know costs the vectorization, 62% of copy
instead of 95%. The path does not change a bit.

Formats with a scale per tensor need the new values' amax before a code can be stored, so their
tensors are worked through twice in the same launch: first for the amaxes, then for the step, whose
programs wait for all of their tensor's first ones (megaopt.kernels.chunks.scales).

Formats, rules, and what stores weights come in as compile-time values (megaopt.kernels.formats,
megaopt.kernels.rules, megaopt.kernels.quantizers).
"""

from __future__ import annotations

from megaopt.kernels.chunks.blocks import (
    first_block,
    first_masked,
    inside,
    lead_of,
    next_masked,
    offsets_of,
    pointers_of,
    rows_of,
)
from megaopt.kernels.chunks.chunk import (
    Block,
    Chunk,
    ChunkScales,
    Column,
    chunk_of,
    entry,
    place_of,
)
from megaopt.kernels.chunks.codes import load_words, numbers_of
from megaopt.kernels.chunks.draws import block_words, draw_of
from megaopt.kernels.chunks.rows import (
    GROUP,
    MASTER_SCALE,
    MOMENT,
    NUMEL,
    WEIGHT_SCALE_INV,
)
from megaopt.kernels.chunks.scales import (
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
from megaopt.kernels.digest.step import (
    add_memory,
    add_sums,
    marks_of,
    no_sums,
    read_code,
    with_block,
)
from megaopt.kernels.optional_triton import helper, jit, tl
from megaopt.kernels.rules.loading import load_row
from megaopt.kernels.step import controls as order
from megaopt.kernels.step.update import controlled_grad, loaded_and_updated, stored_block, updated

# Places in a row of the fp32 controls, as in controls.py, and its length.
GRAD_SCALE: tl.constexpr = tl.constexpr(order.GRAD_SCALE)
INVERSE_SCALE: tl.constexpr = tl.constexpr(order.INVERSE_SCALE)
COEFFICIENT: tl.constexpr = tl.constexpr(order.COEFFICIENT)
SKIP: tl.constexpr = tl.constexpr(order.SKIP)
UNSCALED: tl.constexpr = tl.constexpr(order.UNSCALED)
CONTROLS: tl.constexpr = tl.constexpr(order.COUNT)


@helper
def scalars_of(column, scalars_ptr, scalar_count, RULE: tl.constexpr):
    return load_row(scalars_ptr + entry(column, GROUP) * scalar_count, RULE.row_length)


@helper
def draw_row(column, scalars_ptr, scalar_count, RULE: tl.constexpr):
    """Returns a pointer to a group's numbers for random bits, behind the rule's own numbers."""
    return scalars_ptr + entry(column, GROUP) * scalar_count + RULE.row_length


@helper
def is_left_out(column, controls_ptr):
    """Returns whether the controls of a tensor's group leave it as it is."""
    return tl.load(controls_ptr + entry(column, GROUP) * CONTROLS + SKIP) != 0


@helper
def controls_of(column, controls_ptr, CONTROLLED: tl.constexpr):
    if CONTROLLED:
        # scalar loads from the group's row, fp32 [CONTROLS]
        row_ptr = controls_ptr + entry(column, GROUP) * CONTROLS
        controls = (
            tl.load(row_ptr + GRAD_SCALE),
            tl.load(row_ptr + INVERSE_SCALE),
            tl.load(row_ptr + COEFFICIENT),
            tl.load(row_ptr + UNSCALED),
        )
    else:
        # never read: without controls gradients are taken as they are
        controls = (1.0, 1.0, 1.0, 0.0)
    return controls


@helper
def old_moment_scale(column, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    return old_scale(column, MOMENT + 2 * INDEX + 1, FORMAT)


@helper
def param_scale(column, master_scale, FORMATS: tl.constexpr):
    """The scale of the codes that are updated: a master's, or scale_inv of an fp8 weight."""
    scale = master_scale
    if FORMATS.in_place:
        # no master: the weight's codes are read, with the scale_inv they were stored with
        scale = tl.load(entry(column, WEIGHT_SCALE_INV).to(tl.pointer_type(tl.float32)))
    return scale


@helper
def kept_moment_scale(scratch_ptr, column, start, lead, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    """The scale from before the step; of moments in blocks a pointer to the chunk's scales."""
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    if FORMAT.block:
        # uint8 scales, one for each block counted from the parameter's first element
        address = entry(column, MOMENT + 2 * INDEX + 1)
        scale = address.to(tl.pointer_type(tl.uint8)) + (start + lead) // FORMAT.block
    else:
        # fp32, one number; the scale in memory may be the new one by now
        scale = kept_scale(scratch_ptr, 1 + INDEX, column, FORMAT, FORMATS.moment_count)
    return scale


@helper
def new_moment_scale(scratch_ptr, column, start, scale, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    """The reciprocal of the new scale; of moments in blocks where the new ones go, `scale`."""
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    if FORMAT.block:
        inverse = scale
    else:
        row = MOMENT + 2 * INDEX + 1
        inverse = new_scale(scratch_ptr, 1 + INDEX, column, row, start, FORMAT)
    return inverse


@helper
def keep_moment_amax(
    scratch_ptr, chunk, amax_bits, scale, FORMATS: tl.constexpr, INDEX: tl.constexpr
):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    keep_amax(scratch_ptr, 1 + INDEX, chunk, amax_bits, scale, FORMAT, FORMATS.moment_count)


@helper
def raised_amax(amax_bits, value, mask, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    if mask is not None:
        # what lies outside the tensor does not count
        value = tl.where(mask, value, 0.0)
    return finite_amax_bits(amax_bits, value, FORMAT)


@helper
def raised_amaxes(amaxes, values, mask, FORMATS: tl.constexpr):
    """The amaxes of the master and of the moments, raised to those of a block."""
    master, moments = amaxes
    param, new_moments = values
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    COUNT: tl.constexpr = FORMATS.moment_count
    # the master's, int32 [BLOCK]; masked elements count as 0
    if mask is not None:
        param = tl.where(mask, param, 0.0)
    master = finite_amax_bits(master, param, MASTER_FORMAT)
    # the moments', one int32 [BLOCK] each
    raised = ()
    for index in tl.static_range(COUNT):
        raised += (raised_amax(moments[index], new_moments[index], mask, FORMATS, index),)
    return master, raised


@helper
def find_amaxes(scratch_ptr, chunk, unmasked, SPEC: tl.constexpr):
    """A chunk's part in what the new scales must cover: the update, of which nothing is stored.

    Computing the update twice moves fewer bytes than an fp32 scratch copy of it would.
    """
    AMAXES: tl.constexpr = SPEC.amaxes
    FORMATS: tl.constexpr = SPEC.formats
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    COUNT: tl.constexpr = FORMATS.moment_count
    BLOCK: tl.constexpr = SPEC.block
    # the scales of the codes in memory, and amaxes for each lane of the program, int32 [BLOCK]
    moment_scales, moment_amaxes = (), ()
    for index in tl.static_range(COUNT):
        moment_scales += (old_moment_scale(chunk.column, FORMATS, index),)
        moment_amaxes += (tl.zeros((BLOCK,), tl.int32),)
    master_scale = old_scale(chunk.column, MASTER_SCALE, MASTER_FORMAT)
    param = param_scale(chunk.column, master_scale, FORMATS)
    # no inverses: this phase stores no codes
    scales = ChunkScales(param, moment_scales, 1.0, (), 1.0)
    amaxes = (tl.zeros((BLOCK,), tl.int32), moment_amaxes)
    index = tl.zeros((), tl.int32)
    # whole blocks, without a mask
    while index < unmasked:
        block = Block(offsets_of(index, SPEC), 0, None)
        values = loaded_and_updated(chunk, scales, block, AMAXES)
        amaxes = raised_amaxes(amaxes, values, None, FORMATS)
        index += 1
    # the rest of the chunk, masked
    while index * BLOCK < chunk.elements:
        offsets = offsets_of(index, SPEC)
        block = Block(offsets, 0, offsets < chunk.elements)
        values = loaded_and_updated(chunk, scales, block, AMAXES)
        amaxes = raised_amaxes(amaxes, values, block.mask, FORMATS)
        index += 1
    # lanes reduced and sent to the tensor's scratch; slot 0 is the master, 1 + i moment i
    keep_amax(scratch_ptr, 0, chunk, amaxes[0], master_scale, MASTER_FORMAT, COUNT)
    for index in tl.static_range(COUNT):
        keep_moment_amax(scratch_ptr, chunk, amaxes[1][index], moment_scales[index], FORMATS, index)


@helper
def drawn_words(chunk, index, block, SPEC: tl.constexpr):
    """The random words of a block's elements."""
    FORMATS: tl.constexpr = SPEC.formats
    IN_QUADS: tl.constexpr = block.mask is None
    return block_words(
        chunk.draw, chunk.start, index * SPEC.block, block.offsets, FORMATS.draws, SPEC.split,
        SPEC.block, IN_QUADS,
    )  # fmt: skip


@helper
def store_step(chunk, scales, index, block, values, amax_bits, SPEC: tl.constexpr):
    """Encodes and stores a block's new values; the amaxes raised to its own."""
    FORMATS: tl.constexpr = SPEC.formats
    words = drawn_words(chunk, index, block, SPEC)
    return stored_block(chunk, scales, block, values, amax_bits, words, FORMATS)


@helper
def step_block(
    chunk, scales, marks, index, amax_bits, sums, SPEC: tl.constexpr, MASKED: tl.constexpr
):
    """The step of one block; the amaxes raised to its own, and the digests' sums with its own."""
    FORMATS: tl.constexpr = SPEC.formats
    offsets = offsets_of(index, SPEC)
    # made here: Triton 3.6 returns no None from a function
    mask = inside(offsets, chunk.start, chunk.elements, FORMATS) if MASKED else None
    block = Block(offsets, rows_of(index, SPEC), mask)
    # read before the update: a step that unscales may write over the gradient
    grad_code = read_code(chunk, block, SPEC)
    values = loaded_and_updated(chunk, scales, block, SPEC)
    amax_bits = store_step(chunk, scales, index, block, values, amax_bits, SPEC)
    if SPEC.digest_count:
        # the same words again, for the digest of the codes that were stored
        words = drawn_words(chunk, index, block, SPEC)
        sums = with_block(sums, grad_code, block, values, words, marks, index, SPEC)
    return amax_bits, sums


@helper
def step_ahead(chunk, scales, index, unmasked, amax_bits, SPEC: tl.constexpr):
    """The unmasked blocks from `index` on, each with the next one's codes on their way.

    Where arithmetic takes as long as memory, few warps find room on a multiprocessor, and waiting
    for loads was a third of their time. Returns the amaxes, raised to theirs, and the block behind.
    """
    if index < unmasked:
        # codes of the first block; each round then loads those of the block behind
        words = load_words(chunk.pointers, scales.moments, rows_of(index, SPEC), SPEC)
        while index < unmasked:
            # the last one's again, which nobody takes
            behind = rows_of(tl.minimum(index + 1, unmasked - 1), SPEC)
            following = load_words(chunk.pointers, scales.moments, behind, SPEC)
            block = Block(offsets_of(index, SPEC), rows_of(index, SPEC), None)
            # fp32 tiles [rows, 8]; the loads for `following` are in flight during this arithmetic
            grad, param, moments = numbers_of(words, scales, SPEC)
            grad = controlled_grad(grad, chunk, block, SPEC)
            values = updated(grad, param, moments, chunk, block.offsets, SPEC)
            amax_bits = store_step(chunk, scales, index, block, values, amax_bits, SPEC)
            words = following
            index += 1
    return amax_bits, index


@helper
def step_chunk(scratch_ptr, chunk, lead, unmasked, marks, SPEC: tl.constexpr):
    """The step of one chunk; the sums of its digests, where there are any."""
    FORMATS: tl.constexpr = SPEC.formats
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    COUNT: tl.constexpr = FORMATS.moment_count
    column, start = chunk.column, chunk.start
    # the moments' factors: to read by (old), and to store by (reciprocal of new)
    moment_scales, moment_inverses = (), ()
    for index in tl.static_range(COUNT):
        scale = kept_moment_scale(scratch_ptr, column, start, lead, FORMATS, index)
        moment_scales += (scale,)
        moment_inverses += (new_moment_scale(scratch_ptr, column, start, scale, FORMATS, index),)
    # the same of the master, and of the weight what its store wants
    scale = kept_scale(scratch_ptr, 0, column, MASTER_FORMAT, COUNT)
    param = param_scale(column, scale, FORMATS)
    master_inverse = new_scale(scratch_ptr, 0, column, MASTER_SCALE, start, MASTER_FORMAT)
    weight_scale = FORMATS.store.begin(column, FORMATS)
    scales = ChunkScales(param, moment_scales, master_inverse, moment_inverses, weight_scale)
    # int32, the shape of a block: what the store raises to the new weights' amaxes
    amax_bits = tl.zeros_like(offsets_of(0, SPEC))
    sums = no_sums(SPEC)

    # unmasked blocks; with 8 elements a thread, their loads run one block ahead
    # while, not range: the interpreter cannot range over a loaded bound under numpy >= 2.4
    index = first_block(start, FORMATS)
    if SPEC.width == 8:
        amax_bits, index = step_ahead(chunk, scales, index, unmasked, amax_bits, SPEC)
    else:
        while index < unmasked:
            amax_bits, sums = step_block(chunk, scales, marks, index, amax_bits, sums, SPEC, False)
            index += 1

    # masked blocks: the chunk's end, and in blocks of scales one that begins before the tensor
    masked = first_masked(index, start, FORMATS)
    while masked * SPEC.block < chunk.elements:
        amax_bits, sums = step_block(chunk, scales, marks, masked, amax_bits, sums, SPEC, True)
        masked = next_masked(masked, index, FORMATS)

    # the weights' amaxes leave the program here
    FORMATS.store.finish(column, start, weight_scale, amax_bits, FORMATS)
    return sums


@jit(do_not_specialize=["tensors", "chunks", "scalar_count"])
def step_kernel(
    table_ptr,  # *int64 [Formats.row_count, tensors]
    chunks_ptr,  # *int32 as table.Chunks; if scaled [3, chunks]: tensor, place in chunks, phase
    scalars_ptr,  # *fp32 [groups, scalar_count]
    controls_ptr,  # *fp32 [groups, CONTROLS]; unread unless controlled
    scratch_ptr,  # *int32 as scales.py lays it out, zero; unread without scales
    digests_ptr,  # *int64 [tensors, digests, 2], added to; None without digests
    tensors,
    chunks,
    scalar_count,
    SPEC: tl.constexpr,
):
    """One optimizer step of one chunk, or, for a scale per tensor, what has to come before it."""
    FORMATS: tl.constexpr = SPEC.formats
    RULE: tl.constexpr = SPEC.rule
    BLOCK: tl.constexpr = SPEC.geometry.block
    ITERATIONS: tl.constexpr = SPEC.geometry.iterations
    # which tensor, and which of its chunks
    program = tl.program_id(0)
    if FORMATS.scaled:
        # the ticket, not the program id: work begins in the order of the table of chunks
        program = take_ticket(scratch_ptr, tensors, chunks, FORMATS.moment_count)
        tensor = tl.load(chunks_ptr + program)
        number = tl.load(chunks_ptr + chunks + program)
    else:
        tensor, number = place_of(chunks_ptr, tensors, program, SPEC.geometry.span)

    # a skipped group: nothing is stored, but both phases are counted, so that scratch ends at zero
    column = Column(table_ptr, tensors, tensor)
    if SPEC.controlled:  # noqa: SIM102 at compile time, the other at run time
        if is_left_out(column, controls_ptr):
            if FORMATS.scaled:
                own_chunks = tl.cdiv(entry(column, NUMEL), BLOCK * ITERATIONS).to(tl.int32)
                finish(scratch_ptr, column, own_chunks, FORMATS.moment_count)
            if SPEC.digest_count:
                # the digest of what is there: the tensor is not stepped
                start, elements, _ = chunk_of(column, number, 0, BLOCK, ITERATIONS)
                add_memory(digests_ptr, column, start, elements, SPEC)
            return

    # where the chunk lies: start int64, elements int32, unmasked int32
    lead = lead_of(column, FORMATS)
    start, elements, unmasked = chunk_of(column, number, lead, BLOCK, ITERATIONS)
    # the group's numbers: the rule's, the controls, those of random bits
    scalars = scalars_of(column, scalars_ptr, scalar_count, RULE)
    controls = controls_of(column, controls_ptr, SPEC.controlled)
    pointers = pointers_of(column, start, FORMATS)
    row_ptr = draw_row(column, scalars_ptr, scalar_count, RULE)
    draw = draw_of(column, row_ptr, FORMATS.draws)
    chunk = Chunk(column, start, elements, pointers, scalars, controls, draw)
    marks = marks_of(column, start, SPEC)

    # first phase: amaxes only; second phase: the step, after all the tensor's amaxes
    if FORMATS.scaled:
        own_chunks = tl.cdiv(entry(column, NUMEL), BLOCK * ITERATIONS).to(tl.int32)
        if tl.load(chunks_ptr + 2 * chunks + program) == AMAX_PHASE:
            find_amaxes(scratch_ptr, chunk, unmasked, SPEC)
        else:
            wait_for_amaxes(scratch_ptr, column, own_chunks, FORMATS.moment_count)
            step_chunk(scratch_ptr, chunk, lead, unmasked, marks, SPEC)
        finish(scratch_ptr, column, own_chunks, FORMATS.moment_count)
    else:
        # one phase is enough: scales are of blocks, or there are none
        sums = step_chunk(scratch_ptr, chunk, lead, unmasked, marks, SPEC)
        if SPEC.digest_count:
            add_sums(digests_ptr, column, sums, SPEC)
