"""Ranks that hold parts of the same parameters all step, or all raise: none waits for ever."""

import contextlib
import logging
import re
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import float8_ranks
import pytest
import torch
import torch.distributed as dist
from float8_ranks import initial_weights, shards_of
from fsdp2_ranks import Bare, give, gradients, mesh_of, raised_by, sharded, snapshot, values
from runs import BF16, FP32, REMAINDERS, assert_same, copied, params_of
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megaopt import FusedAdam
from megaopt.float8 import RECIPES, Float8Weight
from megaopt.float8.shard import Float8Shard
from megaopt.kernels.step.reference import ReferencePlan
from megaopt.step.ranks import answers
from megaopt.step.ranks.peers import Peers

# One rank does something else than the others: what each of them says, and what it has then.

HYPER = {"lr": 0.01, "weight_decay": 0.1}
MASTERS = {**HYPER, "dtype": FP32}


def is_odd_one():
    """Whether this rank is the one that does something else: the last."""
    return dist.get_rank() == dist.get_world_size() - 1


class Kind(NamedTuple):
    """Parameters of which ranks hold parts: what is done to them."""

    made: Callable
    give: Callable
    """Gradients of a step's number."""
    built: dict[str, Callable]
    """Parameters that one rank makes in their place, and the options of its optimizer, by name."""
    between: dict[str, Callable]
    """Changes that one rank makes to its optimizer before a later step, by name."""


def local(value):
    if isinstance(value, Float8Shard):
        return value.weight.tensors()
    return value.to_local() if hasattr(value, "to_local") else value


def own(optimizer):
    """Weights, states and step counts of this rank alone: no rank has to answer another."""
    weights = [local(param) for param in params_of(optimizer)]
    states = [{n: local(t) for n, t in state.items()} for state in optimizer.state.values()]
    steps = [int(group["step"]) for group in optimizer.param_groups]
    return copied([weights, states, steps])


def outcome(optimizer, action):
    """The error of an action, "" for none, and what was there before and after it."""
    before, message = own(optimizer), ""
    try:
        action()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    return message, before, own(optimizer)


def without_waiting():
    """Lets a rank that has not changed go on without seeing what others did, as on a GPU."""
    return mock.patch.object(Peers, "is_read_at_once", False)


def split(whole, *placements):
    made = distribute_tensor(whole, mesh_of(), placements or [Shard(0)], src_data_rank=None)
    return torch.nn.Parameter(made)


def give_all(params, step):
    shapes = [tuple(param.shape) for param in params]
    grads = gradients(step, shapes)
    give(params, [g.to(p.dtype) for g, p in zip(grads, params, strict=True)])


# --- an optimizer that is another from the beginning: its parameters, and its arguments


def parameters(dtype=BF16):
    return list(sharded(Bare(dtype=dtype)).parameters())


def changed(index, value, *placements):
    """The parameters with another one in a place."""
    params = parameters()
    params[index] = split(value, *placements)
    return params, MASTERS


def in_two_groups():
    params = parameters()
    return [{"params": params[:2]}, {"params": params[2:]}], MASTERS


BUILT = {
    "other_order": lambda: (parameters()[::-1], MASTERS),
    "one_more": lambda: ([*parameters(), split(values((4, 2), 9).to(BF16))], MASTERS),
    "one_more_plain": lambda: (
        [*parameters(), torch.nn.Parameter(values((4, 2), 9).to(BF16))],
        MASTERS,
    ),
    "one_less": lambda: (parameters()[:-1], MASTERS),
    "another_shape": lambda: changed(1, values((8,), 9).to(BF16)),
    "another_dtype": lambda: changed(1, values((7,), 9)),
    "replicated": lambda: changed(1, values((7,), 9).to(BF16), Replicate()),
    "another_dimension": lambda: changed(0, values((5, 3), 9).to(BF16), Shard(1)),
    "remainders": lambda: (parameters(), {**HYPER, **REMAINDERS}),
    "no_masters": lambda: (parameters(), HYPER),
    "bf16_moments": lambda: (parameters(), {**MASTERS, "exp_avg_dtype": BF16}),
    "two_groups": in_two_groups,
}


