"""GaLoreAdamW's DTensors: projected on the rank that has the rows, refreshed on one of them."""

import contextlib
import re
from functools import partial
from unittest import mock

import fsdp2_ranks
import fsdp2_ranks as ranks
import galore_ranks
import pytest
import torch
import torch.distributed as dist
from bits import assert_same_bits
from fsdp2_ranks import (
    Bare,
    assert_same_on_all,
    give,
    gradients,
    mesh_of,
    odd_step,
    raised_by,
    said,
    sharded,
    snapshot,
    train,
)
from galore_ranks import (
    GAP,
    NUMBERS,
    RANK,
    RANKED,
    SHAPES,
    Bytes,
    build,
    bytes_by_turns,
    exact_weights,
    load_and_train,
    norm_of_errors,
    save,
    trained,
)
from interpreted import interpreted, marks_of
from runs import BF16, MASTER, REMAINDERS, assert_same, values
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megaopt import FusedAdam, GaLoreAdamW
from megaopt.kernels.galore import rule
from megaopt.params import view_of
from megaopt.step.ranks.peers import PartsOnRanks

# --- what ranks do


KEPT = ("projection", "captured_energy")


def bytes_of_steps(options, steps, replicas=1, clip_norm=None):
    """For each step what this rank communicates."""
    model, optimizer = build(options, replicas)
    params, found = list(model.parameters()), []
    for number in range(steps):
        give(params, gradients(number, [tuple(p.shape) for p in params], params[0].dtype))
        with Bytes() as counted:
            optimizer.step(clip_norm=clip_norm)
        found.append(counted.count)
    return found


def matrices_of(run):
    return [weight for weight in run["weights"] if weight.dim() == 2]


def selecting(optimizer, offset=0):
    """Gives every matrix a projection of 0 and 1, with which all products are exact.

    Of other numbers where a precision says how they are multiplied.
    """
    optimizer.initialize_states()
    for number, own in enumerate(optimizer.state.values()):
        if "projection" in own:
            basis = own["projection"]
            basis = basis.to_local() if isinstance(basis, DTensor) else basis
            if optimizer.options.precision != "ieee":
                basis.copy_(values(basis.shape, number))
                continue
            is_wide = basis.shape[0] < basis.shape[1]
            rows = basis if is_wide else basis.T
            rows.zero_().diagonal(offset).fill_(1.0)


def selected(options, steps, replicas=1, shapes=SHAPES, **step):
    """Steps by such projections, which stay; the norms too where steps clip."""
    given = {"update_proj_gap": 1000, **options}
    model, optimizer = build(given, replicas, shapes)
    optimizer.param_groups[0]["param_numbers"] = [500 + i for i in range(len(shapes))]
    selecting(optimizer)
    train(model, optimizer, steps, **step)
    found = snapshot(optimizer)
    return (found, optimizer.grad_norm.clone()) if "clip_norm" in step else found


def largest_of(sent):
    """Of one number from each rank."""
    param = distribute_tensor(torch.ones(6, 30), mesh_of(), [Shard(0)], src_data_rank=None)
    parts = PartsOnRanks(view_of(param), 0)
    return parts.largest(torch.tensor(sent[dist.get_rank()]))


def after_a_gradient(options, change, shape, before=3):
    """Projections before and after a refresh by a changed gradient, and after the next one."""
    model, optimizer = build({**options, "stagger": False}, shapes=[shape])
    train(model, optimizer, before)
    found = [projection_of(optimizer)] if before else []
    for number in range(before, before + GAP + 1):
        grad = gradients(number, [shape])[0]
        give(model.parameters(), [change(grad) if number == before else grad])
        optimizer.step()
        if number in (before, before + GAP):
            found.append(projection_of(optimizer))
    return found


def projection_of(optimizer):
    (own,) = optimizer.state.values()
    basis = own.get("projection")
    return (basis.to_local() if isinstance(basis, DTensor) else basis).clone()


def zeros(grad):
    return torch.zeros_like(grad)


def nan_in_the_last_row(grad):
    grad[-1, 2] = torch.nan
    return grad


def infinite_in_the_first_row(grad):
    grad[0, 1] = -torch.inf
    return grad


def of_one_dimension(grad):
    return grad[:, :1] * torch.arange(1.0, grad.shape[1] + 1)


