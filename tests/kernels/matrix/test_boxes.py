"""Boxes that are copied in one launch, beside their twin and beside slices of torch."""

import random

import pytest
import torch

from megaopt.kernels.chunks.table import OWN
from megaopt.kernels.matrix.boxes import UNIT, VECTOR, Box, BoxCopies
from megaopt.step.ranks.owners import rows_of

CHUNK = OWN.block * OWN.iterations
"""As many numbers of a box a program copies at most."""
MARGIN = 64
"""Numbers before the memory and behind all boxes."""


def memory_of(numbers, device, seed=0):
    """Bytes of so many numbers, each pattern of 16 bits; the memory begins within another."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 256, (UNIT * (numbers + 2 * MARGIN),), generator=generator)
    return whole.to(torch.uint8).to(device)[UNIT * MARGIN :]


def by_slices(memory, boxes):
    """The same numbers copied row by row."""
    found, numbers = memory.clone(), memory.view(torch.int16)
    into = found.view(torch.int16)
    for source, target, rows, columns, source_stride, target_stride in boxes:
        for row in range(rows):
            begin, end = source + row * source_stride, target + row * target_stride
            into[end : end + columns] = numbers[begin : begin + columns]
    return found


def copied(memory, boxes, device):
    """The memory behind the launch, which has all bytes of its twin's and of those of slices."""
    found, twin = memory.clone(), memory.clone()
    copies = BoxCopies(boxes, device)
    copies.copy(found)
    copies.copy_reference(twin)
    assert torch.equal(twin, by_slices(memory, boxes))
    assert torch.equal(found, twin)
    return found.view(torch.int16)


def unpacking(boxes_of_tensor, place, tensor):
    """Boxes from a message, which begins at `place`, into a tensor, which begins at another."""
    found = []
    for first, rows, columns, stride in boxes_of_tensor:
        found.append(Box(place, tensor + first, rows, columns, columns, stride))
        place += rows * columns
    return found


def turned(boxes):
    """The way back."""
    return [Box(t, s, rows, columns, other, one) for s, t, rows, columns, one, other in boxes]


CUTS = {
    "whole rows": ((12, 40), ((3, 8), (0, 40))),
    "a row": ((12, 40), ((11, 12), (0, 40))),
    "a column": ((12, 40), ((0, 12), (7, 8))),
    "columns": ((12, 40), ((0, 12), (16, 40))),
    "a corner": ((9, 21), ((2, 9), (5, 20))),
    "a vector's part": ((100,), ((32, 99),)),
    "experts": ((5, 6, 8), ((1, 4), (0, 6), (0, 8))),
    "rows of experts": ((5, 6, 8), ((0, 5), (2, 5), (0, 8))),
    "columns of experts": ((5, 6, 9), ((1, 5), (0, 6), (3, 7))),
    "a corner of experts": ((5, 6, 9), ((1, 5), (2, 6), (1, 9))),
    "a convolution's": ((4, 3, 5, 7), ((1, 3), (0, 3), (2, 5), (1, 6))),
}


@pytest.mark.parametrize(("shape", "box"), CUTS.values(), ids=CUTS)
def test_a_box_goes_where_torch_slices(shape, box, device):
    """From a message into a tensor, and from the tensor into a message."""
    size, tensor = torch.Size(shape).numel(), 1024
    boxes = unpacking(rows_of(box, shape), 512, tensor)
    before = memory_of(tensor + size, device)
    found = copied(before, boxes, device)
    slices = tuple(slice(*ends) for ends in box)
    message = before.view(torch.int16)[512:]
    part = found[tensor : tensor + size].view(shape)[slices]
    assert torch.equal(part.flatten(), message[: part.numel()])

    back = copied(before, turned(boxes), device)
    part = before.view(torch.int16)[tensor : tensor + size].view(shape)[slices]
    assert torch.equal(back[512 : 512 + part.numel()], part.flatten())