def each_another():
    """One parameter on the first rank, two on the second, three on the third."""
    optimizer = FusedAdam(parameters()[: dist.get_rank() + 1], **MASTERS)
    give_all(params_of(optimizer), 0)
    return outcome(optimizer, lambda: optimizer.step(clip_norm=1.0))


# --- something that changes between steps


def no_gradient(optimizer, index=1):
    params_of(optimizer)[index].grad = None


def no_gradients(optimizer):
    for param in params_of(optimizer):
        param.grad = None


def another_group(optimizer):
    param = split(values((4, 2), 9).to(BF16))
    optimizer.add_param_group({"params": [param]})
    give([param], [values((4, 2), 10).to(BF16)])


def gradient_of_float64(optimizer):
    optimizer.use_decoupled_grad = True
    for param in params_of(optimizer):
        param.decoupled_grad = param.grad
    params_of(optimizer)[1].decoupled_grad = params_of(optimizer)[1].grad.double()


def bad_lr(optimizer):
    optimizer.param_groups[0]["lr"] = -1.0


BETWEEN = (no_gradient, no_gradients, gradient_of_float64, bad_lr)
BETWEEN = {change.__name__: change for change in BETWEEN}
OF_DTENSORS = {**BETWEEN, "another_group": another_group}


# --- fp8 weights that ranks share


def give_shards(shards, step):
    """A gradient for every shard: the part of its weight's, by the weight's shape."""
    grads = {grad.shape: grad for grad in float8_ranks.gradients(step)}
    for shard in shards:
        whole = grads.get(shard.weight.shape, torch.ones(shard.weight.shape).bfloat16())
        shard.grad = whole.flatten()[shard.start : shard.start + shard.numel()]


def shards(recipe="current", group=None):
    weights = initial_weights(RECIPES[recipe])
    return shards_of(weights, dist.get_world_size(), dist.get_rank(), group)


def small_shard():
    weight = Float8Weight.from_values(torch.ones(4, 8).bfloat16(), RECIPES["current"])
    return Float8Shard(torch.nn.Parameter(weight), 0, 0)


SHARDS_BUILT = {
    "other_order": lambda: (shards()[::-1], MASTERS),
    "one_less": lambda: (shards()[:-1], MASTERS),
    "one_more": lambda: ([*shards(), small_shard()], MASTERS),
    "another_recipe": lambda: ([*shards()[:-1], shards("delayed")[-1]], MASTERS),
    "no_masters": lambda: (shards(), HYPER),
    "bf16_moments": lambda: (shards(), {**MASTERS, "exp_avg_dtype": BF16}),
}


def both():
    return [*parameters(), *shards()]


def give_both(params, step):
    count = len(parameters())
    give_all(params[:count], step)
    give_shards(params[count:], step)


OF_BOTH = {**OF_DTENSORS, "of_a_shard": partial(no_gradient, index=-1)}
KINDS = {
    "DTensors": Kind(parameters, give_all, BUILT, OF_DTENSORS),
    "fp8": Kind(shards, give_shards, SHARDS_BUILT, BETWEEN),
    "both": Kind(both, give_both, {}, OF_BOTH),
}


def built(kind, name, options, step):
    """The first step, of optimizers that were not built alike."""
    kind = KINDS[kind]
    params, own_options = kind.built[name]() if is_odd_one() else (kind.made(), MASTERS)
    optimizer = FusedAdam(params, **{**own_options, **options})
    kind.give(params_of(optimizer), 0)
    return outcome(optimizer, lambda: optimizer.step(**step))


def between(kind, name, options, step):
    """The second step, before which one rank changed something."""
    kind = KINDS[kind]
    optimizer = FusedAdam(kind.made(), **{**MASTERS, **options})
    kind.give(params_of(optimizer), 0)
    optimizer.step(**step)
    kind.give(params_of(optimizer), 1)
    if is_odd_one():
        kind.between[name](optimizer)
    return outcome(optimizer, lambda: optimizer.step(**step))


