"""Where the numbers of matrices lie on ranks, in messages and at owners, beside torch's slices."""

import math
import random

import pytest
import torch

from megaopt.kernels.matrix.bucket import pack, unpacked
from megaopt.kernels.muon.orthogonal import Orthogonal, coefficients_of
from megaopt.kernels.rules.matrix import split
from megaopt.step.ranks.owners import RankBucket, box_of, placed_matrices, rows_of

SIMPLE = coefficients_of("simple", 1)


def sliced(whole, box):
    return whole[tuple(slice(*ends) for ends in box)]


def drawn_box(chance, shape):
    """Some of a tensor, now and then all of a dimension, or nothing of it."""
    box = []
    for size in shape:
        begin, end = sorted(chance.choices(range(size + 1), k=2))
        box.append((0, size) if chance.random() < 0.4 else (begin, end))
    return tuple(box)


@pytest.mark.parametrize("dims", [1, 2, 3, 4])
def test_rows_of_a_box_are_those_that_torch_slices(dims):
    """In order, with no number twice; one run of rows for each index before the last two."""
    chance, empty = random.Random(dims), 0
    for _ in range(100):
        shape = [chance.randrange(1, 6) for _ in range(dims)]
        box = drawn_box(chance, shape)
        whole = torch.arange(math.prod(shape)).view(shape)
        found = []
        for first, rows, columns, stride in rows_of(box, shape):
            for row in range(rows):
                begin = first + row * stride
                found += range(begin, begin + columns)
        assert found == sliced(whole, box).flatten().tolist()
        empty += not found
    assert 0 < empty < 100


def test_few_rows_say_where_a_whole_box_lies():
    """Each is a piece of a message to copy: matrices are one, however many rows they have."""
    counts = {
        ((2, 7), (0, 9)): [1],
        ((0, 20), (2, 7)): [20],
        ((1, 3), (0, 8), (0, 9)): [1],
        ((1, 3), (2, 5), (0, 9)): [2],
        ((1, 3), (2, 5), (0, 4)): [3, 3],
    }
    for box, rows in counts.items():
        shape = (20, 9) if len(box) == 2 else (4, 8, 9)
        assert [count for _, count, _, _ in rows_of(box, shape)] == rows


def test_numbers_that_follow_each_other_are_a_box():
    """Whole rows of some dimension."""
    shape = (3, 4, 5)
    whole = torch.arange(60).view(shape)
    for stride in (1, 5, 20):
        row = {1: 5, 5: 20, 20: 60}[stride]
        for first in range(0, 60, stride):
            for size in range(stride, row - first % row + 1, stride):
                box = box_of(first, size, shape)
                assert sliced(whole, box).flatten().tolist() == list(range(first, first + size))


# --- buckets of layouts that no mesh has to make


def cut(shape, dim, ends):
    """Shards of a tensor, a rank each: of a dimension what lies between two ends."""
    whole = [(0, size) for size in shape]
    return [
        (*whole[:dim], (begin, end), *whole[dim + 1 :])
        for begin, end in zip((0, *ends), (*ends, shape[dim]), strict=True)
    ]


def both(one, other):
    """What is cut in two dimensions: of each shard of one what the others' have in common."""
    return [
        tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(x, y, strict=True))
        for x in one
        for y in other
    ]


def by_rows(shape):
    """Uneven, and of three ranks the second has nothing of what has few rows."""
    ends = (1, 1) if shape[0] < 3 else (1, shape[0] - 1)
    return cut(shape, 0, ends)


