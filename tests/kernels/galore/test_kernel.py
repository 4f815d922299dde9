"""The kernel that projects back and updates, beside the twin."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from bits import assert_same_bits
from interpreted import interpreted
from lowrank_cases import (
    FLOAT32,
    KERNEL,
    PLAIN,
    ROW,
    SMALL,
    buffers,
    controls_of,
    formats_of,
    give,
    guarded,
    moved,
    projections_of,
    shifted,
)
from mutants import mutant
from step_cases import PAIRS, assert_same_buffers, copied

from megaopt.kernels.chunks import codes
from megaopt.kernels.chunks.blocks import load_block
from megaopt.kernels.formats import GRADS, MASTERS, MOMENTS, NONE
from megaopt.kernels.galore import kernel, wave
from megaopt.kernels.galore.launch import launched_plan
from megaopt.kernels.galore.products import loaded
from megaopt.kernels.galore.rule import LEFT, RIGHT, LowRank
from megaopt.kernels.galore.tiles import BackTile
from megaopt.kernels.matrix.plan import MatrixPlan
from megaopt.kernels.optional_triton import INTERPRETED

SHAPES = [(5, 70), (33, 18), (16, 16), (70, 40)]
UNSCALED = [
    pytest.param(pair, marks=[] if place % 3 == 0 else [pytest.mark.slow])
    for place, pair in enumerate(pair for pair in PAIRS if not pair[1].scaled)
]


def both_step(
    formats, shapes, projections, device, tiles=SMALL, controls=None, hard=True, **options
):
    """What kernel and twin make of the same buffers, and these as they were.

    Both on the device: the gradients' projection is torch's product there.
    """
    before = buffers(formats, shapes, hard=hard)
    twin, own = (moved(copied(before), device) for _ in range(2))
    sizes, groups = [torch.Size(shape) for shape in shapes], [0] * len(shapes)
    reference = MatrixPlan(formats, groups)
    launched = launched_plan(formats, sizes, groups, device, tiles=tiles, **options)
    for plan, tensors in ((reference, twin), (launched, own)):
        plan.look(tensors)
        give(plan, [projection.to(device) for projection in projections])
        plan.step([ROW], None if controls is None else controls.to(device))
    return own, moved(twin, "cpu"), before


def assert_bits_agree(pair, low_rank, device, shapes=SHAPES, **kinds):
    formats = formats_of(pair, low_rank, **kinds)
    projections = projections_of(low_rank, shapes, single=True)
    found, expected, before = both_step(formats, shapes, projections, device)
    assert_same_buffers(found, expected)
    assert not torch.equal(found["weight"][0].cpu(), before["weight"][0])


@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("side", [RIGHT, LEFT])
def test_the_step_is_the_twins_where_a_product_is_exact(side, rank, device):
    assert_bits_agree(PLAIN, LowRank(side, rank), device)


@pytest.mark.parametrize("pair", UNSCALED, ids=lambda pair: "-".join(f.name for f in pair))
def test_weights_and_masters_of_every_format(pair, device):
    """The step's own load and store, of hard values: subnormals, infinities, NaN, ties."""
    kinds = {"grad": GRADS["bfloat16"], "moment": MOMENTS["bfloat16_stochastic"]}
    assert_bits_agree(pair, LowRank(RIGHT, 3), device, [(33, 18)], **kinds)


@pytest.mark.parametrize(("side", "rank"), [(RIGHT, 16), (LEFT, 17), (RIGHT, 40)])
def test_ranks_of_several_blocks(side, rank, device):
    assert_bits_agree(PLAIN, LowRank(side, rank), device, [(50, 41), (32, 64)])


def assert_within_the_bound(low_rank, shapes, device):
    """A sum of r products in fp32 is off by at most r * 2**-24 of the products' magnitudes.

    In any order (Higham, Accuracy and Stability, 3.5: n u / (1 - n u), here below 1.001 n u), so
    that kernel and twin differ by twice that. Then, in both, four operations each round a number of
    the weight's size: 2 * 4 * 2**-24 of the larger of weight and update.
    """
    formats, unit = formats_of(PLAIN, low_rank), 2.0**-24
    projections = projections_of(low_rank, shapes)
    found, expected, before = both_step(formats, shapes, projections, device, hard=False)
    step_size, eps = ROW[9], ROW[6]
    for index, projection in enumerate(projections):
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(found[name][index].cpu(), expected[name][index], name)
        mean, square = (expected[name][index].double() for name in ("exp_avg", "exp_avg_sq"))
        low = (mean / (square.sqrt() + eps)).abs()
        basis = projection.double().abs()
        size = step_size * (low @ basis if low_rank.side == RIGHT else basis @ low)
        weight = before["weight"][index].double().abs()
        bound = 2.01 * low_rank.rank * unit * size + 8 * unit * (weight + size)
        difference = (found["weight"][index].cpu().double() - expected["weight"][index]).abs()
        assert bool((difference <= bound).all()), (difference / bound).max()