def heard_later(kind, name, options, step, by):
    """Does as `between` on a GPU: after the step comes another, or a look at the state."""
    kind = KINDS[kind]
    optimizer = FusedAdam(kind.made(), **{**MASTERS, **options})
    with without_waiting():
        for number in range(2):
            kind.give(params_of(optimizer), number)
            optimizer.step(**step)
        kind.give(params_of(optimizer), 2)
        if is_odd_one():
            kind.between[name](optimizer)
        found = outcome(optimizer, lambda: optimizer.step(**step))
        if is_odd_one():
            return found, ("", *[own(optimizer)] * 2)
        then = {"step": lambda: optimizer.step(**step), "state_dict": optimizer.state_dict}
        return found, outcome(optimizer, then[by])


def as_on_a_gpu(options, step):
    """Steps like others, of which nobody waits for the ranks' answer; and the norms."""
    optimizer, norms = FusedAdam(parameters(), **{**MASTERS, **options}), []
    with without_waiting():
        for number in range(3):
            give_all(params_of(optimizer), number)
            optimizer.step(**step)
            norms.append(optimizer.grad_norm.clone())
    return snapshot(optimizer), norms


def two_meshes(name):
    """Parameters split over 4 ranks, over rows and over columns: not all ranks meet in one sum."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    wholes = [values((4, 4), index) for index in range(2)]
    placements = [[Shard(0), Replicate()], [Replicate(), Shard(0)]]
    if name == "all_first":
        placements[0] = [Shard(0), Shard(1)]
    params = [
        torch.nn.Parameter(distribute_tensor(whole, mesh, own, src_data_rank=None))
        for whole, own in zip(wholes, placements, strict=True)
    ]
    optimizer = FusedAdam(params, **HYPER)
    give(params, wholes)
    if is_odd_one():
        params[0].grad = None
    return outcome(optimizer, lambda: optimizer.step(clip_norm=1.0))


NAMES = ["embedding", "bias", "norm", "head", "tail"]


def named():
    """An optimizer whose parameters have names, after a step."""
    params = parameters()
    optimizer = FusedAdam([{"params": params, "param_names": NAMES}], **MASTERS)
    give_all(params, 0)
    optimizer.step(clip_norm=1.0)
    give_all(params, 1)
    return optimizer


def edited(group, values):
    group.update(values)


def turned(group, _):
    group["params"].reverse()
    group["param_names"] = group["param_names"][::-1]


def without_gradient(group, index):
    group["params"][index].grad = None


def said_of(edit, value, clip_norm=1.0, odd=(2,), waits=True):
    """What a step says if some ranks have edited their group, and then one in which none has."""
    optimizer = named()
    (group,) = optimizer.param_groups
    kept = {**group, "params": list(group["params"])}
    is_odd = dist.get_rank() in odd
    if is_odd and edit is not None:
        edit(group, value)
    step = lambda: optimizer.step(clip_norm=clip_norm if is_odd else 1.0)  # noqa: E731
    with contextlib.nullcontext() if waits else without_waiting():
        error, before, after = outcome(optimizer, step)
        if not waits:
            later, _, after = outcome(optimizer, step)
            error = error or later
    group.update(kept)
    give_all(kept["params"], 1)
    then, *_ = outcome(optimizer, lambda: optimizer.step(clip_norm=1.0))
    assert (then, before) == ("", before)
    return error, after[0], before[0]


def waits_told(late, seconds, raises=False):
    """What is logged where one rank comes late to its step; half a second is long then.

    raises: that rank has failed in the middle of the step before.
    """
    told, logger = [], logging.getLogger("megaopt")
    handler = logging.Handler()
    handler.emit = lambda record: told.append((record.levelname, record.getMessage()))
    optimizer = named()
    if raises:
        fails = mock.Mock(side_effect=RuntimeError("no memory"))
        is_late, ended = dist.get_rank() == late, contextlib.nullcontext()
        with mock.patch.object(ReferencePlan, "step", fails) if is_late else ended:
            assert raised_by(lambda: optimizer.step(clip_norm=1.0))
    dist.barrier()
    logger.addHandler(handler)
    try:
        # another thread, as one that runs already sleeps for as long as it was
        others = mock.patch.object(answers._Watch, "thread", None)
        with mock.patch.object(answers, "LONG", 0.5), others:
            if dist.get_rank() == late:
                time.sleep(seconds)
            optimizer.step(clip_norm=1.0)
            dist.barrier()
    finally:
        logger.removeHandler(handler)
    return told


def another_clip_norm():
    optimizer = FusedAdam(parameters(), **MASTERS)
    give_all(params_of(optimizer), 0)
    return outcome(optimizer, lambda: optimizer.step(clip_norm=2.0 if is_odd_one() else 1.0))


def overflow_on_one(options, step):
    """found_inf that one rank alone has set, as no GradScaler would."""
    optimizer = FusedAdam(parameters(), **{**MASTERS, **options})
    give_all(params_of(optimizer), 0)
    optimizer.step(**step)
    give_all(params_of(optimizer), 1)
    optimizer.grad_scale = torch.ones(())
    optimizer.found_inf = torch.tensor(float(is_odd_one()))
    return outcome(optimizer, lambda: optimizer.step(**step))


# --- a first step with lr=0


def looked_at(optimizer):
    assert optimizer.state[params_of(optimizer)[0]] == {}


def initialized(optimizer):
    optimizer.initialize_state(params_of(optimizer)[0])


WARM = {"looked_at": looked_at, "initialized": initialized, "no_gradient": no_gradient}


def warm_up(name, zeros):
    """A first step with lr=0, with gradients or with zeros; then one with lr=0.5."""
    optimizer = FusedAdam(parameters(FP32), **HYPER)
    found = []
    for step, lr in enumerate((0.0, 0.5)):
        give_all(params_of(optimizer), step)
        for param in params_of(optimizer):
            if zeros and lr == 0.0:
                param.grad.to_local().zero_()
        if is_odd_one() and lr == 0.0:
            WARM[name](optimizer)
        optimizer.param_groups[0]["lr"] = lr
        found.append(outcome(optimizer, optimizer.step))
    return found


def checkpointed():
    """torch.distributed.checkpoint asks for the state, at which one rank has looked."""
    model = sharded(Bare())
    optimizer = FusedAdam(model.parameters(), **HYPER)
    if is_odd_one():
        looked_at(optimizer)
    saved = []
    found = outcome(optimizer, lambda: saved.append(get_optimizer_state_dict(model, optimizer)))
    names = [sorted(own) for own in saved[0]["state"].values()] if saved else None
    return *found, names


def warm_up_fp8(look):
    """A first step with lr=0, before which one rank may have looked at a state."""
    optimizer = FusedAdam(shards(), **{**MASTERS, "lr": 0.0})
    if look and is_odd_one():
        looked_at(optimizer)
    give_shards(params_of(optimizer), 0)
    return outcome(optimizer, optimizer.step)


def inner_group(innermost_first):
    """All ranks share one weight, the last two another, of which one of them has no gradient."""
    world, rank = dist.get_world_size(), dist.get_rank()
    inner = dist.new_group([world - 2, world - 1])
    weights = initial_weights(RECIPES["current"])
    own = [shards_of(weights, 3, rank, None)[1]]
    if rank >= world - 2:
        place = rank - (world - 2)
        bounds = [(0, 4097), (4097, 26000)][place]
        own.insert(0 if innermost_first else 1, Float8Shard(weights[0], *bounds, inner))
    optimizer = FusedAdam(own, **MASTERS)
    give_shards(params_of(optimizer), 0)
    if is_odd_one():
        for shard in own:
            shard.grad = None if shard.weight is weights[0] else shard.grad
    return outcome(optimizer, optimizer.step)


# --- models


def modules(name, step):
    """fully_shard's own gradients; before the second step one rank changes something."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3)]
    model = torch.nn.Sequential(*layers)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh_of())
    params = list(model.parameters())
    odd = is_odd_one()
    if name == "other_order" and odd:
        params.reverse()
    options = MASTERS if name != "remainders" or not odd else {**HYPER, **REMAINDERS}
    model.bfloat16()
    optimizer = FusedAdam(params, **options)
    model(values((4, 6), 0, BF16)).float().square().mean().backward()
    if name == "no_gradient" and odd:
        params[1].grad = None
    return outcome(optimizer, lambda: optimizer.step(**step))


