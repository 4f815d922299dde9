"""What all casts to fp8 share, and the passes over masters and scales of whole tensors."""

from __future__ import annotations

from megaopt.kernels.optional_triton import helper, jit, tl
from megaopt.kernels.quantizers.scale import magnitude_bits
from megaopt.kernels.step.blocks import load_block, pointer, store_block
from megaopt.kernels.step.draws import block_words, draw_of, weight_bits
from megaopt.kernels.step.kernel import SKIP, chunk_of, draw_row, place_of
from megaopt.kernels.step.rows import (
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
from megaopt.kernels.step.scales import old_scale


@helper
def rounded(value, FORMATS: tl.constexpr):
    """What is encoded: the value through the weight's dtype, unless the recipe is direct."""
    return FORMATS.cast.rounding.decode(FORMATS.cast.rounding.encode(value, 1.0), 1.0)


@helper
def scale_inv_pointer(table_ptr, tensors, tensor, FORMATS: tl.constexpr):
    address = tl.load(table_ptr + WEIGHT_SCALE_INV * tensors + tensor)
    return address.to(tl.pointer_type(FORMATS.cast.quantizer.scale_element))


@helper
def amax_pointer(table_ptr, tensors, tensor):
    address = tl.load(table_ptr + WEIGHT_AMAX * tensors + tensor)
    return address.to(tl.pointer_type(tl.int32))


@helper
def noted(param, amax_bits, mask, FORMATS: tl.constexpr, MASKED: tl.constexpr):
    """A store's: what is encoded, and the bits of amaxes raised to it."""
    value = rounded(param, FORMATS)
    if MASKED:
        value = tl.where(mask, value, 0.0)
    return value, tl.maximum(amax_bits, magnitude_bits(value))


@helper
def remainder_pointer(table_ptr, tensors, tensor, start, FORMATS: tl.constexpr):
    """To what lies beside a chunk's codes, where there is something."""
    FORMAT: tl.constexpr = FORMATS.remainder
    ROW: tl.constexpr = MASTER if FORMATS.master.joined else WEIGHT_REMAINDER
    return pointer(table_ptr, ROW, tensors, tensor, start, FORMAT)


@helper
def cast_draw(
    table_ptr, scalars_ptr, scalar_count, tensors, tensor, FORMATS: tl.constexpr, RULE: tl.constexpr
):
    """What the random words of a cast are made from, where it draws."""
    if FORMATS.cast_draws:
        row_ptr = draw_row(table_ptr, scalars_ptr, scalar_count, tensors, tensor, RULE)
        draw = draw_of(table_ptr, tensors, tensor, row_ptr, True)
    else:
        draw = ((0, 0, 0), 0, 0, 0, 0)
    return draw


@helper
def drawn_code(product, words, FORMATS: tl.constexpr):
    """The codes of values times scales."""
    if FORMATS.weight.draws:
        code = FORMATS.weight.encode(product, 1.0, weight_bits(words))
    else:
        code = FORMATS.weight.encode(product, 1.0)
    return code


@helper
def store_codes(
    weight_ptr, remainder_ptr, product, words, offsets, mask, FORMATS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Stores the codes of values times scales, and what lies beside them."""
    REMAINDER: tl.constexpr = FORMATS.remainder
    if REMAINDER.present:
        if REMAINDER.draws:
            code, remainder = REMAINDER.encode(product, weight_bits(words))
        else:
            code, remainder = REMAINDER.encode(product)
        store_block(remainder_ptr, offsets, remainder, mask, MASKED)
    else:
        code = drawn_code(product, words, FORMATS)
    store_block(weight_ptr, offsets, code, mask, MASKED)


@helper
def raise_amax(table_ptr, place, scale, amax_bits, FORMATS: tl.constexpr):
    """A store's `finish`: the tensor's amax becomes at least the chunk's."""
    tensors, tensor, _start = place
    tl.atomic_max(amax_pointer(table_ptr, tensors, tensor), tl.max(amax_bits))


@helper
def loaded_values(
    weight_ptr, remainder_ptr, scale_inv, offsets, mask, FORMATS: tl.constexpr, MASKED: tl.constexpr
):
    """What fp8 codes stand for, with what lies beside them; fp32."""
    code = load_block(weight_ptr, offsets, mask, MASKED)
    REMAINDER: tl.constexpr = FORMATS.remainder
    if REMAINDER.present:
        value = REMAINDER.decode(code, load_block(remainder_ptr, offsets, mask, MASKED))
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
    tensor, number = place_of(chunks_ptr, tensors, tl.program_id(0), SPAN)
    start, elements, unmasked = chunk_of(table_ptr, tensors, tensor, number, 0, BLOCK, ITERATIONS)
    WEIGHT_FORMAT: tl.constexpr = FORMATS.weight
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    weight_ptr = pointer(table_ptr, WEIGHT, tensors, tensor, start, WEIGHT_FORMAT)
    master_ptr = pointer(table_ptr, MASTER, tensors, tensor, start, MASTER_FORMAT)
    remainder_ptr = remainder_pointer(table_ptr, tensors, tensor, start, FORMATS)
    scale_inv = tl.load(scale_inv_pointer(table_ptr, tensors, tensor, FORMATS))
    scale_inv = FORMATS.cast.quantizer.value(scale_inv)
    block = tl.zeros((), tl.int32)
    while block < unmasked:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        value = loaded_values(weight_ptr, remainder_ptr, scale_inv, offsets, None, FORMATS, False)
        store_block(master_ptr, offsets, value, None, False)
        block += 1
    while block * BLOCK < elements:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < elements
        value = loaded_values(weight_ptr, remainder_ptr, scale_inv, offsets, mask, FORMATS, True)
        store_block(master_ptr, offsets, value, mask, True)
        block += 1


@jit(do_not_specialize=["tensors", "scalar_count"])
def cast_kernel(
    table_ptr,  # *int64 [Formats.row_count, tensors]
    chunks_ptr,  # *int32, as table.Chunks
    controls_ptr,  # *fp32 [CONTROLS]; unread unless CONTROLLED
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
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    tensor, number = place_of(chunks_ptr, tensors, tl.program_id(0), SPAN)
    start, elements, unmasked = chunk_of(table_ptr, tensors, tensor, number, 0, BLOCK, ITERATIONS)
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    WEIGHT_FORMAT: tl.constexpr = FORMATS.weight
    master_ptr = pointer(table_ptr, MASTER, tensors, tensor, start, MASTER_FORMAT)
    weight_ptr = pointer(table_ptr, WEIGHT, tensors, tensor, start, WEIGHT_FORMAT)
    master_scale = old_scale(table_ptr, MASTER_SCALE, tensors, tensor, MASTER_FORMAT)
    amax_ptr = amax_pointer(table_ptr, tensors, tensor)
    remainder_ptr = remainder_pointer(table_ptr, tensors, tensor, start, FORMATS)
    draw = cast_draw(table_ptr, scalars_ptr, scalar_count, tensors, tensor, FORMATS, RULE)
    scale = 1.0
    if not ONLY_AMAX:
        place = (tensors, tensor, start)
        scale, scale_inv = FORMATS.cast.quantizer.scale(
            table_ptr, place, tl.load(amax_ptr), FORMATS
        )
        tl.store(scale_inv_pointer(table_ptr, tensors, tensor, FORMATS), scale_inv, mask=start == 0)
    amax_bits = tl.zeros((BLOCK,), tl.int32)
    block = tl.zeros((), tl.int32)
    while block < unmasked:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        code = load_block(master_ptr, offsets, None, False)
        value = rounded(MASTER_FORMAT.decode(code, master_scale), FORMATS)
        if ONLY_AMAX:
            amax_bits = tl.maximum(amax_bits, magnitude_bits(value))
        else:
            words = block_words(
                draw, start, block * BLOCK, offsets, FORMATS.cast_draws, False, BLOCK, True
            )
            store_codes(
                weight_ptr, remainder_ptr, value * scale, words, offsets, None, FORMATS, False
            )
        block += 1
    while block * BLOCK < elements:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < elements
        code = load_block(master_ptr, offsets, mask, True)
        value = rounded(MASTER_FORMAT.decode(code, master_scale), FORMATS)
        if ONLY_AMAX:
            amax_bits = tl.maximum(amax_bits, magnitude_bits(tl.where(mask, value, 0.0)))
        else:
            words = block_words(
                draw, start, block * BLOCK, offsets, FORMATS.cast_draws, False, BLOCK, False
            )
            store_codes(
                weight_ptr, remainder_ptr, value * scale, words, offsets, mask, FORMATS, True
            )
        block += 1
    if ONLY_AMAX:
        tl.atomic_max(amax_ptr, tl.max(amax_bits, 0))


@jit(do_not_specialize=["tensors"])
def scale_invs_kernel(
    table_ptr,
    chunks_ptr,  # *int32, as table.Chunks, of scales
    controls_ptr,  # *fp32 [CONTROLS]; unread unless CONTROLLED
    tensors,
    FORMATS: tl.constexpr,
    CONTROLLED: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Stores scale_inv of whole weights, also of blocks that lie on other ranks."""
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    tensor, number = place_of(chunks_ptr, tensors, tl.program_id(0), SPAN)
    index = number * BLOCK + tl.arange(0, BLOCK)
    if FORMATS.cast.quantizer.columns > 0:
        rows = tl.load(table_ptr + WEIGHT_ROWS * tensors + tensor)
        columns = tl.load(table_ptr + WEIGHT_COLUMNS * tensors + tensor)
        columns = tl.cdiv(columns, FORMATS.cast.quantizer.columns)
        mask = index < tl.cdiv(rows, FORMATS.cast.quantizer.rows) * columns
        stride = tl.load(table_ptr + WEIGHT_SCALE_STRIDE * tensors + tensor)
        place = index // columns * stride + index % columns
    else:
        mask = index < 1
        place = index
    amax_bits = tl.load(amax_pointer(table_ptr, tensors, tensor) + index, mask=mask, other=0)
    weight = (tensors, tensor, 0)
    _scale, scale_inv = FORMATS.cast.quantizer.scale(table_ptr, weight, amax_bits, FORMATS)
    tl.store(scale_inv_pointer(table_ptr, tensors, tensor, FORMATS) + place, scale_inv, mask=mask)
