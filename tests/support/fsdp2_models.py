"""What ranks do with models of torch in the tests of DTensor parameters, forward and backward."""

import torch
from fsdp2_ranks import mesh_of, snapshot
from runs import BF16, values
from torch.distributed.fsdp import fully_shard

import megaopt
from megaopt import FusedAdam


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
