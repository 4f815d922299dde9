"""Pieces of tensors at their places in whole ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megaopt.kernels.place import Place


class ShardRange(NamedTuple):
    """A stretch of a rank's tensor, and its place in the whole."""

    begin: int
    """The index of its first element in the rank's tensor, flat."""
    numel: int
    place: Place

    def local(self, place: int) -> int | None:
        """The index in the rank's tensor of an element of the whole; None: it is elsewhere."""
        _, first, run, stride = self.place
        runs, rest = divmod(place - first, stride) if stride else (0, place - first)
        here = runs * run + rest
        inside = place >= first and (rest < run or not stride) and here < self.numel
        return self.begin + here if inside else None


def whole(shape: Sequence[int]) -> tuple[ShardRange, ...]:
    """The pieces of a tensor that a rank has whole."""
    numel = math.prod(shape)
    return (ShardRange(0, numel, Place(0)),) if numel else ()


def cut(pieces: Sequence[ShardRange], begin: int, end: int) -> tuple[ShardRange, ...]:
    """The pieces of the flat elements from begin to end of a tensor."""
    parts = []
    for piece in pieces:
        low, high = max(begin, piece.begin), min(end, piece.begin + piece.numel)
        for start, numel, place in _runs(piece.place, low - piece.begin, high - piece.begin):
            parts.append(ShardRange(piece.begin + start - begin, numel, place))
    return tuple(parts)


def _runs(place: Place, low: int, high: int) -> Iterator[ShardRange]:
    """Elements from low to high of those at a place: a part of a run, whole runs, another part."""
    while low < high:
        runs, rest = divmod(low, place.run) if place.stride else (0, low)
        first = place.first + runs * place.stride + rest
        if not place.stride:
            end, piece_place = high, Place(0, first)
        elif rest or high - low < place.run:
            end, piece_place = min(high, low - rest + place.run), Place(0, first)
        else:
            end, piece_place = high - high % place.run, Place(0, first, place.run, place.stride)
        yield ShardRange(low, end - low, piece_place)
        low = end
