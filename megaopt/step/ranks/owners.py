"""The ranks that hold parts of matrices: which of them makes which, and what they send each other.

Every rank finds the same by the parameters' shapes and placements, without a message.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, product, zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megaopt.kernels.matrix.exchange import WHOLLY, Local, MatrixBox, MatrixPart, ParameterMatrix
from megaopt.kernels.rules.matrix import Cut
from megaopt.step.ranks.peers import SUM, group_of, hand_out, reduced

ROOM = 2**26
"""Bytes of the matrices of a bucket that a rank makes, or as many as one takes.

On two H200s a message of 117 MB takes 0.3 ms, and the products of such a matrix 4 ms; three buckets
of parts and whole matrices stay below half a gigabyte.
"""
ALL_IN_ONE = 1.5
"""The largest only bucket, in ROOMs: what fits into it is not cut.

The calls for a bucket take 0.4 to 0.5 ms of an H200's host, the products of 48 matrices of a GPT of
124M, 85 MB a rank, 1.3 ms, and their messages 0.1 ms each.
"""
ALIGNED = 128
"""Numbers of which what an owner sends to all is a multiple: the next owner's begin aligned."""

Box = tuple[tuple[int, int], ...]
"""The first index and the one behind the last, in each dimension."""


class PlacedMatrix(NamedTuple):
    """A matrix of a parameter, and where it lies there."""

    piece: ParameterMatrix
    runs: list[tuple[Box, int]]
    """Boxes of the parameter, and where their numbers begin in the matrix."""


def placed_matrices(param: int, shape: Sequence[int], cuts: Sequence[Cut]) -> list[PlacedMatrix]:
    """Returns the matrices of a parameter of this shape, by its cuts; none that is empty."""
    # a parameter's matrices lie one below another in what states keep: where each begins
    rows = [0, *accumulate(cut.shape[0] for cut in cuts)]
    matrices = []
    # where runs follow each other: as boxes of the parameter, which a shard can be cut with, and
    # counted in the matrix
    for index, cut in enumerate(cuts):
        row_range = slice(rows[index], rows[index + 1]) if len(cuts) > 1 else WHOLLY
        boxes = [box_of(first, size, shape) for first, size in cut.runs if size]
        firsts = accumulate((size for _, size in cut.runs if size), initial=0)
        if boxes:
            piece = ParameterMatrix(param, row_range, tuple(cut.shape))
            matrices.append(PlacedMatrix(piece, list(zip(boxes, firsts, strict=False))))
    return matrices


