"""No memory in the middle of a step: everything is as before, and the step may be repeated."""

import functools
import sys
from collections import Counter

import float8_ranks
import fsdp2_ranks
import pytest
import torch
import torch.distributed as dist
from float8_ranks import WORLD, bytes_of, give, gradients, initial_weights, shards_of
from handling import both_backends
from kinds import KINDS, OF_MATRICES, params_for
from runs import BF16, FP32, assert_same, copied, everything, give_gradients, parameters, values
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaopt import FusedAdam, FusedMuon, GaLoreAdamW
from megaopt.float8 import RECIPES
from megaopt.params.dtensor import locals_of

LIFTED = torch.ops.aten.lift_fresh.default
"""What torch.tensor calls, whose memory is taken out of sight."""


DEPTH = 8
"""Callers that say where in the code a call is."""


class Planted(RuntimeError):
    """As a device that has no memory left."""


class FailsAt(TorchDispatchMode):
    """Raises at the torch call of this number among those that take memory; -1: counts them.

    failed: a set of calls, each a place in the code and how often it was there before: raises
    instead at the first that is not among them, and adds it.
    """

    def __init__(self, number=-1, failed=None):
        super().__init__()
        self.number, self.failed, self.count = number, failed, 0
        self.visits = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {memory_of(each) for each in tree_leaves((args, kwargs))}
        new = {memory_of(each) for each in tree_leaves(result)} - given - {None}
        if (new or func is LIFTED) and not is_interpreted():
            self.count += 1
            if self.count - 1 == self.number or (self.failed is not None and self.is_first()):
                raise Planted("planted")
        return result

    def is_first(self):
        """Whether this call has not failed before; it counts as failed then."""
        frame, place = sys._getframe(2), 0
        for _ in range(DEPTH):
            place = hash((place, id(frame.f_code), frame.f_lineno))
            frame = frame.f_back
        call = place, self.visits[place]
        self.visits[place] += 1
        is_new = call not in self.failed
        self.failed.add(call)
        return is_new


def memory_of(value):
    value = getattr(value, "_local_tensor", value)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def is_interpreted():
    """Whether a kernel runs: what Triton's interpreter takes there no card does."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("triton."):
            return True
        frame = frame.f_back
    return False


def fail_everywhere(optimizer, step, before=None):
    """Fails at each call of a step that takes memory; how many there were.

    Each time everything is as it was, or the part of it that `before` looks at, and the last step
    goes through. Calls are known by their places: what a failed step has made, and the next one
    does not make again, moves their numbers.
    """
    look, failed = before or everything, set()
    was = look(optimizer)
    while True:
        try:
            with FailsAt(failed=failed):
                step()
        except Planted:
            assert_same(look(optimizer), was, f"failure {len(failed)}")
        else:
            return len(failed)


# One rank of three whose torch calls fail, one after the other, where a step takes memory.

FSDP2 = {"lr": 0.01, "weights": BF16, "dtype": FP32}


class Shards:
    """FSDP2's parameters and their optimizer, on this rank."""

    def __init__(self, **arguments):
        self.model, self.optimizer = fsdp2_ranks.build(FSDP2)
        self.arguments = arguments

    def give(self, number):
        fsdp2_ranks.give(self.model.parameters(), fsdp2_ranks.gradients(number, dtype=BF16))

    def step(self):
        self.optimizer.step(**self.arguments)

    def look(self):
        params = list(self.model.parameters())
        states = [dict(locals_of(self.optimizer.state[param])) for param in params]
        count = self.optimizer.param_groups[0]["step"]
        return copied([[param.to_local() for param in params], states, count])


class Float8Shards:
    """Parts of fp8 weights and their optimizer, on this rank."""

    def __init__(self, recipe, options, **arguments):
        self.weights = initial_weights(RECIPES[recipe])
        self.shards = shards_of(self.weights, WORLD, dist.get_rank(), dist.group.WORLD)
        self.optimizer = FusedAdam(
            self.shards, backend="reference", **float8_ranks.HYPER, **options
        )
        self.arguments = arguments

    def give(self, number):
        give(self.shards, gradients(number))

    def step(self):
        self.optimizer.step(**self.arguments)

    def look(self):
        states = [dict(self.optimizer.state[shard]) for shard in self.shards]
        count = self.optimizer.param_groups[0]["step"]
        return copied([[bytes_of(weight) for weight in self.weights], states, count])


