"""Steps of fp8 weights that are sharded over processes; what each of them has afterwards."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megaopt import FusedAdam
from megaopt.float8 import Float8Recipe, Float8Weight
from megaopt.float8.shard import Float8Shard

WORLD = 3
SHAPES = [(130, 200), (3, 300), (64, 33)]
BOUNDS = {
    2: [(0, 4097, 26000), (0, 0, 900), (0, 2112, 2112)],
    3: [(0, 4097, 25601, 26000), (0, 301, 555, 900), (0, 0, 33, 2112)],
}
"""Where shards begin and end, by ranks: within rows and within blocks, some empty."""
STEPS = 2
HYPER = {"lr": 3e-2, "weight_decay": 0.1}


class Case(NamedTuple):
    """A run of shards, on the first so many ranks."""

    ranks: int
    backend: str
    recipe: Float8Recipe
    options: dict[str, Any]
    controlled: bool = False


def initial_weights(recipe):
    torch.manual_seed(0)
    return [
        torch.nn.Parameter(Float8Weight.from_values(torch.randn(shape).bfloat16(), recipe))
        for shape in SHAPES
    ]


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]


def arguments(case):
    """Of `step`: a coefficient makes the kernels read controls."""
    return {"clip_coefficient": torch.tensor(0.75)} if case.controlled else {}


def bytes_of(weight):
    return {name: tensor.view(torch.uint8) for name, tensor in weight.tensors().items()}


def whole(case):
    """The weights and the optimizer after the same steps by one process: the reference."""
    weights = initial_weights(case.recipe)
    optimizer = FusedAdam(weights, backend="reference", **HYPER, **case.options)
    for step in range(STEPS):
        for weight, grad in zip(weights, gradients(step), strict=True):
            weight.grad = grad
        optimizer.step(**arguments(case))
    return weights, optimizer


def shards_of(weights, ranks, rank, group):
    bounds = [each[rank : rank + 2] for each in BOUNDS[ranks]]
    return [Float8Shard(w, *own, group) for w, own in zip(weights, bounds, strict=True)]


def give(shards, grads):
    for shard, grad in zip(shards, grads, strict=True):
        shard.grad = grad.flatten()[shard.start : shard.start + shard.numel()]


def step_case(rank, group, case):
    weights = initial_weights(case.recipe)
    shards = shards_of(weights, case.ranks, rank, group)
    optimizer = FusedAdam(shards, backend=case.backend, **HYPER, **case.options)
    for step in range(STEPS):
        give(shards, gradients(step))
        optimizer.step(**arguments(case))
    state = [optimizer.state[shard] for shard in shards]
    return {"parts": [bytes_of(weight) for weight in weights], "state": state}


def in_groups(rank, meeting):
    """Joins the others; the group of the first so many ranks, by their number."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", world_size=WORLD, rank=rank)
    return {size: dist.new_group(list(range(size))) for size in (2, 3)}


def step_cases(rank, meeting, cases, folder):
    """A rank's process."""
    groups = in_groups(rank, meeting)
    saved = {
        name: step_case(rank, groups[case.ranks], case)
        for name, case in cases.items()
        if rank < case.ranks
    }
    torch.save(saved, f"{folder}/{rank}")
    dist.destroy_process_group()