CLIP = {"clip_norm": 1.0}
MODES = {
    "clip_norm": ({}, CLIP),
    "skip": ({"nonfinite": "skip"}, {}),
    "error": ({"nonfinite": "error"}, {}),
    "capturable": ({"capturable": True}, CLIP),
}
SKIP = {"nonfinite": "skip"}
OTHERS = (
    r"ValueError: ranks that hold parts of the same parameters must step the same, got .* on "
    r"ranks? .*{last}\b.* \(this is rank {rank}\)"
)
OWN = {
    "gradient_of_float64": r"ValueError: parameter \d of group 0: the gradient's dtype must",
    "bad_lr": r"ValueError: group 0: lr must be a",
}
"""What the rank says that had an error anyway."""

modes = pytest.mark.parametrize(("options", "step"), MODES.values(), ids=MODES)
worlds = pytest.mark.parametrize("world", [2, 3])


def assert_refused(found, name=None):
    """On all ranks, and no weight or step count has changed; state that was there neither."""
    for rank, (message, before, after) in enumerate(found):
        odd = rank == len(found) - 1
        expected = OWN.get(name, OTHERS) if odd else OTHERS
        assert re.match(expected.format(rank=rank, last=len(found) - 1), message), (
            f"rank {rank}: {message!r}"
        )
        assert_same(after[::2], before[::2], f"rank {rank}")
        assert_same(after[1][: len(before[1])], before[1], f"rank {rank}")


