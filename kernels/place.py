"""Which part of a parameter a tensor holds."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Where a tensor's elements lie in their parameter.

    Element i of the tensor is the parameter's element first + i // run * stride + i % run.
    """

    number: int
    """The parameter's, from 0 to 2**32 - 1."""
    first: int = 0
    run: int = 1
    """With a stride: how many elements follow each other. A shard of columns has parts of rows."""
    stride: int = 0
    """From the first element of a run to that of the next; 0 where there is one run."""

    def last(self, numel: int) -> int:
        """The index of the last of so many elements, at least one."""
        runs, rest = divmod(numel - 1, self.run)
        return self.first + (runs * self.stride + rest if self.stride else numel - 1)

    @property
    def in_quads(self) -> bool:
        """Whether four elements from every fourth one on are the four of one counter."""
        return self.first % 4 == 0 and not self.stride


def in_order(count: int) -> list[Place]:
    """The places of `count` whole parameters, which are numbered from 0."""
    return [Place(number) for number in range(count)]
