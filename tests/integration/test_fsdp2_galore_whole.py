"""GaLoreAdamW's DTensors whose products add up over ranks: owners make them as one process."""

import contextlib
from functools import partial
from unittest import mock

import fsdp2_ranks
import pytest
import torch
import torch.distributed as dist
from fsdp2_ranks import (
    assert_same_on_all,
    give,
    gradients,
    is_last_rank,
    left_out,
    odd_last_rank,
    odd_step,
    raised_by,
    snapshot,
    train,
)
from galore_ranks import (
    RANK,
    build,
    load_and_train,
    placed_galore,
    ranked,
    refreshed_by_hand,
    save,
    trained,
)
from interpreted import interpreted
from runs import BF16, MASTER, REMAINDERS, assert_same
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaopt import FusedMuon
from megaopt.kernels.galore import ranks, rule
from megaopt.kernels.matrix import boxes, bucket, shared

# --- what ranks do


def of_strided_projections(options, steps, shapes, strided):
    """Trains with projections that become tensors with gaps behind the first step."""
    model, optimizer = build(options, shapes=shapes)
    train(model, optimizer, 1)
    for state in optimizer.state.values() if strided else ():
        if "projection" in state:
            local = state["projection"].to_local()
            local = torch.stack([local, local], -1)[..., 0]
            placed = state["projection"].device_mesh, state["projection"].placements
            state["projection"] = DTensor.from_local(local, *placed)
    train(model, optimizer, steps, 1)
    return snapshot(optimizer)


def shards_of_states(options, shapes):
    """For each parameter what this rank has of each state tensor: numbers, and its placement."""
    model, optimizer = build(options, shapes=shapes)
    train(model, optimizer, 1)
    return [
        {
            name: (value.to_local().numel(), str(value.placements[0]), tuple(value.shape))
            for name, value in optimizer.state[param].items() if value is not None
        }
        for param in model.parameters()
    ]  # fmt: skip


def made_here(options, steps, shapes):
    """How many updates and how many projections this rank makes."""
    model, optimizer = build(options, shapes=shapes)
    counts = {"projected_back": 0, "refreshed": 0}

    def counting(name, function):
        def call(*own, **others):
            counts[name] += 1
            return function(*own, **others)

        return call

    own = {name: counting(name, getattr(rule, name)) for name in counts}
    with mock.patch.multiple(rule, **own):
        train(model, optimizer, steps)
    return list(counts.values())


def said_of_left_out(options, reason, first, shapes):
    """As odd_step, of one that is left out; a "nan" is in the last rank's gradient."""
    model, optimizer = build(options, shapes=shapes)
    oddity = partial(left_out, reason=reason, here=is_last_rank())
    return odd_step(model, optimizer, first, oddity, more=2)


GROUPS = {"steps": {"step": 7}, "lr": {"lr": "much"}}
PLACES = {
    "exchange": (bucket, "unpacked"),
    "refresh": (rule, "refreshed"),
    "update": (rule, "projected_back"),
    "launched exchange": (boxes.PartCopies, "copy"),
    "launched projection": (ranks.ProjectionGroup, "project"),
    "launched update": (ranks.ProjectionGroup, "project_back"),
}


def said_of(kind, options, shapes):
    """As odd_step, of one whose last rank is odd: it has one of GROUPS, or fails in a place."""
    model, optimizer = build(options, shapes=shapes)
    oddity = partial(odd_last_rank, kind=kind, places=PLACES, options=GROUPS)
    return odd_step(model, optimizer, 3, oddity)


def kinds_of_steps(options, shapes):
    """The names of what steps the buckets of matrices."""
    names, init = [], shared.BucketSteps.__init__

    def noted(way, bucket, low, steps):
        names.append(type(steps).__name__)
        init(way, bucket, low, steps)

    with mock.patch.object(shared.BucketSteps, "__init__", noted):
        model, optimizer = build(options, shapes=shapes)
        train(model, optimizer, 1)
    return names


