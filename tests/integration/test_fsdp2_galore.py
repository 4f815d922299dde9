"""GaLoreAdamW's DTensors: projected on the rank that has the rows, refreshed on one of them."""

import re

import fsdp2_models
import galore_ranks
import pytest
import torch
from bits import assert_same_bits
from fsdp2_ranks import assert_same_on_all
from galore_ranks import (
    GAP,
    RANK,
    SHAPES,
    bytes_by_turns,
    exact_weights,
    matrices_of,
    norm_of_errors,
    selected,
    trained,
)
from interpreted import interpreted, marks_of
from runs import BF16, MASTER, REMAINDERS, assert_same, values

from megaopt import GaLoreAdamW

LAYOUTS = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "2x2": (4, 2)}
all_layouts = pytest.mark.parametrize(("world", "replicas"), LAYOUTS.values(), ids=LAYOUTS)
MATRICES = [shape for shape in SHAPES if len(shape) == 2]


# --- steps


DRAWN = {"exp_avg_dtype": "bfloat16_stochastic", "exp_avg_sq_dtype": "bfloat16_stochastic"}
KINDS = {
    "fp32": {"weights": torch.float32},
    "masters": {"weights": BF16, **MASTER},
    "remainders": {"weights": BF16, **REMAINDERS, "kernel": "hybrid"},
    "grouped": {"weights": BF16, **MASTER, "kernel": "grouped", "precision": "bf16"},
    "tf32": {"weights": BF16, **MASTER, "precision": "tf32"},
    "bf16": {"weights": torch.float32, "precision": "bf16"},
    "stochastic": {"weights": BF16, "weight_rounding": "stochastic", "seed": 7, **DRAWN},
    "hybrid": {"weights": BF16, "weight_rounding": "stochastic", "kernel": "hybrid", **DRAWN},
}


EXACT = [
    pytest.param(
        options, *layout, id=f"{kind}-{name}", marks=[pytest.mark.sample(2), *marks_of(options)]
    )
    for kind, options in KINDS.items()
    for name, layout in LAYOUTS.items()
    if "kernel" not in options or name == "3"  # interpreted
]


@pytest.mark.parametrize(("options", "world", "replicas"), EXACT)
@pytest.mark.sample(2)
def test_steps_are_whole_steps(on_ranks, options, world, replicas):
    """Moments, weights, masters, random bits, norm, to the bit; of ieee where products are exact.

    That is by projections of 0 and 1.
    """
    shapes = SHAPES if options.get("precision", "ieee") == "ieee" else [*SHAPES, (5, 1040)]
    own = (options, 3, replicas, SHAPES[:3] if "kernel" in options else shapes)
    found = on_ranks(world, selected, *own, clip_norm=1.0)
    assert_same_on_all(found, selected(*own, clip_norm=1.0))


BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3", "seed": 3}


@pytest.mark.parametrize(("rank", "dtype"), [(128, torch.uint8), (100, torch.float32)], ids=str)
def test_moments_in_blocks_are_those_of_whole_matrices(on_ranks, rank, dtype):
    """Where rows of the moments are of whole blocks; otherwise they are fp32, on all ranks."""
    given = ({**BLOCKS, "rank": rank}, 2, 1, [(290, 290)])
    expected = selected(*given)
    for own in on_ranks(3, selected, *given):
        assert own["states"][0]["exp_avg"].dtype == dtype
        assert expected["states"][0]["exp_avg"].dtype == dtype
        assert_same(own["states"], expected["states"])
        assert_same(own["weights"], expected["weights"])


@pytest.mark.parametrize(
    ("kernel", "stagger", "layouts"),
    [
        pytest.param("torch", False, LAYOUTS, id="torch at once"),
        pytest.param("torch", True, ["3"], id="torch"),
        pytest.param("hybrid", True, ["2"], id="hybrid", marks=[interpreted, pytest.mark.slow]),
    ],
)
def test_ieee_weights_are_off_by_no_more_than_twice_what_one_process_is(
    on_ranks, kernel, stagger, layouts
):
    """Against fp64, by norm, over three refreshes of each matrix; projections have its bits."""
    options, exact = {"kernel": kernel, "stagger": stagger}, exact_weights(8, stagger)
    one = trained(options, 8)
    alone = norm_of_errors(matrices_of(one), exact)
    assert alone > 0
    for world, replicas in map(LAYOUTS.get, layouts):
        runs = on_ranks(world, trained, options, 8, replicas)
        for run in runs:
            assert norm_of_errors(matrices_of(run), exact) <= 2 * alone
            assert_same(refreshed_of(run), refreshed_of(one))
            assert_same(run, runs[0])


