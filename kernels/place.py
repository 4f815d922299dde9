"""The part of a parameter that a tensor holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """The places of a tensor's elements in their parameter.

    Element i of the tensor is the parameter's element first + i // run * stride + i % run.
    """

    number: int
    """The parameter's, from 0 to 2**32 - 1."""
    first: int = 0
    run: int = 1
    """The number of elements that follow each other, with a stride: a shard of columns has parts of
    rows."""
    stride: int = 0
    """The distance from a run's first element to that of the next; 0 where there is one run."""

    def last(self, numel: int) -> int:
        """The index of the last of so many elements, at least one."""
        runs, rest = divmod(numel - 1, self.run)
        return self.first + (runs * self.stride + rest if self.stride else numel - 1)

    def after(self, count: int, numel: int) -> Place:
        """The place of so many elements from element `count` on: whole runs, or within one."""
        runs, rest = divmod(count, self.run) if self.stride else (0, count)
        first = self.first + runs * self.stride + rest
        if not self.stride or rest + numel <= self.run:
            return Place(self.number, first)
        return self._replace(first=first)

    @property
    def in_quads(self) -> bool:
        """Returns whether four elements from every fourth one on are the four of one counter."""
        return self.first % 4 == 0 and not self.stride


def in_order(count: int) -> list[Place]:
    """The places of `count` whole parameters, which are numbered from 0."""
    return [Place(number) for number in range(count)]


def place_of_box(
    number: int, first: int, shape: Sequence[int], whole: Sequence[int]
) -> Place | None:
    """The place of a box in a parameter of shape `whole`; first: the index of its first element.

    None for a part of two dimensions behind the first, whose runs have no one stride.
    """
    cut = [dim for dim, size in enumerate(shape) if size != whole[dim]]
    leading = next((dim for dim, size in enumerate(whole) if size != 1), 0)
    if not cut or cut == [leading]:
        return Place(number, first)
    if set(cut) - {leading, cut[-1]}:
        return None
    inner = math.prod(whole[cut[-1] + 1 :])
    return Place(number, first, shape[cut[-1]] * inner, whole[cut[-1]] * inner)
