"""The step of a variant with ranks: each owns a part of every weight, as ZeRO-1 shards them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from megaopt.commands.bits import Snapshot
from megaopt.commands.config import FusedVariant, OptimizerConfig
from megaopt.commands.regression.float8 import weight_tensors
from megaopt.commands.regression.fused import (
    STATE_KINDS,
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


def shard_of(
    name: str, parameter: nn.Parameter, bounds: Sequence[int], rank: int, group: dist.ProcessGroup
) -> Piece:
    """What a rank's optimizer is given of a weight."""
    start, stop = bounds[rank], bounds[rank + 1]
    tensor: torch.Tensor
    if isinstance(parameter, Float8Weight):
        tensor = Float8Shard(parameter, start, stop, group)
    else:
        tensor = nn.Parameter(parameter.detach().view(-1)[start:stop])
    return Piece(name=name, source=parameter, tensor=tensor, start=start, stop=stop)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, one-dimensional; a view."""
    return tensor.view(-1).view(torch.uint8)


def memory_of(parameter: torch.Tensor) -> torch.Tensor:
    """The elements of a weight as they lie: codes, where it is fp8."""
    held = parameter.data8 if isinstance(parameter, Float8Weight) else parameter.detach()
    return held.view(-1)


class ShardedWeights(OptimizerWeights):
    """Owns a rank's shards of a model's weights through FusedAdam, and gathers the others'.

    Args:
        model: the same on every rank, with the same gradients.
        config: the hyper-parameters.
        variant: with ranks.
        group: of its ranks; this process is one of them.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        variant: FusedVariant,
        group: dist.ProcessGroup,
    ) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.parameters = dict(model.named_parameters())
        self.bounds = {
            name: shard_bounds(parameter.numel(), self.ranks, number)
            for number, (name, parameter) in enumerate(self.parameters.items())
        }
        self.pieces = {
            name: shard_of(name, parameter, self.bounds[name], self.rank, group)
            for name, parameter in self.parameters.items()
        }
        groups = group_pieces(list(self.pieces.values()), config, ways=1)
        self.optimizer = build_optimizer(groups, config, variant)

    def step(self, learning_rate: float) -> None:
        """Updates this rank's shards, then gathers the weights."""
        for piece in self.pieces.values():
            piece.take_gradient()
        self._step(learning_rate)
        self.optimizer.zero_grad(set_to_none=True)
        self._gather({name: memory_of(p) for name, p in self.parameters.items()})
        for parameter in self.parameters.values():
            if isinstance(parameter, Float8Weight):
                parameter.values_changed()

    def _gather(self, whole: dict[str, torch.Tensor]) -> None:
        """Completes flat tensors, of which each rank has its shard in place, in one collective."""
        parts = [self._parts(whole, rank) for rank in range(self.ranks)]
        sizes = [sum(part.numel() for part in own) for own in parts]
        device = next(iter(whole.values())).device
        # as many bytes from every rank as the largest has: gloo wants them equal
        received = [torch.zeros(max(sizes), dtype=torch.uint8, device=device) for _ in parts]
        own = torch.cat(parts[self.rank])
        mine = torch.nn.functional.pad(own, (0, max(sizes) - len(own)))
        dist.all_gather(received, mine, group=self.group)
        for places, data in zip(parts, received, strict=True):
            for place in places:
                place.copy_(data[: place.numel()])
                data = data[place.numel() :]

    def _parts(self, whole: dict[str, torch.Tensor], rank: int) -> list[torch.Tensor]:
        """The bytes of a rank's shards, views."""
        bounds = {name: self.bounds[name.split(" ")[0]] for name in whole}
        return [
            as_bytes(tensor[bounds[name][rank] : bounds[name][rank + 1]])
            for name, tensor in whole.items()
        ]

    def weights(self) -> Snapshot:
        """The weights, as this rank has them."""
        return {name: weight_tensors(parameter) for name, parameter in self.parameters.items()}

    def snapshot(self) -> Snapshot:
        """The weights and the state, gathered; for all ranks to call together."""
        result, whole = self.weights(), {}
        for name, piece in self.pieces.items():
            for kind in STATE_KINDS:
                own = self.optimizer.state[piece.tensor][kind]
                if own is not None:
                    tensor = own.new_zeros(piece.source.numel())
                    tensor[piece.start : piece.stop] = own
                    whole[f"{name} {kind}"] = tensor
                    result[name][kind] = tensor.view(piece.source.shape)
        self._gather(whole)
        return result
