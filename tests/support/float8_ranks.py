"""Steps of fp8 weights that are sharded over processes; what each of them has afterwards."""

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megaopt import FusedAdam
from megaopt.float8 import RECIPES, Float8Recipe, Float8Weight
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
    wait = timedelta(minutes=4)  # a rank that waits for ever fails
    dist.init_process_group("gloo", f"file://{meeting}", wait, world_size=WORLD, rank=rank)
    return {size: dist.new_group(list(range(size))) for size in (2, 3)}


def skipped(rank, groups, how, options):
    """Rank 0 alone has an overflow in the second of three steps: the loss of each, the bytes."""
    case = Case(WORLD, "reference", RECIPES["current"], {"dtype": torch.float32, **options})
    weights = initial_weights(case.recipe)
    shards = shards_of(weights, WORLD, rank, groups[WORLD])
    optimizer = FusedAdam(shards, backend=case.backend, **HYPER, **case.options)
    raised = False
    for step in (0, 7, 1):
        give(shards, gradients(step))
        overflow = step == 7 and rank == 0
        if how == "found_inf":
            optimizer.grad_scale, optimizer.found_inf = (
                torch.ones(()),
                torch.tensor(float(overflow)),
            )
        elif overflow:
            shards[0].grad = shards[0].grad.clone().fill_(torch.nan)
        try:
            optimizer.step()
        except FloatingPointError:
            raised = True
    counted = int(optimizer.param_groups[0]["step"])
    return {"parts": [bytes_of(weight) for weight in weights], "raised": raised, "steps": counted}


def unlike(rank, groups):
    """Rank 1 has no gradient for a weight that the others have: what each says, and its bytes."""
    weights = initial_weights(RECIPES["current"])
    shards = shards_of(weights, WORLD, rank, groups[WORLD])
    optimizer = FusedAdam(shards, backend="reference", **HYPER)
    give(shards, gradients(0))
    if rank == 1:
        shards[1].grad = None
    before = [bytes_of(weight) for weight in weights]
    try:
        optimizer.step()
        message = "no error"
    except ValueError as error:
        message = str(error)
    after = [bytes_of(weight) for weight in weights]
    same = all(torch.equal(o[k], n[k]) for o, n in zip(before, after, strict=True) for k in o)
    return {"message": message, "unchanged": same}


def several_groups(rank, groups):
    """Ranks 0 and 1 share one weight, all three another, with gradients of other dtypes."""
    weights = initial_weights(RECIPES["current"])
    shards = [shards_of(weights, 3, rank, groups[3])[1]]
    if rank < 2:
        shards.insert(0, shards_of(weights, 2, rank, groups[2])[0])
    optimizer = FusedAdam(shards, backend="reference", use_decoupled_grad=True, **HYPER)
    for step in range(STEPS):
        for shard in shards:
            grad = gradients(step)[0 if shard.weight is weights[0] else 1].flatten()
            grad = grad[shard.start : shard.start + shard.numel()]
            # the same numbers in another dtype are another batch, in another place
            shard.decoupled_grad = grad.float() if rank == 1 and shard is shards[0] else grad
        optimizer.step()
    return [bytes_of(weight) for weight in weights]


SKIPS = {
    "found_inf": ("found_inf", {}),
    "found_inf, capturable": ("found_inf", {"capturable": True}),
    "skip": ("nonfinite", {"nonfinite": "skip"}),
    "skip, capturable": ("nonfinite", {"nonfinite": "skip", "capturable": True}),
    "error": ("nonfinite", {"nonfinite": "error"}),
}


def meet_hazards(rank, meeting, folder):
    """A rank's process: what one rank does alone."""
    groups = in_groups(rank, meeting)
    saved = {name: skipped(rank, groups, *how) for name, how in SKIPS.items()}
    saved["unlike"], saved["groups"] = unlike(rank, groups), several_groups(rank, groups)
    torch.save(saved, f"{folder}/{rank}")
    dist.destroy_process_group()


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
