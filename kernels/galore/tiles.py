"""The tiles of GaLore's launches: how large they are shows in no bit."""

from __future__ import annotations

from dataclasses import dataclass

from megaopt.kernels.galore.products import BF16, IEEE
from megaopt.kernels.galore.rule import LowRank
from megaopt.kernels.optional_triton import INTERPRETED


def padded(rank: int) -> int:
    """Returns a rank, or the power of two above it, as Triton wants it; at least 16."""
    return max(16, 1 << (rank - 1).bit_length())


def part_of(most: int, rank: int) -> int:
    """Returns the part of a rank that a tile takes: `padded`, or a power of two that is less."""
    return min(most, padded(rank))


def operand_bytes(low_rank: LowRank) -> int:
    """Returns the size of a number that was rounded ahead, in bytes."""
    return 2 if low_rank.precision == BF16 else 4


@dataclass(frozen=True)
class ProjectTile:
    """The tile of a projected gradient [outer, rank], as project_kernel has it."""

    outer: int
    inner: int
    """Terms of the sum at a time."""
    ranks: int
    """Ranks of a tile at most; a smaller rank takes fewer."""
    warps: int
    stages: int


@dataclass(frozen=True)
class BackTile:
    """The tile of a matrix [rows, columns] that is projected back."""

    rows: int
    columns: int
    inner: int
    """Terms of the sum over the rank at a time, at most."""
    warps: int
    stages: int
    strip: int = 1
    """Tiles of a program, one beside another."""
    registers: int | None = None
    """The most that a thread may have; None: as many as the compiler takes."""

    @property
    def width(self) -> int:
        """Columns of a program."""
        return self.columns * self.strip


@dataclass(frozen=True)
class WholeTile:
    """The tile of matrices that have whole ones only, which come by descriptors."""

    rows: int
    columns: int
    warps: int
    stages: int
    """Tiles of which there is room at a time; by blocks, of the factors."""
    inner: int | None = None
    """Bytes of the rank at a time, by blocks; None: all of it, by strips."""
    at_once: int = 1
    """Programs of a processor."""


@dataclass(frozen=True)
class ProjectionTiles:
    """The tiles of both launches; for matrices that have whole tiles only, and for others."""

    project: ProjectTile
    back: BackTile
    uneven_project: ProjectTile
    uneven_back: BackTile
    ahead: bool = False
    """Projections are rounded ahead, once for both launches, by another; not with ieee."""
    strip: WholeTile | None = None
    """The tile by strips, where there is room for it; None: there are no strips."""
    block: WholeTile | None = None
    """The tile by blocks, elsewhere; None: there are none."""


# Compiled for sm_90 the others' masks take so many registers that larger tiles spill.
UNEVEN_PROJECT, UNEVEN_BACK = ProjectTile(64, 32, 64, 8, 2), BackTile(64, 64, 32, 8, 1)

# 8 matrices of 4096 x 11008 at rank 128, projected on the left, ms of each launch; fp32 weights for
# tf32 (one H100, fused, whose copies take 0.55 and 0.96; torch.mm's projection 0.68), bf16 weights
# with fp32 masters for bf16 (one H200). No projecting tile of bf16 is more than a fifth slower than
# the best at ranks 32 to 512, 1 or 8 matrices, either side.
#
# | project, outer x inner, warps, stages | tf32 | bf16  | bf16, rounded ahead |
# |---|---|---|---|
# | 64 x 32, 4, 4                         | 1.04 |       |       |
# | the same, grouped                     | 0.72 |       |       |
# | 64 x 32, 4, 3                         | 1.03 |       |       |
# | 128 x 32, 8, 4                        | 1.03 |       |       |
# | 128 x 32, 4, 4: two sums spill        | 1.23 |       |       |
# | 128 x 64, 4, 4                        |      |       | 0.214 |
# | 64 x 64, 8, 3                         |      |       | 0.218 |
# | 128 x 64, 8, 3                        |      | 0.557 |       |
#
# | back, rows x columns x inner, warps, stages, strip, registers | tf32 | bf16, rounded ahead |
# |---|---|---|
# | 64 x 64 x 128, 4, 2, 4, 128           | 1.29 | 1.16 |
# | 64 x 32 x 128, 4, 2, 8                |      | 1.21 |
# | 128 x 64 x 128, 8, 2, 4, 128          | 1.64 | 1.24 |
# | 128 x 32 x 128, 8, 2, 8               |      | 1.31 |
# | 128 x 32 x 128, 8, 2, 8, 128          | 1.37 |      |
# | 64 x 64 x 32, 4, 3, 2                 | 1.41 |      |
# | 64 x 32 x 128, 4, 1, 8                | 1.50 |      |
# | 128 x 64 x 128, 8, 1, 1               | 1.46 |      |
# | 128 x 64 x 128, 8, 2, 1               |      | 1.36 |
#
# With slabs of 1,024 terms, which need two sums of a tile, bf16 takes 64 x 64 with 4 warps and 4
# stages: a step of these 8 matrices took an H100 1.90 ms, by 64 x 64, 8, 3 1.91, by 128 x 64, 8, 3
# 1.92, by 128 x 64, 4, 4 1.99; 8 of 4096 x 4096 on the right 0.700, 0.702, 0.706, 0.729. ieee, one
# of 4096 x 11008, back: 64 x 64 x 32 with 4 warps and 2 stages 0.327, with 8 and 3 0.374.

