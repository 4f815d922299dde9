"""The parts that all casts to fp8 share; passes over masters and scales of whole tensors."""

from __future__ import annotations

from megaopt.kernels.chunks.blocks import load_block, pointer, store_block
from megaopt.kernels.chunks.chunk import Block, Column, chunk_of, entry, place_of
from megaopt.kernels.chunks.draws import block_words, draw_of
from megaopt.kernels.chunks.rows import (
    MASTER,
    MASTER_SCALE,
    WEIGHT,
    WEIGHT_AMAX,
    WEIGHT_COLUMNS,
    WEIGHT_REMAINDER,
    WEIGHT_ROWS,
    WEIGHT_SCALE_INV,
    WEIGHT_SCALE_STRIDE,
)
from megaopt.kernels.chunks.scales import old_scale
from megaopt.kernels.chunks.store import drawn_code, joined_codes
from megaopt.kernels.optional_triton import helper, jit, tl
from megaopt.kernels.quantizers.scale import magnitude_bits
from megaopt.kernels.step.kernel import draw_row, is_left_out


@helper
def rounded(value, FORMATS: tl.constexpr):
    """Rounds a value to the weight's dtype before it is encoded, unless the recipe is direct."""
    return FORMATS.cast.rounding.decode(FORMATS.cast.rounding.encode(value, 1.0), 1.0)


@helper
def scale_inv_pointer(column, FORMATS: tl.constexpr):
    ELEMENT: tl.constexpr = FORMATS.cast.quantizer.scale_element
    return entry(column, WEIGHT_SCALE_INV).to(tl.pointer_type(ELEMENT))


@helper
def amax_pointer(column):
    return entry(column, WEIGHT_AMAX).to(tl.pointer_type(tl.int32))


@helper
def noted(param, amax_bits, mask, FORMATS: tl.constexpr):
    """A store's: what is encoded, and the bits of amaxes raised to it."""
    value = rounded(param, FORMATS)
    # what lies behind the tensor must not raise the amax
    if mask is not None:
        value = tl.where(mask, value, 0.0)
    return value, tl.maximum(amax_bits, magnitude_bits(value))


@helper
def remainder_pointer(column, start, FORMATS: tl.constexpr):
    """Returns a pointer to what lies beside a chunk's codes, where there is something."""
    FORMAT: tl.constexpr = FORMATS.remainder
    # a joined master lies beside the codes itself; other remainders have buffers of their own
    ROW: tl.constexpr = MASTER if FORMATS.master.joined else WEIGHT_REMAINDER
    return pointer(column, ROW, start, FORMAT)


@helper
def cast_draw(column, scalars_ptr, scalar_count, FORMATS: tl.constexpr, RULE: tl.constexpr):
    """Returns what the random words of a cast are made from, where it draws."""
    row_ptr = draw_row(column, scalars_ptr, scalar_count, RULE)
    return draw_of(column, row_ptr, FORMATS.cast_draws)


@helper
def store_codes(weight_ptr, remainder_ptr, block, product, words, FORMATS: tl.constexpr):
    """Stores the codes of values times scales, and what lies beside them."""
    REMAINDER: tl.constexpr = FORMATS.remainder
    if REMAINDER.present:
        code, remainder = joined_codes(product, words, REMAINDER)
        store_block(remainder_ptr, block.offsets, remainder, block.mask)
    else:
        WEIGHT_FORMAT: tl.constexpr = FORMATS.weight
        code = drawn_code(product, words, WEIGHT_FORMAT)
    store_block(weight_ptr, block.offsets, code, block.mask)


@helper
def raise_amax(column, start, scale, amax_bits, FORMATS: tl.constexpr):
    """A store's `finish`: the tensor's amax becomes at least the chunk's."""
    tl.atomic_max(amax_pointer(column), tl.max(amax_bits))