def planted_on_ranks(kind, who, own, arguments, start, every):
    """For calls of rank `who` that take memory, in a step each, what was raised here.

    start, every: the first of these calls, and the distance to the next.
    What a rank raised it has not done: it takes its step again.
    """
    run, found = kind(*own, **arguments), []
    run.give(0)
    run.step()
    while True:
        number = start + every * len(found)
        run.give(len(found) + 1)
        was, raised = run.look(), ""
        try:
            with FailsAt(number if dist.get_rank() == who else -1):
                run.step()
        except (Planted, ValueError) as error:
            raised = f"{type(error).__name__}: {error}"
            assert_same(run.look(), was, f"failure {number}")
            run.step()
        over = torch.tensor([int(not raised)])
        dist.broadcast(over, who)
        if over:
            break
        found.append(raised)
    after, run = run.look(), kind(*own, **arguments)
    for number in range(len(found) + 2):
        run.give(number)
        run.step()
    assert_same(run.look(), after)
    return found


HYPER = {"lr": 0.01, "weight_decay": 0.1}
REFERENCE, KERNELS = {"backend": "reference"}, {"backend": "triton"}
PAIRS = {"master_weights": True, "master_weight_dtype": "remainder8_stochastic"}


def of_two_kinds():
    """Which are stepped by two launches."""
    return [*parameters(), *parameters(dtype=FP32)]


def apart():
    """Of which one has no contiguous memory."""
    return [*parameters(), torch.nn.Parameter(values((6, 4), 9, BF16).t())]


def matrices():
    return [torch.nn.Parameter(values(shape, 5)) for shape in ((24, 10), (7, 6), (9,))]


def small():
    return [torch.nn.Parameter(values(shape, 5)) for shape in ((6, 4), (3, 5), (9,))]


GALORE = functools.partial(GaLoreAdamW, rank=3, update_proj_gap=2)
CASES = {
    **{
        name: (kind, functools.partial(params_for, name), options)
        for name, (kind, options) in KINDS.items()
    },
    "two kinds": (FusedAdam, of_two_kinds, {"dtype": FP32}),
    "two kinds, capturable": (FusedAdam, of_two_kinds, {"dtype": FP32, "capturable": True}),
    "apart": (FusedAdam, apart, {"dtype": FP32}),
    "capturable": (FusedAdam, parameters, {"dtype": FP32, "capturable": True}),
    "galore": (GALORE, matrices, {}),
    "muons": (FusedMuon, small, {"second_moment": "normuon", "ns_steps": 1}),
    "galore svd": (GALORE, matrices, {"refresh": "svd", "stagger": False}),
}
SLOW = [
    pytest.param(name, marks=[pytest.mark.exhaustive] * (place % 8 != 0))
    for place, name in enumerate(CASES)
]
"""One kind in eight."""
OF_WORKSPACES = ("galore", "galore svd", "muons", *OF_MATRICES)
QUICK = ("fp32_masters", "apart", "capturable", "galore", "muons", "fp8 mxfp8, masters")


def made(name, backend=REFERENCE):
    kind, make, options = CASES[name]
    params = make()
    return params, kind(params, **HYPER, **backend, **options)


def failed(name, first, backend=REFERENCE, scaled=False, missing=False, **arguments):
    """How often a step failed that comes after so many; at last its bits are another's.

    missing: steps before it step one parameter less.
    """
    found = []
    for fails in (True, False):
        params, optimizer = made(name, backend)
        step = functools.partial(optimizer.step, **arguments)
        for number in range(first + 2):
            give_gradients(params, number)
            if missing and number < first:
                params[0].grad = None
            if scaled:
                optimizer.grad_scale = torch.tensor(8.0)
                optimizer.found_inf = torch.tensor(0.0)
            if fails and number == first:
                before = weights_of if missing or not first else None
                count = fail_everywhere(optimizer, step, before)
            else:
                step()
        found.append(everything(optimizer))
    assert_same(*found)
    return count


