"""FusedMuon's replicas: ranks with copies divide the work, and have the bits of one process."""

import copy
import io
import pickle
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp2_ranks import (
    Bare,
    assert_same_on_all,
    build,
    give,
    gradients,
    left_out,
    odd_last_rank,
    odd_step,
    raised_by,
    snapshot,
    train,
)
from interpreted import interpreted
from late_exchange import late
from muon_ranks import CHANGED, by_small_tiles, divided, in_small_buckets, matrices_made
from runs import BF16, FP16, FP32, MASTER, REMAINDERS, assert_same
from slow_cases import slow_but
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import megaopt
from megaopt import FusedMuon
from megaopt.kernels.matrix import bucket
from megaopt.kernels.muon import newton_schulz

# --- what ranks do


SHAPES = [(24, 10), (7, 33), (9,), (1, 40), (33, 20), (20, 33), (5, 6, 7), (4, 3, 2, 2)]
"""Tall, wide, a vector, one of one row, two of the same products, experts, a convolution."""
trained = partial(divided, shapes=SHAPES)


def made(options, shapes=SHAPES, kind="group", alone=False):
    """A model and its optimizer, of which all ranks have all; alone: they divide no work."""
    own = {"optimizer": FusedMuon, **options}
    return build(own, shapes=shapes, place=None if alone else kind)


def said_of(what, options):
    """As odd_step, of one whose last rank is odd: it has a group CHANGED, or fails in a place."""
    places = {"exchange": (bucket, "unpacked"), "product": (newton_schulz.launch, "products")}
    oddity = partial(odd_last_rank, kind=what, places=places, options=CHANGED)
    return odd_step(*made(options), 2, oddity)


def said_of_left_out(options, reason):
    """As odd_step, of one that is left out; a "nan" is in all ranks' gradients, or in "one"."""
    here = reason == "nan" or dist.get_rank() == 1
    return odd_step(*made(options), 2, partial(left_out, reason=reason, here=here))


def bytes_sent(options, shapes):
    """What this rank sends in a step after the first: bytes of each gather to every other rank."""
    model, optimizer = made(options, shapes)
    train(model, optimizer, 1)
    sent, gather = [], dist.all_gather_into_tensor

    def counting(into, out, **named):
        sent.append(out.numel() * out.element_size())
        return gather(into, out, **named)

    nothing = mock.Mock(side_effect=AssertionError("directions are sent"))
    with (
        mock.patch.object(dist, "all_gather_into_tensor", counting),
        mock.patch.object(dist, "all_to_all_single", nothing),
    ):
        train(model, optimizer, 1, first=1)
    return sent


