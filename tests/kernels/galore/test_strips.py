"""The kernels that project whole tiles back, by strips and by blocks, beside the twin."""

from dataclasses import replace

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

from megaopt.kernels.galore import kernel, wave
from megaopt.kernels.galore.launch import launched_plan
from megaopt.kernels.galore.rule import LEFT, RIGHT, LowRank
from megaopt.kernels.galore.tiles import tiles_of

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
STRIPS, BLOCKS = KINDS = ("back_strips_kernel", "back_blocks_kernel")


def by_tiles(low_rank, device, pair=PLAIN, kernel="grouped", shapes=SHAPES, kind=STRIPS, **options):
    """Steps the same buffers by launches and by the twin; both results."""
    formats, tiles = formats_of(pair, low_rank), tiles_of(low_rank)
    tiles = replace(tiles, strip=None) if kind == BLOCKS else replace(tiles, block=None)
    own = formats, shapes, buffers(formats, shapes), projections_of(low_rank, shapes)
    return steps(*own, device, tiles, kernel, **options)


@pytest.fixture
def only_whole(monkeypatch):
    """Another launch fails; two programs have several tiles, or strips of several, each."""
    monkeypatch.setattr(kernel, "back_project_kernel", None)
    monkeypatch.setattr(wave, "processors", lambda device: 2)
    monkeypatch.setattr(wave, "PARTS", (2,))


@pytest.mark.usefixtures("only_whole")
@pytest.mark.sample(8)
@pytest.mark.parametrize("rank", [16, 40])
@pytest.mark.parametrize(
    ("way", "kind"),
    [(way, kind) for kind in KINDS for way in WAYS[: 7 if kind == STRIPS else 6]],
    ids=str,
)
def test_the_step_is_the_twins(way, kind, rank, device):
    """Rank 40 is filled up by zeros. Blocks want TF32's right factor turned."""
    precision, launches, side = way
    low_rank = LowRank(side, rank, precision)
    assert_same_buffers(*by_tiles(low_rank, device, kernel=launches, kind=kind))


@pytest.mark.usefixtures("only_whole")
@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", [LEFT, RIGHT])
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if not pair[1].scaled])
def test_every_format_is_the_twins(pair, side, kind, device):
    own = LowRank(side, 16, "bf16"), device, pair
    assert_same_buffers(*by_tiles(*own, shapes=SHAPES[1:], kind=kind))


@pytest.mark.usefixtures("only_whole")
@pytest.mark.parametrize("parts", [1, 2, 3, 100])
def test_how_high_strips_are_shows_in_no_bit(parts, device, monkeypatch):
    """One for all tiles, some that end within the matrix or with it, and one for each tile."""
    monkeypatch.setattr(wave, "PARTS", (parts,))
    assert_same_buffers(*by_tiles(LowRank(RIGHT, 16, "bf16"), device))


@pytest.mark.usefixtures("only_whole")
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_writes_nothing(kind, device):
    low_rank = LowRank(RIGHT, 16, "bf16")
    before = buffers(formats_of(PLAIN, low_rank), SHAPES)
    found, _ = by_tiles(low_rank, device, kind=kind, controls=controls_of(skip=1.0))
    assert_same_buffers(found, before)


def step_with(formats, device, change, kind=STRIPS):
    """Steps buffers with changed weights in place; the buffers."""
    tiles = tiles_of(formats.matrix.how)
    tiles = replace(tiles, strip=None) if kind == BLOCKS else tiles
    own = moved(buffers(formats, SHAPES), device)
    own["weight"] = [change(weight) for weight in own["weight"]]
    sizes = [torch.Size(shape) for shape in SHAPES]
    plan = launched_plan(formats, sizes, [0] * len(sizes), device, kernel="grouped", tiles=tiles)
    plan.look(own)
    give(plan, [each.to(device) for each in projections_of(formats.matrix.how, SHAPES)])
    plan.step([ROW])
    return own


@pytest.mark.usefixtures("only_whole")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_beside_a_matrix_is_written(kind, device):
    """The last strip of a matrix is lower than the others."""
    beside = []

    def within(weight):
        own, around = guarded(weight)
        beside.extend(around)
        return own

    step_with(formats_of(PLAIN, LowRank(RIGHT, 16, "bf16")), device, within, kind)
    assert len(beside) == 2 * len(SHAPES)
    assert all(bool((memory == -1).all()) for memory in beside)


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_that_are_not_aligned_go_without(kind, device, monkeypatch):
    """Descriptors want addresses of whole 16 bytes."""
    low_rank = LowRank(RIGHT, 16, "bf16")
    expected, _ = by_tiles(low_rank, device)
    monkeypatch.setattr(kernel, kind, None)
    assert_same_buffers(step_with(formats_of(PLAIN, low_rank), device, shifted, kind), expected)


# What the comparison with the twin has to notice.
MUTANTS = {
    "another strip's columns": (
        "column = (strip - first) % across * COLUMNS",
        "column = (strip - first) // down % across * COLUMNS",
    ),
    "the first columns of the right factor": (
        "right = places.right.load([inner, column])", "right = places.right.load([inner, 0])",
    ),
    "the first rows of the left factor": (
        "left = places.left.load([row, 0])", "left = places.left.load([top, 0])",
    ),
    "a matrix's last tiles left out": (
        "bottom = tl.minimum(top + down * ROWS, places.rows)",
        "bottom = tl.minimum(top + down * ROWS, places.rows - ROWS)",
    ),
    "a program's later strips left out": (
        "for strip in range(loop_bound(begin), loop_bound(end), loop_bound(programs)",
        "for strip in range(loop_bound(begin), loop_bound(begin + 1), loop_bound(programs)",
    ),
    "other rows": (
        "start, whole = places.columns.to(tl.int64) * row + column,",
        "start, whole = places.columns.to(tl.int64) * (row // 2) + column,",
    ),
}  # fmt: skip
OF_BLOCKS = {
    "the first column of tiles": (
        "(tile - first) % high * ROWS, (tile - first) // high * COLUMNS",
        "(tile - first) % high * ROWS, (tile - first) // high * 0",
    ),
    "the rank's first terms again": (
        "left = places.left.load([row, inner])", "left = places.left.load([row, 0])",
    ),
    "the rank's last terms left out": (
        "for inner in range(0, PRODUCT.rank, INNER)",
        "for inner in range(0, PRODUCT.rank - INNER, INNER)",
    ),
    "only a tile of each matrix": (
        "loop_bound(begin), loop_bound(end), loop_bound(programs), flatten=True",
        "loop_bound(begin), loop_bound(begin + 1), loop_bound(programs), flatten=True",
    ),
}  # fmt: skip
CASES = [(STRIPS, change) for change in MUTANTS.values()]
CASES += [(BLOCKS, change) for change in OF_BLOCKS.values()]


@pytest.mark.usefixtures("only_whole")
@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "change"), CASES, ids=[*MUTANTS, *OF_BLOCKS])
def test_a_mutant_is_noticed(kind, change, tmp_path, device, monkeypatch):
    monkeypatch.setattr(wave, "kernel", mutant(KERNEL, change, tmp_path))
    with pytest.raises(AssertionError, match="differ"):
        assert_same_buffers(*by_tiles(LowRank(RIGHT, 40, "bf16"), device, kind=kind))
