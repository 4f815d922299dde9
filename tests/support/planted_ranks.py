"""One rank of three whose torch calls fail, one after the other, where a step takes memory."""

import fsdp2_ranks
import torch
import torch.distributed as dist
from float8_ranks import HYPER, WORLD, bytes_of, give, gradients, initial_weights, shards_of
from planted import FailsAt, Planted
from runs import BF16, FP32, assert_same, copied

from megaopt import FusedAdam
from megaopt.float8 import RECIPES
from megaopt.params.dtensor import locals_of

FSDP2 = {"lr": 0.01, "weights": BF16, "dtype": FP32}


class Shards:
    """FSDP2's parameters and their optimizer, on this rank."""

    def __init__(self, **arguments):
        self.model, self.optimizer = fsdp2_ranks.build(FSDP2)
        self.arguments = arguments

    def give(self, number):
        fsdp2_ranks.give(self.model.parameters(), fsdp2_ranks.gradients(number, dtype=BF16))

    def step(self):
        self.optimizer.step(**self.arguments)

    def look(self):
        params = list(self.model.parameters())
        states = [dict(locals_of(self.optimizer.state[param])) for param in params]
        count = self.optimizer.param_groups[0]["step"]
        return copied([[param.to_local() for param in params], states, count])


class Float8Shards:
    """Parts of fp8 weights and their optimizer, on this rank."""

    def __init__(self, recipe, options, **arguments):
        self.weights = initial_weights(RECIPES[recipe])
        self.shards = shards_of(self.weights, WORLD, dist.get_rank(), dist.group.WORLD)
        self.optimizer = FusedAdam(self.shards, backend="reference", **HYPER, **options)
        self.arguments = arguments

    def give(self, number):
        give(self.shards, gradients(number))

    def step(self):
        self.optimizer.step(**self.arguments)

    def look(self):
        states = [dict(self.optimizer.state[shard]) for shard in self.shards]
        count = self.optimizer.param_groups[0]["step"]
        return copied([[bytes_of(weight) for weight in self.weights], states, count])


def planted(kind, who, own, arguments, start, every):
    """For calls of rank `who` that take memory, in a step each, what was raised here.

    start, every: the first of these calls, and the distance to the next.
    What a rank raised it has not done: it takes its step again.
    """
    run, found = kind(*own, **arguments), []
    run.give(0)
    run.step()
    while True:
        number = start + every * len(found)
        run.give(len(found) + 1)
        was, raised = run.look(), ""
        try:
            with FailsAt(number if dist.get_rank() == who else -1):
                run.step()
        except (Planted, ValueError) as error:
            raised = f"{type(error).__name__}: {error}"
            assert_same(run.look(), was, f"failure {number}")
            run.step()
        over = torch.tensor([int(not raised)])
        dist.broadcast(over, who)
        if over:
            break
        found.append(raised)
    after, run = run.look(), kind(*own, **arguments)
    for number in range(len(found) + 2):
        run.give(number)
        run.step()
    assert_same(run.look(), after)
    return found
