"""scale_inv of whole fp8 weights, also of blocks that lie on other ranks."""

from __future__ import annotations

from megaopt.kernels.float8.scale import reciprocal
from megaopt.kernels.optional_triton import jit, tl
from megaopt.kernels.step.cast import amax_pointer, scale_inv_pointer, scale_of
from megaopt.kernels.step.kernel import SKIP, place_of, weight_scale_of
from megaopt.kernels.step.rows import WEIGHT_COLUMNS, WEIGHT_ROWS, WEIGHT_SCALE_STRIDE


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
    """Stores the scale_inv that amaxes now give, or, under delayed scaling, the scale there is."""
    if CONTROLLED:  # noqa: SIM102 at compile time, the other at run time
        if tl.load(controls_ptr + SKIP) != 0:
            return
    tensor, number = place_of(chunks_ptr, tensors, tl.program_id(0), SPAN)
    index = number * BLOCK + tl.arange(0, BLOCK)
    if FORMATS.block_columns > 0:
        rows = tl.load(table_ptr + WEIGHT_ROWS * tensors + tensor)
        columns = tl.load(table_ptr + WEIGHT_COLUMNS * tensors + tensor)
        columns = tl.cdiv(columns, FORMATS.block_columns)
        mask = index < tl.cdiv(rows, FORMATS.block_rows) * columns
        stride = tl.load(table_ptr + WEIGHT_SCALE_STRIDE * tensors + tensor)
        place = index // columns * stride + index % columns
    else:
        mask = index < 1
        place = index
    if FORMATS.is_delayed:
        scale_inv = reciprocal(weight_scale_of(table_ptr, tensors, tensor, FORMATS))
    else:
        amax_ptr = amax_pointer(table_ptr, tensors, tensor)
        _scale, scale_inv = scale_of(tl.load(amax_ptr + index, mask=mask, other=0), FORMATS)
    tl.store(scale_inv_pointer(table_ptr, tensors, tensor, FORMATS) + place, scale_inv, mask=mask)
