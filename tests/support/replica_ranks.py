"""What ranks do in the tests of FusedMuon's replicas: plain parameters that all of them have."""

import contextlib
import copy
import io
import pickle
from unittest import mock

import torch
import torch.distributed as dist
from fsdp2_ranks import Bare, give, gradients, raised_by, snapshot, train
from muon_ranks import CHANGED, groups_of
from runs import FP32, on_cpu
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import megaopt
from megaopt import FusedMuon
from megaopt.kernels.matrix import bucket
from megaopt.kernels.muon import newton_schulz

SHAPES = [(24, 10), (7, 33), (9,), (1, 40), (33, 20), (20, 33), (5, 6, 7), (4, 3, 2, 2)]
"""Tall, wide, a vector, one of one row, two of the same products, experts, a convolution."""


def ranks_as(kind):
    """All ranks, as a process group or as a mesh of one dimension or two."""
    world = dist.get_world_size()
    if kind == "group":
        return dist.group.WORLD
    sizes = (world,) if kind == "mesh" else (2, world // 2)
    names = ("a", "b")[: len(sizes)]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def made(options, shapes=SHAPES, kind="group", split=False, alone=False, device="cpu"):
    """A model and its optimizer, of which all ranks have all; alone: they divide no work."""
    options = dict(options)
    model = Bare(shapes, options.pop("weights", FP32)).to(device)
    if dist.is_initialized() and not alone:
        options["replicas"] = ranks_as(kind)
    return model, FusedMuon(groups_of(list(model.parameters()), split), **options)


def trained(options, steps, clip_norm=None, **named):
    """What an optimizer has after steps."""
    model, optimizer = made(options, **named)
    train(model, optimizer, steps, clip_norm=clip_norm)
    return on_cpu(snapshot(optimizer))


def trained_alike(options, steps, replicas, shapes):
    """The same, with arguments as of those with shards; replicas: 1, as all have all."""
    assert replicas == 1
    return trained(options, steps, shapes=shapes)


def matrices_made(options, steps, **named):
    """The shapes of the matrices that this rank makes in steps."""
    shapes, iterated = [], newton_schulz.iterated

    def counting(room, *own):
        shapes.extend(tuple(each.shape) for each in room.first)
        return iterated(room, *own)

    with mock.patch.object(newton_schulz, "iterated", counting):
        trained(options, steps, **named)
    return shapes


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


def said_of(what, options, shapes=SHAPES):
    """The error of a step in which the last rank does something else, and what was before and is.

    what: it lacks a "gradient", has a group CHANGED, or fails in the "exchange" or in a "product".
    """
    model, optimizer = made(options, shapes)
    train(model, optimizer, 2)
    before, params = snapshot(optimizer), list(model.parameters())
    group, is_last = optimizer.param_groups[0], dist.get_rank() == dist.get_world_size() - 1
    kept = {key: group[key] for key in CHANGED.get(what, ())}
    give(params, gradients(2, shapes, params[0].dtype))
    with contextlib.ExitStack() as stack:
        if is_last and what == "gradient":
            params[1].grad = None
        elif is_last and what in CHANGED:
            group.update(CHANGED[what])
        elif is_last:
            place = {"exchange": (bucket, "unpacked"), "product": (newton_schulz, "products")}[what]
            failing = mock.patch.object(*place, side_effect=RuntimeError("no memory"))
            stack.enter_context(failing)
        error = raised_by(optimizer.step)
    group.update(kept)
    after = snapshot(optimizer)
    train(model, optimizer, 1, first=2)
    return error, before, after, snapshot(optimizer)


def left_out(options, reason):
    """What there is before a step that is left out, after it, and after one that is not.

    reason: "found_inf", a "nan" in all ranks' gradients, or in "one" rank's alone.
    """
    model, optimizer = made(options)
    train(model, optimizer, 2)
    before, params = snapshot(optimizer), list(model.parameters())
    give(params, gradients(2, SHAPES, params[0].dtype))
    if reason == "found_inf":
        optimizer.found_inf = torch.tensor(1.0)
    elif reason == "nan" or dist.get_rank() == 1:
        params[0].grad[-1] = torch.nan
    error = raised_by(optimizer.step)
    optimizer.found_inf = None
    after = snapshot(optimizer)
    train(model, optimizer, 1, first=2)
    return error, before, after, snapshot(optimizer)


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