@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.slow), 17, 40])
@pytest.mark.parametrize("side", [RIGHT, LEFT])
def test_the_step_is_the_twins_within_the_error_of_a_product(side, rank, device):
    assert_within_the_bound(LowRank(side, rank), [(50, 41)], device)


def in_fp64(before, index, projection, side):
    """The weight and moments after the step of one matrix, by the row's fp32 scalars, in fp64."""
    own = {slot: each[index].double() for slot, each in before.items()}
    basis, (beta1, rest1, beta2, rest2, _, _, eps) = projection.double(), ROW[:7]
    low = own["grad"] @ basis.mT if side == RIGHT else basis.mT @ own["grad"]
    mean = own["exp_avg"] * beta1 + low * rest1
    square = own["exp_avg_sq"] * beta2 + low * low * rest2
    low = mean / (square.sqrt() + eps)
    update = ROW[9] * (low @ basis if side == RIGHT else basis @ low)
    weight = (own["weight"] - update) * (1 - ROW[10])
    return {"weight": weight, "exp_avg": mean, "exp_avg_sq": square}


@pytest.mark.parametrize(
    ("shape", "rank", "tiles"),
    [
        ((50, 41), 17, SMALL),
        pytest.param((4097, 1023), 128, None, marks=pytest.mark.slow),
        pytest.param((300, 700), 17, None, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("side", [RIGHT, LEFT])
def test_errors_are_no_larger_than_torchs(side, shape, rank, tiles, device):
    """By norm, against fp64, at most 1.5 times those of torch's fp32 products."""
    low_rank = LowRank(side, rank)
    projections = projections_of(low_rank, [shape])
    own = (formats_of(PLAIN, low_rank), [shape], projections)
    found, torchs, before = both_step(*own, device, tiles, hard=False)
    for name, exact in in_fp64(before, 0, projections[0], side).items():
        errors = [(each[name][0].cpu() - exact).norm() for each in (found, torchs)]
        assert errors[0] <= 1.5 * errors[1]
        assert errors[1] <= 2.0**-18 * exact.norm()  # sums of 1,023 products, moments near 1


def test_matrices_and_tiles_show_in_no_bit_of_others(device):
    """One launch for all is a launch for each."""
    low_rank = LowRank(RIGHT, 5)
    formats, projections = formats_of(PLAIN, low_rank), projections_of(low_rank, SHAPES)
    together, _, before = both_step(formats, SHAPES, projections, device)
    for index, shape in enumerate(SHAPES):
        own = {slot: [each[index].to(device)] for slot, each in copied(before).items()}
        plan = launched_plan(formats, [torch.Size(shape)], [0], device, tiles=SMALL)
        plan.look(own)
        give(plan, [projections[index].to(device)])
        plan.step([ROW])
        for slot, (tensor,) in own.items():
            assert_same_bits(tensor, together[slot][index], slot)


STRIPS = {
    "strip": {"strip": 2},
    "three": {"strip": 3},
    "few registers": {"strip": 2, "registers": 64},
}


RANKS = 16, 32
"""A part of the rank, loaded once for a strip, and two."""
STRIPPED = [
    pytest.param(
        side, rank, strip, id=f"{side}-{rank}-{name}",
        marks=[pytest.mark.slow] * ((place + RANKS.index(rank) + (side == LEFT)) % 2),
    )
    for place, (name, strip) in enumerate(STRIPS.items())
    for side in (RIGHT, LEFT)
    for rank in RANKS
]  # fmt: skip
"""All; each two values meet in one that is not slow."""
WHOLE = [(32, 96), (48, 96)]
"""Of whole tiles, as many as make whole strips."""


@functools.cache
def by_strips(low_rank, device, **strip):
    """What a step by such strips makes, and what was before."""
    own = (formats_of(PLAIN, low_rank), WHOLE, projections_of(low_rank, WHOLE), device)
    back = replace(BackTile(16, 16, 16, 4, 1), **strip)
    found, _, before = both_step(*own, replace(SMALL, back=back))
    return moved(found, "cpu"), before


@pytest.mark.parametrize(("side", "rank", "strip"), STRIPPED)
@pytest.mark.sample(2)
def test_strips_show_in_no_bit(side, rank, strip, device):
    expected, _ = by_strips(LowRank(side, rank), device)
    found, before = by_strips(LowRank(side, rank), device, **strip)
    assert_same_buffers(found, expected)
    assert not torch.equal(found["weight"][0], before["weight"][0])


def checked(load):
    """A function that loads as `load` does; without a mask only from multiples of 16 bytes on."""

    def found(ptr, offsets, mask, *whole):
        first = (ptr + offsets).handle.data[..., 0]
        is_whole = bool(whole[0]) if whole else mask is None
        assert not (is_whole and (first % 16).any()), "an unaligned load"
        return load(ptr, offsets, mask, *whole)

    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("slot", ["weight", "master", "projection"])
def test_alignment_shows_in_no_bit(slot, device, monkeypatch):
    """Of whole tiles, of which one matrix begins elsewhere; a GPU refuses such loads itself."""
    low_rank, shapes = LowRank(RIGHT, 16), WHOLE
    formats = formats_of((FLOAT32, MASTERS["float32"] if slot == "master" else NONE), low_rank)
    projections = projections_of(low_rank, shapes)
    tiles = replace(SMALL, back=BackTile(16, 16, 16, 4, 1, strip=2))
    expected, _, before = both_step(formats, shapes, projections, device, tiles)
    if INTERPRETED:
        monkeypatch.setattr(codes, "load_block", checked(load_block))
        monkeypatch.setattr(kernel, "loaded", checked(loaded))
    own = moved({**copied(before), "projection": projections}, device)
    own[slot][1] = shifted(own[slot][1])
    plan = launched_plan(formats, [*map(torch.Size, shapes)], [0, 0], device, tiles=tiles)
    give(plan, own.pop("projection"))
    plan.look(own)
    plan.step([ROW])
    assert_same_buffers(own, moved(expected, "cpu"))


@pytest.mark.parametrize(
    ("rank", "shapes"), [(5, [(5, 70), (16, 41), (1, 6), (6, 1)]), (16, [(17, 32), (16, 48)])]
)
def test_nothing_beside_a_matrix_is_written(rank, shapes, device):
    """Of matrices that end within a tile, in their rows, columns or both, or within a strip."""
    low_rank = LowRank(RIGHT, rank)
    formats = formats_of((FLOAT32, MASTERS["float32"]), low_rank)
    own = moved(buffers(formats, shapes, hard=False), device)
    beside = []
    for slot, index in itertools.product(("weight", "master"), range(len(shapes))):
        own[slot][index], around = guarded(own[slot][index])
        beside += around
    sizes = [torch.Size(shape) for shape in shapes]
    plan = launched_plan(formats, sizes, [0] * len(shapes), device, tiles=SMALL)
    plan.look(own)
    give(plan, [each.to(device) for each in projections_of(low_rank, shapes)])
    plan.step([ROW])
    assert all(bool((memory == -1).all()) for memory in beside)


@interpreted
@pytest.mark.parametrize("side", [RIGHT, LEFT])
def test_both_factors_are_read_and_nothing_beside_them(side, device, monkeypatch):
    """What lies behind a factor shows in no bit, but may be no memory of the process."""
    read, low_rank, shape = set(), LowRank(side, 5), (33, 18)

    def noted(ptr, offsets, mask, even):
        read.update((ptr + offsets).handle.data[mask.handle.data].tolist())
        return loaded(ptr, offsets, mask, even)

    monkeypatch.setattr(kernel, "loaded", noted)
    formats, projections = formats_of(PLAIN, low_rank), projections_of(low_rank, [shape])
    both_step(formats, [shape], projections, device)
    assert len(read) == low_rank.rank * sum(shape)


def test_a_skipped_step_writes_nothing(device):
    low_rank = LowRank(RIGHT, 5)
    own = (formats_of(PLAIN, low_rank), SHAPES, projections_of(low_rank, SHAPES))
    found, expected, before = both_step(*own, device, controls=controls_of(skip=1.0))
    assert_same_buffers(found, before)
    assert_same_buffers(expected, before)


# What the comparison with the twin has to notice.
MUTANTS = {
    "the last part of the rank dropped": (
        "for first in range(0, PRODUCT.rank, INNER)",
        "for first in range(0, PRODUCT.rank - INNER, INNER)",
    ),
    "a part of the rank added twice": (
        "stride, PRODUCT)\n        total = added_product(left,",
        "stride, PRODUCT)\n        total = tl.where(first == 0, 2.0, 1.0) * added_product(left,",
    ),
    "only the last part of the rank": (
        "stride, PRODUCT)\n        total = added_product(left, right, total,",
        "stride, PRODUCT)\n        total = added_product(left, right, 0 * total,",
    ),
    "a product in 16 bits": (
        "right, total, PRECISION)\n    return total",
        "right, total, PRECISION)\n    return total.to(tl.float16).to(tl.float32)",
    ),
    "the rows of another tile": ("first_row = tile // across *", "first_row = tile // columns *"),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_noticed(change, tmp_path, device, monkeypatch):
    monkeypatch.setattr(wave, "kernel", mutant(KERNEL, change, tmp_path))
    with pytest.raises(AssertionError, match="tensor"):
        assert_within_the_bound(LowRank(RIGHT, 40), [(20, 50)], device)


def test_the_check_passes_on_the_true_source(device):
    assert wave.kernel is kernel
    assert_within_the_bound(LowRank(RIGHT, 40), [(20, 50)], device)
