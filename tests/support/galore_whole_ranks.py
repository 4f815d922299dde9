"""What ranks do in the tests of GaLore's matrices that go to owners."""

import contextlib
from unittest import mock

import fsdp2_ranks
import torch
import torch.distributed as dist
from fsdp2_ranks import give, gradients, load, raised_by, save, snapshot, train
from galore_ranks import build, ranked
from muon_ranks import placed
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaopt import GaLoreAdamW
from megaopt.kernels.galore import ranks, rule
from megaopt.kernels.matrix import boxes, bucket, shared


def placed_galore(options, steps, *placed_as, **named):
    """`placed` with a GaLoreAdamW."""
    return placed(ranked({**options, "optimizer": GaLoreAdamW}), steps, *placed_as, **named)


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


def saved_by_some(options, steps, folder, shapes):
    return save(ranked(options), steps, folder, False, shapes)


def gone_on(options, steps, first, folder, shapes):
    """What is loaded, with another seed and another lr made here, and what steps then make."""
    model, optimizer = load(ranked({**options, "seed": 5}), folder, False, shapes)
    loaded = snapshot(optimizer)
    train(model, optimizer, steps, first)
    return loaded, snapshot(optimizer)


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


def left_out(options, reason, first, shapes):
    """What there is before a step that is left out, after it, and after those that follow.

    reason: "found_inf", or a "nan" in the last rank's gradient.
    """
    model, optimizer = build(options, shapes=shapes)
    train(model, optimizer, first)
    before, params = snapshot(optimizer), list(model.parameters())
    give(params, gradients(first, shapes, params[0].dtype))
    if reason == "found_inf":
        optimizer.found_inf = torch.tensor(1.0)
    elif not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        local = params[0].grad.to_local() if dist.is_initialized() else params[0].grad
        local[-1] = torch.nan
    optimizer.step()
    optimizer.found_inf = None
    after = snapshot(optimizer)
    train(model, optimizer, 2, first)
    return before if before["states"][0] else None, after, snapshot(optimizer)


def said_of(kind, options, shapes):
    """The error of a step in which the last rank does something else, and what was before and is.

    kind: it lacks a "gradient", has taken other "steps", has an "lr" that is none, or fails in
        the "exchange", in a "refresh" or when it makes an "update"; or in one of the launches.
    """
    model, optimizer = build(options, shapes=shapes)
    train(model, optimizer, 3)
    before, params = snapshot(optimizer), list(model.parameters())
    group, is_last = optimizer.param_groups[0], dist.get_rank() == dist.get_world_size() - 1
    give(params, gradients(3, shapes, params[0].dtype))
    places = {
        "exchange": (bucket, "unpacked"),
        "refresh": (rule, "refreshed"),
        "update": (rule, "projected_back"),
        "launched exchange": (boxes.PartCopies, "copy"),
        "launched projection": (ranks.ProjectionGroup, "project"),
        "launched update": (ranks.ProjectionGroup, "project_back"),
    }
    with contextlib.ExitStack() as stack:
        if is_last and kind == "gradient":
            params[1].grad = None
        elif is_last and kind in ("steps", "lr"):
            group.update({"steps": {"step": 7}, "lr": {"lr": "much"}}[kind])
        elif is_last:
            failing = mock.patch.object(*places[kind], side_effect=RuntimeError("no memory"))
            stack.enter_context(failing)
        error = raised_by(optimizer.step)
    group.update(step=3, lr=0.01)
    after = snapshot(optimizer)
    give(params, gradients(3, shapes, params[0].dtype))
    optimizer.step()
    return error, before, after, snapshot(optimizer)


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
