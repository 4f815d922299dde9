"""What ranks do with DTensors whose moments are in blocks; without a process group, the whole."""

from functools import partial

import fsdp2_ranks as ranks
import torch
import torch.distributed as dist
from fsdp2_ranks import build, give, gradients, mesh_of, said, snapshot, train
from runs import BF16, assert_same, values
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megaopt import FusedAdam

SHAPES = [(33, 128), (2, 2048), (1, 4096), (10,), (5, 8, 128), (6, 896)]
"""Rows of whole blocks: uneven on 2 and 3 ranks, the second and third empty on some; the fourth is
a small one, which keeps fp32."""
BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}


trained, save, load_and_train, through_full_state = (
    partial(function, shapes=SHAPES)
    for function in (ranks.trained, ranks.save, ranks.load_and_train, ranks.through_full_state)
)


def kinds_of_state(options):
    """Placements, shape and dtype of each state tensor, beside the parameter's own."""
    model, optimizer = build(options, shapes=SHAPES)
    train(model, optimizer, 1)
    found = []
    for param in model.parameters():
        for name, tensor in optimizer.state[param].items():
            if tensor is not None:
                alike = isinstance(tensor, DTensor) and tensor.placements == param.placements
                shards = tuple(tensor.to_local().shape), tuple(param.to_local().shape)
                own = tuple(param.shape), tuple(tensor.shape), tensor.dtype
                found.append((name, alike, *own, *shards))
    return found


def read_and_set(options):
    """Values of DTensors that are read and set again; whether each is what it was."""
    model, optimizer = build(options, shapes=SHAPES)
    train(model, optimizer, 2)
    same = []
    for param in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            value = optimizer.get_unscaled_state(param, name).clone()
            kept = value.to_local().clone()
            optimizer.set_scaled_state(param, name, value * 0)
            optimizer.set_scaled_state(param, name, value.clone())
            again = optimizer.get_unscaled_state(param, name).to_local()
            same.append(torch.equal(again, kept) and bool((kept != 0).any() or not kept.numel()))
    return same


# --- other placements than FSDP2's


def mesh_and_placements(placements):
    if not dist.is_initialized():
        return None, []
    if len(placements) == 1:
        return mesh_of(), placements
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2)), placements


def placed(shape, names, options, steps=3):
    """Steps of one parameter of these placements, such as ("rows", "columns", None)."""
    kinds = [Replicate() if name is None else Shard(name) for name in names]
    mesh, placements = mesh_and_placements(kinds)

    def split(whole):
        if mesh is None:
            return whole.clone()
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)

    param = torch.nn.Parameter(split(values(shape, 0).to(BF16)))
    optimizer = FusedAdam([param], **options)
    for (grad,) in (gradients(step, [shape], BF16) for step in range(steps)):
        give([param], [grad])
        optimizer.step()
    return snapshot(optimizer)


def refused(shape, names, options):
    """What is said of such a parameter, by the constructor and by add_param_group."""
    kinds = [Replicate() if name is None else Shard(name) for name in names]
    mesh, placements = mesh_and_placements(kinds)
    whole = values(shape, 0)
    param = torch.nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    other = torch.nn.Parameter(values((3,), 0))
    optimizer, found = FusedAdam([other], **options), []
    before = snapshot(optimizer)
    for action in (
        lambda: FusedAdam([param], **options),
        lambda: optimizer.add_param_group({"params": [param]}),
    ):
        found.append(said(action))
    assert_same(snapshot(optimizer), before)
    assert torch.equal(param.full_tensor(), whole)
    return found
