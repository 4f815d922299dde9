"""What ranks do in the tests of FusedMuon's DTensors."""

import contextlib
import itertools
from unittest import mock

import torch
import torch.distributed as dist
from fsdp2_ranks import (
    Bare,
    build,
    give,
    gradients,
    raised_by,
    said,
    snapshot,
    split_like,
    train,
    trained,
)
from runs import FP32, on_cpu
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megaopt import FusedMuon
from megaopt.kernels.matrix import boxes, bucket, tiles
from megaopt.kernels.muon import launch, newton_schulz, wave
from megaopt.kernels.muon import ranks as muon_ranks
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
    "the last two": lambda shape: [Shard(max(len(shape) - 2, 0)), Shard(len(shape) - 1)],
    "copies of rows": lambda shape: [Replicate(), Shard(0)],
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


def made_at(options, placements=None, sizes=None, shapes=SHAPES, split=False, device="cpu"):
    """A model and an optimizer of its DTensors; without placements of whole tensors."""
    options = dict(options)
    model = Bare(shapes, options.pop("weights", FP32)).to(device)
    if placements is not None:
        named = ("a", "b")[: len(sizes)]
        mesh = init_device_mesh(device, sizes, mesh_dim_names=named)
        place = {**PLACEMENTS, **MESHES}[placements]
        for name, param in list(model.named_parameters()):
            own = distribute_tensor(param.detach(), mesh, place(param.shape), src_data_rank=None)
            setattr(model, name, torch.nn.Parameter(own))
    kind = options.pop("optimizer", FusedMuon)
    return model, kind(groups_of(list(model.parameters()), split), **options)


def placed(
    options, steps, placements=None, sizes=None, shapes=SHAPES, split=False, device="cpu", **step
):
    """What an optimizer of DTensors has after steps; without placements one of whole tensors."""
    model, optimizer = made_at(options, placements, sizes, shapes, split, device)
    train(model, optimizer, steps, **step)
    return on_cpu(snapshot(optimizer))


def in_small_buckets(room, *arguments, made=placed, **named):
    """What `made` returns with buckets of so many bytes."""
    with mock.patch.object(owners.Owners.__init__, "__defaults__", (False, False, room)):
        return made(*arguments, **named)


def by_launches(options, *arguments, made=placed, **named):
    """What `made` returns where no rank steps a bucket by torch's operations, as the twin does."""
    refused = AssertionError("a bucket of torch's operations")
    with mock.patch.object(bucket.TorchBucket, "direct", side_effect=refused):
        return made({**options, "backend": "triton"}, *arguments, **named)


def beside_local(*arguments, **named):
    """What `by_launches` returns, and how many matrices no other rank has a part of."""
    counts, init = [], owners.Owners.__init__

    def counting(self, *own):
        init(self, *own)
        counts.append(len(self.local))

    with mock.patch.object(owners.Owners, "__init__", counting):
        return by_launches(*arguments, **named), sum(counts)


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
    counts, iterated = [], newton_schulz.iterated

    def counting(room, *own):
        counts.append(len(room.first))
        return iterated(room, *own)

    with mock.patch.object(newton_schulz, "iterated", counting):
        train(model, optimizer, steps)
    return sum(counts)


def resumed(options, folder, steps, first, replicas=1, saves=False):
    """Loads what was saved, where there is something, trains, and saves."""
    model, optimizer = build({**options, "optimizer": FusedMuon}, replicas, shapes=SHAPES)
    if first:
        own = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        checkpoint.load(own, checkpoint_id=folder)
        model.load_state_dict(own["model"])
        set_optimizer_state_dict(model, optimizer, own["optimizer"])
    train(model, optimizer, steps, first=first)
    if saves:
        own = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        checkpoint.save(own, checkpoint_id=folder)
    return snapshot(optimizer)


CHANGED = {
    "coefficients": {"ns_steps": 3},
    "lr": {"lr": "much"},
    "eps": {"eps": None},
    "sizes": {"split_sizes": (3,)},
}


