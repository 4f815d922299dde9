"""What ranks do with models of torch in the tests of DTensor parameters, forward and backward."""

import fsdp2_ranks
import pytest
import torch
import torch.distributed as dist
from fsdp2_ranks import build, mesh_of, snapshot, split_like, whole
from runs import BF16, values
from torch.distributed.fsdp import fully_shard

import megaopt
from megaopt import FusedAdam

LAYERS = {"0.weight": (6, 4), "0.bias": (6,), "2.weight": (5, 6), "2.bias": (5,)}
LAYERS |= {"3.weight": (5,), "3.bias": (5,)}


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
