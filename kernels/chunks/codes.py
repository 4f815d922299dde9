"""What a block of the step has in memory, loaded and decoded."""

from __future__ import annotations

from megaopt.kernels.chunks.blocks import load_block, load_pairs, load_scale
from megaopt.kernels.formats.block8 import factor
from megaopt.kernels.optional_triton import helper, tl


@helper
def loaded_moments(chunk, scales, block, FORMATS: tl.constexpr):
    """fp32; scales: of the tensors, or pointers to those of blocks."""
    COUNT: tl.constexpr = FORMATS.moment_count
    moments = ()
    for index in tl.static_range(COUNT):
        moments += (loaded_moment(chunk, scales[index], block, FORMATS, index),)
    return moments


@helper
def loaded_moment(chunk, scale, block, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    if FORMAT.block:
        MASKED: tl.constexpr = block.mask is not None
        code = load_scale(scale, block.rows, chunk.elements, FORMATS, INDEX, MASKED)
        scale = factor(code)[:, None]
    if FORMAT.packed == 2:
        code = load_pairs(chunk.pointers.moments[INDEX], block.offsets, block.rows, block.mask)
    else:
        code = load_block(chunk.pointers.moments[INDEX], block.offsets, block.mask)
    return FORMAT.decode(code, scale)


@helper
def loaded_param(pointers, master_scale, offsets, mask, FORMATS: tl.constexpr):
    """The fp32 value that the rule updates: the master's where there is one, else the weight's."""
    if FORMATS.master.joined:
        weight_code = load_block(pointers.weight, offsets, mask)
        master_code = load_block(pointers.master, offsets, mask)
        param = FORMATS.master.decode(weight_code, master_code)
    elif FORMATS.master.present:
        master_code = load_block(pointers.master, offsets, mask)
        param = FORMATS.master.decode(master_code, master_scale)
    else:
        param = FORMATS.weight.decode(load_block(pointers.weight, offsets, mask), 1.0)
    if FORMATS.in_place:
        param *= master_scale  # scale_inv of the codes
    return param