def refreshed_of(run):
    """The projections of a run and their energies."""
    names = ("projection", "captured_energy")
    return [state[name] for state in run["states"] for name in names if name in state]


@pytest.mark.sample(4)
@all_layouts
@pytest.mark.parametrize("stagger", [False, True], ids=["at once", "staggered"])
@pytest.mark.parametrize("refresh", ["subspace", "svd"])
@pytest.mark.parametrize("kind", ["tf32", "bf16"])
def test_runs_have_the_bits_of_one_process(on_ranks, world, replicas, stagger, refresh, kind):
    """Weights, moments, projections and energies over refreshes, of products that are specified."""
    options = {**KINDS[kind], "refresh": refresh, "stagger": stagger}
    expected = trained(options, 8)
    assert_same_on_all(on_ranks(world, trained, options, 8, replicas), expected)


def test_parameters_without_a_rank_take_fused_adams_step(on_ranks):
    for own, plain in on_ranks(3, galore_ranks.beside_fused_adam, MASTER, 3):
        assert_same(own, plain)


def test_refreshes_between_steps_are_those_of_steps(on_ranks):
    """capturable=True."""
    found = on_ranks(3, galore_ranks.refreshed_by_hand, {}, 5)
    assert_same(found, on_ranks(3, trained, {}, 5))


def test_gradients_may_be_released(on_ranks):
    own = (fsdp2_models.released, galore_ranks.ranked({}))
    assert_same(*(on_ranks(2, *own, releases, steps=2 * GAP) for releases in (True, False)))


# --- what ranks tell each other


@all_layouts
@pytest.mark.sample(2)
def test_bytes_are_those_of_refreshes_alone(on_ranks, world, replicas):
    for stagger in (True, False):
        own = {"stagger": stagger}
        found = on_ranks(world, galore_ranks.bytes_of_steps, own, 7, replicas)
        layout = world, replicas
        assert found == [bytes_by_turns(7, stagger, rank, *layout) for rank in range(world)]
        assert stagger or found[0][1:3] == [0, 0]


def test_a_norm_adds_its_own_bytes(on_ranks):
    """No more than FusedAdam's: 4 KB of whole numbers."""
    counts = on_ranks(2, galore_ranks.bytes_of_steps, {"stagger": False}, 3, 1, 1.0)
    for rank, own in enumerate(counts):
        plain = bytes_by_turns(3, False, rank, world=2)
        beside = [each - refresh for each, refresh in zip(own, plain, strict=True)]
        assert len(set(beside)) == 1
        assert 4000 < beside[0] < 4300


# --- gradients that say nothing


