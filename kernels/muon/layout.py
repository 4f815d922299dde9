"""The matrices of a wave, and where they lie in its workspace.

`parts_of` cuts parameters into parts, `waves` puts parts together, and a `Layout` says where the
pieces (the matrices) and runs (what elementwise launches step) of a wave lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy
import torch

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.muon.newton_schulz import (
    SQUARES,
    MatrixScales,
    Workspace,
)
from megaopt.kernels.muon.orthogonal import FP16, Orthogonal
from megaopt.kernels.norm.bins import BANKS, ROWS
from megaopt.kernels.rules.matrix import Shape

UNIT = 256
"""The bytes at whose multiples areas of the workspace begin."""
WIDE = 8
"""Rows of squares begin at multiples of so many numbers, 16 bytes, as tensor descriptors want."""


class MatrixGroup(NamedTuple):
    """A matrix, or all those of a parameter that share a scale: it is stepped in one wave."""

    param: int
    """The parameter's place in the batch."""
    row: int
    """The rows of the parameter's matrices before these."""
    shapes: Sequence[Shape]
    """The shapes of its matrices."""
    runs: Sequence[tuple[int, int]]
    """Their numbers, in order: where those that follow each other begin in the parameter, and how
    many they are."""


def parts_of(formats: Formats, shapes: Sequence[torch.Size]) -> list[MatrixGroup] | None:
    """Returns the parts of parameters, but for empty ones; None where no launches step them.

    Matrices that share a scale must follow each other and have one form; none may begin in a block.
    """
    assert formats.matrix is not None
    how: Orthogonal = formats.matrix.how
    parts = []
    for param, shape in enumerate(shapes):
        # row: the rows of the parameter's matrices so far
        cuts, row = how.cuts(shape), 0
        # a scale is of the whole parameter: its matrices are one part
        if formats.scaled:
            cut_shapes = [cut.shape for cut in cuts]
            if len(set(map(how.is_gram, cut_shapes))) > 1 or any(cut.runs[1:] for cut in cuts):
                return None
            parts.append(MatrixGroup(param, row, cut_shapes, [(0, shape.numel())]))
            continue
        # else each matrix is a part of its own
        for cut in cuts:
            parts.append(MatrixGroup(param, row, [cut.shape], cut.runs))
            row += cut.shape[0]
    # no launch steps a part that begins within a block of numbers with one scale
    if any(first % (formats.block or 1) for part in parts for first, _ in part.runs):
        return None
    return [part for part in parts if shapes[part.param].numel()]


class WaveMatrix(NamedTuple):
    """A matrix of a wave."""

    param: int
    row: int
    """The rows of the parameter's matrices before this one."""
    shape: Shape
    begin: int
    """The count of numbers before it in the memory of all matrices."""

    def of(self, matrices: torch.Tensor) -> torch.Tensor:
        """Returns this matrix of that memory."""
        return matrices[self.begin : self.begin + math.prod(self.shape)].view(*self.shape)


class ElementRun(NamedTuple):
    """Numbers of a part that follow each other in the parameter, and in the workspace."""

    param: int
    first: int
    """The count of the parameter's numbers before these."""
    size: int
    """The count of these numbers."""
    begin: int
    """The count of numbers before them in the memory of all matrices."""


class Area(NamedTuple):
    """Memory of a workspace."""

    begin: int
    """The bytes of the workspace before it."""
    dtype: torch.dtype
    shape: Shape

    @property
    def size(self) -> int:
        """The bytes that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, workspace: torch.Tensor) -> torch.Tensor:
        """Returns the tensor there."""
        return workspace[self.begin : self.begin + self.size].view(self.dtype).view(*self.shape)

    def places(self, begins: numpy.ndarray) -> numpy.ndarray:
        """Returns the bytes of the workspace before what begins behind so many numbers of this."""
        offsets: numpy.ndarray = self.begin + begins * self.dtype.itemsize
        return offsets


class Layout:
    """A wave's matrices, and where they lie in its workspace."""

    def __init__(self, how: Orthogonal, parts: Sequence[MatrixGroup], is_gram: bool) -> None:
        self.how, self.is_gram, self.is_scaled = how, is_gram, how.precision == FP16
        # end: numbers of all matrices so far, which is where the next part begins
        self.pieces, self.runs, end = list[WaveMatrix](), list[ElementRun](), 0
        for part in parts:
            row, begin = part.row, end
            # the matrices of a part lie one behind another without gaps
            for shape in part.shapes:
                self.pieces.append(WaveMatrix(part.param, row, shape, begin))
                row, begin = row + shape[0], begin + math.prod(shape)
            # and so do their runs: both are the same numbers, cut in two ways
            for first, size in part.runs:
                self.runs.append(ElementRun(part.param, first, size, end))
                end += size
            # the next part begins at a multiple of UNIT bytes
            end = _rounded_up(begin, UNIT // how.dtype.itemsize)

        # from here on areas are taken one behind another
        self.used, count = 0, len(self.pieces)
        """The workspace's bytes."""
        self.bins = self._take(torch.int64, count, BANKS, ROWS, 2)
        self.scales = self._take(torch.float32, len(MatrixScales._fields), count)
        self.first = self._take(how.dtype, end)
        # directions that are cast when their norms are known: gone before what lies over them comes
        self.wide = Area(self.used, torch.float32, (end,)) if self.is_scaled else self.first
        # products go from one of the two areas into the other and back
        self.second = self._take(how.dtype, end)
        # squares [short, short] of each matrix, in rows of [short, short rounded up to WIDE]
        shorts = [min(piece.shape) for piece in self.pieces]
        self.squares = [
            [self._take(how.dtype, short, _rounded_up(short, WIDE)) for short in shorts]
            for _ in range(SQUARES[is_gram])
        ]
        # where fp32 directions need more than the areas over which they lie
        self.used = max(self.used, self.wide.begin + self.wide.size)

    def _take(self, dtype: torch.dtype, *shape: int) -> Area:
        area = Area(self.used, dtype, shape)
        self.used += _rounded_up(area.size, UNIT)
        return area

    def places(self, area: Area) -> numpy.ndarray:
        """Returns the bytes of the workspace before each matrix that lies there."""
        return area.places(numpy.array([piece.begin for piece in self.pieces]))

    def room(self, workspace: torch.Tensor) -> Workspace:
        """Returns the matrices in a workspace."""
        # of each matrix a view [rows, columns] in either area
        wholes = (self.first.of(workspace), self.second.of(workspace))
        first, second = ([piece.of(whole) for piece in self.pieces] for whole in wholes)
        # without the numbers that fill rows up
        squares = [
            [area.of(workspace)[:, : area.shape[0]] for area in areas] for areas in self.squares
        ]
        return Workspace(first, second, squares)


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def waves(how: Orthogonal, parts: Sequence[MatrixGroup], room: int) -> Iterator[Layout]:
    """Returns layouts of the parts that are stepped together, all in one form."""

    # those of one shape follow each other: their products are one run of a launch
    def kind(part: MatrixGroup) -> Any:
        shape = part.shapes[0]
        return how.is_gram(shape), shape[0] > shape[1], shape

    for is_gram, alike in groupby(sorted(parts, key=kind), lambda part: kind(part)[0]):
        wave, used = list[MatrixGroup](), 0
        for part in alike:
            # the bytes of one part alone: several together take no more than the sum
            needed = Layout(how, [part], is_gram).used
            if wave and used + needed > room:
                # the next part has no room any more: it begins another wave
                yield Layout(how, wave, is_gram)
                wave, used = [], 0
            wave.append(part)
            used += needed
        yield Layout(how, wave, is_gram)