def by_columns(shape):
    return cut(shape, len(shape) - 1, (shape[-1] // 4, shape[-1] // 2))


def of_a_middle_dimension(shape):
    return cut(shape, len(shape) // 2, (shape[len(shape) // 2] // 2, shape[len(shape) // 2]))


def in_both(shape):
    return both(cut(shape, 0, (shape[0] // 2,)), cut(shape, len(shape) - 1, (shape[-1] // 3,)))


def rows_and_copies(shape):
    """Ranks 0 and 2 have the first rows, 1 and 3 the others."""
    return cut(shape, 0, (shape[0] // 2,)) * 2


def copies_of_columns(shape):
    """Ranks 0 and 1 have the first columns."""
    return [own for own in cut(shape, len(shape) - 1, (shape[-1] // 3,)) for _ in range(2)]


def copies(shape):
    return [tuple((0, size) for size in shape)] * 3


def alone(rank, ranks):
    return [other == rank for other in range(ranks)]


LAYOUTS = {
    "rows": (by_rows, lambda rank, ranks: [True] * ranks),
    "columns": (by_columns, lambda rank, ranks: [True] * ranks),
    "a middle dimension": (of_a_middle_dimension, lambda rank, ranks: [True] * ranks),
    "2 x 2": (in_both, lambda rank, ranks: [True] * ranks),
    "rows and copies": (
        rows_and_copies,
        lambda rank, ranks: [rank // 2 == r // 2 for r in range(ranks)],
    ),
    "copies of columns": (
        copies_of_columns,
        lambda rank, ranks: [rank % 2 == r % 2 for r in range(ranks)],
    ),
    "copies": (copies, alone),
}
"""The shards of a tensor of each rank, and for each rank whose directions it sends to whom."""
SHAPES = [(12, 7), (2, 9), (5, 6, 4), (8, 3, 2, 2), (24, 5), (1, 4), (3, 8, 5)]
SIZES = {"whole": None, "rows of three": (2, 1, 1)}


def exchanged(out, leaving):
    """What comes to each rank of what all send: all_to_all_single."""
    sent = [torch.split(each[: sum(own)], own) for each, own in zip(out, leaving, strict=True)]
    return [torch.cat([own[taker] for own in sent]) for taker in range(len(out))]


def laid_out(layout, sizes):
    """Whole tensors of numbers that all differ, their matrices, and of each rank a bucket."""
    place, gives = LAYOUTS[layout]
    shapes = [shape for shape in SHAPES if sizes is None or shape[-2] % sum(sizes) == 0]
    how = Orthogonal(SIMPLE, split_sizes=sizes)
    shards = [place(shape) for shape in shapes]
    ranks, numel, wholes = len(shards[0]), 0, []
    for shape in shapes:
        wholes.append(numel + torch.arange(math.prod(shape)).view(shape))
        numel += math.prod(shape)
    cuts = [how.cuts(shape) for shape in shapes]
    matrices = [m for p, shape in enumerate(shapes) for m in placed_matrices(p, shape, cuts[p])]
    views = [v for own, whole in zip(cuts, wholes, strict=True) for v in split(own, whole)]
    owners = [index * 7 % 5 % ranks for index in range(len(matrices))]
    boxes = [[own[rank] for own in shards] for rank in range(ranks)]
    buckets = [
        RankBucket(matrices, owners, boxes, rank, gives(rank, ranks), together=False)
        for rank in range(ranks)
    ]
    return wholes, views, owners, boxes, buckets


def local_numbers(bucket, shards, tensors, firsts=None):
    """This rank's parts of tensors, one behind another, or where they begin."""
    local = [sliced(each, box).flatten() for each, box in zip(tensors, shards, strict=True)]
    found = []
    for index, first, numel in bucket.parts:
        found.append(local[bucket.pieces[index].param][first : first + numel])
    return found


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_owners_get_each_number_of_their_matrices_once(layout, sizes):
    """The way there, from all ranks' parts: matrices are those that torch slices."""
    wholes, views, owners, boxes, buckets = laid_out(layout, sizes)
    near = [
        torch.cat([*local_numbers(bucket, own, wholes), torch.zeros(0, dtype=torch.int64)])
        for bucket, own in zip(buckets, boxes, strict=True)
    ]
    far = exchanged(near, [bucket.sent for bucket in buckets])
    for rank, (bucket, coming) in enumerate(zip(buckets, far, strict=True)):
        assert len(coming) == sum(bucket.received)
        assert bucket.indices == [index for index, owner in enumerate(owners) if owner == rank]
        for index, matrix in zip(bucket.indices, unpacked(bucket, coming), strict=True):
            assert torch.equal(matrix, views[index])
        wanted = sorted(
            number for index in bucket.indices for number in views[index].flatten().tolist()
        )
        assert sorted(coming.tolist()) == wanted


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_get_their_parts_of_all_updates(layout, sizes):
    """The way back, to copies too: a shard's parts are those that torch slices of the updates."""
    wholes, views, _, boxes, buckets = laid_out(layout, sizes)
    far = []
    for bucket in buckets:
        own = torch.full((sum(bucket.leaving),), -1)
        pack(bucket, [views[index].clone() for index in bucket.indices], own)
        assert not (own == -1).any()
        far.append(own)
    back = exchanged(far, [bucket.leaving for bucket in buckets])
    for bucket, own, coming in zip(buckets, boxes, back, strict=True):
        assert len(coming) == sum(bucket.coming)
        parts = local_numbers(bucket, own, wholes)
        covered = []
        for first, part in zip(bucket.returned, parts, strict=True):
            assert torch.equal(coming[first : first + len(part)], part)
            covered += range(first, first + len(part))
        assert sorted(covered) == list(range(len(coming)))
        numels = [math.prod(end - begin for begin, end in box) for box in own]
        assert len(coming) == sum(numels)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_all_of_a_shard_in_no_place_twice(layout):
    """Each number of a rank's tensors is stepped once."""
    wholes, _, _, boxes, buckets = laid_out(layout, (2, 1, 1))
    for bucket, own in zip(buckets, boxes, strict=True):
        stepped = torch.cat(
            [torch.zeros(0, dtype=torch.int64), *local_numbers(bucket, own, wholes)]
        )
        shards = [sliced(whole, box).flatten() for whole, box in zip(wholes, own, strict=True)]
        assert torch.equal(stepped.sort().values, torch.cat(shards).sort().values)