LAUNCHES = {
    "direct": (wave.PartLaunches, "direct"),
    "sums": (muon_ranks.PartNorms, "measure"),
    "cast": (muon_ranks.PartNorms, "cast"),
    "boxes": (boxes.BoxCopies, "copy"),
    "products": (wave.Iteration, "step"),
    "apply": (wave.PartLaunches, "apply"),
    "local": (launch.MuonLaunches, "step"),
}
PLACES = {"exchange": (bucket, "unpacked"), "tiles": (tiles, "products"), **LAUNCHES}
"""Where a step fails."""
AT_FIRST = {
    "plans": (muon_ranks, "BoxCopies"),
    "notes": (wave.Iteration, "note"),
    **LAUNCHES,
}


def said_of_a_first_step(kind, turn, options, shapes):
    """The error of a first step in which the last rank fails, and what steps after it come to.

    kind: of AT_FIRST. turn: which of the calls of this rank fails.
    """
    model, optimizer = build({**options, "optimizer": FusedMuon}, shapes=shapes)
    give(model.parameters(), gradients(0, shapes, next(model.parameters()).dtype))
    error = None
    if dist.get_rank() == dist.get_world_size() - 1:
        place, name = AT_FIRST[kind]
        calls, call = itertools.count(), getattr(place, name)

        def failing(*own, **others):
            if next(calls) == turn:
                raise RuntimeError("no memory")
            return call(*own, **others)

        with mock.patch.object(place, name, failing):
            error = raised_by(optimizer.step)
    else:
        error = raised_by(optimizer.step)
    train(model, optimizer, 2)
    return error, snapshot(optimizer)


def said_of(kind, options, shapes=SHAPES):
    """The error of a step in which the last rank does something else, and what was before and is.

    kind: it lacks a "gradient", has one of another "dtype", has a group CHANGED, or fails in the
        exchange, in the "tiles" of a product, or in a LAUNCH.
    """
    model, optimizer = build({**options, "optimizer": FusedMuon}, shapes=shapes)
    train(model, optimizer, 2)
    before, params = snapshot(optimizer), list(model.parameters())
    group, is_last = optimizer.param_groups[0], dist.get_rank() == dist.get_world_size() - 1
    kept = {key: group[key] for key in CHANGED.get(kind, ())}
    give(params, gradients(2, shapes, params[0].dtype))
    with contextlib.ExitStack() as stack:
        if is_last and kind == "gradient":
            params[1].grad = None
        elif is_last and kind == "dtype":
            params[1].grad_dtype = None
            params[1].grad = params[1].grad.float()
        elif is_last and kind in CHANGED:
            group.update(CHANGED[kind])
        elif is_last:
            place = PLACES[kind]
            failing = mock.patch.object(*place, side_effect=RuntimeError("no memory"))
            stack.enter_context(failing)
        error = raised_by(optimizer.step)
    group.update(kept)
    after = snapshot(optimizer)
    give(params, gradients(2, shapes, params[0].dtype))
    optimizer.step()
    return error, before, after, snapshot(optimizer)


def moved_once(kind, options, shapes):
    """What four steps come to whose gradients lie in one place, but for one that fails between.

    kind: of LAUNCHES, which fails on all ranks. A step's memory is always the same.
    """
    model, optimizer = build({**options, "optimizer": FusedMuon}, shapes=shapes)
    params, place = list(model.parameters()), LAUNCHES[kind]
    memory, empty = {}, torch.empty

    def same(*size, dtype=None, **others):
        if dtype != torch.uint8:
            return empty(*size, dtype=dtype, **others)
        return memory.setdefault(size, empty(*size, dtype=dtype, **others))

    with mock.patch.object(torch, "empty", same):
        give(params, gradients(0, shapes, params[0].dtype))
        before = [param.grad for param in params]
        for step in range(4):
            news = gradients(step, shapes, params[0].dtype)
            for param, grad, new in zip(params, before, news, strict=True):
                grad.to_local().copy_(split_like(param, new).to_local())
                param.grad = grad
            optimizer.step()
            if step == 2:
                give(params, gradients(9, shapes, params[0].dtype))
                with mock.patch.object(*place, side_effect=RuntimeError("no memory")):
                    assert "no memory" in raised_by(optimizer.step)
    return snapshot(optimizer)