@pytest.mark.parametrize("name", KINDS["DTensors"].built)
@worlds
@pytest.mark.sample(2)
def test_optimizers_that_are_not_alike(on_ranks, world, name):
    assert_refused(on_ranks(world, built, "DTensors", name, {}, CLIP))


@pytest.mark.parametrize("name", KINDS["fp8"].built)
@worlds
def test_optimizers_of_fp8_weights_that_are_not_alike(on_ranks, world, name):
    assert_refused(on_ranks(world, built, "fp8", name, {}, {}))


def test_a_rank_that_is_the_mean_of_the_others_raises_too(on_ranks):
    assert_refused(on_ranks(3, each_another))


@modes
def test_another_order_is_refused_wherever_there_is_a_norm(on_ranks, options, step):
    assert_refused(on_ranks(2, built, "DTensors", "other_order", options, step))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", KINDS["DTensors"].between)
@modes
def test_one_rank_changes_between_steps(on_ranks, options, step, name):
    assert_refused(on_ranks(3, between, "DTensors", name, options, step), name)


@pytest.mark.parametrize("name", KINDS["fp8"].between)
@pytest.mark.parametrize("options", [{}, SKIP, {"capturable": True}], ids=str)
def test_one_rank_changes_fp8_weights_between_steps(on_ranks, options, name):
    assert_refused(on_ranks(3, between, "fp8", name, options, {}), name)


@pytest.mark.parametrize("name", KINDS["both"].between)
def test_ranks_meet_once_for_dtensors_and_once_for_fp8_weights(on_ranks, name):
    assert_refused(on_ranks(2, between, "both", name, SKIP, {}), name)


def test_kernels_are_asked_too(on_ranks):
    for name in ("no_gradient", "gradient_of_float64"):
        found = on_ranks(2, between, "DTensors", name, {"backend": "triton"}, CLIP)
        assert_refused(found, name)


