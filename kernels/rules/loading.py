"""Reading and writing a row of scalars on the device."""

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


@helper
def store_nine(row_ptr, row):
    """Writes what load_nine reads."""
    tl.store(row_ptr, row[0])
    tl.store(row_ptr + 1, row[1])
    tl.store(row_ptr + 2, row[2])
    tl.store(row_ptr + 3, row[3])
    tl.store(row_ptr + 4, row[4])
    tl.store(row_ptr + 5, row[5])
    tl.store(row_ptr + 6, row[6])
    tl.store(row_ptr + 7, row[7])
    tl.store(row_ptr + 8, row[8])


@helper
def load_seven(row_ptr):
    """The same of a row of seven."""
    return (
        tl.load(row_ptr),
        tl.load(row_ptr + 1),
        tl.load(row_ptr + 2),
        tl.load(row_ptr + 3),
        tl.load(row_ptr + 4),
        tl.load(row_ptr + 5),
        tl.load(row_ptr + 6),
    )


@helper
def store_seven(row_ptr, row):
    """Writes what load_seven reads."""
    tl.store(row_ptr, row[0])
    tl.store(row_ptr + 1, row[1])
    tl.store(row_ptr + 2, row[2])
    tl.store(row_ptr + 3, row[3])
    tl.store(row_ptr + 4, row[4])
    tl.store(row_ptr + 5, row[5])
    tl.store(row_ptr + 6, row[6])


@helper
def number(hyper_ptr, column):
    """One of a group's fp64 numbers."""
    return tl.load(hyper_ptr + column).to(tl.float64, bitcast=True)
