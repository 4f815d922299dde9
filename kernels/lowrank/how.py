"""How the matrices of a batch are stepped, and what that makes of a matrix's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megaopt.kernels.formats import WEIGHTS
from megaopt.kernels.lowrank.formats import direction_formats
from megaopt.kernels.lowrank.operands import BF16
from megaopt.kernels.lowrank.project import SLAB_UNIT
from megaopt.kernels.lowrank.spec import LEFT, LowRank
from megaopt.kernels.lowrank.tiles import (
    MOST_SLABS,
    OUTER_UNIT,
    PROGRAMS,
    BackTile,
    ProjectTile,
    Tiles,
)
from megaopt.kernels.step.batch import Formats

FLOAT32 = WEIGHTS["float32"]


@dataclass(frozen=True)
class How:
    """What is the same for all matrices of a batch."""

    formats: Formats
    grouped: bool
    """The gradients are projected by one launch, not by torch."""
    precision: str
    """Of operands.PRECISIONS."""
    tiles: Tiles

    @property
    def low_rank(self) -> LowRank:
        """Side and rank."""
        assert self.formats.low_rank is not None
        return self.formats.low_rank

    @property
    def direction(self) -> Formats:
        """Of Adam's step, which writes the direction as the last product takes it."""
        return direction_formats(self.formats, self.precision)

    def low_numel(self, shape: torch.Size) -> int:
        """Numbers of a projected gradient."""
        return torch.Size(self.low_rank.low_shape(shape)).numel()

    @property
    def casts(self) -> bool:
        """Projections are cast to bf16 ahead, once for both launches."""
        return self.tiles.cast and self.precision == BF16

    def workspace_bytes(self, shape: torch.Size) -> int:
        """What a step takes for a while: the projected gradient, its direction, the projection."""
        low, cast = self.low_numel(shape), torch.Size(self.low_rank.projection_shape(shape)).numel()
        direction = 0 if self.direction.weight is FLOAT32 else 2 * low
        return 4 * low + direction + (2 * cast if self.casts else 0)

    def outer_and_terms(self, shape: Sequence[int]) -> tuple[int, int]:
        """Of a gradient: the dimension that stays, and that along which sums go."""
        rows, columns = shape
        return (columns, rows) if self.low_rank.side == LEFT else (rows, columns)

    def even(self, shape: torch.Size) -> tuple[bool, bool]:
        """Whether it has whole tiles only, of rows of whole 16 bytes: in the two launches."""
        (outer, terms), rank = self.outer_and_terms(shape), self.low_rank.rank
        project, back, wide = self.tiles.project, self.tiles.back, shape[1] % 16
        first = (outer % project.outer, terms % SLAB_UNIT.value, rank % project.ranks_of(rank))
        last = (shape[0] % back.rows, shape[1] % back.width, rank % back.inner_of(rank))
        return not any((*first, wide)), not any((*last, wide))

    def project_tile(self, shape: torch.Size) -> ProjectTile:
        """The tile of a projected gradient."""
        return self.tiles.project if self.even(shape)[0] else self.tiles.uneven_project

    def back_tile(self, shape: torch.Size) -> BackTile:
        """The tile of a matrix."""
        return self.tiles.back if self.even(shape)[1] else self.tiles.uneven_back

    def project_count(self, shape: torch.Size) -> int:
        """Tiles of a projected gradient."""
        outer, own = self.outer_and_terms(shape)[0], self.project_tile(shape)
        return -(-outer // own.outer) * -(-self.low_rank.rank // own.ranks_of(self.low_rank.rank))

    def back_count(self, shape: torch.Size) -> int:
        """Programs of a matrix."""
        own = self.back_tile(shape)
        return -(-shape[0] // own.rows) * -(-shape[1] // own.width)

    def slabs(self, shape: torch.Size) -> int:
        """In how many slabs a matrix's sums are cut: as many as make PROGRAMS tiles of it.

        By the shape alone, as they say in which order numbers are added.
        """
        outer, terms = self.outer_and_terms(shape)
        most: int = min(MOST_SLABS, terms // (2 * SLAB_UNIT.value))
        return max(1, min(PROGRAMS // -(-outer // OUTER_UNIT), most))
