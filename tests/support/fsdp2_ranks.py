"""What ranks do in the tests of DTensor parameters: real fully_shard, on CPUs, over gloo."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runs import BF16, FP32, values
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from megaopt import FusedAdam

SHAPES = [(5, 3), (7,), (1, 4), (6, 2, 3), (2, 600)]
"""Cut in the first dimension: uneven on 2 to 4 ranks, the third empty on all but one."""


class Bare(torch.nn.Module):
    """Parameters alone; gradients are given by hand."""

    def __init__(self, shapes=SHAPES, dtype=FP32, seed=0):
        super().__init__()
        for index, shape in enumerate(shapes):
            value = values(shape, seed + index).to(dtype)
            setattr(self, f"p{index}", torch.nn.Parameter(value))


def gradients(step, shapes=SHAPES, dtype=FP32):
    return [values(shape, 100 * (step + 1) + i).to(dtype) for i, shape in enumerate(shapes)]


def mesh_of(replicas=1):
    """All ranks in one row, or in so many rows that have copies of one another's shards."""
    world = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh("cpu", (world,))
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("copy", "shard"))


def sharded(model, replicas=1):
    return fully_shard(model, mesh=mesh_of(replicas))


def split_like(param, whole):
    """A whole tensor, the same on all ranks, as a DTensor of the parameter's sharding."""
    return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)


def give(params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = split_like(param, grad) if isinstance(param, DTensor) else grad.clone()


def whole(value):
    """Everything in it without a DTensor."""
    if isinstance(value, DTensor):
        own = value.detach()
        if value.dtype == torch.int16:  # gloo cannot send it
            return own.int().full_tensor().short()
        return own.full_tensor()
    if isinstance(value, dict):
        return {name: whole(content) for name, content in value.items()}
    if isinstance(value, (list, tuple)):
        return [whole(content) for content in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def snapshot(optimizer):
    """Weights, states, step counts, whole."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [dict(optimizer.state.get(param, {})) for param in params]
    steps = [int(group["step"]) for group in optimizer.param_groups]
    return whole({"weights": params, "states": states, "steps": steps})


def build(options, replicas=1, dtype=None, shapes=SHAPES, seed=0):
    """A model and its optimizer; without a process group a whole one.

    options: FusedAdam's; "external" among them makes fp32 masters of the values before bf16.
    """
    options = dict(options)
    dtype = dtype or options.pop("weights", FP32)
    model = Bare(shapes, dtype, seed)
    if dist.is_initialized():
        sharded(model, replicas)
    if options.pop("external", False):
        options["master_weights"] = [param.detach().clone() for param in model.parameters()]
        model.to(BF16)
    return model, FusedAdam(model.parameters(), **options)


def train(model, optimizer, steps, first=0, **step):
    params = list(model.parameters())
    shapes = [tuple(param.shape) for param in params]
    for number in range(first, first + steps):
        give(params, gradients(number, shapes, params[0].dtype))
        optimizer.step(**step)


def trained(options, steps, replicas=1, **step):
    """What an optimizer has after some steps; of all ranks the same."""
    model, optimizer = build(options, replicas)
    train(model, optimizer, steps, **step)
    return snapshot(optimizer)


# --- what belongs to the processes alone


def kinds_of_state(options, replicas):
    """Whether each state tensor is a DTensor of the parameter's mesh and placements."""
    model, optimizer = build(options, replicas)
    train(model, optimizer, 1)
    return [
        isinstance(tensor, DTensor)
        and tensor.placements == param.placements
        and tensor.device_mesh == param.device_mesh
        and tensor.shape == param.shape
        and tensor.stride() == param.stride()
        for param in model.parameters()
        for tensor in optimizer.state[param].values()
        if tensor is not None
    ]


def save(options, steps, folder, flat):
    model, optimizer = build(options)
    train(model, optimizer, steps)
    given = StateDictOptions(flatten_optimizer_state_dict=flat)
    content = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=given),
    }
    dcp.save(content, checkpoint_id=folder)


def load_and_train(options, steps, first, folder, flat):
    """From a checkpoint of another number of ranks on; all that was made here is overwritten."""
    model, optimizer = build({**options, "lr": 77.0}, seed=50)
    given = StateDictOptions(flatten_optimizer_state_dict=flat)
    content = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=given),
    }
    dcp.load(content, checkpoint_id=folder)
    set_model_state_dict(model, content["model"])
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=given)
    loaded = snapshot(optimizer)
    train(model, optimizer, steps, first)
    return loaded, snapshot(optimizer)


def copy_of_everything(model, optimizer):
    return copy.deepcopy(snapshot(optimizer)), [p.grad is None for p in model.parameters()]