class Planted(TorchDispatchMode):
    """Has the operation that takes memory for the n-th time fail; None: counts them."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.fails_at, self.count = fails_at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returns = func._schema.returns
        is_new = any(str(own.type) == "Tensor" and own.alias_info is None for own in returns)
        if is_new and "c10d" not in func.namespace:
            self.count += 1
            if self.count == self.fails_at:
                raise MemoryError("planted")
        return func(*args, **(kwargs or {}))


def operations_of_a_step(options, shapes):
    """How many operations of a step take memory."""
    model, optimizer = fsdp2_ranks.build(options, shapes=shapes)
    train(model, optimizer, 3)
    give(model.parameters(), gradients(3, shapes, model.p0.dtype))
    with Planted() as planted:
        optimizer.step()
    return planted.count


def without_memory(options, shapes, every=1):
    """Steps in each of which a later operation of the last rank has no memory.

    Returns the errors, the state before and after all of these, and after a step that is taken.
    """
    is_last = dist.get_rank() == dist.get_world_size() - 1
    count = torch.tensor([operations_of_a_step(options, shapes)])
    dist.broadcast(count, dist.get_world_size() - 1)
    model, optimizer = fsdp2_ranks.build(options, shapes=shapes)
    train(model, optimizer, 3)
    before, errors = snapshot(optimizer), []
    for number in range(1, int(count) + 1, every):
        give(model.parameters(), gradients(3, shapes, model.p0.dtype))
        with Planted(number) if is_last else contextlib.nullcontext():
            error = raised_by(optimizer.step)
        errors.append(error or "none")
        if error is None:
            break
    after = snapshot(optimizer)
    train(model, optimizer, 1, 3)
    return errors, before, after, snapshot(optimizer)


SHAPES = [(24, 10), (7, 9), (9,), (6, 30), (4, 40), (12, 12), (33, 20)]
"""Tall, wide and square; uneven on 2 and 3 ranks, of fewer rows than ranks; a vector."""
LEFT = {"proj_type": "left"}
DRAWN = {"exp_avg_dtype": "bfloat16_stochastic", "exp_avg_sq_dtype": "bfloat16_stochastic"}
KINDS = {
    "fp32": {},
    "masters": {"weights": BF16, **MASTER},
    "remainders, at once": {"weights": BF16, **REMAINDERS, "stagger": False},
    "bf16": {"weights": BF16, **MASTER, "precision": "bf16"},
    "tf32, svd": {"precision": "tf32", "refresh": "svd"},
    "drawn": {"weights": BF16, "weight_rounding": "stochastic", "seed": 7, **DRAWN},
}
LAYOUTS = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "2x2": (4, 2)}
QUICK = ["1-fp32", "2-fp32", "2-bf16", "3-drawn", "3-remainders, at once", "2x2-masters"]
CASES = [
    pytest.param(*sizes, options, id=f"{layout}-{kind}",
                 marks=[] if f"{layout}-{kind}" in QUICK else [pytest.mark.slow])
    for layout, sizes in LAYOUTS.items()
    for kind, options in KINDS.items()
]  # fmt: skip


@pytest.mark.parametrize(("world", "replicas", "options"), CASES)
@pytest.mark.sample(2)
def test_fully_shard_has_the_bits_of_one_process(on_ranks, world, replicas, options):
    """Weights, masters, moments, projections and their energies, over refreshes."""
    given = ({**LEFT, **options}, 7)
    expected = trained(*given, shapes=SHAPES, clip_norm=1.0)
    found = on_ranks(world, trained, *given, replicas, SHAPES, clip_norm=1.0)
    assert_same_on_all(found, expected)


MATRICES = [shape for shape in SHAPES if len(shape) == 2]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "placements",
    ["columns", "by turns", "rows and columns", "rows twice", "copies of columns"],
)
@pytest.mark.sample(2)
def test_any_placements_have_the_bits_of_one_process(on_ranks, placements, side):
    """Where each has a matrix: rows that are projected on the right stay where they are."""
    kind = "fp32" if placements == "rows twice" else "drawn"
    shapes = [s for s in MATRICES if side == "left" or placements != "by turns" or sum(s) % 2]
    options, sizes = {**KINDS[kind], "proj_type": side}, (3,)
    if placements not in ("columns", "by turns"):
        sizes = (2, 2)
    expected = placed_galore(options, 5, shapes=shapes)
    named = {"placements": placements, "sizes": sizes, "shapes": shapes}
    found = on_ranks(4 if len(sizes) == 2 else 3, placed_galore, options, 5, **named)
    assert_same_on_all(found, expected)


def test_projections_may_have_gaps(on_ranks):
    """Over a refresh."""
    given = (LEFT, 5, [(6, 30), (24, 10)])
    strided, dense = (
        on_ranks(2, of_strided_projections, *given, is_strided) for is_strided in (True, False)
    )
    assert_same(strided, dense)


LAUNCHES = ("exchange", "projection", "update")
"""Those that fail in a test."""
LAUNCHED = {
    "ieee": {"weights": BF16, **MASTER},
    "tf32": {"precision": "tf32"},
    "bf16": {**KINDS["drawn"], "precision": "bf16"},
    "remainders": {"weights": BF16, **REMAINDERS, "kernel": "grouped", "precision": "bf16"},
}


@interpreted
@pytest.mark.parametrize(
    ("kind", "world", "replicas"),
    [
        ("ieee", 2, 1),
        ("bf16", 3, 1),
        pytest.param("tf32", 2, 1, marks=pytest.mark.slow),
        pytest.param("remainders", 2, 1, marks=pytest.mark.slow),
        pytest.param("bf16", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_launches_have_the_same_bits(on_ranks, kind, world, replicas):
    """Over a refresh, and a step behind it; products of "ieee" are torch's."""
    options, shapes = {**LEFT, **LAUNCHED[kind]}, SHAPES[:4]
    alone = {**options, "kernel": "torch"}
    expected = trained(alone, 5, shapes=shapes, clip_norm=1.0)
    given = ({**options, "backend": "triton"}, 5, replicas, shapes)
    assert_same_on_all(on_ranks(world, trained, *given, clip_norm=1.0), expected)


