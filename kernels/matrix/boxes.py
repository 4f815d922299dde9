"""Copies boxes of matrices within one memory, and parts of tensors into it: many in one launch.

What ranks send one another lies there part behind part; a matrix lies row behind row. A part is a
box of its matrix: whole rows where a rank has rows, and a piece of each row where it has columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy
import torch

from megaopt.kernels.calling import Again, call
from megaopt.kernels.chunks import rows as table_rows
from megaopt.kernels.chunks.chunk import Column, chunk_of, entry, place_of
from megaopt.kernels.chunks.rows import GRAD, WEIGHT
from megaopt.kernels.chunks.table import OWN as GEOMETRY
from megaopt.kernels.chunks.table import Chunks, DeviceTable
from megaopt.kernels.optional_triton import helper, jit, tl

UNIT = 2
"""Bytes of a number: boxes are counted in numbers of 16 bits, one of 32 bits is two of them."""
VECTOR = 8
"""Numbers that are read at once where a box begins at a multiple of them, 16 bytes."""
WIDTH = 4096
"""Columns of a box without gaps between its rows: a kernel counts within a row in 32 bits."""

# Rows of the int64 table, one column a box, beside GRAD (where its numbers lie), WEIGHT (where they
# go), NUMEL and ALIGNED; all are numbers of the memory.
COLUMNS: tl.constexpr = tl.constexpr(2)
SOURCE_STRIDE: tl.constexpr = tl.constexpr(3)
TARGET_STRIDE: tl.constexpr = tl.constexpr(4)


class Box(NamedTuple):
    """Rows of numbers, and where these lie in two places, all counted in numbers."""

    source: int
    target: int
    rows: int
    columns: int
    source_stride: int
    """The distance between the beginnings of rows."""
    target_stride: int

    @property
    def turned(self) -> Box:
        """The box of the way back."""
        sizes, strides = (self.rows, self.columns), (self.target_stride, self.source_stride)
        return Box(self.target, self.source, *sizes, *strides)


class BoxCopies:
    """The launch that copies some boxes, whose table is made once.

    Args:
        boxes: none is empty; targets do not overlap.
        device: of the memory.
    """

    def __init__(self, boxes: Sequence[Box], device: torch.device) -> None:
        self._boxes = boxes
        # int64 [10, boxes]
        table = numpy.zeros((int(table_rows.ALIGNED) + 1, len(boxes)), dtype=numpy.int64)
        if boxes:
            # int64 [boxes] each
            source, target, rows, columns, *strides = numpy.array(boxes, dtype=numpy.int64).T
            without_gaps = (rows == 1) | ((strides[0] == columns) & (strides[1] == columns))
            table[int(GRAD)], table[int(WEIGHT)] = source, target
            widths = {COLUMNS: columns, SOURCE_STRIDE: strides[0], TARGET_STRIDE: strides[1]}
            for row, width in widths.items():  # where there are no gaps any width is right
                table[int(row)] = numpy.where(without_gaps, WIDTH, width)
            table[int(table_rows.NUMEL)] = rows * columns
            # copied by vectors: rows follow each other on both sides, and both begin at 16 bytes
            whole = (source | target) % VECTOR == 0
            table[int(table_rows.ALIGNED)] = without_gaps & whole
        # a program copies a chunk, of which a large box has many
        numels = table[int(table_rows.NUMEL)].tolist()
        self._chunks, self._table = Chunks(numels, GEOMETRY, device), DeviceTable(device)
        self._table.update(table)

    def copy(self, memory: torch.Tensor) -> None:
        """Copies all boxes; memory: uint8, begins at a multiple of 16 bytes."""
        if self._boxes:
            # bits are copied as they are, whatever dtype they are of
            numbers, count = memory.view(torch.int16), len(self._boxes)
            arguments = (self._table.kept(), self._chunks.table, numbers, count)
            call(copy_kernel, self._chunks.count, arguments, OPTIONS)

    def copy_reference(self, memory: torch.Tensor) -> None:
        """The twin of `copy`."""
        numbers = memory.view(torch.int16)
        for source, target, rows, columns, source_stride, target_stride in self._boxes:
            size = (rows, columns)
            begin = numbers.storage_offset()
            # [rows, columns] on both sides
            into = numbers.as_strided(size, (target_stride, 1), begin + target)
            into.copy_(numbers.as_strided(size, (source_stride, 1), begin + source))


class PartCopies:
    """The launch that copies numbers of tensors, which may move, into a memory.

    Args:
        targets: where the numbers of each part go in the memory, in numbers of 16 bits.
        sizes: how many such numbers each has; none is empty, and targets do not overlap.
        device: of all.
    """

    def __init__(self, targets: Sequence[int], sizes: Sequence[int], device: torch.device) -> None:
        # int64 [10, parts]; GRAD and ALIGNED come when tensors are known
        self._rows = numpy.zeros((int(table_rows.ALIGNED) + 1, len(sizes)), dtype=numpy.int64)
        self._rows[int(WEIGHT)], self._rows[int(table_rows.NUMEL)] = targets, sizes
        # a part is flat on both sides: boxes without gaps
        for row in (COLUMNS, SOURCE_STRIDE, TARGET_STRIDE):
            self._rows[int(row)] = WIDTH
        self._chunks, self._table = Chunks(sizes, GEOMETRY, device), DeviceTable(device)
        self._launch, self._has_moved = Again(copy_kernel, self._chunks.count, OPTIONS), True

    def look(self, sources: numpy.ndarray, memory: torch.Tensor) -> None:
        """Notes where all lies.

        sources: int64, the address of each part; memory: uint8, begins at a multiple of 16 bytes.
        """
        # as numbers of the memory, which the kernel counts from, though they lie elsewhere
        places = (sources - memory.data_ptr()) // UNIT
        self._rows[int(GRAD)] = places
        # the memory begins at 16 bytes: multiples of VECTOR from there on do, too
        both = places | self._rows[int(WEIGHT)]
        self._rows[int(table_rows.ALIGNED)] = both % VECTOR == 0
        self._has_moved = True

    def copy(self, memory: torch.Tensor) -> None:
        """Copies all parts from where `look` last saw them."""
        if not self._chunks.count:
            return
        table = self._table.update(self._rows) if self._has_moved else self._table.kept()
        self._has_moved = False  # only now: without memory for the table the next step tries again
        count = self._rows.shape[1]
        self._launch((table, self._chunks.table, memory.view(torch.int16), count))


OPTIONS: dict[str, object] = {
    "BLOCK": GEOMETRY.block,
    "ITERATIONS": GEOMETRY.iterations,
    "SPAN": GEOMETRY.span,
    "num_warps": GEOMETRY.warps,
}
"""The constants of every launch of `copy_kernel`."""


@helper
def place_in(first, column, offsets, STRIDE: tl.constexpr):
    """Returns where numbers of a box lie; first: the box's row and column where offsets begin."""
    # the row and the column of the block's first number are found in 64 bits, once
    columns = entry(column, COLUMNS)
    index = (first % columns).to(tl.int32) + offsets
    # and those of each of its numbers from there on in 32 bits
    narrow = columns.to(tl.int32)
    row = first // columns + index // narrow
    return row * entry(column, STRIDE) + index % narrow