@pytest.mark.parametrize("innermost_first", [False, True])
def test_ranks_of_an_outer_group_hear_of_an_inner_one(on_ranks, innermost_first):
    assert_refused(on_ranks(3, inner_group, innermost_first))


DIFFER = "ValueError: ranks that hold parts of the same parameters must step the same, got "
SAID = {
    "clip_norm": (None, 0, {"clip_norm": 2.0}, "clip_norm: 1.0 on ranks 0 to 1, 2.0 on rank 2"),
    "lr": (
        edited, {"lr": 0.5}, {}, "lr of group 0: 0.01 on ranks 0 to 1, 0.5 on rank 2"
    ),
    "lr, on two": (
        edited, {"lr": 0.5}, {"odd": (0, 2)},
        "lr of group 0: 0.5 on ranks 0, 2, 0.01 on rank 1",
    ),
    "betas": (
        edited, {"betas": (0.9, 0.95)}, {},
        "betas of group 0: (0.9, 0.999) on ranks 0 to 1, (0.9, 0.95) on rank 2",
    ),
    "step": (edited, {"step": 7}, {}, "step of group 0: 1 on ranks 0 to 1, 7 on rank 2"),
    "gradient": (
        without_gradient, 1, {},
        "gradient of parameter 'bias': one, formats ('float32', 'float32', 'float32', None, None) "
        "on ranks 0 to 1, none on rank 2",
    ),
    "order": (
        turned, None, {},
        "the parameter at place 0: parameter 'embedding' on ranks 0 to 1, ",
    ),
    "an error": (
        edited, {"lr": "x"}, {},
        "ValueError: group 0: lr must be a finite number >= 0 in fp32, got 'x'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_differs_is_said_with_ranks_and_values(on_ranks, name):
    edit, value, more, told = SAID[name]
    for rank, (error, after, before) in enumerate(on_ranks(3, said_of, edit, value, **more)):
        if name == "an error" and rank == 2:
            assert error.startswith(told)
        else:
            assert told in error
            assert error.startswith(DIFFER)
            assert error.endswith(f"(this is rank {rank})")
            assert len(error) < 400
        assert_same(after, before)


def test_a_rank_with_other_numbers_is_heard_of_without_waiting(on_ranks):
    """In the next step."""
    given = edited, {"lr": 0.5}
    for rank, (error, after, before) in enumerate(on_ranks(3, said_of, *given, waits=False)):
        assert "lr of group 0: 0.01 on ranks 0 to 1, 0.5 on rank 2" in error
        assert f"(this is rank {rank})" in error
        assert_same(after, before)


def test_ranks_that_wait_for_long_say_for_whom(on_ranks):
    found = on_ranks(3, waits_told, 1, 2.0)
    for rank, other in ((0, 2), (2, 0)):
        ((level, told),) = found[rank]
        assert level == "WARNING"
        assert re.match(rf"rank {rank} has waited \d+ s for ranks .* in step 2, which hold", told)
        assert f"rank {other} waiting too; not there yet: rank 1" in told
    assert found[1] == []


def test_ranks_that_wait_for_one_that_raised_say_its_error(on_ranks):
    """In the middle of a step, where the others of a GPU hear nothing of it."""
    found = on_ranks(3, waits_told, 1, 2.0, raises=True)
    for rank in (0, 2):
        ((_, told),) = found[rank]
        assert told.endswith(
            "not there yet: rank 1; rank 1 raised RuntimeError: no memory in step 2"
        )


def test_another_clip_norm(on_ranks):
    assert_refused(on_ranks(2, another_clip_norm))


@pytest.mark.parametrize("capturable", [False, True], ids=["host", "capturable"])
@worlds
def test_an_overflow_that_one_rank_alone_knows_of_skips_on_all(on_ranks, world, capturable):
    found = on_ranks(world, overflow_on_one, {"capturable": capturable}, CLIP)
    for message, before, after in found:
        assert message == ""
        assert_same(after, before)


@pytest.mark.parametrize("name", ["other_order", "no_gradient", "remainders"])
def test_modules_of_fsdp2(on_ranks, name):
    assert_refused(on_ranks(2, modules, name, CLIP))


@pytest.mark.parametrize("name", ["all_first", "no_sum_of_all"])
def test_ranks_that_do_not_all_meet_in_the_first_sum(on_ranks, name):
    assert_refused(on_ranks(4, two_meshes, name))


# --- as on a GPU: who has not changed does not wait


def assert_heard_later(found, name, options):
    """The others left the step out, and raise in what comes next."""
    *others, odd = found
    assert re.match(OWN.get(name, OTHERS).format(rank=len(others), last=len(others)), odd[0][0])
    assert_same(odd[0][2][::2], odd[0][1][::2])
    counted = 0 if options.get("capturable") else 1  # the host's count, until it hears
    for rank, ((message, before, after), (later, _, last)) in enumerate(others):
        assert message == ""
        assert_same(after[:2], before[:2])
        assert [n - counted for n in after[2]] == before[2]
        assert re.match(OTHERS.format(rank=rank, last=len(others)), later), later
        assert_same(last, before)


@pytest.mark.parametrize("by", ["step", "state_dict"])
@pytest.mark.parametrize("name", KINDS["DTensors"].between)
def test_the_others_leave_the_step_out_and_raise_in_the_next(on_ranks, name, by):
    found = on_ranks(3, heard_later, "DTensors", name, {}, CLIP, by)
    assert_heard_later(found, name, {})


@pytest.mark.parametrize("name", KINDS["fp8"].between)
@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=["host", "capturable"])
def test_the_others_leave_the_step_of_fp8_weights_out(on_ranks, options, name):
    found = on_ranks(3, heard_later, "fp8", name, options, {}, "step")
    assert_heard_later(found, name, options)


def test_the_device_counts_no_step_that_is_left_out(on_ranks):
    options = {"capturable": True}
    found = on_ranks(2, heard_later, "DTensors", "no_gradient", options, CLIP, "step")
    assert_heard_later(found, "no_gradient", options)


@pytest.mark.parametrize("name", ["no_gradient", "of_a_shard", "bad_lr"])
def test_the_others_leave_the_step_of_dtensors_and_fp8_weights_out(on_ranks, name):
    options = {**SKIP, "capturable": True}
    found = on_ranks(2, heard_later, "both", name, options, {}, "step")
    assert_heard_later(found, name, options)


@modes
def test_steps_of_ranks_that_agree_are_the_same_without_waiting(on_ranks, options, step):
    expected = on_ranks(1, as_on_a_gpu, options, step)[0]
    for found in on_ranks(3, as_on_a_gpu, options, step):
        assert_same(found, expected)


# --- the first step, with lr=0


@pytest.mark.parametrize("zeros", [False, True], ids=["gradients", "zeros"])
@pytest.mark.parametrize("name", WARM)
def test_a_first_step_with_lr_0_is_counted_on_all_ranks_or_on_none(on_ranks, name, zeros):
    # a state that one rank has, or a gradient that it lacks, is no question for states
    counted = not (zeros and name == "looked_at")
    for found in on_ranks(3, warm_up, name, zeros):
        assert [message for message, _, _ in found] == ["", ""]
        assert [after[2] for _, _, after in found] == [[counted], [counted + 1]]


def test_torch_asks_for_the_states_at_which_one_rank_has_looked(on_ranks):
    for message, before, after, names in on_ranks(2, checkpointed):
        assert message == ""
        assert_same(after[::2], before[::2])
        assert names == [["exp_avg", "exp_avg_sq"]] * 5


@pytest.mark.parametrize("looks", [False, True], ids=["alike", "one_looks_at_its_state"])
def test_a_first_step_of_fp8_weights_with_lr_0_is_a_step(on_ranks, looks):
    for message, _, after in on_ranks(3, warm_up_fp8, looks):
        assert message == ""
        assert after[2] == [1]
