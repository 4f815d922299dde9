"""What ranks do with models of torch in the tests of DTensor parameters, forward and backward."""

import pytest
import torch
import torch.distributed as dist
import fsdp2_ranks
from fsdp2_ranks import build, gradients, mesh_of, snapshot, split_like, train, whole
from runs import BF16, FP32, values
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import megaopt
from megaopt import FusedAdam

TENSOR_PARALLEL = {"0.weight": (6, 4), "0.bias": (6,), "2.weight": (5, 6), "2.bias": (5,)}
TENSOR_PARALLEL |= {"3.weight": (5,), "3.bias": (5,)}


def with_tensor_parallel(options, steps):
    """FSDP2 over tensor parallelism, 2 x 2: meshes of one and two dimensions, strided shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layers = [torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 5), torch.nn.LayerNorm(5)]
    model = torch.nn.Sequential(*layers)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    for param in model.parameters():  # each element's place in the whole tensor
        local = param.detach()
        places = torch.arange(param.numel(), dtype=FP32).view(param.shape)
        if isinstance(param, DTensor):
            places = split_like(param, places)
        local.copy_(places)
    fully_shard(model, mesh=mesh["data"])
    params = dict(model.named_parameters())
    places = {name: param.to_local().long() for name, param in params.items()}

    def part(name, value):
        own = value.flatten()[places[name].flatten()].view(places[name].shape)
        own = own.contiguous()
        like = params[name]
        given = {"run_check": False, "shape": like.shape, "stride": like.stride()}
        return DTensor.from_local(own, like.device_mesh, like.placements, **given)

    for index, (name, param) in enumerate(params.items()):
        param.detach().copy_(part(name, values(TENSOR_PARALLEL[name], index)))
    optimizer = FusedAdam(params.values(), **options)
    for step in range(steps):
        grads = gradients(step, TENSOR_PARALLEL.values())
        for (name, param), grad in zip(params.items(), grads, strict=True):
            param.grad = part(name, grad)
        optimizer.step(clip_norm=0.5)
    return snapshot(optimizer), optimizer.grad_norm


def losses(replicas, steps, options):
    """bf16 weights made of fp32 ones that stay as masters; every rank has the same batches."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3)]
    model = torch.nn.Sequential(*layers)
    if dist.is_initialized():
        mesh = mesh_of(replicas)
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
    masters = [param.detach().clone() for param in model.parameters()]
    model.bfloat16()
    optimizer = FusedAdam(model.parameters(), master_weights=masters, **options)
    found = []
    for step in range(steps):
        loss = model(values((4, 6), step, BF16)).float().square().mean()
        loss.backward()
        found.append(loss.detach())
        optimizer.step(clip_norm=0.5)
        optimizer.zero_grad()
    return found, snapshot(optimizer)


def _perceptron(dtype=BF16):
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    for seed, param in enumerate(model.parameters()):
        param.data = values(param.shape, seed).to(dtype)
    return model


def released(options, releases, steps=3):
    """What steps of a model leave behind, with its gradients released or not."""
    options = {"lr": 0.01, "optimizer": FusedAdam, **options}
    model = _perceptron()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of())
    optimizer = options.pop("optimizer")(model.parameters(), **options)
    if releases:
        megaopt.release_gradients(model, optimizer)
    for step in range(steps):
        model(values((4, 6), step, BF16)).float().pow(2).sum().backward()
        assert all((param.grad is None) is releases for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(optimizer)


def fp32_values(options):
    """State dicts of a model after steps, and after other values were set; refusals of others."""
    model, optimizer = build({"weights": BF16, **options})
    fsdp2_ranks.train(model, optimizer, 2)
    first = whole(dict(megaopt.get_fp32_model_state_dict(model, optimizer)))
    given = {name: values(param.shape, 40) for name, param in model.named_parameters()}
    if dist.is_initialized():
        params = dict(model.named_parameters())
        for spoilt in (given, {**given, "p0": torch.ones(2)}):
            with pytest.raises(ValueError, match=r"state_dict\['p0'\]"):
                megaopt.set_fp32_model_state_dict(model, optimizer, spoilt)
        given = {name: split_like(params[name], value) for name, value in given.items()}
    megaopt.set_fp32_model_state_dict(model, optimizer, given)
    second = whole(dict(megaopt.get_fp32_model_state_dict(model, optimizer)))
    weights = whole(dict(model.state_dict()))
    fsdp2_ranks.train(model, optimizer, 1, first=2)
    return [first, second, weights, whole(dict(model.state_dict()))]
