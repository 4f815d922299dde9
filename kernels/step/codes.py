"""What a block of the step has in memory, loaded and decoded."""

from __future__ import annotations

from megaopt.kernels.formats.block8 import factor
from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.step.blocks import load_block, load_pairs, load_scale


@helper
def loaded_moments(
    moment_ptrs,
    scales,
    offsets,
    rows,
    elements,
    mask,
    FORMATS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """fp32; scales: of the tensors, or pointers to those of blocks."""
    COUNT: tl.constexpr = FORMATS.moment_count
    moments = ()
    for index in tl.static_range(COUNT):
        moments += (
            loaded_moment(
                moment_ptrs[index], scales[index], offsets, rows, elements, mask, FORMATS, index,
                MASKED,
            ),
        )  # fmt: skip
    return moments


@helper
def loaded_moment(
    moment_ptr,
    scale,
    offsets,
    rows,
    elements,
    mask,
    FORMATS: tl.constexpr,
    INDEX: tl.constexpr,
    MASKED: tl.constexpr,
):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    if FORMAT.block:
        scale = factor(load_scale(scale, rows, elements, FORMATS, INDEX, MASKED))[:, None]
    if FORMAT.packed == 2:
        code = load_pairs(moment_ptr, offsets, rows, mask, MASKED)
    else:
        code = load_block(moment_ptr, offsets, mask, MASKED)
    return FORMAT.decode(code, scale)


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
    if FORMATS.in_place:
        param *= master_scale  # scale_inv of the codes
    return param
