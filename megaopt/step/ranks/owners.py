"""The ranks that hold parts of matrices: which of them makes which, and what they send each other.

Every rank finds the same by the parameters' shapes and placements, without a message.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, chain, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megaopt.kernels.matrix.shared import WHOLLY, Part, Piece
from megaopt.kernels.rules.matrix import Cut
from megaopt.step.ranks.peers import SUM, reduced

ROOM = 2**26
"""Bytes of the matrices of a bucket that a rank makes, or as many as one takes.

On NVLink they are there in some 0.2 ms, while their products take 1 ms or more; three buckets of
parts and whole matrices stay below half a gigabyte.
"""

Box = tuple[tuple[int, int], ...]
"""The first index and the one behind the last, in each dimension."""


class Matrix(NamedTuple):
    """A matrix of a parameter, and where it lies there."""

    piece: Piece
    runs: list[tuple[Box, int]]
    """Boxes of the parameter, and where their numbers begin in the matrix."""


def matrices_of(param: int, shape: Sequence[int], cuts: Sequence[Cut]) -> list[Matrix]:
    """Those of a parameter of this shape, by elements or indices; none that is empty."""
    rows = [0, *accumulate(cut.shape[0] for cut in cuts)]
    found = []
    for index, cut in enumerate(cuts):
        kept = slice(rows[index], rows[index + 1]) if len(cuts) > 1 else WHOLLY
        boxes = [box_of(first, size, shape) for first, size in cut.runs if size]
        firsts = accumulate((size for _, size in cut.runs if size), initial=0)
        if boxes:
            piece = Piece(param, kept, tuple(cut.shape))
            found.append(Matrix(piece, list(zip(boxes, firsts, strict=False))))
    return found


def box_of(first: int, size: int, shape: Sequence[int]) -> Box:
    """Where numbers that follow each other, whole rows of some dimension, lie in a tensor."""
    box: list[tuple[int, int]] = []
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :])
        index, first = divmod(first, stride)
        if size % stride == 0:
            rest = [(0, each) for each in shape[dim + 1 :]]
            return (*box, (index, index + size // stride), *rest)
        box.append((index, index + 1))
    return tuple(box)


def common(one: Box, other: Box) -> Box:
    """What two boxes have in common; empty ones have no numbers."""
    ends = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return tuple((begin, max(begin, end)) for begin, end in ends)


def sizes_of(box: Box) -> tuple[int, ...]:
    """The size of a box in each dimension."""
    return tuple(end - begin for begin, end in box)


def within(box: Box, outer: Box) -> Box:
    """A box as counted from the beginning of another."""
    return tuple((a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))


def owners_of(costs: Sequence[float], holders: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Who makes which matrix.

    Who has one whole makes it, as long as that is no more than an equal part of the work; of the
    rest the most expensive go first, each to who has the least to do.

    holders: for each matrix the ranks that have it whole, as they may have an expert.
    """
    loads, found, equal = [0.0] * ranks, [-1] * len(costs), sum(costs) / ranks
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    for index in order:
        own = min(holders[index], key=lambda rank: (loads[rank], rank), default=None)
        if own is not None and loads[own] + costs[index] <= equal:
            found[index] = own
            loads[own] += costs[index]
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for index in order:
        if found[index] < 0:
            load, found[index] = heap[0]
            heapq.heapreplace(heap, (load + costs[index], found[index]))
    return found


def cost_of(shape: Sequence[int]) -> float:
    """Multiply-adds of a step of Newton and Schulz, of a matrix [rows, columns]."""
    short, long = sorted((shape[0], math.prod(shape[1:])))
    return float(short * short * (2 * long + short))


def group_of(mesh: Any) -> Any:
    """The group of all ranks of a mesh; the first call meets them, where it has many dimensions."""
    # a mesh made after destroy_process_group may equal one from before it
    return mesh.get_group() if mesh.ndim == 1 else _group_of(mesh, dist.group.WORLD)


@cache
def _group_of(mesh: Any, world: Any) -> Any:
    """The group of a mesh among those of the world."""
    ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) == dist.get_world_size():
        return world
    return dist.new_group(ranks, use_local_synchronization=True)