def said_after_a_fault(options):
    """The errors of a step in which a product and all calls after it fail, and of a step after."""
    model, optimizer = build({**options, "optimizer": FusedMuon}, shapes=SHAPES)
    train(model, optimizer, 1)
    give(model.parameters(), gradients(1, SHAPES, next(model.parameters()).dtype))
    fault, later = RuntimeError("the product"), RuntimeError("a call after it")
    with (
        mock.patch.object(newton_schulz, "products", side_effect=fault),
        mock.patch.object(owners.Owners, "back", side_effect=later),
    ):
        first = raised_by(optimizer.step)
    return first, raised_by(optimizer.step)


def lying_otherwise(options, steps, turns, shapes):
    """What an optimizer has after steps in which local gradients lie in columns.

    turns: of the second matrix on all ranks, of which some have a row, and of the third on the
        first rank alone; otherwise none does.
    """
    model, optimizer = build(options, shapes=shapes)
    params = list(model.parameters())
    for step in range(steps):
        give(params, gradients(step, shapes, params[0].dtype))
        for param in params[1 : 1 + turns * (1 if dist.get_rank() else 2)]:
            local = param.grad._local_tensor
            param.grad._local_tensor = local.t().contiguous().t()
        optimizer.step()
    return snapshot(optimizer)


def in_a_world_anew(folder, shapes):
    """What two optimizers have after steps, of equal meshes before and after a group ends."""
    found, (rank, world) = [], (dist.get_rank(), dist.get_world_size())
    for number in range(2):
        found.append(placed({}, 2, "rows and columns", (1, world), shapes))
        dist.destroy_process_group()
        meeting = f"file://{folder}/{number}"
        dist.init_process_group("gloo", meeting, world_size=world, rank=rank)
    return found


def said_of_parts_of_blocks(momentum):
    """What the constructor says of experts whose matrices, unlike rows, are no whole blocks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    experts = torch.nn.Parameter(distribute_tensor(torch.zeros(8, 16, 600), mesh, [Shard(0)]))
    group = {"params": [experts], "split_sizes": [4, 12]}
    return said(lambda: FusedMuon([group], momentum_buffer_dtype=momentum))


def by_small_tiles(options, steps, replicas, shapes, made=trained):
    """What an optimizer has after steps, and the multiply-adds of this rank's products."""
    work = []
    names = ("products", "symmetric_products")
    with contextlib.ExitStack() as stack:
        for module in (tiles, newton_schulz):
            own = {name: counted(getattr(module, name), work) for name in names}
            stack.enter_context(mock.patch.multiple(module, **own))
        stack.enter_context(mock.patch.object(tiles, "UNIT", 8))
        found = made(options, steps, replicas, shapes)
    return found, sum(work)


def counted(function, work):
    """The function, which notes the multiply-adds of its products."""

    def call(left, *own, **others):
        is_symmetric = function.__name__ == "symmetric_products"
        right = others.get("right") if is_symmetric else own[0]
        turned = [each.mT for each in left] if right is None else right
        for a, b in zip(left, turned, strict=True):
            work.append(a.shape[0] * b.shape[1] * a.shape[1] * (0.5 if is_symmetric else 1))
        return function(left, *own, **others)

    return call


def left_out(options, reason, shapes=SHAPES):
    """What there is before a step that is left out, after it, and after one that is not.

    reason: "found_inf", or a "nan" in the last rank's gradient.
    """
    model, optimizer = build({**options, "optimizer": FusedMuon}, shapes=shapes)
    train(model, optimizer, 2)
    before, params = snapshot(optimizer), list(model.parameters())
    give(params, gradients(2, shapes, params[0].dtype))
    if reason == "found_inf":
        optimizer.found_inf = torch.tensor(1.0)
    elif dist.get_rank() == dist.get_world_size() - 1:
        params[0].grad.to_local()[-1] = torch.nan
    optimizer.step()
    optimizer.found_inf = None
    after = snapshot(optimizer)
    train(model, optimizer, 1, first=2)
    return before, after, snapshot(optimizer)
