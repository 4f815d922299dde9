"""A program's work as tuples: a tensor's column of the table, a chunk, a block of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from megaopt.kernels.chunks.rows import ALIGNED, NUMEL
from megaopt.kernels.optional_triton import helper, tl


class Column(NamedTuple):
    """A tensor's column of the table."""

    table_ptr: Any
    """*int64 [rows, tensors] (megaopt.kernels.chunks.rows)."""
    tensors: Any
    tensor: Any
    """The column's number."""


class Pointers(NamedTuple):
    """Pointers to a chunk's first element in each buffer; null where there is no buffer."""

    grad: Any
    weight: Any
    master: Any
    moments: Any
    """A tuple of pointers, in the rule's order."""


class Chunk(NamedTuple):
    """The part of a tensor that a program steps."""

    column: Any
    start: Any
    """int64, the chunk's first element in the tensor."""
    elements: Any
    """int32, the offset at which the tensor or the chunk ends."""
    pointers: Any
    scalars: Any
    """A tuple of the rule's numbers for the group."""
    controls: Any
    """A tuple: grad scale, its inverse, clip coefficient, whether gradients are unscaled."""
    draw: Any
    """The numbers that random words are made of (draws.draw_of)."""


class ChunkScales(NamedTuple):
    """The factors of a chunk's codes when they are read and when they are stored."""

    param: Any
    """The master's scale, or scale_inv of an fp8 weight that has none."""
    moments: Any
    """A tuple; of moments in blocks pointers to the chunk's scales."""
    master_inverse: Any
    """The reciprocal of the master's new scale."""
    moment_inverses: Any
    """Likewise; of moments in blocks pointers to where the new scales go."""
    weight: Any
    """The scale that `Store.begin` returned."""


class Block(NamedTuple):
    """The elements of a chunk that are worked on at a time."""

    offsets: Any
    """int32, from the chunk's first element on: [BLOCK], or with rows [rows, width]."""
    rows: Any
    """int32 [rows], the offsets of the rows' first elements; 0 where there are no rows."""
    mask: Any
    """A mask of the tensor's elements; None: all are, and they are aligned."""


@helper
def entry(column, row):
    """int64, what the table has of a tensor in a row."""
    return tl.load(column.table_ptr + row * column.tensors + column.tensor)


@helper
def place_of(chunks_ptr, tensors, chunk, SPAN):
    """A chunk's tensor, and its place there in chunks; chunks_ptr: as table.Chunks has it."""
    # where to begin: the tensor of the first chunk of this span
    tensor = tl.load(chunks_ptr + tensors + 1 + chunk // SPAN)
    # then on to the tensor whose chunks end behind this one; empty tensors are passed over
    while tl.load(chunks_ptr + tensor + 1) <= chunk:
        tensor += 1
    return tensor, chunk - tl.load(chunks_ptr + tensor)


@helper
def chunk_of(column, number, lead, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr):
    """The first element of a tensor's chunk, its elements, and the blocks that go unmasked.

    lead: elements before the tensor, from which on its first chunk is counted.
    """
    # int64; negative where the first chunk begins before the tensor
    start = number.to(tl.int64) * (BLOCK * ITERATIONS) - lead
    # int32, up to the end of chunk or tensor
    elements = tl.minimum(entry(column, NUMEL) - start, BLOCK * ITERATIONS).to(tl.int32)
    # 0 or 1 from the table: a tensor that is not aligned has no unmasked blocks
    aligned = entry(column, ALIGNED).to(tl.int32)
    return start, elements, (elements // BLOCK) * aligned
