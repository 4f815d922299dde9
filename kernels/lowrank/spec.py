"""On which side a matrix is projected, and to how many dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaopt.kernels.step.draws import Place

RIGHT, LEFT = "right", "left"


@dataclass(frozen=True)
class LowRank:
    """What the matrices of a batch have in common.

    A gradient [m, n] is projected to [m, rank] on the right, by a projection [rank, n] of
    orthonormal rows; on the left to [rank, n], by one [m, rank] of orthonormal columns.
    """

    side: str
    """RIGHT or LEFT."""
    rank: int

    def low_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Of the projected gradient of a matrix, and of its moments."""
        rows, columns = shape
        return (rows, self.rank) if self.side == RIGHT else (self.rank, columns)

    def projection_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Of the projection of a matrix."""
        rows, columns = shape
        return (self.rank, columns) if self.side == RIGHT else (rows, self.rank)

    def low_place(self, place: Place, shape: Sequence[int]) -> Place:
        """Where the projected gradient of some rows lies in that of the whole matrix.

        Args:
            place: of the rows in the matrix.
            shape: of the rows.
        """
        if not place.first:
            return place
        return place._replace(first=place.first // shape[1] * self.low_shape(shape)[1])


def saves(rank: int, shape: Sequence[int]) -> bool:
    """Whether projection and projected gradient together are smaller than the gradient."""
    rows, columns = shape
    return rank * (rows + columns) < rows * columns
