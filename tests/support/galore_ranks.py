"""What ranks do in the tests of GaLore's DTensors: real fully_shard, on CPUs, over gloo."""

import fsdp2_ranks as ranks
import torch
from fsdp2_ranks import (
    give,
    gradients,
    snapshot,
)
from galore_cases import GAP as TWINS_GAP
from galore_cases import Twin
from muon_ranks import placed
from runs import values
from torch.utils._python_dispatch import TorchDispatchMode

from megaopt import GaLoreAdamW

SHAPES = [(24, 10), (7, 6), (9,), (6, 30), (4, 40), (12, 12)]
"""Tall, wide and square; even and uneven on 2 and 3 ranks, the fifth empty on the last of 3."""
GAP, RANK = 3, 3
NUMBERS = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}
RANKED = {"rank": RANK, "update_proj_gap": GAP, "scale": 0.25, "proj_type": "auto"}


def ranked(options):
    """A GaLoreAdamW's, as fsdp2_ranks takes them."""
    return {**NUMBERS, **RANKED, "optimizer": GaLoreAdamW, **options}


def build(options, replicas=1, shapes=SHAPES):
    """A model and its GaLoreAdamW; without a process group a whole one."""
    return ranks.build(ranked(options), replicas, shapes=shapes)


def trained(options, steps, replicas=1, shapes=SHAPES, **step):
    return ranks.trained(ranked(options), steps, replicas, shapes, **step)


def placed_galore(options, steps, *placed_as, **named):
    """`placed` with a GaLoreAdamW."""
    return placed(ranked({**options, "optimizer": GaLoreAdamW}), steps, *placed_as, **named)


def save(options, steps, folder, flat, shapes=SHAPES):
    return ranks.save(ranked(options), steps, folder, flat, shapes)


def load_and_train(options, steps, first, folder, flat, shapes=SHAPES):
    """The seed too is the checkpoint's."""
    own = ranked({**options, "seed": 5})
    return ranks.load_and_train(own, steps, first, folder, flat, shapes)


def refreshed_by_hand(options, steps):
    """With capturable: a refresh before each step."""
    model, optimizer = build({**options, "capturable": True})
    params = list(model.parameters())
    for number in range(steps):
        give(params, gradients(number, [tuple(p.shape) for p in params]))
        optimizer.refresh(None if number % 2 else number)
        optimizer.step()
    return snapshot(optimizer)


class Bytes(TorchDispatchMode):
    """Counts what this rank hands to collectives, whatever they are."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            place = 1 if "alltoall" in func._schema.name else 0  # which has its output first
            tensors = torch.utils._pytree.tree_leaves(args[place])
            self.count += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


def bytes_of_a_refresh(shape, number, is_first, low, rank, world, replicas):
    """The rows of ranks that send the maker theirs, fp32; projection and energy come back to all.

    A maker has copies of some rows.
    """
    asked = 4 if is_first else 0  # whether the gradient can make a projection
    shards = world // replicas
    most = -(-shape[0] // shards)
    rows = max(0, min(most, shape[0] - rank % shards * most))
    gives = rank // shards == number % world // shards
    return gives * 4 * rows * shape[1] + 4 * (low * shape[1] + 1) + asked


MESSAGE = 8 * (16 * 16 * 2 + 4)
"""Bytes of the message in which ranks compare what they are going to step, at the first step."""


def bytes_by_turns(steps, stagger, rank, world, replicas=1, shapes=SHAPES, low=RANK):
    """For each step what a rank hands others: refreshes whose turn it is; at first a message."""
    found = []
    for step in range(steps):
        due = [
            (shape, number, step == 0)
            for number, shape in enumerate(shapes)
            if len(shape) == 2 and (step == 0 or step % GAP == (number % GAP if stagger else 0))
        ]
        layout = (low, rank, world, replicas)
        found.append(sum(bytes_of_a_refresh(*each, *layout) for each in due))
    found[0] += MESSAGE * min(replicas, 2)  # one for each dimension of the mesh
    return found


# --- against fp64


def exact_weights(steps, stagger, shapes=SHAPES, rank=RANK):
    """Of the matrices, in fp64, by the twin."""
    assert TWINS_GAP == GAP
    group, found = {**NUMBERS, "betas": (0.9, 0.999), "bias_correction": True, "scale": 0.25}, []
    for number, shape in enumerate(shapes):
        if len(shape) == 2:
            turn = number if stagger else 0
            weight, how = values(shape, number).double(), {"refresh": "subspace", "number": turn}
            twin = Twin(weight, "right", rank, group, **how)
            for step in range(steps):
                twin.step(gradients(step, shapes)[number].double())
            found.append(twin.weight)
    return found


def norm_of_errors(found, exact):
    pairs = zip(found, exact, strict=True)
    return sum((own.double() - other).square().sum() for own, other in pairs).sqrt()
