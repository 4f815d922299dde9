"""The table of a launch over matrices: the step's rows, and those of the products."""

from __future__ import annotations

from megaopt.kernels.optional_triton import tl
from megaopt.kernels.step.rows import FIRST_MOMENT_ROW

# Where the step's table has moments: addresses of the projection, of the projected gradient, and of
# Adam's direction in its place.
PROJECTION: tl.constexpr = tl.constexpr(FIRST_MOMENT_ROW)
LOW: tl.constexpr = tl.constexpr(FIRST_MOMENT_ROW + 1)
DIRECTION: tl.constexpr = tl.constexpr(FIRST_MOMENT_ROW + 2)
ROW_COUNT = FIRST_MOMENT_ROW + 3