class Bucket:
    """Matrices that are on their way together: megaopt.kernels.matrix.shared.Bucket.

    Args:
        matrices: all of them, in one order on all ranks.
        owners: the rank that makes each.
        boxes: for each rank of the group the shard of each parameter.
        rank: this one's place in the group.
        gives: for each rank whether this one's copy of a matrix is that which it takes.
        together: all ranks make the one matrix.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        owners: Sequence[int],
        boxes: Sequence[Sequence[Box]],
        rank: int,
        gives: Sequence[bool],
        together: bool,
    ) -> None:
        self.owner = owners[0] if together else None
        self._matrices, self._gives, ranks = matrices, gives, range(len(boxes))
        self.pieces = [each.piece for each in matrices]
        self.own = [index for index, owner in enumerate(owners) if owner == rank]
        order = sorted(range(len(matrices)), key=lambda i: (not gives[owners[i]], owners[i]))
        returned = dict.fromkeys(ranks, 0)
        found = []
        for index in order:
            own = boxes[rank][matrices[index].piece.param]
            for whole, _ in matrices[index].runs:
                box = common(own, whole)
                numel = math.prod(sizes_of(box))
                if numel:
                    first = _offset(within(box, own), sizes_of(own))
                    found.append((Part(index, first, numel), owners[index]))
                    returned[owners[index]] += numel
        starts = dict(zip(ranks, accumulate(returned.values(), initial=0), strict=False))
        self.parts, self.returned = [part for part, _ in found], []
        for part, owner in found:
            self.returned.append(starts[owner])
            starts[owner] += part.numel
        self.coming = list(returned.values())
        """Numbers of updates that come from each rank."""
        self.sent = [count if gives[each] else 0 for each, count in enumerate(self.coming)]
        """Numbers of directions that go to each."""
        self._boxes = [
            [
                [(common(own[matrices[i].piece.param], box), box, first)
                 for box, first in matrices[i].runs]
                for i in self.own
            ]
            for own in boxes
        ]  # fmt: skip
        """For each rank, each of `own` and its runs: what the rank has, the run and its first."""
        self.leaving = [
            sum(math.prod(sizes_of(part)) for runs in own for part, _, _ in runs)
            for own in self._boxes
        ]
        """Numbers of updates that go to each."""
        self.received = [count if gives[each] else 0 for each, count in enumerate(self.leaving)]
        """Numbers of directions that come from each."""

    @property
    def most(self) -> tuple[int, int]:
        """Numbers of this rank's parts, and of those of all ranks of what this one makes."""
        return sum(self.coming), sum(self.leaving)

    def cut(self, wholes: Sequence[torch.Tensor], far: torch.Tensor, takes: bool) -> Iterator[Any]:
        """Parts of whole matrices beside their numbers in `far`; takes: those that come here."""
        begin = 0
        for rank, own in enumerate(self._boxes):
            if takes and not self._gives[rank]:
                continue
            for whole, runs in zip(wholes, own, strict=True):
                for part, box, first in runs:
                    sizes, outer = sizes_of(part), sizes_of(box)
                    numel = math.prod(sizes)
                    if numel:
                        chosen = tuple(slice(*ends) for ends in within(part, box))
                        run = whole.view(-1)[first : first + math.prod(outer)].view(outer)
                        yield run[chosen], far[begin : begin + numel].view(sizes)
                        begin += numel


def _laid_out(
    views: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    cuts: Sequence[Sequence[Cut]],
    places: Sequence[tuple[int, ...]],
) -> tuple[list[Matrix], list[list[Box]]]:
    """The matrices of parameters of these shapes, and for each place of the mesh their shards."""
    found, by_view = [], []
    for param, (view, shape, own) in enumerate(zip(views, shapes, cuts, strict=True)):
        found += matrices_of(param, view.box_shape(shape), own)
        by_view.append(view.boxes(places, shape))
    return found, [[own[rank] for own in by_view] for rank in range(len(places))]


def _has(own: Box, matrix: Matrix) -> bool:
    """Whether a box has a whole matrix."""
    return all(common(own, box) == box for box, _ in matrix.runs)