SAYING = {  # what a gradient becomes, and whether it says enough to move the projection
    "zeros": (galore_ranks.zeros, False),
    "NaN on the last rank": (galore_ranks.nan_in_the_last_row, False),
    "infinity on the first rank": (galore_ranks.infinite_in_the_first_row, False),
    "one dimension": (galore_ranks.of_one_dimension, True),
    "zeros on the first rank": (galore_ranks.zeros_in_the_first_rows, True),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("before", [0, GAP], ids=["first", "later"])
@pytest.mark.parametrize(("change", "moves"), SAYING.values(), ids=SAYING)
def test_all_ranks_decide_alike_what_a_gradient_says(on_ranks, change, moves, before):
    """As one process decides; the projection of all of them is one."""
    given = ({}, change, (24, 10), before)
    for world in (2, 3):
        ranks = on_ranks(world, galore_ranks.after_a_gradient, *given)
        for projections in ranks:
            assert_same(projections, ranks[0])
        *known, then, after = ranks[0]
        assert torch.isfinite(then).all()
        assert not torch.equal(after, then)
        if known:
            assert torch.equal(then, known[0]) is not moves
        elif not moves:  # the sketch, which is the same everywhere
            assert_same_bits(then, galore_ranks.after_a_gradient(*given)[0])


@pytest.mark.parametrize(
    "sent", [[1.0, -0.0, 3.0], [5.0, torch.nan, torch.inf], [0.0, torch.inf, 2.0]]
)
def test_the_largest_magnitude_of_all_ranks(on_ranks, sent):
    """Collectives are free to lose a NaN among numbers."""
    expected = torch.tensor(sent).amax()
    assert_same_on_all(on_ranks(3, galore_ranks.largest_of, sent), expected)


def test_clip_norm_is_of_the_whole_gradients(on_ranks):
    """Of the matrices themselves: FusedAdam's norm."""
    expected = galore_ranks.norm_of(2, "FusedAdam")
    for world in (2, 3):
        assert_same_on_all(on_ranks(world, galore_ranks.norm_of, 2, "GaLoreAdamW"), expected)


def test_an_infinity_on_one_rank_skips_the_step_on_all(on_ranks):
    for before, after in on_ranks(3, galore_ranks.one_infinity, {"nonfinite": "skip"}):
        assert_same(after, before)


@pytest.mark.parametrize("what", ["gradient", "error"])
def test_a_rank_that_raises_before_a_refresh_keeps_none_waiting(on_ranks, what):
    """Where ranks meet for a norm, all raise, and the step can be taken again."""
    expected = on_ranks(3, trained, {"stagger": False}, GAP + 1, clip_norm=1.0)[0]
    for message, before, changed, after in on_ranks(3, galore_ranks.differing, what):
        assert message != "nothing was refused"
        assert_same(changed, before)
        assert_same(after, expected)


@pytest.mark.parametrize("groups", [1, 2], ids=["one batch", "two"])
@pytest.mark.parametrize("before", [0, GAP], ids=["first", "later"])
def test_a_refresh_that_fails_on_a_rank_keeps_none_waiting(on_ranks, before, groups):
    """It raises; the others have the projections that they made, and the old ones of its own."""
    given = (before, groups)
    whole = on_ranks(3, galore_ranks.failing_at_a_refresh, None, *given)[0][1]
    for failing in range(3):
        found = on_ranks(3, galore_ranks.failing_at_a_refresh, failing, *given)
        assert [message for message, _ in found] == [
            "RuntimeError: no memory" if rank == failing else None for rank in range(3)
        ]
        one, other = [projections for rank, (_, projections) in enumerate(found) if rank != failing]
        for number, expected in enumerate(whole):
            if expected is not None:
                assert_same_bits(one[number], other[number])
                is_made = number % 3 != failing
                assert torch.equal(one[number], expected) is is_made
                assert is_made or before or not one[number].any()


@pytest.mark.parametrize("groups", [1, 2], ids=["one batch", "two"])
def test_all_raise_for_a_refresh_that_fails_in_a_clipped_step(on_ranks, groups):
    """Nobody has taken it."""
    given = (GAP, groups)
    for failing in (0, 2):
        found = on_ranks(3, galore_ranks.failing_at_a_refresh, failing, *given, clip_norm=1.0)
        for rank, (message, projections) in enumerate(found):
            wanted = "no memory" if rank == failing else "another rank .* failed in this step"
            assert re.search(wanted, message)
            assert_same(projections, found[failing][1])


def test_ranks_of_another_gap_raise(on_ranks):
    for message in on_ranks(2, galore_ranks.of_another_gap):
        assert "update_proj_gap" in message


@pytest.mark.parametrize("mesh", [[1, 0], [2, 0, 1], [[3, 1], [2, 0]], [[0, 2], [1, 3]]], ids=str)
def test_ranks_may_lie_anywhere_in_a_mesh(on_ranks, mesh):
    """Also in another order than their numbers."""
    expected = galore_ranks.at_places(None, GAP + 1)
    world = torch.tensor(mesh).numel()
    assert_same_on_all(on_ranks(world, galore_ranks.at_places, mesh, GAP + 1), expected)


def test_ranks_that_project_differently_refuse_to_step(on_ranks):
    for message in on_ranks(2, galore_ranks.of_another_rank):
        assert "ranks that hold parts of the same parameters must step the same" in message


# --- states


def shapes_of_state(shape):
    """Of a parameter's whole state tensors; and which every rank has whole."""
    if len(shape) != 2:
        return dict.fromkeys(("exp_avg", "exp_avg_sq", "master_param"), shape), ()
    low, kept = (shape[0], RANK), {"projection": (RANK, shape[1]), "captured_energy": ()}
    return {"exp_avg": low, "exp_avg_sq": low, "master_param": shape, **kept}, kept


@all_layouts
def test_moments_are_sharded_and_projections_replicated(on_ranks, world, replicas):
    options = {"weights": BF16, **MASTER}
    for kinds in on_ranks(world, galore_ranks.kinds_of_state, options, replicas):
        for shape, own in zip(SHAPES, kinds, strict=True):
            shapes, kept = shapes_of_state(shape)
            assert {name: kind[2] for name, kind in own.items()} == shapes
            for name, (is_alike, placement, whole, local) in own.items():
                assert is_alike, name
                assert placement == ("R" if name in kept else "S(0)"), name
                assert local == whole if name in kept else local[1:] == whole[1:]


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize(
    ("kind", "steps"),
    [("masters", 2), ("remainders", GAP), ("masters", 0), ("stochastic", 2), ("bf16", 2)],
    ids=["between refreshes", "at a refresh", "before all", "stochastic", "bf16"],
)
@pytest.mark.parametrize("worlds", [(2, 2), (3, 2), (2, 3)], ids=lambda w: f"{w[0]}to{w[1]}")
@pytest.mark.sample(4)
def test_saved_on_some_ranks_loads_on_others(on_ranks, tmp_path, worlds, kind, steps, flat):
    """Every bit is loaded; the run goes on as if it had not stopped.

    With "ieee" on as many ranks: products are torch's.
    """
    options, folder = {**KINDS[kind], "kernel": "torch"}, str(tmp_path / "checkpoint")
    saved = on_ranks(worlds[0], galore_ranks.save, options, steps, folder, flat)
    given = (options, 4, steps, folder, flat)
    found = on_ranks(worlds[1], galore_ranks.load_and_train, *given)
    straight = on_ranks(worlds[1], trained, options, steps + 4)
    for (loaded, after), expected in zip(found, straight, strict=True):
        assert_same(loaded, saved[0])
        if worlds[0] == worlds[1] or "precision" in options:
            assert_same(after, expected)


def test_values_read_and_set(on_ranks):
    """Also out of blocks, which are counted in the rows of moments, not of weights."""
    given = ({**BLOCKS, "rank": 128}, [(290, 290)])
    expected, _ = galore_ranks.values_read_and_set(*given)
    for read, found in on_ranks(3, galore_ranks.values_read_and_set, *given):
        assert [each.shape for each in read] == [each.shape for each in expected]
        assert_same(found, read)


# --- what is refused


def test_flat_parameters_are_refused(on_ranks):
    """FSDP1's by what it says of them; others' as they take the place of matrices."""
    pattern = r"None beside its parameter 0, a flat part .* FSDP2 \(fully_shard\) .* got 3"
    for found in on_ranks(2, galore_ranks.under_fsdp1):
        for message in found:
            assert re.search(pattern, message), message


def test_flat_tensors_in_the_place_of_matrices_are_refused():
    """As DeepSpeed's ZeRO and Megatron's distributed optimizer put them there."""
    params = [torch.nn.Parameter(values(shape, 0)) for shape in [(24, 10), (9,)]]
    optimizer = GaLoreAdamW(params, rank=3)
    flat = torch.nn.Parameter(torch.cat([param.detach().flatten() for param in params]))
    optimizer.param_groups[0]["params"], flat.grad = [flat], torch.ones_like(flat)
    before = flat.detach().clone()
    with pytest.raises(ValueError, match=r"group 0: rank must be None .* a flat part of a matrix"):
        optimizer.step()
    assert_same_bits(flat.detach(), before)
    optimizer.param_groups[0]["rank"] = None
    optimizer.step()
    assert not torch.equal(flat, before)


def test_biases_may_stand_in_a_group_of_their_own():
    biases = [torch.nn.Parameter(values((9,), 0))]
    optimizer = GaLoreAdamW([{"params": [torch.nn.Parameter(values((24, 10), 0))]}], rank=3)
    optimizer.add_param_group({"params": biases})
    biases[0].grad = torch.ones(9)
    optimizer.step()
    assert not torch.equal(biases[0], values((9,), 0))
