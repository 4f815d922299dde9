"""Steps of fp8 weights that are sharded over processes; what each of them has afterwards."""

import torch
import torch.distributed as dist

from megaopt import FusedAdam
from megaopt.float8 import Float8Weight
from megaopt.float8.shard import Float8Shard

SHAPES = [(130, 257), (64, 33), (3, 40)]
BOUNDS = [(0, 4097, 130 * 257), (0, 0, 64 * 33), (0, 120, 120)]
"""Of two ranks: inside a row and a block; the first has nothing; the second has nothing."""
STEPS = 3
OPTIONS = {"lr": 3e-2, "weight_decay": 0.1, "dtype": torch.float32}


def initial_weights(recipe):
    torch.manual_seed(0)
    return [
        torch.nn.Parameter(Float8Weight.from_values(torch.randn(shape).bfloat16(), recipe))
        for shape in SHAPES
    ]


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]


def step_shards(rank, meeting, recipes, backend, folder):
    """A rank's process."""
    dist.init_process_group("gloo", f"file://{meeting}", world_size=2, rank=rank)
    for name, recipe in recipes.items():
        weights = initial_weights(recipe)
        starts = [bounds[rank : rank + 2] for bounds in BOUNDS]
        shards = [Float8Shard(w, *own) for w, own in zip(weights, starts, strict=True)]
        optimizer = FusedAdam(shards, backend=backend, **OPTIONS)
        for step in range(STEPS):
            for shard, grad, (start, stop) in zip(shards, gradients(step), starts, strict=True):
                shard.grad = grad.flatten()[start:stop]
            optimizer.step()
        parts = [{k: t.view(torch.uint8) for k, t in w.tensors().items()} for w in weights]
        state = [optimizer.state[shard] for shard in shards]
        torch.save({"parts": parts, "state": state}, f"{folder}/{name}.{rank}")
    dist.destroy_process_group()
