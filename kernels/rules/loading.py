"""Reading and writing a row of scalars on the device."""

from __future__ import annotations

from megaopt.kernels.optional_triton import helper, tl


@helper
def load_row(row_ptr, LENGTH: tl.constexpr):
    """The fp32 numbers of a parameter group's row, in order."""
    row = ()
    for index in tl.static_range(LENGTH):
        row += (tl.load(row_ptr + index),)
    return row


@helper
def store_row(row_ptr, row, LENGTH: tl.constexpr):
    """Writes what load_row reads."""
    for index in tl.static_range(LENGTH):
        tl.store(row_ptr + index, row[index])


@helper
def number(hyper_ptr, column):
    """One of a group's fp64 numbers."""
    return tl.load(hyper_ptr + column).to(tl.float64, bitcast=True)