@interpreted
def test_launches_take_columns_and_matrices_of_several_slabs(on_ranks):
    options = {**LEFT, "precision": "bf16", "weights": BF16, **MASTER}
    shapes = [(1030, 40), (40, 6), (6, 44)]
    for side in ("left", "right"):
        own = {**options, "proj_type": side, "kernel": "torch"}
        expected = placed_galore(own, 2, shapes=shapes)
        named = {"placements": "columns", "sizes": (2,), "shapes": shapes}
        own = {**own, "kernel": "auto", "backend": "triton"}
        assert_same_on_all(on_ranks(2, placed_galore, own, 2, **named), expected)


@interpreted
def test_launches_refresh_between_steps_as_steps_do(on_ranks):
    """capturable=True; a refresh takes other memory than steps."""
    options = {**LEFT, "precision": "bf16", "backend": "triton"}
    found = on_ranks(2, refreshed_by_hand, options, 4)
    assert_same_on_all(found, trained({**options, "kernel": "torch", "backend": "reference"}, 4))


@interpreted
def test_launches_step_buckets_without_plain_torch(on_ranks):
    """Of "auto"; "torch" has torch's operations."""
    options = {**LEFT, "backend": "triton"}
    found = on_ranks(2, kinds_of_steps, options, SHAPES)
    assert found == [["GaLoreBucket"]] * 2
    found = on_ranks(2, kinds_of_steps, {**options, "kernel": "torch"}, SHAPES)
    assert found == [["TorchBucket"]] * 2


def test_refreshes_between_steps_are_those_of_steps(on_ranks):
    """capturable=True."""
    found = on_ranks(3, refreshed_by_hand, LEFT, 5)
    assert_same_on_all(found, trained(LEFT, 5))