def _offset(box: Box, shape: Sequence[int]) -> int:
    """The first number of a box in a tensor."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return sum(begin * stride for (begin, _), stride in zip(box, strides, strict=True))


class Arrived:
    """A message that nobody waits for."""

    def wait(self) -> None:
        """Returns at once."""


ARRIVED = Arrived()


class Owners:
    """The ranks of a mesh: megaopt.kernels.matrix.shared.Exchange.

    Args:
        views: the parameters of a batch, of one mesh and split.
        cuts: for each its matrices.
        lows: of each the shape of what is made of its gradient; None: its own.
        itemsize: bytes of a number that is sent.
        shares_work: a matrix that is most of the work is made by all ranks together.
        room: of a bucket, as ROOM.
    """

    def __init__(
        self,
        views: Sequence[Any],
        cuts: Sequence[Sequence[Cut]],
        lows: Sequence[Sequence[int]] | None,
        itemsize: int,
        shares_work: bool = False,
        room: int = ROOM,
    ) -> None:
        assert views[0].split is not None
        self._mesh, dims = views[0].split
        self._groups = [self._mesh.get_group(dim) for dim in dims]
        ranks = self._mesh.mesh
        places = list(product(*map(range, ranks.shape)))
        places.sort(key=lambda place: int(ranks[place]))  # as ranks are in a group
        here = tuple(self._mesh.get_coordinate())
        self.rank, self.ranks = places.index(here), len(places)
        copies = [dim for dim in range(self._mesh.ndim) if dim not in dims]
        gives = [all(place[dim] == here[dim] for dim in copies) for place in places]
        shapes = [view.whole_shape for view in views]
        matrices, boxes = _laid_out(views, shapes, cuts, places)
        holders = [
            [rank for rank, own in enumerate(boxes) if dims and _has(own[each.piece.param], each)]
            for each in matrices
        ]  # where all ranks have all, nobody is preferred
        costs = [cost_of(each.piece.shape) for each in matrices]
        owners = owners_of(costs, holders, len(places))
        self.owned: list[list[Piece]] = [[] for _ in places]
        shares_work = shares_work and len(places) > 1
        large = [i for i, cost in enumerate(costs) if shares_work and 2 * cost > sum(costs)]
        # where all ranks have all, each has memory for the updates of all
        room = room if dims else room // len(places)
        rest = self._cut(matrices, owners, large, room // itemsize)
        order = [large, *rest] if large else rest

        def bucket(found: Sequence[Matrix], boxes: Any, chosen: list[int]) -> Bucket:
            given = [found[i] for i in chosen], [owners[i] for i in chosen]
            return Bucket(*given, boxes, self.rank, gives, chosen == large)

        self.buckets = self.lows = [bucket(matrices, boxes, chosen) for chosen in order]
        if lows is not None:
            own = [[Cut(tuple(low), [(0, math.prod(low))])] for low in lows]
            low_matrices, low_boxes = _laid_out(views, lows, own, places)
            self.lows = [bucket(low_matrices, low_boxes, chosen) for chosen in order]
        for index in chain(*order):
            self.owned[owners[index]].append(matrices[index].piece)
        most = [(0, 0), *(each.most for each in (*self.buckets, *self.lows))]
        self.most = (max(near for near, _ in most), max(far for _, far in most))

    def _cut(
        self, matrices: Sequence[Matrix], owners: Sequence[int], but: Sequence[int], room: int
    ) -> list[list[int]]:
        """The places of matrices in buckets, those of one shape one after another; but: these."""
        found: dict[int, list[int]] = {}
        used = [(0, 0)] * self.ranks
        order = [index for index in range(len(matrices)) if index not in but]
        for index in sorted(order, key=lambda i: matrices[i].piece.shape):
            numel, owner = math.prod(matrices[index].piece.shape), owners[index]
            bucket, taken = used[owner]
            if taken and taken + numel > room:
                bucket, taken = bucket + 1, 0
            used[owner] = bucket, taken + numel
            found.setdefault(bucket, []).append(index)
        return [found[bucket] for bucket in sorted(found)]

    def add_up(self, own: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that hold the other parts of the same matrices; in place."""
        return reduced(own, self._groups, SUM)

    def there(self, bucket: Bucket, near: torch.Tensor, far: torch.Tensor) -> Any:
        """Sends parts in `near` to their matrices' owners; returns what waits."""
        if not self._groups:  # owners have all of them
            count = sum(bucket.sent)
            far[:count].copy_(near[:count])
            return ARRIVED
        return self._sent(near, far, bucket.sent, bucket.received)

    def wholes(self, bucket: Bucket, far: torch.Tensor) -> list[torch.Tensor]:
        """The matrices `bucket.own` of the parts that have come."""
        found = [far.new_empty(bucket.pieces[index].shape) for index in bucket.own]
        _copy([(part, own) for part, own in bucket.cut(found, far, True)])
        return found

    def pack(self, bucket: Bucket, updates: Sequence[torch.Tensor], far: torch.Tensor) -> None:
        """Writes the parts of the updates of `bucket.own`."""
        own = [each.contiguous() for each in updates]
        _copy([(into, part) for part, into in bucket.cut(own, far, False)])

    def back(self, bucket: Bucket, far: torch.Tensor, near: torch.Tensor) -> Any:
        """Sends each rank its parts; returns what waits."""
        return self._sent(far, near, bucket.leaving, bucket.coming)

    def hand_out(self, whole: torch.Tensor, owner: int) -> None:
        """Gives all ranks the owner's tensor, in place."""
        group: Any = group_of(self._mesh)
        source: Any = dist.get_global_rank(group, owner)  # untyped in torch
        dist.broadcast(whole.view(-1).view(torch.uint8), source, group=group)

    def spread(
        self, own: Sequence[torch.Tensor], lengths: Sequence[int], memory: torch.Tensor
    ) -> torch.Tensor:
        """Puts together what all ranks have, one behind another; takes no memory."""
        total, count = sum(lengths), lengths[self.rank]
        found, out = memory[:total], memory[total : total + self.ranks * count]
        for each, part in zip(own, torch.split(out[:count], [e.numel() for e in own]), strict=True):
            part.view(each.shape).copy_(each)
        out.view(self.ranks, count)[1:].copy_(out[:count])
        self._sent(out, found, [count] * self.ranks, lengths).wait()
        return found

    def _sent(
        self, out: torch.Tensor, into: torch.Tensor, leaving: Sequence[int], coming: Sequence[int]
    ) -> Any:
        """Sends so many numbers to each rank, and takes so many from each."""
        size = out.element_size()  # as bytes: not every library sends 16 bits
        return dist.all_to_all_single(
            into[: sum(coming)].view(torch.uint8),
            out[: sum(leaving)].view(torch.uint8),
            [count * size for count in coming],
            [count * size for count in leaving],
            group=group_of(self._mesh),
            async_op=True,
        )


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the second of each pair into the first: a few launches."""
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [own for _, own in pairs])
