"""The rows of a step's table, one column a tensor."""

from __future__ import annotations

from megaopt.kernels.optional_triton import tl

FIXED_ROWS = {
    "grad": 0,
    "weight": 1,
    "master": 2,
    "master_scale": 3,
    "weight_scale": 4,
    "weight_scale_inv": 5,
    "weight_amax": 6,
    "weight_remainder": 19,
}
"""The kinds of buffer that every rule has, and their rows in the kernel's table of addresses."""
FIRST_MOMENT_ROW = 20
"""The first row after rows of numbers; two rows a moment: its address, and that of its scale."""

# Rows of the int64 table, one column a tensor. First addresses.
GRAD: tl.constexpr = tl.constexpr(FIXED_ROWS["grad"])
WEIGHT: tl.constexpr = tl.constexpr(FIXED_ROWS["weight"])
MASTER: tl.constexpr = tl.constexpr(FIXED_ROWS["master"])
MASTER_SCALE: tl.constexpr = tl.constexpr(FIXED_ROWS["master_scale"])
WEIGHT_SCALE: tl.constexpr = tl.constexpr(FIXED_ROWS["weight_scale"])
WEIGHT_SCALE_INV: tl.constexpr = tl.constexpr(FIXED_ROWS["weight_scale_inv"])
WEIGHT_AMAX: tl.constexpr = tl.constexpr(FIXED_ROWS["weight_amax"])
WEIGHT_REMAINDER: tl.constexpr = tl.constexpr(FIXED_ROWS["weight_remainder"])
NUMEL: tl.constexpr = tl.constexpr(7)
GROUP: tl.constexpr = tl.constexpr(8)
ALIGNED: tl.constexpr = tl.constexpr(9)
VECTORIZED: tl.constexpr = tl.constexpr(10)
# of fp8 weights: the whole weight's rows and columns, and where in it the tensor starts
WEIGHT_ROWS: tl.constexpr = tl.constexpr(11)
WEIGHT_COLUMNS: tl.constexpr = tl.constexpr(12)
WEIGHT_START: tl.constexpr = tl.constexpr(13)
# and, in blocks, how far apart the rows of its scale_inv lie
WEIGHT_SCALE_STRIDE: tl.constexpr = tl.constexpr(14)
# of what draws random bits: the parameter's number, and where in it the tensor's elements lie
NUMBER: tl.constexpr = tl.constexpr(15)
FIRST_ELEMENT: tl.constexpr = tl.constexpr(16)
RUN: tl.constexpr = tl.constexpr(17)
RUN_STRIDE: tl.constexpr = tl.constexpr(18)
# for each moment its address, then that of its scale
MOMENT: tl.constexpr = tl.constexpr(FIRST_MOMENT_ROW)