@helper
def loaded_values(weight_ptr, remainder_ptr, scale_inv, offsets, mask, FORMATS: tl.constexpr):
    """Loads the fp32 values of fp8 codes, with what lies beside them."""
    code = load_block(weight_ptr, offsets, mask)
    REMAINDER: tl.constexpr = FORMATS.remainder
    # fp8 code and remainder together are one more precise number
    if REMAINDER.present:
        value = REMAINDER.decode(code, load_block(remainder_ptr, offsets, mask))
    else:
        value = FORMATS.weight.decode(code, 1.0)
    return value * scale_inv


@jit(do_not_specialize=["tensors"])
def values_kernel(
    table_ptr,  # *int64 [Formats.row_count, tensors]
    chunks_ptr,  # *int32, as table.Chunks
    tensors,
    FORMATS: tl.constexpr,
    BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Stores what codes with a scale per tensor stand for where a step's masters are."""
    # the program's tensor, and its chunk there; BLOCK elements are worked on at a time
    tensor, number = place_of(chunks_ptr, tensors, tl.program_id(0), SPAN)
    column = Column(table_ptr, tensors, tensor)
    start, elements, unmasked = chunk_of(column, number, 0, BLOCK, ITERATIONS)

    # codes and remainders are read, fp32 values go to the masters' place
    WEIGHT_FORMAT: tl.constexpr = FORMATS.weight
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    weight_ptr = pointer(column, WEIGHT, start, WEIGHT_FORMAT)
    master_ptr = pointer(column, MASTER, start, MASTER_FORMAT)
    remainder_ptr = remainder_pointer(column, start, FORMATS)
    # one factor for the whole tensor, fp32
    scale_inv = tl.load(scale_inv_pointer(column, FORMATS))
    scale_inv = FORMATS.cast.quantizer.value(scale_inv)

    # whole aligned blocks go without masks
    block = tl.zeros((), tl.int32)
    while block < unmasked:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        value = loaded_values(weight_ptr, remainder_ptr, scale_inv, offsets, None, FORMATS)
        store_block(master_ptr, offsets, value, None)
        block += 1
    # the rest of the chunk, behind which another tensor's memory may lie
    while block * BLOCK < elements:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < elements
        value = loaded_values(weight_ptr, remainder_ptr, scale_inv, offsets, mask, FORMATS)
        store_block(master_ptr, offsets, value, mask)
        block += 1


@helper
def cast_block(
    pointers, scales, draw, start, begin, block, amax_bits, FORMATS: tl.constexpr,
    ONLY_AMAX: tl.constexpr,
):  # fmt: skip
    """Casts a block of masters, whose first is `begin` in the chunk; or only raises amax_bits."""
    master_ptr, weight_ptr, remainder_ptr = pointers
    master_scale, scale = scales
    # fp32 [BLOCK], masters decoded
    code = load_block(master_ptr, block.offsets, block.mask)
    param = FORMATS.master.decode(code, master_scale)
    if ONLY_AMAX:
        _value, amax_bits = noted(param, amax_bits, block.mask, FORMATS)
    else:
        # whole blocks begin with a quad of elements, which shares one draw of four words
        value = rounded(param, FORMATS)
        IN_QUADS: tl.constexpr = block.mask is None
        BLOCK: tl.constexpr = block.offsets.shape[0]
        words = block_words(
            draw, start, begin, block.offsets, FORMATS.cast_draws, False, BLOCK, IN_QUADS
        )
        store_codes(weight_ptr, remainder_ptr, block, value * scale, words, FORMATS)
    return amax_bits


@jit(do_not_specialize=["tensors", "scalar_count"])
def cast_kernel(
    table_ptr,  # *int64 [Formats.row_count, tensors]
    chunks_ptr,  # *int32, as table.Chunks
    controls_ptr,  # *fp32 [groups, CONTROLS]; unread unless CONTROLLED
    scalars_ptr,  # *fp32 [groups, scalar_count], of the step; unread unless the cast draws
    tensors,
    scalar_count,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    ONLY_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Casts masters to weights with a scale per tensor, or only raises the tensors' amaxes."""
    # the program's tensor, and its chunk there
    tensor, number = place_of(chunks_ptr, tensors, tl.program_id(0), SPAN)
    column = Column(table_ptr, tensors, tensor)
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if is_left_out(column, controls_ptr):
            return
    start, elements, unmasked = chunk_of(column, number, 0, BLOCK, ITERATIONS)

    # pointers to the chunk's first element, and what its random words are made of
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    WEIGHT_FORMAT: tl.constexpr = FORMATS.weight
    master_ptr = pointer(column, MASTER, start, MASTER_FORMAT)
    weight_ptr = pointer(column, WEIGHT, start, WEIGHT_FORMAT)
    master_scale = old_scale(column, MASTER_SCALE, MASTER_FORMAT)
    amax_ptr = amax_pointer(column)
    remainder_ptr = remainder_pointer(column, start, FORMATS)
    draw = cast_draw(column, scalars_ptr, scalar_count, FORMATS, RULE)
    scale = 1.0
    if not ONLY_AMAX:
        # the tensor's amax is known by now; its first chunk stores scale_inv for all
        scale, scale_inv = FORMATS.cast.quantizer.scale(column, tl.load(amax_ptr), FORMATS)
        tl.store(scale_inv_pointer(column, FORMATS), scale_inv, mask=start == 0)

    # int32 [BLOCK], patterns of magnitudes: one largest number for each place in a block
    amax_bits = tl.zeros((BLOCK,), tl.int32)
    pointers, scales = (master_ptr, weight_ptr, remainder_ptr), (master_scale, scale)
    # whole aligned blocks go without masks
    block = tl.zeros((), tl.int32)
    while block < unmasked:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        amax_bits = cast_block(
            pointers, scales, draw, start, block * BLOCK, Block(offsets, 0, None), amax_bits,
            FORMATS, ONLY_AMAX,
        )  # fmt: skip
        block += 1
    # the rest of the chunk
    while block * BLOCK < elements:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        amax_bits = cast_block(
            pointers, scales, draw, start, block * BLOCK, Block(offsets, 0, offsets < elements),
            amax_bits, FORMATS, ONLY_AMAX,
        )  # fmt: skip
        block += 1
    # chunks of a tensor meet in one number; patterns of magnitudes are ordered as integers
    if ONLY_AMAX:
        tl.atomic_max(amax_ptr, tl.max(amax_bits, 0))


@jit(do_not_specialize=["tensors"])
def scale_invs_kernel(
    table_ptr,
    chunks_ptr,  # *int32, as table.Chunks, of scales
    controls_ptr,  # *fp32 [groups, CONTROLS]; unread unless CONTROLLED
    tensors,
    FORMATS: tl.constexpr,
    CONTROLLED: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Stores scale_inv of whole weights, also of blocks that lie on other ranks."""
    tensor, number = place_of(chunks_ptr, tensors, tl.program_id(0), SPAN)
    column = Column(table_ptr, tensors, tensor)
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if is_left_out(column, controls_ptr):
            return

    # [BLOCK], places of scales in the tensor
    index = number * BLOCK + tl.arange(0, BLOCK)
    # amaxes are counted row by row without gaps, rows of scale_inv lie `stride` apart
    if FORMATS.cast.quantizer.columns > 0:
        rows = entry(column, WEIGHT_ROWS)
        columns = entry(column, WEIGHT_COLUMNS)
        columns = tl.cdiv(columns, FORMATS.cast.quantizer.columns)
        mask = index < tl.cdiv(rows, FORMATS.cast.quantizer.rows) * columns
        stride = entry(column, WEIGHT_SCALE_STRIDE)
        place = index // columns * stride + index % columns
    else:
        mask = index < 1
        place = index
    # other ranks' amaxes have come into the buffer before
    amax_bits = tl.load(amax_pointer(column) + index, mask=mask, other=0)
    _scale, scale_inv = FORMATS.cast.quantizer.scale(column, amax_bits, FORMATS)
    tl.store(scale_inv_pointer(column, FORMATS) + place, scale_inv, mask=mask)
