"""What a block of the step has in memory, and the numbers that it is.

Codes are loaded first and decoded later, so that the next block's can be on their way while one is
computed (kernel.py).
"""

from __future__ import annotations

from megaopt.kernels.formats.block8 import factor
from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.step.blocks import load_block, load_pairs, load_scale


@helper
def load_codes(
    pointers,
    scales,
    offsets,
    rows,
    elements,
    mask,
    FORMATS: tl.constexpr,
    MASKED: tl.constexpr,
    WITH_PARAM: tl.constexpr,
):
    """The codes of gradient, weight and master, and tuples of the moments' and of their scales.

    What is not there or not needed is 0; so are scales that are no codes of blocks. Without
    WITH_PARAM weight and master are not needed.
    """
    grad_ptr, weight_ptr, master_ptr, moment_ptrs = pointers
    COUNT: tl.constexpr = FORMATS.moment_count
    grad = load_block(grad_ptr, offsets, mask, MASKED)
    moments, moment_scales = (), ()
    for index in tl.static_range(COUNT):
        moments += (load_moment(moment_ptrs[index], offsets, rows, mask, FORMATS, index, MASKED),)
        moment_scales += (load_scale(scales[index], rows, elements, FORMATS, index, MASKED),)
    weight, master = 0, 0
    if WITH_PARAM:
        weight, master = load_param(weight_ptr, master_ptr, offsets, mask, FORMATS, MASKED)
    return grad, weight, master, moments, moment_scales


@helper
def load_param(weight_ptr, master_ptr, offsets, mask, FORMATS: tl.constexpr, MASKED: tl.constexpr):
    """What the fp32 value is made of: the weight's code, the master's, or both."""
    weight, master = 0, 0
    if FORMATS.master.joined or not FORMATS.master.present:
        weight = load_block(weight_ptr, offsets, mask, MASKED)
    if FORMATS.master.present:
        master = load_block(master_ptr, offsets, mask, MASKED)
    return weight, master


@helper
def load_moment(
    moment_ptr, offsets, rows, mask, FORMATS: tl.constexpr, INDEX: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    if FORMAT.packed == 2:
        code = load_pairs(moment_ptr, offsets, rows, mask, MASKED)
    else:
        code = load_block(moment_ptr, offsets, mask, MASKED)
    return code


@helper
def numbers_of(codes, scales, FORMATS: tl.constexpr, WITH_PARAM: tl.constexpr):
    """The fp32 numbers of codes as load_codes has them: gradient, param and a tuple of moments.

    Param is what the rule updates: the master's value where there is one, else the weight's; 0
    without WITH_PARAM. scales: of the master and the moments' tensors.
    """
    grad_code, weight, master, moment_codes, scale_codes = codes
    COUNT: tl.constexpr = FORMATS.moment_count
    grad = FORMATS.grad.decode(grad_code, 1.0)
    moments = ()
    for index in tl.static_range(COUNT):
        moments += (
            moment_of(moment_codes[index], scales[1][index], scale_codes[index], FORMATS, index),
        )
    if WITH_PARAM:  # noqa: SIM108 at compile time
        param = param_of(weight, master, scales[0], FORMATS)
    else:
        param = tl.zeros_like(grad)
    return grad, param, moments


@helper
def param_of(weight, master, master_scale, FORMATS: tl.constexpr):
    """The master's value where there is one, else the weight's."""
    if FORMATS.master.joined:
        param = FORMATS.master.decode(weight, master)
    elif FORMATS.master.present:
        param = FORMATS.master.decode(master, master_scale)
    else:
        param = FORMATS.weight.decode(weight, 1.0)
    return param


@helper
def moment_of(code, scale, scale_code, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    """scale: of the tensor; scale_code: of the rows, where the moment is in blocks."""
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    if FORMAT.block:
        scale = factor(scale_code)[:, None]
    return FORMAT.decode(code, scale)