def groups_apart(steps, alone=False):
    """What there is of a group that says other ranks, one that says None, and what is divided."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = Bare([(12, 8)] * 4)
    params = list(model.parameters())
    own = {} if alone else {"replicas": pairs[dist.get_rank() // 2]}
    none = {} if alone else {"replicas": None}
    groups = [{"params": params[:2], **own}, {"params": params[2:3], **none}]
    optimizer = FusedMuon(groups, replicas=None if alone else dist.group.WORLD)
    optimizer.add_param_group({"params": params[3:]})
    train(model, optimizer, steps)
    lines = [(each.ranks, str(each)) for each in optimizer.describe()]
    keys = [sorted(group) for group in optimizer.param_groups]
    return snapshot(optimizer), lines, keys


def resumed(options, steps, first, saved=None, **named):
    """What an optimizer goes on to from what was saved, and what it saves."""
    model, optimizer = made(options, **named)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, steps, first)
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return snapshot(optimizer), copy.deepcopy(kept)


def asked_by_one(options, steps):
    """What steps make after torch.distributed.checkpoint has asked one rank for its states."""
    model, optimizer = made(options)
    if dist.get_rank() == 0:
        get_optimizer_state_dict(model, optimizer)
    train(model, optimizer, steps)
    return snapshot(optimizer)


def copies_of(options, steps):
    """What a deepcopy and a pickle of an optimizer go on to, and among how many ranks."""
    model, optimizer = made(options)
    train(model, optimizer, 1)
    file = io.BytesIO()
    pickle.dump(optimizer, file)
    file.seek(0)
    found = []
    for other in (copy.deepcopy(optimizer), pickle.load(file)):
        params = [param for group in other.param_groups for param in group["params"]]
        for step in range(1, steps):
            give(params, gradients(step, SHAPES, params[0].dtype))
            other.step()
        found.append((snapshot(other), max(each.ranks for each in other.describe())))
    return found


def released(options, steps):
    """What steps within the backward pass make: of a loss whose gradients are those of `train`.

    No rank sends an update.
    """
    model, optimizer = made(options)
    megaopt.release_gradients(model, optimizer)
    with mock.patch.object(dist, "all_to_all_single", side_effect=AssertionError("a message")):
        for step in range(steps):
            grads = gradients(step, SHAPES, next(model.parameters()).dtype)
            pairs = zip(model.parameters(), grads, strict=True)
            sum((param * grad).sum() for param, grad in pairs).backward()
            optimizer.step()
    return snapshot(optimizer)


def said_of_ranks():
    """What is said of what is no group of ranks with copies, and of formats and contracts."""
    model = Bare([(8, 256)])
    experts = [torch.nn.Parameter(torch.zeros(8, 16, 600))]
    other = dist.new_group([0])
    mesh = dist.DeviceMesh("cpu", [0])
    world = {"replicas": dist.group.WORLD}
    params = list(model.parameters())

    def error(given=None, **options):
        return raised_by(lambda: FusedMuon(params if given is None else given, **options)) or ""

    is_out = dist.get_rank() > 0
    return {
        "number": error(replicas=2),
        "group": error([{"params": params, "replicas": "dp"}]),
        "out": error(replicas=other) if is_out else "",
        "out of the mesh": error(replicas=mesh) if is_out else "",
        "torch": error(contract="torch", **world),
        "scale": error(momentum_buffer_dtype=torch.float16, **world),
        "blocks": error(
            [{"params": experts, "split_sizes": [4, 12]}],
            momentum_buffer_dtype="block_int8",
            **world,
        ),
        "another optimizer": raised_by(lambda: megaopt.FusedAdam(params, **world)),
    }


NORMUON = {"second_moment": "normuon"}
KINDS = {
    "bf16": {"weights": BF16, **MASTER},
    "fp16, normuon": {"weights": BF16, **MASTER, "precision": "fp16", **NORMUON},
    "fp16 weights": {"weights": FP16, **MASTER, "precision": "fp16", "method": "gram"},
    "fp32, normuon": {"weights": FP32, **NORMUON},
    "remainders": {"weights": BF16, **REMAINDERS, "momentum_buffer_dtype": BF16},
    "drawn": {
        "weights": BF16, "weight_rounding": "stochastic", "seed": 7,
        "momentum_buffer_dtype": "bfloat16_stochastic", **NORMUON,
    },
    "eo": {"weights": BF16, **MASTER, "contract": "eo"},
    "capturable": {"weights": BF16, **MASTER, "capturable": True},
    "host memory": {"weights": BF16, **MASTER, "state_device": "cpu"},
}  # fmt: skip
STEPS = 7
TWO_DIMENSIONS = [(24, 10), (9,), (7, 33), (33, 20), (20, 33)]


CASES = {f"{world}-{kind}": (world, kind) for world in (2, 3) for kind in KINDS}
QUICK = ["2-bf16", "3-fp16, normuon", "2-drawn", "3-eo"]


@pytest.mark.parametrize(("world", "kind"), slow_but(CASES, QUICK))
def test_ranks_have_the_bits_of_one_process(on_ranks, world, kind):
    """Weights, masters, momenta, second moments; gradients are clipped on the way."""
    shapes = TWO_DIMENSIONS if kind == "eo" else SHAPES
    own = {"clip_norm": 1.0, "shapes": shapes}
    expected = trained(KINDS[kind], STEPS, **own)
    assert_same_on_all(on_ranks(world, trained, KINDS[kind], STEPS, **own), expected)


@pytest.mark.parametrize("kind", ["mesh", "mesh of two dimensions"])
def test_a_mesh_says_the_same(on_ranks, kind):
    options = KINDS["fp16, normuon"]
    found = on_ranks(4, trained, options, 2, kind=kind, split=True)
    assert_same_on_all(found, trained(options, 2, split=True))


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("room", [1, 700, 2**26])
def test_buckets_of_any_size_have_the_same_bits(on_ranks, room, in_order):
    """Messages move when they are waited for; a poison stands where they come until then."""
    options = KINDS["drawn"]
    called = (late, in_small_buckets, room, options, 3)
    found = on_ranks(2, *called, made=trained, in_order=in_order)
    assert_same_on_all(found, trained(options, 3))


def test_momenta_in_blocks_have_the_bits_of_one_process(on_ranks):
    options = {**KINDS["bf16"], "momentum_buffer_dtype": "block_int8", "seed": 5}
    shapes = [(33, 256), (64, 128), (16, 256)]
    found = on_ranks(2, trained, options, 3, shapes=shapes)
    assert_same_on_all(found, trained(options, 3, shapes=shapes))


@interpreted
@pytest.mark.parametrize("kind", ["fp16, normuon", "drawn"])
def test_launches_have_the_same_bits(on_ranks, kind):
    shapes = SHAPES[:5]
    expected = trained(KINDS[kind], 2, shapes=shapes, clip_norm=1.0)
    options = {**KINDS[kind], "backend": "triton"}
    found = on_ranks(2, trained, options, 2, shapes=shapes, clip_norm=1.0)
    assert_same_on_all(found, expected)


# --- the work


@pytest.mark.parametrize("kind", ["bf16", "fp16, normuon"])
def test_each_matrix_is_made_by_one_rank(on_ranks, kind):
    """Six of one cost go to three ranks, two each; alone every rank makes all."""
    shapes = [(20, 30)] * 6 + [(7,)]
    made = on_ranks(3, matrices_made, trained, KINDS[kind], 2, shapes=shapes)
    assert made == [[(20, 30)] * 4] * 3
    called = (matrices_made, trained, KINDS[kind], 1)
    alone = on_ranks(3, *called, shapes=shapes, alone=True)
    assert [len(own) for own in alone] == [6] * 3


def test_the_work_is_divided_by_its_cost(on_ranks):
    """The most expensive matrix goes first: all ranks have it, and nobody has another before."""
    shapes = [(16, 16)] * 6 + [(32, 24)]  # of which the last is some 40% of the work
    made = on_ranks(3, matrices_made, trained, {}, 1, shapes=shapes)
    assert sorted(made, key=len) == [[(32, 24)], [(16, 16)] * 3, [(16, 16)] * 3]


def test_updates_alone_are_sent(on_ranks):
    """Each once to each other rank, in 2 bytes a number."""
    shapes = [(20, 30)] * 4 + [(7,)]
    sent = on_ranks(2, bytes_sent, KINDS["bf16"], shapes)
    # two matrices of 1,200 bytes, up to where the next rank's begin at a multiple of 256
    assert sent == [[2560]] * 2


def test_a_bucket_has_room_for_the_updates_of_all_ranks(on_ranks):
    """Each rank has memory for all of them: of 1,200 bytes each two go together here, not four."""
    shapes = [(20, 30)] * 4
    own = (KINDS["bf16"], shapes)
    sent = on_ranks(2, in_small_buckets, 2400, *own, made=bytes_sent)
    assert sent == [[1280, 1280]] * 2


@pytest.mark.parametrize("form", ["standard", "gram"])
def test_a_matrix_that_is_most_of_the_work_is_made_by_all(on_ranks, form):
    options, shapes = {**KINDS["fp16, normuon"], "method": form}, [(40, 90), (10, 12), (7,)]
    expected = trained(options, 3, shapes=shapes)
    called = (by_small_tiles, trained, options, 3)
    found = on_ranks(2, *called, shapes=shapes)
    assert_same_on_all([run for run, _ in found], expected)
    alone = by_small_tiles(trained, options, 3, shapes=shapes)[1]
    assert max(work for _, work in found) < 0.75 * alone


# --- groups


def test_a_group_may_say_other_ranks_or_none(on_ranks):
    found = on_ranks(4, groups_apart, 3)
    expected = on_ranks(4, groups_apart, 3, alone=True)
    for (own, lines, keys), (wanted, *_) in zip(found, expected, strict=True):
        assert_same(own, wanted)
        assert [count for count, _ in lines] == [2, 2, 1, 4]
        assert [line.partition("by its shape")[2] for _, line in lines] == [
            *[", divided among 2 ranks"] * 2, "", ", divided among 4 ranks",
        ]  # fmt: skip
        assert not any("replicas" in group for group in keys)


# --- steps that are left out, and errors

DIFFER = "ranks that hold parts of the same parameters must step the same"
FAILED = "another rank that steps the same parameters failed in this step"
WRONG = {
    "gradient": (DIFFER, DIFFER),
    "lr": (DIFFER, "lr must be a finite number"),
    "exchange": (FAILED, "RuntimeError: no memory"),
    "product": (FAILED, "RuntimeError: no memory"),
}


@pytest.mark.parametrize("what", WRONG)
def test_ranks_that_differ_or_fail_change_nothing_on_any(on_ranks, what):
    """And all go on with the next step as if there had been none."""
    options, (elsewhere, there) = KINDS["fp16, normuon"], WRONG[what]
    straight = trained(options, 3)
    found = on_ranks(3, said_of, what, options)
    for rank, (error, before, after, then) in enumerate(found):
        assert (there if rank == 2 else elsewhere) in error
        assert_same(after, before)
        assert_same(then, straight)


LEFT_OUT = [("found_inf", "skip"), ("nan", "error"), ("one", "skip"), ("one", "error")]


@pytest.mark.parametrize(("reason", "nonfinite"), LEFT_OUT)
def test_a_step_that_is_left_out_leaves_everything(on_ranks, reason, nonfinite):
    """Also where one rank alone has an infinity or NaN, which its copies should have too."""
    options = {**KINDS["fp16, normuon"], "nonfinite": nonfinite}
    raises = nonfinite == "error" and reason != "found_inf"
    for error, before, after, then in on_ranks(3, said_of_left_out, options, reason):
        assert (error or "").startswith("FloatingPointError") is raises
        assert_same(after, before)
        with pytest.raises(AssertionError):
            assert_same(then["states"], before["states"])


def test_numbers_on_the_device_leave_a_step_out(on_ranks):
    options = {**KINDS["capturable"], **NORMUON, "nonfinite": "skip"}
    for _, before, after, _ in on_ranks(2, said_of_left_out, options, "nan"):
        assert_same(after, before)


def test_what_is_refused(on_ranks):
    wanted = {
        "number": "replicas must be None, or a torch.distributed.ProcessGroup or DeviceMesh",
        "group": "group 0: replicas must be None, or a torch.distributed.ProcessGroup or",
        "out": "replicas must be None, or a",
        "out of the mesh": "that this rank is in",
        "torch": "parameter 0 of group 0: replicas must be None with contract='torch'",
        "scale": "momentum_buffer_dtype must be a format without a scale per tensor with replicas",
        "blocks": "must find whole blocks of 128 elements in each matrix that one of several",
        "another optimizer": "replicas",
    }
    for rank, found in enumerate(on_ranks(2, said_of_ranks)):
        for name, words in wanted.items():
            if rank > 0 or not name.startswith("out"):
                assert words in found[name], name


# --- states


@pytest.mark.parametrize("kind", ["fp16, normuon", "drawn"])
def test_it_resumes_with_replicas_and_without(on_ranks, kind):
    """States are whole on each rank."""
    options = KINDS[kind]
    straight = trained(options, 4)
    _, saved = on_ranks(2, resumed, options, 2, 0)[1]
    for world, named in ((3, {}), (2, {"alone": True})):
        found = on_ranks(world, resumed, options, 2, 2, saved, **named)
        assert_same_on_all([own for own, _ in found], straight)
    _, saved = resumed(options, 2, 0)
    found = on_ranks(2, resumed, options, 2, 2, saved)
    assert_same_on_all([own for own, _ in found], straight)


def test_one_rank_may_ask_for_states_before_the_first_step(on_ranks):
    """As those of DistributedDataParallel may: it waits for nobody."""
    options = KINDS["bf16"]
    found = on_ranks(2, asked_by_one, options, 2)
    assert_same_on_all(found, trained(options, 2))


def test_copies_divide_the_work_too_and_pickles_do_not(on_ranks):
    options = KINDS["bf16"]
    straight = trained(options, 3)
    for copied, pickled in on_ranks(2, copies_of, options, 3):
        assert [ranks for _, ranks in (copied, pickled)] == [2, 1]
        for own, _ in (copied, pickled):
            assert_same(own, straight)


def test_steps_within_the_backward_pass_are_made_by_every_rank(on_ranks):
    options = {**KINDS["bf16"], "weights": FP32}
    assert_same_on_all(on_ranks(2, released, options, 2), trained(options, 2))