def box_of(first: int, size: int, shape: Sequence[int]) -> Box:
    """Returns the box of numbers that follow each other, whole rows of some dimension."""
    # from the outermost dimension in: one index each, until the rest is whole rows
    box: list[tuple[int, int]] = []
    for dim in range(len(shape)):
        # numbers of one index of this dimension
        stride = math.prod(shape[dim + 1 :])
        index, first = divmod(first, stride)
        # whole rows of this dimension; those inside have their full length
        if size % stride == 0:
            rest = [(0, length) for length in shape[dim + 1 :]]
            return (*box, (index, index + size // stride), *rest)
        box.append((index, index + 1))
    return tuple(box)


def rows_of(box: Box, outer: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """A box in a tensor of these sizes, as rows of numbers that follow each other.

    Yields where the first number lies, how many rows and columns there are, and how far apart rows
    begin: once for a box of a matrix, and once for each index of dimensions before the last two.
    """
    # dimensions that the box has whole, from the innermost, go into one row
    sizes, dim = sizes_of(box), len(outer) - 1
    if not math.prod(sizes):
        return
    while dim and sizes[dim] == outer[dim]:
        dim -= 1

    # columns: a row's numbers without a gap; stride: from row to row in the outer tensor
    columns, stride = math.prod(sizes[dim:]), math.prod(outer[dim:])
    rows = sizes[dim - 1] if dim else 1
    firsts = [begin for begin, _ in box]
    # each index of the dimensions in front of rows and columns
    for index in product(*map(range, sizes[: max(dim - 1, 0)])):
        corner = [begin + more for begin, more in zip_longest(firsts, index, fillvalue=0)]
        first = sum(begin * math.prod(outer[d + 1 :]) for d, begin in enumerate(corner))
        yield first, rows, columns, stride


def common(first: Box, second: Box) -> Box:
    """Returns the intersection of two boxes; an empty one has no numbers."""
    # an end below its beginning is moved up: an empty range, not a negative one
    ends = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True)]
    return tuple((begin, max(begin, end)) for begin, end in ends)


def sizes_of(box: Box) -> tuple[int, ...]:
    """The size of a box in each dimension."""
    return tuple(end - begin for begin, end in box)


def within(box: Box, outer: Box) -> Box:
    """A box as counted from the beginning of another."""
    return tuple((a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))


def owners_of(costs: Sequence[float], holders: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Returns the rank that makes each matrix.

    A rank that has one whole makes it, as long as that is no more than an equal part of the work;
    of the rest the most expensive go first, each to the rank that has the least to do.

    holders: for each matrix the ranks that have it whole, as they may have an expert.
    """
    # the work of each rank so far; -1: nobody yet; an equal part of all
    loads, owners, equal = [0.0] * ranks, [-1] * len(costs), sum(costs) / ranks
    # the place settles ties, so that all ranks find the same
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    # a rank that has all of a matrix spares the way there
    for index in order:
        owner = min(holders[index], key=lambda rank: (loads[rank], rank), default=None)
        if owner is not None and loads[owner] + costs[index] <= equal:
            owners[index] = owner
            loads[owner] += costs[index]

    # what is left goes to whoever has the least, the lower rank first
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for index in order:
        if owners[index] < 0:
            load, owners[index] = heap[0]
            heapq.heapreplace(heap, (load + costs[index], owners[index]))
    return owners


class RankBucket:
    """Matrices that are on their way together: megaopt.kernels.matrix.exchange.Bucket.

    Args:
        matrices: all of them, in one order on all ranks.
        owners: the rank that makes each.
        boxes: for each rank of the group the shard of each parameter.
        rank: this one's place in the group.
        gives: for each rank whether this one's copy of a matrix is that which it takes.
        together: all ranks make the one matrix.
        alike: all ranks have all of every parameter: each gets all updates of each owner.
    """

    def __init__(
        self,
        matrices: Sequence[PlacedMatrix],
        owners: Sequence[int],
        boxes: Sequence[Sequence[Box]],
        rank: int,
        gives: Sequence[bool],
        together: bool,
        alike: bool = False,
    ) -> None:
        self.owner = owners[0] if together else None
        ranks = range(len(boxes))
        self.pieces = [matrix.piece for matrix in matrices]
        # the matrices that this rank makes, by their places in the bucket
        self.indices = [index for index, owner in enumerate(owners) if owner == rank]
        # parts lie by the owner that they go to, as all_to_all sends them; first those for owners
        # that take this rank's copy: what is sent is then the front of `near`
        order = sorted(range(len(matrices)), key=lambda i: (not gives[owners[i]], owners[i]))
        # numbers of this rank's parts, by owner
        returned = dict.fromkeys(ranks, 0)
        owned_parts = []
        for index in order:
            local_box = boxes[rank][matrices[index].piece.param]
            # what this rank's shard has of each run of the matrix
            for whole, _ in matrices[index].runs:
                box = common(local_box, whole)
                numel = math.prod(sizes_of(box))
                if numel:
                    # the first number of the run in the shard, row by row
                    shape, inner = sizes_of(local_box), within(box, local_box)
                    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
                    first = sum(
                        start * step for (start, _), step in zip(inner, strides, strict=True)
                    )
                    owned_parts.append((MatrixPart(index, first, numel), owners[index]))
                    returned[owners[index]] += numel
        # updates come back in the order of the owners' ranks, not in that of the parts: where each
        # owner's begin, and so where each part's do
        starts = dict(zip(ranks, accumulate(returned.values(), initial=0), strict=False))
        self.parts, self.returned = [part for part, _ in owned_parts], []
        for part, owner in owned_parts:
            self.returned.append(starts[owner])
            starts[owner] += part.numel
        self.coming = list(returned.values())
        """Numbers of updates that come from each rank."""
        self.sent = [count if gives[peer] else 0 for peer, count in enumerate(self.coming)]
        """Numbers of directions that go to each."""
        # the other way: of each matrix that this rank owns, what lies in which rank's shard
        self.leaving, boxes_of = [], [list[MatrixBox]() for _ in ranks]
        """Numbers of updates that go to each."""
        # the numbers lie in each rank's message in the order in which that rank has its parts
        for taker, shards in enumerate(boxes):
            place = 0
            for turn, index in enumerate(self.indices):
                shard = shards[matrices[index].piece.param]
                # the shard's piece of a run: rows in the matrix, one behind another in the message
                for run, first in matrices[index].runs:
                    box, outer = within(common(shard, run), run), sizes_of(run)
                    for begin, rows, columns, stride in rows_of(box, outer):
                        part_box = MatrixBox(turn, first + begin, rows, columns, stride, place)
                        boxes_of[taker].append(part_box)
                        place += rows * columns
            self.leaving.append(place)
        self.received = [count if gives[peer] else 0 for peer, count in enumerate(self.leaving)]
        """Numbers of directions that come from each."""
        # updates go to all that have a part; directions came from one copy of each part alone
        self.packed = _one_behind_another(boxes_of, self.leaving)
        self.unpacked = _one_behind_another(
            [peer_boxes if gives[peer] else [] for peer, peer_boxes in enumerate(boxes_of)],
            self.received,
        )
        # where all ranks have all, updates go to all by one all-gather: of equal length, padded
        self.width = -(-max(self.coming) // ALIGNED) * ALIGNED if alike else 0
        """Numbers that each owner sends to all, where all ranks have all; else 0."""
        # then each owner's updates begin at a multiple of the width
        if alike:
            before = dict(zip(ranks, accumulate(self.coming, initial=0), strict=False))
            self.returned = [
                first - before[owner] + owner * self.width
                for first, (_, owner) in zip(self.returned, owned_parts, strict=True)
            ]
            # this rank has all of what it makes: one copy of it, instead of one for each rank
            self.packed = self.unpacked

    @property
    def most(self) -> tuple[int, int]:
        """Numbers of this rank's parts, and of those of all ranks of what this one makes."""
        # near: the all-gather's result; far: this rank's contribution
        if self.width:
            return self.width * len(self.coming), self.width
        return sum(self.coming), sum(self.leaving)


def _one_behind_another(
    boxes_of: Sequence[Sequence[MatrixBox]], counts: Sequence[int]
) -> list[MatrixBox]:
    """Boxes of all ranks, in memory where those of each rank begin behind the last one's."""
    begins = accumulate(counts, initial=0)
    return [
        box._replace(place=begin + box.place)
        for begin, boxes in zip(begins, boxes_of, strict=False)
        for box in boxes
    ]


def _laid_out(
    views: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    cuts: Sequence[Sequence[Cut]],
    places: Sequence[tuple[int, ...]],
) -> tuple[list[PlacedMatrix], list[list[Box]]]:
    """The matrices of parameters of these shapes, and for each place of the mesh their shards."""
    # boxes by view and place of the mesh, then turned: by place and view
    matrices, by_view = [], []
    for param, (view, shape, param_cuts) in enumerate(zip(views, shapes, cuts, strict=True)):
        box_shape = (math.prod(shape),) if view.is_flat else tuple(shape)
        matrices += placed_matrices(param, box_shape, param_cuts)
        by_view.append(view.boxes(places, shape))
    return matrices, [[boxes[rank] for boxes in by_view] for rank in range(len(places))]


def _local_runs(
    matrix: PlacedMatrix, owner: int, boxes: Sequence[Sequence[Box]]
) -> list[tuple[int, int]] | None:
    """Returns the runs of a matrix in its owner's shard; None where another rank has some of it.

    Each run is the place where numbers that follow each other begin, and their count.
    """
    param = matrix.piece.param
    # the owner has each run whole, and no other rank any number of them
    for rank, shards in enumerate(boxes):
        shared = [math.prod(sizes_of(common(shards[param], run))) for run, _ in matrix.runs]
        expected = [math.prod(sizes_of(run)) if rank == owner else 0 for run, _ in matrix.runs]
        if shared != expected:
            return None
    # each run as counted in the owner's tensor; rows with gaps between them are given up
    runs, shard = [], boxes[owner][param]
    for run, _ in matrix.runs:
        for first, rows, columns, _ in rows_of(within(run, shard), sizes_of(shard)):
            if rows > 1:
                return None
            runs.append((first, columns))
    return runs


class Owners:
    """The ranks of a mesh: megaopt.kernels.matrix.exchange.Exchange.

    Args:
        views: the parameters of a batch, of one mesh and split.
        cuts: for each its matrices.
        lows: of each the shape of what is made of its gradient; None: its own.
        itemsize: bytes of a number that is sent.
        shares_work: a matrix that is most of the work is made by all ranks together.
        keeps_local: a matrix that nobody but its owner has any part of is in no bucket.
        room: of a bucket, as ROOM.
    """

    def __init__(
        self,
        views: Sequence[Any],
        cuts: Sequence[Sequence[Cut]],
        lows: Sequence[Sequence[int]] | None,
        itemsize: int,
        shares_work: bool = False,
        keeps_local: bool = False,
        room: int = ROOM,
    ) -> None:
        assert views[0].split is not None
        # dims: the mesh's dimensions that split the parameters; along the others are copies
        self._mesh, dims = views[0].split
        self._groups = [self._mesh.get_group(dim) for dim in dims]

        # coordinates in the mesh, in the order of their ranks: "rank" below is a place in this list
        ranks = self._mesh.mesh
        places = list(product(*map(range, ranks.shape)))
        places.sort(key=lambda place: int(ranks[place]))  # as ranks are in a group
        here = tuple(self._mesh.get_coordinate())
        self.rank, self.ranks = places.index(here), len(places)
        # an owner takes directions from the ranks with its own coordinates along copies: one of
        # each part
        copies = [dim for dim in range(self._mesh.ndim) if dim not in dims]
        # seen from here: whether it is this rank's copy that each owner takes
        gives = [all(place[dim] == here[dim] for dim in copies) for place in places]
        shapes = [view.whole_shape for view in views]
        matrices, boxes = _laid_out(views, shapes, cuts, places)
        # the ranks that have a whole matrix, as a shard may be all of an expert; where all ranks
        # have all, nobody is preferred
        holders: list[list[int]] = []
        for matrix in matrices:
            shards = [rank_boxes[matrix.piece.param] for rank_boxes in boxes] if dims else []
            holders.append(
                [
                    rank
                    for rank, shard in enumerate(shards)
                    if all(common(shard, run) == run for run, _ in matrix.runs)
                ]
            )
        # all ranks come to the same owners, as shapes and shards are all that goes in
        costs = []
        for matrix in matrices:
            # multiply-adds of a step of Newton and Schulz, of a matrix [rows, columns]: A = X @ X.T
            # and a product with X take short * short * long each, A @ A takes short**3
            shape = matrix.piece.shape
            short, long = sorted((shape[0], math.prod(shape[1:])))
            costs.append(float(short * short * (2 * long + short)))
        owners = owners_of(costs, holders, len(places))
        self.owned: list[list[ParameterMatrix]] = [[] for _ in places]
        # matrices that their owner alone has go in no bucket: nothing of them is sent
        shares_work = shares_work and len(places) > 1
        local = {
            index: runs
            for index, (matrix, owner) in enumerate(zip(matrices, owners, strict=True))
            if keeps_local and (runs := _local_runs(matrix, owner, boxes)) is not None
        }
        self.local = [
            Local(matrices[index].piece, runs)
            for index, runs in local.items()
            if owners[index] == self.rank
        ]
        # with more than half of all work in one matrix others would wait: all ranks make it
        total = sum(cost for index, cost in enumerate(costs) if index not in local)
        large = [i for i, cost in enumerate(costs) if shares_work and 2 * cost > total]
        large = [index for index in large if index not in local]
        # where all ranks have all, each has memory for the updates of all
        room = room if dims else room // len(places)
        # room is in bytes here, and in numbers there
        rest = self._cut(matrices, owners, {*large, *local}, room // itemsize)
        # places of matrices by bucket; the one that all make together goes first
        order = [large, *rest] if large else rest

        def bucket(candidates: Sequence[PlacedMatrix], boxes: Any, chosen: list[int]) -> RankBucket:
            arguments = [candidates[i] for i in chosen], [owners[i] for i in chosen]
            return RankBucket(*arguments, boxes, self.rank, gives, chosen == large, not dims)

        self.buckets = self.lows = [bucket(matrices, boxes, chosen) for chosen in order]

        # what `before` makes of gradients has other shapes, and goes by the same owners in the same
        # buckets
        if lows is not None:
            low_cuts = [[Cut(tuple(low), [(0, math.prod(low))])] for low in lows]
            low_matrices, low_boxes = _laid_out(views, lows, low_cuts, places)
            self.lows = [bucket(low_matrices, low_boxes, chosen) for chosen in order]
        # in the order of the buckets, as what states keep is spread
        for index in chain(*order, local):
            self.owned[owners[index]].append(matrices[index].piece)
        # NCCL runs messages in the order of the calls, on a stream of its own
        self.is_nccl = False
        if views[0].local.is_cuda:
            backends = dist.get_backend_config(self._mesh.get_group(0))  # of each type of device
            self.is_nccl = "cuda:nccl" in backends.split(",")
        # where owners have all, nothing goes to them by a message behind those that go back
        self.keeps_order = self.is_nccl and bool(self._groups)
        # the largest bucket says how much memory the others take turns with
        most = [(0, 0), *(one_bucket.most for one_bucket in (*self.buckets, *self.lows))]
        self.most = (max(near for near, _ in most), max(far for _, far in most))

    def _cut(
        self,
        matrices: Sequence[PlacedMatrix],
        owners: Sequence[int],
        but: Collection[int],
        room: int,
    ) -> list[list[int]]:
        """The places of matrices in buckets, those of one shape one after another; but: these."""
        # matrices by bucket; the numbers of the fullest rank in each; bucket and numbers of each
        # rank so far
        buckets: dict[int, list[int]] = {}
        sizes: dict[int, int] = {}
        # ranks fill their buckets at their own pace: bucket i has the i-th lot of every owner
        used = [(0, 0)] * self.ranks
        order = [index for index in range(len(matrices)) if index not in but]
        # what fits into one bucket, or nearly, is not cut: a bucket costs the host some calls
        numels = [math.prod(matrix.piece.shape) for matrix in matrices]
        totals = [0] * self.ranks
        for index in order:
            totals[owners[index]] += numels[index]
        if max(totals) <= ALL_IN_ONE * room:
            room = max(totals)
        # those of one shape together: one product makes several
        for index in sorted(order, key=lambda i: matrices[i].piece.shape):
            numel, owner = numels[index], owners[index]
            # the owner's bucket is full: it goes on with the next
            bucket, taken = used[owner]
            if taken and taken + numel > room:
                bucket, taken = bucket + 1, 0
            used[owner] = bucket, taken + numel
            buckets.setdefault(bucket, []).append(index)
            sizes[bucket] = max(sizes.get(bucket, 0), taken + numel)
        # nothing hides the way there of the first bucket, nor the way back of the last
        # the smallest goes first, the second smallest last
        by_size = sorted(buckets, key=lambda bucket: (sizes[bucket], bucket))
        return [buckets[bucket] for bucket in (*by_size[:1], *by_size[2:], *by_size[1:2])]

    @cached_property
    def _group(self) -> Any:
        """The group of all ranks; they meet where it is asked for first."""
        return group_of(self._mesh)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that hold the other parts of the same matrices; in place."""
        return reduced(tensor, self._groups, SUM)

    def there(self, bucket: RankBucket, near: torch.Tensor, far: torch.Tensor, size: int) -> Any:
        """Sends parts in `near` to their matrices' owners; returns what waits."""
        # a plain copy, and no message
        if not self._groups:  # owners have all of them
            count = sum(bucket.sent) * size
            far[:count].copy_(near[:count])
            return None
        # parts lie by owner, and come in the order of the ranks that sent them
        return self._sent(near, far, bucket.sent, bucket.received, size)

    def back(self, bucket: RankBucket, far: torch.Tensor, near: torch.Tensor, size: int) -> Any:
        """Sends each rank its parts; returns what waits."""
        # each rank's updates, padded to the width, one behind another in `near`
        if bucket.width:  # all ranks get all
            count = bucket.width * size
            into, out = near[: self.ranks * count], far[:count]
            return dist.all_gather_into_tensor(into, out, group=self._group, async_op=True)
        # to every rank its parts of what this one owns, its copies too
        return self._sent(far, near, bucket.leaving, bucket.coming, size)

    def hand_out(self, whole: torch.Tensor, owner: int) -> None:
        """Gives all ranks the owner's tensor, in place."""
        # a broadcast from one rank, in the group of the whole mesh
        source: Any = dist.get_global_rank(self._group, owner)  # untyped in torch
        hand_out(whole, source, self._group)

    def spread(
        self, tensors: Sequence[torch.Tensor], lengths: Sequence[int], memory: torch.Tensor
    ) -> torch.Tensor:
        """Puts together what all ranks have, one behind another; takes no memory."""
        # memory has room for the result, and for this rank's own numbers once for each rank
        total, count = sum(lengths), lengths[self.rank]
        joined, out = memory[:total], memory[total : total + self.ranks * count]
        # this rank's numbers, flat, one tensor behind another
        for tensor, part in zip(
            tensors, torch.split(out[:count], [e.numel() for e in tensors]), strict=True
        ):
            part.view(tensor.shape).copy_(tensor)
        # all_to_all sends to each rank its own piece of memory: the same numbers in all of them
        out.view(self.ranks, count)[1:].copy_(out[:count])
        # lengths differ by rank, which an all-gather would not take
        counts, size = [count] * self.ranks, memory.itemsize
        self._sent(out.view(torch.uint8), joined.view(torch.uint8), counts, lengths, size).wait()
        return joined

    def _sent(
        self,
        out: torch.Tensor,
        into: torch.Tensor,
        leaving: Sequence[int],
        coming: Sequence[int],
        size: int,
    ) -> Any:
        """Sends so many numbers of `size` bytes to each rank, and takes so many from each."""
        # as bytes: not every library sends 16 bits
        incoming, outgoing = [count * size for count in coming], [count * size for count in leaving]
        # over NCCL it begins behind what the current stream has queued, and wait() holds up that
        # stream alone
        return dist.all_to_all_single(
            into[: sum(incoming)],
            out[: sum(outgoing)],
            incoming,
            outgoing,
            group=self._group,
            async_op=True,
        )
