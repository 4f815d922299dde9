"""Reading a row of scalars in the kernel."""

from __future__ import annotations

from megaopt.kernels.optional_triton import helper, tl


@helper
def load_nine(row_ptr):
    """The nine fp32 numbers of a parameter group's row, in order."""
    return (
        tl.load(row_ptr),
        tl.load(row_ptr + 1),
        tl.load(row_ptr + 2),
        tl.load(row_ptr + 3),
        tl.load(row_ptr + 4),
        tl.load(row_ptr + 5),
        tl.load(row_ptr + 6),
        tl.load(row_ptr + 7),
        tl.load(row_ptr + 8),
    )