@pytest.mark.parametrize("placements", ["rows", "columns", "rows and columns"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_moments_in_blocks_have_the_bits_of_one_process(on_ranks, side, placements):
    """Of shards of whole blocks."""
    blocks = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3", "seed": 3}
    rank, shape = (17, (300, 256)) if side == "left" else (256, (600, 530))
    options = {**blocks, "proj_type": side, "rank": rank}
    sizes = (2, 2) if placements == "rows and columns" else (2,)
    expected = placed_galore(options, 2, shapes=[shape])
    named = {"placements": placements, "sizes": sizes, "shapes": [shape]}
    if side == "right" and placements == "rows":
        return  # made where the rows are: test_fsdp2_galore.py
    found = on_ranks(4 if len(sizes) == 2 else 2, placed_galore, options, 2, **named)
    assert found[0]["states"][0]["exp_avg"].dtype == torch.uint8
    assert_same_on_all(found, expected)


# --- states


@pytest.mark.parametrize("steps", [2, 3], ids=["between", "at a refresh"])
@pytest.mark.parametrize("worlds", [(2, 3), (3, 1), (1, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("kind", ["masters", "drawn"])
@pytest.mark.sample(4)
def test_it_resumes_on_another_number_of_ranks(on_ranks, tmp_path, worlds, steps, kind):
    options, folder = {**LEFT, **KINDS[kind]}, str(tmp_path / "saved")
    saved = on_ranks(worlds[0], save, options, steps, folder, False, SHAPES)
    given = (options, 4, steps, folder, False, SHAPES)
    straight = trained(options, steps + 4, shapes=SHAPES)
    for loaded, after in on_ranks(worlds[1], load_and_train, *given):
        assert_same(loaded, saved[0])
        assert_same(after, straight)


def test_ranks_have_moments_once_and_projections_each(on_ranks):
    ranks = on_ranks(3, shards_of_states, LEFT, MATRICES)
    for shape, *own in zip(MATRICES, *ranks, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert sum(each[name][0] for each in own) == RANK * shape[1]
            assert {each[name][1:] for each in own} == {("S(0)", (RANK, shape[1]))}
        assert {each["projection"] for each in own} == {(shape[0] * RANK, "R", (shape[0], RANK))}


def test_each_matrix_is_made_once(on_ranks):
    """Its update in each step, its projection in the first and where its turn is."""
    found = on_ranks(3, made_here, LEFT, 3, [(20, 30)] * 6)
    assert [updates for updates, _ in found] == [6, 6, 6]
    # of six matrices two are refreshed in each step; the first makes all
    assert sum(refreshes for _, refreshes in found) == 6 + 2 + 2


# --- gradients, and ranks, that fail


@pytest.mark.parametrize("first", [0, 3], ids=["first", "at a refresh"])
@pytest.mark.parametrize("reason", ["found_inf", "nan"])
@pytest.mark.parametrize("stays", [True, False], ids=["skip", "propagate"])
@pytest.mark.sample(2)
def test_a_gradient_that_says_nothing_does_what_it_does_to_one_process(
    on_ranks, reason, first, stays
):
    """A step is left out, or NaN goes into weights; projections stay in both."""
    own = {**LEFT, "weights": BF16, **MASTER, "stagger": False}
    given = ({**own, "nonfinite": "skip" if stays else "propagate"}, reason, first, SHAPES)
    expected = said_of_left_out(*given)
    for found in on_ranks(3, said_of_left_out, *given):
        assert_same(found, expected)
        error, before, after, then = found
        assert error is None
        if before["states"][0] and (stays or reason == "found_inf"):
            assert_same(after, before)
            with pytest.raises(AssertionError):
                assert_same(then["states"], before["states"])


DIFFER = "ranks that hold parts of the same parameters must step the same"
FAILED = "another rank that steps the same parameters failed in this step"
WRONG = {
    "gradient": (DIFFER, DIFFER),
    "steps": (DIFFER, DIFFER),
    "lr": (DIFFER, "lr must be a finite number"),
    "exchange": (FAILED, "RuntimeError: no memory"),
    "refresh": (FAILED, "RuntimeError: no memory"),
    "update": (FAILED, "RuntimeError: no memory"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_ranks_that_differ_or_fail_change_nothing_on_any(on_ranks, kind):
    """And all go on with the next step as if there had been none."""
    options, (elsewhere, there) = {**LEFT, "weights": BF16, **MASTER, "stagger": False}, WRONG[kind]
    straight = trained(options, 4, shapes=SHAPES)
    found = on_ranks(3, said_of, kind, options, SHAPES)
    for rank, (error, before, after, then) in enumerate(found):
        assert (there if rank == 2 else elsewhere) in error
        assert_same(after, before)
        assert_same(then, straight)


@interpreted
@pytest.mark.parametrize("kind", ["refresh", *(f"launched {n}" for n in LAUNCHES)])
@pytest.mark.sample(2)
def test_ranks_whose_launches_fail_change_nothing_on_any(on_ranks, kind):
    """And all go on with the next step."""
    options, shapes = {**LEFT, "weights": BF16, **MASTER, "stagger": False}, MATRICES[:3]
    straight = trained({**options, "precision": "bf16"}, 4, shapes=shapes)
    options |= {"precision": "bf16", "backend": "triton"}
    found = on_ranks(2, said_of, kind, options, shapes)
    for rank, (error, before, after, then) in enumerate(found):
        assert ("RuntimeError: no memory" if rank else FAILED) in error
        assert_same(after, before)
        assert_same(then, straight)


MUON = {"optimizer": FusedMuon}
OUT_OF_MEMORY = {
    "galore": (ranked({**LEFT, "weights": BF16, **MASTER, "stagger": False}), SHAPES[:4]),
    "muon": ({**MUON, "weights": BF16, **MASTER, "precision": "fp16"}, [(24, 10), (7, 33), (9,)]),
    "muon, together": ({**MUON, "second_moment": "normuon"}, [(40, 90), (10, 12)]),
}


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("options", "shapes"), OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_a_rank_whose_memory_ends_anywhere_keeps_none_waiting(on_ranks, options, shapes, every):
    """All raise, and nothing has changed on any; at every so manieth operation."""
    ranks = on_ranks(2, without_memory, options, shapes, every)
    straight = fsdp2_ranks.trained(options, 4, shapes=shapes)
    for rank, (errors, before, after, then) in enumerate(ranks):
        assert len(errors) > 20
        said = "MemoryError: planted" if rank else "rank"
        assert [error for error in errors if said not in error] == []
        assert_same(after, before)
        assert_same(then, straight)
