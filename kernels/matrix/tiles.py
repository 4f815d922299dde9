"""Products of one matrix that several ranks make together: each makes some tiles, and has all.

A tile has the bits that it has in the whole product: nothing is summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from megaopt.kernels.products.launch import products, symmetric_products

UNIT = 64
"""Cuts are at multiples of so many rows: a tile's, and what tensor descriptors want of columns."""
Matrices = list[torch.Tensor]


def cuts(size: int, ranks: int, of_triangle: bool) -> list[int]:
    """Returns where equal parts of work begin, and the end; of_triangle: of a lower triangle."""
    # r rows of a triangle are r^2 / 2 numbers: equal parts of it end at roots
    power = 0.5 if of_triangle else 1.0
    # cuts are rounded, so that a small matrix may leave some ranks nothing
    inner = [round(size * (rank / ranks) ** power / UNIT) * UNIT for rank in range(1, ranks)]
    return [0, *(min(row, size) for row in inner), size]


def room_of(lengths: Sequence[int], rank: int) -> int:
    """Returns the room, in numbers, that spreading takes: a rank's own once for each, and all."""
    return sum(lengths) + len(lengths) * lengths[rank]


class TiledProducts:
    """Makes products in the place of kernels.products.launch, of lists of one matrix.

    Args:
        exchange: the ranks that make it: exchange.Exchange.
        memory: of `numel` numbers, in which results go to the others.
        error: of this rank's, before: it makes nothing, and goes on with the others.
    """

    def __init__(self, exchange: Any, memory: torch.Tensor, error: Exception | None = None) -> None:
        self._rank, self._ranks, self._spread = exchange.rank, exchange.ranks, exchange.spread
        self._memory = memory
        self.error = error
        """The exception that failed this rank."""

    @staticmethod
    def numel(shape: Sequence[int], rank: int, ranks: int) -> int:
        """Returns the numbers of memory that the products of a matrix take on a rank."""
        # of each rank's part of a whole matrix, and of its rows of a square's lower triangle
        short, long = sorted(shape)
        lengths = [(b - a) * short for a, b in pairwise(cuts(long, ranks, False))]
        of_square = [(b - a) * b for a, b in pairwise(cuts(short, ranks, True))]
        # one memory for both kinds of products, as they follow each other
        return max(room_of(lengths, rank), room_of(of_square, rank))

    def products(self, left: Matrices, right: Matrices, out: Matrices, **options: Any) -> None:
        """Makes S X of a symmetric matrix S, or of a tall matrix X S, by parts of the longer side.

        `options` may have `add`, the matrix that is added.
        """
        # square: [short, short]; whole and target: [m, n], on each rank
        (target,) = out
        is_tall = target.shape[0] > target.shape[1]
        (whole,), (square,) = (left, right) if is_tall else (right, left)
        # rows of a tall matrix, columns of another: a part is made of the square and that part
        ends = cuts(max(whole.shape), self._ranks, False)
        cut = [_part(target, is_tall, *pair) for pair in pairwise(ends)]

        # what is added is cut as the result is; numbers and factors go as they are
        begin, end = ends[self._rank], ends[self._rank + 1]
        part_options = dict(options)
        if "add" in options:
            part_options["add"] = [_part(options["add"][0], is_tall, begin, end)]
        part = _part(whole, is_tall, begin, end)

        # this rank's part into its place in the result, then all parts to all ranks
        sides = ([part], [square]) if is_tall else ([square], [part])
        self._make(lambda: end > begin and products(*sides, [cut[self._rank]], **part_options))
        self._exchange(cut)

    def symmetric_products(
        self, left: Matrices, out: Matrices, right: Matrices | None = None, **options: Any
    ) -> None:
        """Makes a symmetric product by rows of its lower triangle."""
        # first: [m, k], second: [k, m], target: [m, m], on each rank
        (first,), (target,) = left, out
        second = first.mT if right is None else right[0]
        # each rank has some rows, from the first column to the diagonal's end
        ends = cuts(target.shape[0], self._ranks, True)
        cut = [target[a:b, :b] for a, b in pairwise(ends)]
        begin, end = ends[self._rank], ends[self._rank + 1]

        def make() -> None:
            rows, part_options = first[begin:end], dict(options)
            # left of the diagonal's square: a plain product, in which no number is on the diagonal
            if begin and end > begin:
                part_options.pop("diagonal", None)
                if "add" in options:  # what is added is cut as the result is
                    part_options["add"] = [options["add"][0][begin:end, :begin]]
                products([rows], [second[:, :begin]], [target[begin:end, :begin]], **part_options)

            # the diagonal's square: symmetric by itself
            if end > begin:
                part_options = dict(options)
                if "add" in options:
                    part_options["add"] = [options["add"][0][begin:end, begin:end]]
                square = target[begin:end, begin:end]
                symmetric_products([rows], [square], right=[second[:, begin:end]], **part_options)

        def mirror() -> None:
            # above the diagonal stands what is below it, to the bit
            upper = torch.ones_like(target, dtype=torch.bool).triu_(1)
            target.copy_(torch.where(upper, target.mT, target))

        # all ranks exchange, also those that failed or have no rows
        self._make(make)
        self._exchange(cut)
        self._make(mirror)

    def _make(self, make: Callable[[], Any]) -> None:
        """Makes this rank's part, unless it has failed."""
        if self.error is None:
            try:
                make()
            except Exception as error:
                self.error = error

    def _exchange(self, cut: Matrices) -> None:
        """Gives every rank all parts of a result, of which it has its own."""
        # parts travel flat, rank by rank, through this rank's memory
        sizes = [part.numel() for part in cut]
        numbers = self._spread([cut[self._rank]], sizes, self._memory)
        for part, part_numbers in zip(cut, torch.split(numbers, sizes), strict=True):
            part.copy_(part_numbers.view(part.shape))


def _part(matrix: torch.Tensor, of_rows: bool, begin: int, end: int) -> torch.Tensor:
    return matrix[begin:end] if of_rows else matrix[:, begin:end]
