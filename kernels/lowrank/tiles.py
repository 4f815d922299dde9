"""How large the tiles of the two launches are: it shows in no bit."""

from __future__ import annotations

from dataclasses import dataclass

from megaopt.kernels.lowrank.operands import BF16, IEEE
from megaopt.kernels.optional_triton import INTERPRETED
from megaopt.kernels.step.batch import Formats

PROGRAMS = 128
"""So many tiles keep the 132 processors of an H200 at work."""
OUTER_UNIT = 128
"""Numbers of a tile, for slabs: these must not go by a tile's real size."""
MOST_SLABS = 8


@dataclass(frozen=True)
class ProjectTile:
    """Of a projected gradient [outer, rank], as project.project_kernel has it."""

    outer: int
    inner: int
    """Terms of the sum at a time."""
    ranks: int
    """At most; a smaller rank takes fewer."""
    warps: int
    stages: int

    def ranks_of(self, rank: int) -> int:
        """Of a tile; a power of two, as Triton wants it, and as few as its products take."""
        return max(16, min(self.ranks, 1 << (rank - 1).bit_length()))


@dataclass(frozen=True)
class BackTile:
    """Of a matrix [rows, columns]."""

    rows: int
    columns: int
    inner: int
    """Of the rank, at a time, at most."""
    warps: int
    stages: int
    strip: int = 1
    """Tiles of a program, one beside another."""

    @property
    def width(self) -> int:
        """Columns of a program."""
        return self.columns * self.strip

    def inner_of(self, rank: int) -> int:
        """As ProjectTile.ranks_of."""
        return max(16, min(self.inner, 1 << (rank - 1).bit_length()))


@dataclass(frozen=True)
class Tiles:
    """Of both launches; for matrices that have whole tiles only, and for others."""

    project: ProjectTile
    back: BackTile
    uneven_project: ProjectTile
    uneven_back: BackTile
    cast: bool = False
    """With precision bf16: projections are cast ahead, once for both launches, by another."""


# Compiled for sm_90 the others' masks take so many registers that larger tiles spill.
UNEVEN_PROJECT, UNEVEN_BACK = ProjectTile(64, 32, 64, 8, 2), BackTile(64, 64, 32, 8, 1)


def tiles_of(formats: Formats, precision: str) -> Tiles:
    """The tiles of matrices of these formats."""
    if INTERPRETED:
        own = ProjectTile(128, 128, 128, 4, 1), BackTile(128, 128, 64, 4, 1)
        return Tiles(*own, *own)
    return Tiles(_project(precision), _back(precision), UNEVEN_PROJECT, UNEVEN_BACK)


def _project(precision: str) -> ProjectTile:
    return ProjectTile(128, 64 if precision == BF16 else 32, 128, 8, 3)


def _back(precision: str) -> BackTile:
    if precision == IEEE:
        return BackTile(64, 64, 32, 8, 3)
    return BackTile(128, 128, 64 if precision == BF16 else 32, 8, 3)
