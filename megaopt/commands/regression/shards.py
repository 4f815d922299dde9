"""The step of a variant with ranks: each owns a part of every weight, as ZeRO-1 shards them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from megaopt.commands.config import FusedVariant, OptimizerConfig
from megaopt.commands.regression.fused import (
    OptimizerWeights,
    Piece,
    build_optimizer,
    group_pieces,
)
from megaopt.float8 import Float8Weight
from megaopt.float8.shard import Float8Shard


def shard_bounds(numel: int, ranks: int, number: int) -> list[int]:
    """Where the shards of a weight begin, and where the last one ends: ranks + 1 elements.

    Odd elements, so that shards are not aligned, and shares from 0 up to `ranks` that take turns
    with the weight's number, so that some ranks own nothing of it.
    """
    shares = [(rank + number) % (ranks + 1) for rank in range(ranks)] if ranks > 1 else [1]
    bounds = [0]
    for rank in range(ranks):
        upto = sum(shares[: rank + 1])
        place = numel if upto == sum(shares) else min(numel, numel * upto // sum(shares) | 1)
        bounds.append(place if upto else 0)
    return bounds


def shard_of(name: str, parameter: nn.Parameter, start: int, stop: int) -> Piece:
    """What a rank's optimizer is given of a weight."""
    tensor: torch.Tensor
    if isinstance(parameter, Float8Weight):
        tensor = Float8Shard(parameter, start, stop, dist.group.WORLD)
    else:
        tensor = nn.Parameter(parameter.detach().view(-1)[start:stop])
    return Piece(name=name, source=parameter, tensor=tensor, start=start, stop=stop)


def memory_of(parameter: torch.Tensor) -> torch.Tensor:
    """The elements of a weight as they lie: codes, where it is fp8."""
    held = parameter.data8 if isinstance(parameter, Float8Weight) else parameter.detach()
    return held.view(-1)


class ShardedWeights(OptimizerWeights):
    """Owns a rank's shards of a model's weights through FusedAdam, and gathers the others'.

    Args:
        model: the same on every rank of the default process group, with the same gradients.
        config: the hyper-parameters.
        variant: with ranks.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, variant: FusedVariant) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        parameters = dict(model.named_parameters())
        self.bounds = [
            shard_bounds(parameter.numel(), self.ranks, number)
            for number, parameter in enumerate(parameters.values())
        ]
        self.pieces = [
            shard_of(name, parameter, bounds[self.rank], bounds[self.rank + 1])
            for (name, parameter), bounds in zip(parameters.items(), self.bounds, strict=True)
        ]
        self.optimizer = build_optimizer(group_pieces(self.pieces, config, ways=1), config, variant)

    def step(self, learning_rate: float) -> None:
        """Updates this rank's shards, then gathers the weights."""
        super().step(learning_rate)
        self._gather()
        for piece in self.pieces:
            if isinstance(piece.source, Float8Weight):
                piece.source.values_changed()

    def _gather(self) -> None:
        """Completes the weights, of which each rank has its shards in place, in one collective."""
        parts = [self._parts(rank) for rank in range(self.ranks)]
        sizes = [sum(part.numel() for part in own) for own in parts]
        own = torch.cat(parts[self.rank])
        # as many bytes from every rank as the largest has: gloo wants them equal
        mine = torch.nn.functional.pad(own, (0, max(sizes) - len(own)))
        received = [torch.zeros_like(mine) for _ in parts]
        dist.all_gather(received, mine)
        for places, data in zip(parts, received, strict=True):
            for place in places:
                place.copy_(data[: place.numel()])
                data = data[place.numel() :]

    def _parts(self, rank: int) -> list[torch.Tensor]:
        """The bytes of a rank's shards of the weights, views."""
        return [
            memory_of(piece.source)[bounds[rank] : bounds[rank + 1]].view(torch.uint8)
            for piece, bounds in zip(self.pieces, self.bounds, strict=True)
        ]