def weights_of(optimizer):
    """What a first step leaves alone when it fails: states may be there, and say nothing yet."""
    weights, _, counts, grads = everything(optimizer)
    return [weights, counts, grads]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        *((name, 1) for name in QUICK if name != "muons"),
        *(pytest.param(*own, marks=pytest.mark.slow) for own in (("muons", 1), ("galore", 0))),
    ],
)
def test_a_step_that_fails_anywhere_changes_nothing(name, first):
    assert failed(name, first) > 5


@pytest.mark.parametrize("name", ["two kinds", "two kinds, capturable", "fp8 delayed, remainder8"])
def test_a_step_of_kernels_has_all_its_memory_before_the_first_writes(name):
    assert failed(name, 0, KERNELS) > 5


@pytest.mark.slow
def test_projections_that_were_lost_are_not_there_after_a_failure():
    """A step makes them anew; one that fails leaves the states without them, as they were."""
    params, optimizer = made("galore")
    for number in range(2):
        give_gradients(params, number)
        optimizer.step()
    for name in ("projection", "captured_energy"):
        del optimizer.state[params[0]][name]
    give_gradients(params, 2)
    assert fail_everywhere(optimizer, optimizer.step) > 5
    assert bool(optimizer.state[params[0]]["projection"].any())


@both_backends
def test_galores_gradients_that_cannot_be_measured_raise_what_happened(backend, monkeypatch):
    """Where kernels step it, taking back raised an error of its own."""
    params, optimizer = made("galore", {"backend": backend})
    give_gradients(params, 0)
    optimizer.step(clip_norm=0.5)
    give_gradients(params, 1)
    before = everything(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "zero_", planted)
        with pytest.raises(MemoryError, match="planted"):
            optimizer.step(clip_norm=0.5)
    assert_same(everything(optimizer), before)
    optimizer.step(clip_norm=0.5)


def planted(*_):
    raise MemoryError("planted")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_step_that_fails_anywhere_changes_nothing(name):
    """The first step and a later one; with clipping and under a loss scale."""
    count = failed(name, 0) + failed(name, 1) + failed(name, 1, clip_norm=0.5)
    if not CASES[name][2].get("capturable") and "fp8" not in name:
        count += failed(name, 1, scaled=True)
    print(f"{name}: {count} planted failures")
    assert count > 100


RANKS = {
    "fsdp2": (Shards, (), {}),
    "fsdp2, clipped": (Shards, (), {"clip_norm": 0.5}),
    "fp8 delayed": (Float8Shards, ("delayed", {"dtype": FP32}), {}),
    "fp8 blocks, stochastic": (
        Float8Shards,
        ("block_128x128", {"weight_rounding": "stochastic"}),
        {},
    ),
    "fp8 current, remainder8": (Float8Shards, ("current", PAIRS), {}),
    "fp8 mxfp8, skips": (
        Float8Shards,
        ("mxfp8", {"dtype": FP32, "nonfinite": "skip"}),
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in SLOW if each.values[0] not in OF_WORKSPACES])
def test_every_step_of_kernels_has_all_its_memory_before_the_first_writes(name):
    """First steps, and later ones for which a gradient of the first was missing.

    But for GaLore and Muon, which take workspaces between their launches.
    """
    count = failed(name, 0, KERNELS) + failed(name, 0, KERNELS, clip_norm=0.5)
    count += failed(name, 1, KERNELS, missing=True)
    print(f"{name}: {count} planted failures")
    assert count > 20


EVERY = 8
STARTS = [0, *(pytest.param(start, marks=pytest.mark.exhaustive) for start in range(1, EVERY))]


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("name", RANKS)
def test_where_one_rank_fails_all_raise_that_have_met(on_ranks, name, who, start):
    """Ranks that meet in no collective go on alone; at last all have the bits of other runs."""
    kind, own, arguments = RANKS[name]
    found = on_ranks(3, planted_on_ranks, kind, who, own, arguments, start, EVERY)
    count = len(found[who])
    print(f"{name}: {count} planted failures")
    assert count > 5
    for rank, raised in enumerate(found):
        start = "Planted" if rank == who else "ValueError" if name != "fsdp2" else ""
        assert all(each.startswith(start) for each in raised)
        assert name != "fsdp2" or rank == who or not any(raised)
