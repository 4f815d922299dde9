"""The kernel that projects whole tiles back by strips, beside the twin."""

import pytest
import torch
from lowrank_cases import (
    KERNEL,
    PLAIN,
    ROW,
    buffers,
    controls_of,
    formats_of,
    give,
    guarded,
    moved,
    projections_of,
    shifted,
    steps,
)
from mutants import mutant
from step_cases import PAIRS, assert_same_buffers

from megaopt.kernels.matrix import kernel, launch
from megaopt.kernels.matrix.galore import LEFT, RIGHT, LowRank
from megaopt.kernels.matrix.launch import launched_plan, tiles_of

SHAPES = [(128, 128), (64, 384), (320, 128)]
"""Matrices of whole tiles on a GPU and under the interpreter, of several heights."""
WAYS = [
    ("bf16", "grouped", LEFT),
    ("bf16", "grouped", RIGHT),
    ("bf16", "fused", LEFT),
    ("bf16", "fused", RIGHT),
    ("tf32", "fused", LEFT),
    ("tf32", "fused", RIGHT),
    ("tf32", "grouped", LEFT),
]


def by_strips(low_rank, device, pair=PLAIN, kernel="grouped", shapes=SHAPES, **options):
    """Steps the same buffers by launches and by the twin; both results."""
    formats = formats_of(pair, low_rank)
    own = formats, shapes, buffers(formats, shapes), projections_of(low_rank, shapes)
    return steps(*own, device, tiles_of(low_rank), kernel, **options)


@pytest.fixture
def only_strips(monkeypatch):
    """A launch without strips fails; two programs have several strips each, of several tiles."""
    monkeypatch.setattr(kernel, "back_project_kernel", None)
    monkeypatch.setattr(launch, "processors", lambda device: 2)
    monkeypatch.setattr(launch, "PARTS", (2,))


@pytest.mark.usefixtures("only_strips")
@pytest.mark.sample(4)
@pytest.mark.parametrize("rank", [16, 40])
@pytest.mark.parametrize("way", WAYS, ids=", ".join)
def test_the_step_is_the_twins(way, rank, device):
    """Rank 40 is padded to 64 by zeros."""
    precision, launches, side = way
    assert_same_buffers(*by_strips(LowRank(side, rank, precision), device, kernel=launches))


@pytest.mark.usefixtures("only_strips")
@pytest.mark.sample(2)
@pytest.mark.parametrize("side", [LEFT, RIGHT])
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if not pair[1].scaled])
def test_every_format_is_the_twins(pair, side, device):
    assert_same_buffers(*by_strips(LowRank(side, 16, "bf16"), device, pair, shapes=SHAPES[1:]))


@pytest.mark.usefixtures("only_strips")
@pytest.mark.parametrize("parts", [1, 2, 3, 100])
def test_how_high_strips_are_shows_in_no_bit(parts, device, monkeypatch):
    """One for all tiles, some that end within the matrix or with it, and one for each tile."""
    monkeypatch.setattr(launch, "PARTS", (parts,))
    assert_same_buffers(*by_strips(LowRank(RIGHT, 16, "bf16"), device))


@pytest.mark.usefixtures("only_strips")
def test_a_skipped_step_writes_nothing(device):
    formats = formats_of(PLAIN, LowRank(RIGHT, 16, "bf16"))
    before = buffers(formats, SHAPES)
    found, _ = by_strips(LowRank(RIGHT, 16, "bf16"), device, controls=controls_of(skip=1.0))
    assert_same_buffers(found, before)


def step_with(formats, device, change):
    """Steps buffers with changed weights in place; the buffers."""
    own = moved(buffers(formats, SHAPES), device)
    own["weight"] = [change(weight) for weight in own["weight"]]
    sizes = [torch.Size(shape) for shape in SHAPES]
    plan = launched_plan(formats, sizes, [0] * len(sizes), device, kernel="grouped")
    plan.look(own)
    give(plan, [each.to(device) for each in projections_of(formats.matrix.how, SHAPES)])
    plan.step([ROW])
    return own


@pytest.mark.usefixtures("only_strips")
def test_nothing_beside_a_matrix_is_written(device):
    """The last strip of a matrix is lower than the others."""
    beside = []

    def within(weight):
        own, around = guarded(weight)
        beside.extend(around)
        return own

    step_with(formats_of(PLAIN, LowRank(RIGHT, 16, "bf16")), device, within)
    assert len(beside) == 2 * len(SHAPES)
    assert all(bool((memory == -1).all()) for memory in beside)


def test_matrices_that_are_not_aligned_go_without(device, monkeypatch):
    """Descriptors want addresses of whole 16 bytes."""
    low_rank = LowRank(RIGHT, 16, "bf16")
    expected, _ = by_strips(low_rank, device)
    monkeypatch.setattr(kernel, "back_strips_kernel", None)
    assert_same_buffers(step_with(formats_of(PLAIN, low_rank), device, shifted), expected)


# What the comparison with the twin has to notice.
MUTANTS = {
    "another strip's columns": (
        "column = (strip - first) % across * COLUMNS",
        "column = (strip - first) // down % across * COLUMNS",
    ),
    "the first columns of the right factor": (
        "right = rights.load([0, column])", "right = rights.load([0, 0])",
    ),
    "the first rows of the left factor": (
        "left = lefts.load([row, 0])", "left = lefts.load([top, 0])",
    ),
    "a matrix's last tiles left out": (
        "bottom = tl.minimum(top + down * ROWS, rows)",
        "bottom = tl.minimum(top + down * ROWS, rows - ROWS)",
    ),
    "a program's later strips left out": (
        "loop_bound(begin), loop_bound(end), loop_bound(programs)",
        "loop_bound(begin), loop_bound(begin + 1), loop_bound(programs)",
    ),
    "the tile above": (
        "columns.to(tl.int64) * row + column", "columns.to(tl.int64) * top + column",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("only_strips")
@pytest.mark.sample(3)
@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_noticed(change, tmp_path, device, monkeypatch):
    monkeypatch.setattr(launch, "kernel", mutant(KERNEL, change, tmp_path))
    with pytest.raises(AssertionError, match="differ"):
        assert_same_buffers(*by_strips(LowRank(RIGHT, 16, "bf16"), device))
