"""Steps of fp8 weights that are sharded over processes; what each of them has afterwards."""

import torch

from megaopt.float8 import Float8Weight
from megaopt.float8.shard import Float8Shard

WORLD = 3
SHAPES = [(130, 200), (3, 300), (64, 33)]
BOUNDS = {
    2: [(0, 4097, 26000), (0, 0, 900), (0, 2112, 2112)],
    3: [(0, 4097, 25601, 26000), (0, 301, 555, 900), (0, 0, 33, 2112)],
}
"""Where shards begin and end, by ranks: within rows and within blocks, some empty."""
HYPER = {"lr": 3e-2, "weight_decay": 0.1}


def initial_weights(recipe):
    torch.manual_seed(0)
    return [
        torch.nn.Parameter(Float8Weight.from_values(torch.randn(shape).bfloat16(), recipe))
        for shape in SHAPES
    ]


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]


def bytes_of(weight):
    return {name: tensor.view(torch.uint8) for name, tensor in weight.tensors().items()}


def shards_of(weights, ranks, rank, group):
    bounds = [each[rank : rank + 2] for each in BOUNDS[ranks]]
    return [Float8Shard(w, *own, group) for w, own in zip(weights, bounds, strict=True)]


def give(shards, grads):
    for shard, grad in zip(shards, grads, strict=True):
        shard.grad = grad.flatten()[shard.start : shard.start + shard.numel()]
