"""Where a chunk's buffers lie, and how a block of one is read and written."""

from __future__ import annotations

from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.step.rows import GRAD, MASTER, MOMENT, WEIGHT


@helper
def pointer(table_ptr, row, tensors, tensor, start, FORMAT: tl.constexpr):
    address = tl.load(table_ptr + row * tensors + tensor)
    return address.to(tl.pointer_type(FORMAT.element)) + start


# Moments come as tuples, which tl.static_range grows. What it calls takes the moment's index, and
# finds the format itself: Triton 3.6 does not pass an element of a constexpr tuple on as constexpr.


@helper
def moment_pointer(table_ptr, tensors, tensor, start, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    return pointer(table_ptr, MOMENT + 2 * INDEX, tensors, tensor, start, FORMAT)


@helper
def pointers_of(table_ptr, tensors, tensor, start, FORMATS: tl.constexpr):
    """To a chunk's first element in each buffer; a null pointer where there is no buffer.

    Returns:
        Those of gradient, weight and master, and a tuple of the moments'.
    """
    GRAD_FORMAT: tl.constexpr = FORMATS.grad
    WEIGHT_FORMAT: tl.constexpr = FORMATS.weight
    MASTER_FORMAT: tl.constexpr = FORMATS.master
    COUNT: tl.constexpr = FORMATS.moment_count
    moments = ()
    for index in tl.static_range(COUNT):
        moments += (moment_pointer(table_ptr, tensors, tensor, start, FORMATS, index),)
    return (
        pointer(table_ptr, GRAD, tensors, tensor, start, GRAD_FORMAT),
        pointer(table_ptr, WEIGHT, tensors, tensor, start, WEIGHT_FORMAT),
        pointer(table_ptr, MASTER, tensors, tensor, start, MASTER_FORMAT),
        moments,
    )


@helper
def load_block(ptr, offsets, mask, MASKED: tl.constexpr):
    pointers = ptr + offsets
    if MASKED:
        code = tl.load(pointers, mask=mask, other=0)
    elif len(offsets.shape) == 2:
        code = tl.load(tl.multiple_of(pointers, [16, 16]))
    else:
        # on the sum: a hint on a function's argument would be lost
        code = tl.load(tl.multiple_of(pointers, 16))
    return code


@helper
def store_block(ptr, offsets, code, mask, MASKED: tl.constexpr):
    pointers = ptr + offsets
    if MASKED:
        tl.store(pointers, code, mask=mask)
    elif len(offsets.shape) == 2:
        tl.store(tl.multiple_of(pointers, [16, 16]), code)
    else:
        tl.store(tl.multiple_of(pointers, 16), code)


@helper
def store_where(condition, ptr, offsets, code, mask, MASKED: tl.constexpr):
    """As store_block, where an int32, one for all elements, is not 0."""
    pointers = ptr + offsets
    # a block from the beginning: the interpreter spreads bools as what was compared
    chosen = tl.zeros_like(offsets) + condition != 0
    if MASKED:
        tl.store(pointers, code, mask=mask & chosen)
    elif len(offsets.shape) == 2:
        tl.store(tl.multiple_of(pointers, [16, 16]), code, mask=chosen)
    else:
        tl.store(tl.multiple_of(pointers, 16), code, mask=chosen)


@helper
def loaded_param(
    weight_ptr,
    master_ptr,
    master_scale,
    offsets,
    mask,
    FORMATS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The fp32 value that the rule updates: the master's where there is one, else the weight's."""
    if FORMATS.master.joined:
        weight_code = load_block(weight_ptr, offsets, mask, MASKED)
        master_code = load_block(master_ptr, offsets, mask, MASKED)
        param = FORMATS.master.decode(weight_code, master_code)
    elif FORMATS.master.present:
        master_code = load_block(master_ptr, offsets, mask, MASKED)
        param = FORMATS.master.decode(master_code, master_scale)
    else:
        param = FORMATS.weight.decode(load_block(weight_ptr, offsets, mask, MASKED), 1.0)
    return param


@helper
def loaded_moment(
    moment_ptr,
    scale,
    offsets,
    mask,
    FORMATS: tl.constexpr,
    INDEX: tl.constexpr,
    MASKED: tl.constexpr,
):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    return FORMAT.decode(load_block(moment_ptr, offsets, mask, MASKED), scale)


@helper
def stored_moment(
    moment_ptr,
    value,
    inverse,
    offsets,
    mask,
    FORMATS: tl.constexpr,
    INDEX: tl.constexpr,
    MASKED: tl.constexpr,
):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    store_block(moment_ptr, offsets, FORMAT.encode(value, inverse), mask, MASKED)


@helper
def stored_moments(
    pointers, moments, inverses, offsets, mask, FORMATS: tl.constexpr, MASKED: tl.constexpr
):
    COUNT: tl.constexpr = FORMATS.moment_count
    for index in tl.static_range(COUNT):
        stored_moment(
            pointers[index], moments[index], inverses[index], offsets, mask, FORMATS, index, MASKED
        )
