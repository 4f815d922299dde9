"""What ranks do in the tests of FusedMuon's DTensors."""

from unittest import mock

import torch
import torch.distributed as dist
from fsdp2_ranks import Bare, build, snapshot, train
from runs import FP32
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megaopt import FusedMuon
from megaopt.kernels.matrix import muon
from megaopt.step.ranks import owners

SHAPES = [(24, 10), (7, 33), (9,), (1, 40), (33, 20), (5, 6, 7), (4, 3, 2, 2), (1, 5)]
"""Tall, wide, of fewer rows than ranks, a vector, experts, a convolution."""
PLACEMENTS = {
    "rows": lambda shape: [Shard(0)],
    "columns": lambda shape: [Shard(len(shape) - 1)],
    "by turns": lambda shape: [Shard(sum(shape) % len(shape))],
}
MESHES = {
    "rows and columns": lambda shape: [Shard(0), Shard(len(shape) - 1)],
    "rows twice": lambda shape: [Shard(0), Shard(0)],
    "copies of columns": lambda shape: [Replicate(), Shard(len(shape) - 1)],
    "columns and copies": lambda shape: [Shard(len(shape) - 1), Replicate()],
}


def groups_of(params, split):
    """All parameters in a group; split: those of 24 rows in one of their own, of three matrices."""
    if not split:
        return params
    is_fused = [param.shape[0] == 24 for param in params]
    fused = [param for param, own in zip(params, is_fused, strict=True) if own]
    rest = [param for param, own in zip(params, is_fused, strict=True) if not own]
    return [{"params": fused, "split_sizes": [10, 10, 4]}, {"params": rest}]


def placed(options, steps, placements=None, sizes=None, shapes=SHAPES, split=False, **step):
    """What an optimizer of DTensors has after steps; without placements one of whole tensors."""
    options = dict(options)
    model = Bare(shapes, options.pop("weights", FP32))
    if placements is not None:
        named = ("a", "b")[: len(sizes)]
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=named)
        place = {**PLACEMENTS, **MESHES}[placements]
        for name, param in list(model.named_parameters()):
            own = distribute_tensor(param.detach(), mesh, place(param.shape), src_data_rank=None)
            setattr(model, name, torch.nn.Parameter(own))
    optimizer = FusedMuon(groups_of(list(model.parameters()), split), **options)
    train(model, optimizer, steps, **step)
    return snapshot(optimizer)


def in_small_buckets(room, *arguments, **named):
    """`placed` with buckets of so many bytes."""
    with mock.patch.object(owners.Owners.__init__, "__defaults__", (room,)):
        return placed(*arguments, **named)


def bytes_sent(options, shapes, replicas=1):
    """Bytes that this rank sends others in a step after the first, by collective."""
    model, optimizer = build({**options, "optimizer": FusedMuon}, replicas, shapes=shapes)
    train(model, optimizer, 1)
    sent, rank = {}, dist.get_rank()
    names = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "broadcast")
    originals = {name: getattr(dist, name) for name in names}

    def counting(name):
        def call(*own, **others):
            if name == "all_to_all_single":
                lengths = list(own[3])
                lengths[rank] = 0
                count = sum(lengths)
            else:
                count = own[0].numel() * own[0].element_size()
            sent[name] = sent.get(name, 0) + count
            return originals[name](*own, **others)

        return call

    with mock.patch.multiple(dist, **{name: counting(name) for name in names}):
        train(model, optimizer, 1, first=1)
    return sent


def made_here(shapes, steps=1):
    """How many matrices this rank makes in a step."""
    model, optimizer = build({"optimizer": FusedMuon}, shapes=shapes)
    counts, iterated = [], muon.iterated

    def counting(room, *own):
        counts.append(len(room.first))
        return iterated(room, *own)

    with mock.patch.object(muon, "iterated", counting):
        train(model, optimizer, steps)
    return sum(counts)


def resumed(options, folder, steps, first, replicas=1, saves=False):
    """Loads what was saved, where there is something, trains, and saves."""
    from torch.distributed import checkpoint

    model, optimizer = build({**options, "optimizer": FusedMuon}, replicas, shapes=SHAPES)
    if first:
        own = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        checkpoint.load(own, checkpoint_id=folder)
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        model.load_state_dict(own["model"])
        set_optimizer_state_dict(model, optimizer, own["optimizer"])
    train(model, optimizer, steps, first=first)
    if saves:
        own = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        checkpoint.save(own, checkpoint_id=folder)
    return snapshot(optimizer)


def said_of(kind, options):
    """The error of a step in which the last rank does something else, and whether all is as it was.

    kind: it lacks a "gradient", has one "other" group, or "fails" in the exchange.
    """
    model, optimizer = build({**options, "optimizer": FusedMuon}, shapes=SHAPES)
    train(model, optimizer, 2)
    before, is_last = snapshot(optimizer), dist.get_rank() == dist.get_world_size() - 1
    params = list(model.parameters())
    from fsdp2_ranks import give, gradients

    give(params, gradients(2, SHAPES, params[0].dtype))
    failing = mock.patch.object(owners, "_copy", side_effect=RuntimeError("no memory"))
    error = None
    if is_last and kind == "gradient":
        params[1].grad = None
    if is_last and kind == "coefficients":
        optimizer.param_groups[0]["ns_steps"] = 3
    if is_last and kind == "lr":
        optimizer.param_groups[0]["lr"] = "much"
    try:
        if is_last and kind == "fails":
            with failing:
                optimizer.step()
        else:
            optimizer.step()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    optimizer.param_groups[0].update(ns_steps=5, lr=1e-3)
    after = snapshot(optimizer)
    give(params, gradients(2, SHAPES, params[0].dtype))
    optimizer.step()
    return error, before, after, snapshot(optimizer)
