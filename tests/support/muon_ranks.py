"""What ranks do in the tests of FusedMuon's DTensors."""

import contextlib
from unittest import mock

import torch
from fsdp2_ranks import (
    Bare,
    snapshot,
    train,
    trained,
)
from runs import FP32, on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megaopt import FusedMuon
from megaopt.kernels.matrix import (
    muon,
    shared,
    tiles,
)
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
    with mock.patch.object(shared.TorchBucket, "direct", side_effect=refused):
        return made({**options, "backend": "triton"}, *arguments, **named)


CHANGED = {
    "coefficients": {"ns_steps": 3},
    "lr": {"lr": "much"},
    "eps": {"eps": None},
    "sizes": {"split_sizes": (3,)},
}


def by_small_tiles(options, steps, replicas, shapes, made=trained):
    """What an optimizer has after steps, and the multiply-adds of this rank's products."""
    work = []
    names = ("products", "symmetric_products")
    with contextlib.ExitStack() as stack:
        for module in (tiles, muon):
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