def zeros_in_the_first_rows(grad):
    grad[: grad.shape[0] // 2] = 0
    return grad


def failing_at_a_refresh(failing, before=GAP, groups=1, **step):
    """Returns what a rank raises at a refresh that fails on one of them, and its projections.

    groups: so many, each of another rank.
    """
    model = sharded(Bare(SHAPES))
    params = list(model.parameters())
    lows = [{"params": params[i::groups], **RANKED, "rank": RANK - i} for i in range(groups)]
    optimizer = GaLoreAdamW(lows, **NUMBERS, stagger=False)
    train(model, optimizer, before, **step)
    give(model.parameters(), gradients(before, SHAPES))
    error = RuntimeError("no memory") if dist.get_rank() == failing else None
    with mock.patch.object(rule, "refreshed", side_effect=error, wraps=rule.refreshed):
        message = raised_by(partial(optimizer.step, **step))
    projections = [optimizer.state[p].get("projection") for low in lows for p in low["params"]]
    return message, [None if p is None else p.to_local().clone() for p in projections]


def of_another_gap():
    """Returns what a rank raises at a clipped step after one of them has set another gap."""
    model, optimizer = build({})
    train(model, optimizer, 2, clip_norm=1.0)
    give(model.parameters(), gradients(2, SHAPES))
    optimizer.param_groups[0]["update_proj_gap"] += dist.get_rank()
    return said(partial(optimizer.step, clip_norm=1.0))


def at_places(mesh, steps, shapes=SHAPES):
    """Projections and energies where ranks lie so in a mesh; None: of one process."""
    model, options = Bare(shapes), {**NUMBERS, **RANKED}
    if mesh is not None:
        mesh = DeviceMesh("cpu", mesh)
        for name, param in list(model.named_parameters()):
            placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
            split = distribute_tensor(param.detach(), mesh, placements, src_data_rank=None)
            setattr(model, name, torch.nn.Parameter(split))
    optimizer = GaLoreAdamW(model.parameters(), **options)
    train(model, optimizer, steps)
    tensors = [state[n] for state in optimizer.state.values() for n in KEPT if n in state]
    return [t.to_local().clone() if isinstance(t, DTensor) else t for t in tensors]


def kinds_of_state(options, replicas):
    """By name of each state tensor: mesh and strides as they must be, placement, shapes."""
    model, optimizer = build(options, replicas)
    train(model, optimizer, 1)
    return [
        {
            name: (
                t.device_mesh == p.device_mesh and t.stride() == torch.empty(t.shape).stride(),
                str(t.placements[-1]), tuple(t.shape), tuple(t.to_local().shape),
            )
            for name, t in optimizer.state[p].items() if t is not None
        }
        for p in model.parameters()
    ]  # fmt: skip


def values_read_and_set(options, shapes):
    """fp32 values of moments, whole, and what a second optimizer has that was given them."""
    (model, optimizer), (_, other) = (build(options, shapes=shapes) for _ in range(2))
    train(model, optimizer, 2)
    other.initialize_states()
    read, found = [], []
    for param, twin in zip(model.parameters(), other.param_groups[0]["params"], strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            value = optimizer.get_unscaled_state(param, name)
            other.set_scaled_state(twin, name, value)
            for each, own in ((read, value), (found, other.get_unscaled_state(twin, name))):
                each.append(own.full_tensor() if isinstance(own, DTensor) else own.clone())
    return read, found


def beside_fused_adam(options, steps):
    """Parameters without a rank: of this optimizer, and of FusedAdam."""
    runs = []
    for kind in (GaLoreAdamW, FusedAdam):
        model = sharded(Bare(SHAPES, BF16))
        if kind is GaLoreAdamW:
            params = list(model.parameters())
            ranked = [{"params": params[:2], **RANKED}, {"params": params[2:], "rank": None}]
            optimizer = kind(ranked, **NUMBERS, **options)
        else:
            optimizer = kind(model.parameters(), **NUMBERS, **options)
        train(model, optimizer, steps)
        found = snapshot(optimizer)
        runs.append([found["weights"][2:], found["states"][2:]])
    return runs


def norm_of(steps, kind):
    options = {} if kind == "FusedAdam" else RANKED
    model, optimizer = ranks.build({"optimizer": kind, **options}, shapes=SHAPES)
    train(model, optimizer, steps, clip_norm=1.0)
    return optimizer.grad_norm.clone()


def one_infinity(options):
    """In the last row of a matrix, at a refresh."""
    model, optimizer = build({**options, "stagger": False})
    train(model, optimizer, GAP)
    before, grads = snapshot(optimizer), gradients(GAP, SHAPES)
    grads[0][-1, 0] = torch.inf
    give(model.parameters(), grads)
    optimizer.step()
    return before, snapshot(optimizer)


def under_fsdp1():
    """Views into a flat parameter, and the flat parameter itself."""
    found = []
    for originals in (True, False):
        model = torch.nn.Sequential(torch.nn.Linear(30, 20, bias=False))
        wrapped = FullyShardedDataParallel(
            model, use_orig_params=originals, device_id=torch.device("cpu")
        )
        found.append(said(lambda own=wrapped: GaLoreAdamW(own.parameters(), rank=3)))
    return found


def differing(what):
    """As odd_step, of one that clips and refreshes; one rank's gradient or gap is another."""

    @contextlib.contextmanager
    def oddity(optimizer):
        group = optimizer.param_groups[0]
        if dist.get_rank() == 1 and what == "gradient":
            group["params"][0].grad = torch.ones(24, 10)
        if dist.get_rank() == 1 and what == "error":
            group["update_proj_gap"] = 0
        yield
        group["update_proj_gap"] = GAP

    return odd_step(*build({"stagger": False}), GAP, oddity, clip_norm=1.0)


def of_another_rank():
    """The first step of an optimizer whose matrices one rank would project to other dimensions."""
    _, optimizer = build({"rank": 2 + dist.get_rank()})
    params = optimizer.param_groups[0]["params"]
    give(params, gradients(0, SHAPES))
    return said(lambda: optimizer.step(clip_norm=1.0))


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
    for own, plain in on_ranks(3, beside_fused_adam, MASTER, 3):
        assert_same(own, plain)


def test_refreshes_between_steps_are_those_of_steps(on_ranks):
    """capturable=True."""
    found = on_ranks(3, galore_ranks.refreshed_by_hand, {}, 5)
    assert_same(found, on_ranks(3, trained, {}, 5))


def test_gradients_may_be_released(on_ranks):
    own = (fsdp2_ranks.released, galore_ranks.ranked({}))
    assert_same(*(on_ranks(2, *own, releases, steps=2 * GAP) for releases in (True, False)))


# --- what ranks tell each other


@all_layouts
@pytest.mark.sample(2)
def test_bytes_are_those_of_refreshes_alone(on_ranks, world, replicas):
    for stagger in (True, False):
        own = {"stagger": stagger}
        found = on_ranks(world, bytes_of_steps, own, 7, replicas)
        layout = world, replicas
        assert found == [bytes_by_turns(7, stagger, rank, *layout) for rank in range(world)]
        assert stagger or found[0][1:3] == [0, 0]


def test_a_norm_adds_its_own_bytes(on_ranks):
    """No more than FusedAdam's: 4 KB of whole numbers."""
    counts = on_ranks(2, bytes_of_steps, {"stagger": False}, 3, 1, 1.0)
    for rank, own in enumerate(counts):
        plain = bytes_by_turns(3, False, rank, world=2)
        beside = [each - refresh for each, refresh in zip(own, plain, strict=True)]
        assert len(set(beside)) == 1
        assert 4000 < beside[0] < 4300


# --- gradients that say nothing


SAYING = {  # what a gradient becomes, and whether it says enough to move the projection
    "zeros": (zeros, False),
    "NaN on the last rank": (nan_in_the_last_row, False),
    "infinity on the first rank": (infinite_in_the_first_row, False),
    "one dimension": (of_one_dimension, True),
    "zeros on the first rank": (zeros_in_the_first_rows, True),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("before", [0, GAP], ids=["first", "later"])
@pytest.mark.parametrize(("change", "moves"), SAYING.values(), ids=SAYING)
def test_all_ranks_decide_alike_what_a_gradient_says(on_ranks, change, moves, before):
    """As one process decides; the projection of all of them is one."""
    given = ({}, change, (24, 10), before)
    for world in (2, 3):
        ranks = on_ranks(world, after_a_gradient, *given)
        for projections in ranks:
            assert_same(projections, ranks[0])
        *known, then, after = ranks[0]
        assert torch.isfinite(then).all()
        assert not torch.equal(after, then)
        if known:
            assert torch.equal(then, known[0]) is not moves
        elif not moves:  # the sketch, which is the same everywhere
            assert_same_bits(then, after_a_gradient(*given)[0])


@pytest.mark.parametrize(
    "sent", [[1.0, -0.0, 3.0], [5.0, torch.nan, torch.inf], [0.0, torch.inf, 2.0]]
)
def test_the_largest_magnitude_of_all_ranks(on_ranks, sent):
    """Collectives are free to lose a NaN among numbers."""
    expected = torch.tensor(sent).amax()
    assert_same_on_all(on_ranks(3, largest_of, sent), expected)


def test_clip_norm_is_of_the_whole_gradients(on_ranks):
    """Of the matrices themselves: FusedAdam's norm."""
    expected = norm_of(2, "FusedAdam")
    for world in (2, 3):
        assert_same_on_all(on_ranks(world, norm_of, 2, "GaLoreAdamW"), expected)


def test_an_infinity_on_one_rank_skips_the_step_on_all(on_ranks):
    for before, after in on_ranks(3, one_infinity, {"nonfinite": "skip"}):
        assert_same(after, before)


@pytest.mark.parametrize("what", ["gradient", "error"])
def test_a_rank_that_raises_before_a_refresh_keeps_none_waiting(on_ranks, what):
    """Where ranks meet for a norm, all raise, and the step can be taken again."""
    expected = on_ranks(3, trained, {"stagger": False}, GAP + 1, clip_norm=1.0)[0]
    for message, before, changed, after in on_ranks(3, differing, what):
        assert message.startswith("ValueError")
        assert_same(changed, before)
        assert_same(after, expected)


@pytest.mark.parametrize("groups", [1, 2], ids=["one batch", "two"])
@pytest.mark.parametrize("before", [0, GAP], ids=["first", "later"])
def test_a_refresh_that_fails_on_a_rank_keeps_none_waiting(on_ranks, before, groups):
    """It raises; the others have the projections that they made, and the old ones of its own."""
    given = (before, groups)
    whole = on_ranks(3, failing_at_a_refresh, None, *given)[0][1]
    for failing in range(3):
        found = on_ranks(3, failing_at_a_refresh, failing, *given)
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
        found = on_ranks(3, failing_at_a_refresh, failing, *given, clip_norm=1.0)
        for rank, (message, projections) in enumerate(found):
            wanted = "no memory" if rank == failing else "another rank .* failed in this step"
            assert re.search(wanted, message)
            assert_same(projections, found[failing][1])


def test_ranks_of_another_gap_raise(on_ranks):
    for message in on_ranks(2, of_another_gap):
        assert "update_proj_gap" in message


@pytest.mark.parametrize("mesh", [[1, 0], [2, 0, 1], [[3, 1], [2, 0]], [[0, 2], [1, 3]]], ids=str)
def test_ranks_may_lie_anywhere_in_a_mesh(on_ranks, mesh):
    """Also in another order than their numbers."""
    expected = at_places(None, GAP + 1)
    world = torch.tensor(mesh).numel()
    assert_same_on_all(on_ranks(world, at_places, mesh, GAP + 1), expected)


def test_ranks_that_project_differently_refuse_to_step(on_ranks):
    for message in on_ranks(2, of_another_rank):
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
    for kinds in on_ranks(world, kinds_of_state, options, replicas):
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
    saved = on_ranks(worlds[0], save, options, steps, folder, flat)
    given = (options, 4, steps, folder, flat)
    found = on_ranks(worlds[1], load_and_train, *given)
    straight = on_ranks(worlds[1], trained, options, steps + 4)
    for (loaded, after), expected in zip(found, straight, strict=True):
        assert_same(loaded, saved[0])
        if worlds[0] == worlds[1] or "precision" in options:
            assert_same(after, expected)


def test_values_read_and_set(on_ranks):
    """Also out of blocks, which are counted in the rows of moments, not of weights."""
    given = ({**BLOCKS, "rank": 128}, [(290, 290)])
    expected, _ = values_read_and_set(*given)
    for read, found in on_ranks(3, values_read_and_set, *given):
        assert [each.shape for each in read] == [each.shape for each in expected]
        assert_same(found, read)


# --- what is refused


def test_flat_parameters_are_refused(on_ranks):
    """FSDP1's by what it says of them; others' as they take the place of matrices."""
    pattern = r"None beside its parameter 0, a flat part .* FSDP2 \(fully_shard\) .* got 3"
    for found in on_ranks(2, under_fsdp1):
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