@pytest.mark.parametrize("source", [0, 1, VECTOR - 1, VECTOR])
@pytest.mark.parametrize("target", [0, 1, VECTOR // 2, VECTOR])
def test_places_may_begin_anywhere(source, target, device):
    """Of 16 bytes whole, in part, and of one number: rows without gaps, and with them."""
    target += 4096
    boxes = [
        Box(source, target, 1, 3 * VECTOR, 3 * VECTOR, 3 * VECTOR),
        Box(source + 512, target + 512, 7, 11, 11, 11),
        Box(source + 1024, target + 1024, 7, 11, 11, 16),
        Box(source + 2048, target + 2048, 7, 11, 24, 11),
        Box(source + 3072, target + 3072, 1, 1, 1, 1),
    ]
    copied(memory_of(8192, device), boxes, device)


LARGE = {
    "a row": (1, CHUNK + 5, 0),
    "rows without gaps": (3, CHUNK, 0),
    "rows of a chunk each": (3, CHUNK, 3),
    "rows that end within chunks": (5, CHUNK // 2 + 1, 1),
    "a column": (CHUNK + 9, 1, 1),
    "two columns": (CHUNK // 2 + 9, 2, 3),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("rows", "columns", "gap"), LARGE.values(), ids=LARGE)
def test_boxes_of_several_chunks(rows, columns, gap, first, device):
    """Each beside a small one, which comes before it, and behind it."""
    size = rows * (columns + gap)
    places = 256, 2048 + size
    large = Box(places[0] + first, places[1] + first, rows, columns, columns, columns + gap)
    before, behind = Box(0, 1024 + size, 2, 5, 5, 5), Box(16, 3072 + 2 * size, 2, 5, 5, 7)
    boxes = [before, large, behind]
    memory = memory_of(4096 + 2 * size, device)
    found, twin = memory.clone(), memory.clone()
    copies = BoxCopies(boxes, device)
    copies.copy(found)
    copies.copy_reference(twin)
    assert torch.equal(found, twin)
    own, numbers = large, memory.view(torch.int16)
    part = numbers[own.source : own.source + rows * columns].view(rows, columns)
    there = found.view(torch.int16)[own.target :][:size].view(rows, columns + gap)
    assert torch.equal(there[:, :columns], part)
    untouched = numbers[own.target :][:size].view(rows, columns + gap)
    assert torch.equal(there[:, columns:], untouched[:, columns:])


def test_no_box_is_no_launch(device):
    memory = memory_of(100, device)
    copies = BoxCopies([], device)
    found = memory.clone()
    copies.copy(found)
    copies.copy_reference(found)
    assert torch.equal(found, memory)


def test_columns_of_one_matrix_lie_side_by_side(device):
    """As those of ranks do: each writes its own part of the same rows."""
    rows, widths = 6, [5, 1, 8, 2]
    width, boxes, column = sum(widths), [], 0
    for own in widths:
        message = rows * column
        boxes.append(Box(message, 512 + column, rows, own, own, width))
        column += own
    before = memory_of(1024, device)
    found = copied(before, boxes, device)
    messages = before.view(torch.int16)[: rows * width]
    parts = torch.split(messages, [rows * own for own in widths])
    wanted = torch.cat([part.view(rows, -1) for part in parts], 1)
    assert torch.equal(found[512 : 512 + rows * width].view(rows, width), wanted)


def drawn_boxes(chance):
    """Boxes whose targets do not overlap, behind all of their sources, and where the last ends."""
    boxes, end, sources = [], 20_000, 20_000
    for _ in range(chance.randrange(1, 50)):
        rows, columns = chance.choice([1, 2, 3, 17]), chance.choice([1, 2, 7, 8, 16, 33, 200])
        gaps = [chance.choice([0, 0, 1, 8, 21]) for _ in range(2)]
        one, other = (columns + gap for gap in gaps)
        source = chance.randrange(sources - rows * one)
        if chance.random() < 0.5:
            source, end = source // VECTOR * VECTOR, -(-end // VECTOR) * VECTOR
        boxes.append(Box(source, end, rows, columns, one, other))
        end += rows * other + chance.choice([0, 1, 8])
    return boxes, end


@pytest.mark.parametrize("seed", range(4))
def test_drawn_boxes(seed, device):
    for number in range(6):
        boxes, end = drawn_boxes(random.Random(100 * seed + number))
        copied(memory_of(end, device, seed), boxes, device)


def test_a_table_serves_memory_that_moves(device):
    """Places are counted in the memory: the next one may lie elsewhere, and has other numbers."""
    boxes = [Box(0, 512, 4, 9, 9, 16), Box(64, 1024, 1, 40, 40, 40)]
    copies = BoxCopies(boxes, device)
    for seed in range(3):
        memory = memory_of(2048, device, seed)
        found = memory.clone()
        copies.copy(found)
        assert torch.equal(found, by_slices(memory, boxes))