BACK_BF16 = BackTile(64, 64, 128, 4, 2, 4, 128)
BACK_TF32 = BackTile(128, 32, 128, 8, 2, 8, 128)
# Of ranks that are more than such a tile takes at a time, so that a strip does not share its rows.
HIGH_BACK_BF16 = BackTile(128, 64, 128, 8, 2)
HIGH_BACK_TF32 = BackTile(128, 64, 32, 4, 2, 2)
# Matrices of whole tiles go by strips. One H200, us a matrix of the last launch, bf16 weights with
# fp32 masters, rank 128; 9 of 4096 x 11008, 20 of 4096 x 4096: 124 and 45 in place of 147 and 55 by
# BACK_BF16, whose tiles load as much of the right factor as of the master; copies take 106 and 40.
# A prototype, 8 matrices:
#
# | tiles, warps, stages           | 4096 x 11008 | 4096 x 4096 |
# |---|---|---|
# | 64 x 128, 8, 3                 | 127          | 51          |
# | the same, 4 stages             | 127          | 50          |
# | the same, 4 warps              | 129          | 52          |
# | the same, stored by descriptors | 133         | 54          |
# | 64 x 64, 4, 3, two programs    | 135          | 51          |
# | 64 x 256, 8, 2                 | 163          | 60          |
# | 64 x 128, 8, 3, strips go across | 138        | 52          |
# | 128 x 64, 8, 3, strips go across | 142        | 55          |
#
# TF32, fused, 8 of 4096 x 11008 at ranks 32, 64, 128: 99, 103, 126, and by BACK_TF32 109, 123, 138;
# 64 x 64 with 8 warps 129, 128 x 64 with two stages 163. At 256 64 x 32 with two took 336,
# HIGH_BACK_TF32 245.
STRIP = WholeTile(64, 128, 8, 3)
# Of higher ranks by blocks, two programs a processor: one stores what it made while the other
# multiplies. One H200, us of a step, bf16 weights with fp32 masters, of 4096 x 11008 and 4096 x
# 4096; first by HIGH_BACK_BF16 and HIGH_BACK_TF32, those with a * by strips of 64 x 64:
#
# | tile, warps, stages, at once  | bf16, 512 | bf16, 256   | tf32, 256 | tf32, 512 | tf32, 128   |
# |---|---|---|---|---|---|
# | before                        | 400, 148  | 257*, 105*  | 485, 185  | 730       | 255*, 109*  |
# | 64 x 128, 4, 3, 2             | 329, 129  | 245, 107    | 368, 151  | 534       | 244, 111    |
# | the same, half the terms, 5   |           | 249, 109    | 380       |           | 254, 116    |
# | the same, twice the terms, 2  |           | 308, 134    | 473       |           | 306, 137    |
# | 64 x 64, 4, 3, 3              |           | 253, 110    | 377       |           | 253, 114    |
# | 128 x 64, 4, 3, 2             | 338, 134  | 252         | 375, 156  | 548       |             |
# | 128 x 128, 8, 4, 1            | 337, 134  | 261         | 378, 159  | 526       |             |
# | 128 x 256, 8, 3, 1: two parts | 338, 134  | 264         | 374, 155  | 520       |             |
# | 64 x 256, 8, 3, 1: two parts  | 375, 148  | 294         | 412, 171  | 580       |             |
BLOCK = WholeTile(64, 128, 4, 3, inner=128, at_once=2)
BARRIERS = 1024
"""Bytes of a program for barriers."""
TURN = 1.0
"""A strip's beginning, until its first tiles are there, in tiles."""
PARTS = (1, 2, 3, 4, 6, 8)
"""Numbers of strips, one below another, of which the highest matrix is cut into the fastest.

9 of 4096 x 11008 took 124 us each by whole columns, 130 by strips of 16 tiles.
"""


def tiles_of(low_rank: LowRank) -> ProjectionTiles:
    """Returns the tiles of matrices that are projected so."""
    # ieee products take the projections as they are
    ahead = low_rank.precision != IEEE
    # an interpreted operation takes long whatever its size: tiles are large
    if INTERPRETED:
        project, back = ProjectTile(128, 128, 128, 4, 1), BackTile(128, 64, 64, 4, 1, 2)
        whole = (WholeTile(32, 64, 4, 3), WholeTile(32, 64, 4, 3, inner=64))
        return ProjectionTiles(project, back, project, back, ahead, *whole)
    if low_rank.precision == IEEE:
        project, back = ProjectTile(128, 32, 128, 8, 3), BackTile(64, 64, 32, 4, 2)
    elif low_rank.precision == BF16:
        project = ProjectTile(64, 64, 128, 4, 4)
        # a strip of tiles shares the left factor where the tile has the whole rank
        back = BACK_BF16 if low_rank.rank <= BACK_BF16.inner else HIGH_BACK_BF16
    else:
        # two sums of 128 rows and more than 32 ranks spill
        project = ProjectTile(128 if low_rank.rank <= 32 else 64, 32, 128, 4, 4)
        back = BACK_TF32 if low_rank.rank <= BACK_TF32.inner else HIGH_BACK_TF32
    return ProjectionTiles(project, back, UNEVEN_PROJECT, UNEVEN_BACK, ahead, STRIP, BLOCK)