@jit(do_not_specialize=["boxes"])
def copy_kernel(
    table_ptr,  # *int64 [10, boxes]
    chunks_ptr,  # *int32 as table.Chunks
    memory_ptr,  # *int16
    boxes,
    BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Copies a chunk of a box."""
    # this program's chunk of a box: number is its place among the box's chunks
    box, number = place_of(chunks_ptr, boxes, tl.program_id(0), SPAN)
    column = Column(table_ptr, boxes, box)
    start, elements, unmasked = chunk_of(column, number, 0, BLOCK, ITERATIONS)

    # both sides are of the same memory
    source = memory_ptr + entry(column, GRAD)
    target = memory_ptr + entry(column, WEIGHT)

    # index counts blocks of the chunk
    index = tl.zeros((), tl.int32)
    while index * BLOCK < elements:
        offsets = index * BLOCK + tl.arange(0, BLOCK)
        if index < unmasked:
            # without gaps, from a multiple of 16 bytes on
            code = tl.load(tl.multiple_of(source + start + offsets, 16))
            tl.store(tl.multiple_of(target + start + offsets, 16), code)
        else:
            # rows with gaps, what is not aligned, and the last block of a chunk
            mask = offsets < elements
            code = tl.load(source + place_in(start, column, offsets, SOURCE_STRIDE), mask=mask)
            tl.store(target + place_in(start, column, offsets, TARGET_STRIDE), code, mask=mask)
        index += 1
