"""How large the tiles of the two launches are: it shows in no bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megaopt.kernels.matrix.galore import LEFT, LowRank
from megaopt.kernels.matrix.products import BF16, IEEE
from megaopt.kernels.optional_triton import INTERPRETED

PROGRAMS = 128
"""So many tiles keep the 132 processors of an H200 at work."""
OUTER_UNIT = 128
"""Numbers of a tile, for slabs: these must not go by a tile's real size."""
MOST_SLABS = 8


def part_of(most: int, rank: int) -> int:
    """How much of a rank a tile takes: a power of two, as Triton wants it, and few; at least 16."""
    return max(16, min(most, 1 << (rank - 1).bit_length()))


@dataclass(frozen=True)
class ProjectTile:
    """Of a projected gradient [outer, rank], as kernel.project_kernel has it."""

    outer: int
    inner: int
    """Terms of the sum at a time."""
    ranks: int
    """At most; a smaller rank takes fewer."""
    warps: int
    stages: int


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
    registers: int | None = None
    """The most that a thread may have; None: as many as the compiler takes."""
    ahead: bool = False
    """A tile's master or weight is loaded while the tile before it is computed."""

    @property
    def width(self) -> int:
        """Columns of a program."""
        return self.columns * self.strip


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

# One H200, 8 matrices of 4096 x 11008 at rank 128, projected on the left, ms of each launch; fp32
# weights for tf32, bf16 weights with fp32 masters for bf16. No projecting tile is more than a
# fifth slower than the best at ranks 32 to 512, 1 or 8 matrices, either side.
#
# | project, outer x inner, warps, stages | tf32 | bf16 | bf16, cast ahead |
# |---|---|---|---|
# | 128 x 32, 4, 4                        | 1.65 |      |                  |
# | 128 x 32, 8, 3                        | 1.85 |      |                  |
# | 128 x 64, 4, 4                        |      |      | 0.214            |
# | 64 x 64, 8, 3                         |      |      | 0.218            |
# | 128 x 64, 8, 3                        |      | 0.557 |                 |
#
# | back, rows x columns x inner, warps, stages, strip, registers | tf32 | bf16, cast ahead |
# |---|---|---|
# | 64 x 64 x 128, 4, 2, 4, 128           |      | 1.16 |
# | 64 x 32 x 128, 4, 2, 8                | 1.60 | 1.21 |
# | 128 x 64 x 128, 8, 2, 4, 128          | 2.38 | 1.24 |
# | the same, loaded ahead                | 3.33 | 1.27 |
# | 128 x 32 x 128, 8, 2, 8               | 2.04 | 1.31 |
# | 128 x 32 x 128, 8, 2, 8, 128, ahead   | 1.50 | 1.32 |
# | 64 x 32 x 128, 4, 1, 8                | 1.50 |      |
# | 128 x 64 x 32, 4, 2, 2                | 1.74 |      |
# | 128 x 64 x 128, 8, 2, 1               |      | 1.36 |
#
# On the right, where few tiles are of one matrix, bf16 takes 64 x 64: 0.018 ms for one of
# 4096 x 4096, and 0.029 as it was. ieee, one of 4096 x 11008, back: 64 x 64 x 32 with 4 warps and 2
# stages 0.327, with 8 and 3 0.374.

BACK_BF16 = BackTile(64, 64, 128, 4, 2, 4, 128)
BACK_TF32 = BackTile(128, 32, 128, 8, 2, 8, 128, True)
# Of ranks that are more than such a tile takes at a time, so that a strip does not share its rows.
HIGH_BACK_BF16 = BackTile(128, 64, 128, 8, 2)
HIGH_BACK_TF32 = BackTile(128, 64, 32, 4, 2, 2)


def tiles_of(low_rank: LowRank) -> Tiles:
    """The tiles of matrices that are projected so."""
    if INTERPRETED:
        project, back = ProjectTile(128, 128, 128, 4, 1), BackTile(128, 64, 64, 4, 1, 2)
        return Tiles(project, replace(back, ahead=True), project, back)
    if low_rank.precision == IEEE:
        project, back = ProjectTile(128, 32, 128, 8, 3), BackTile(64, 64, 32, 4, 2)
    elif low_rank.precision == BF16:
        project = ProjectTile(128 if low_rank.side == LEFT else 64, 64, 128, 4, 4)
        back = BACK_BF16 if low_rank.rank <= BACK_BF16.inner else HIGH_BACK_BF16
    else:
        project = ProjectTile(128, 32, 128, 4, 4)
        back = BACK_TF32 if low_rank.rank <= BACK_TF32.inner else HIGH_BACK_TF32
    cast = low_rank.precision == BF16
    return Tiles(project, back, UNEVEN_PROJECT, UNEVEN_BACK, cast)
