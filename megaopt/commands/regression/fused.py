"""The variants under test: optimizers of ours, and of other libraries, on a model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megaopt import FusedAdam, FusedMuon, GaLoreAdamW
from megaopt.commands.config import (
    FusedVariant,
    GaLoreConfig,
    GaLoreVariant,
    MatrixVariant,
    MuonVariant,
    OptimizerConfig,
    PeerVariant,
)
from megaopt.commands.regression.weights import (
    OptimizerWeights,
    Piece,
    group_pieces,
    weight_decay_of,
    whole_pieces,
)
from megaopt.float8 import Float8Weight
from megaopt.float8.shard import Float8Shard

QUANTITIES = {"master": "master_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""What is recorded of a state, and what it is called in it."""


def arguments(config: OptimizerConfig) -> dict[str, Any]:
    """The hyper-parameters, by the names that all have for them."""
    betas = (config.beta1, config.beta2)
    return {"lr": config.learning_rate, "betas": betas, "eps": config.eps}


def unaligned_pieces(model: nn.Module) -> list[Piece]:
    """Two flat views of each parameter, like the shards of a distributed optimizer.

    They meet at an odd element, so that the second is not aligned to 16 bytes, while the model goes
    on computing with the whole, aligned weight: its products are those of the other variants.
    """
    pieces = []
    for name, parameter in model.named_parameters():
        flat = parameter.detach().view(-1)
        middle = min(flat.numel(), flat.numel() // 2 | 1)
        for start, stop in ((0, middle), (middle, flat.numel())):
            pieces.append(Piece(name, parameter, nn.Parameter(flat[start:stop]), start, stop))
    return pieces


def initial_master(parameter: torch.Tensor) -> torch.Tensor | None:
    """The fp32 values that a parameter's master starts from; None for an fp32 one."""
    if isinstance(parameter, Float8Weight):
        values = parameter.high_precision_initial_value()
        return (parameter.dequantize() if values is None else values).float().clone()
    return None if parameter.dtype == torch.float32 else parameter.detach().float()


class FusedWeights(OptimizerWeights):
    """Owns a model's weights through FusedAdam, as a variant says."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, variant: FusedVariant) -> None:
        in_views = variant.layout == "groups_and_views"
        self.pieces = unaligned_pieces(model) if in_views else self._pieces(model)
        remainders = variant.masters == "remainders"
        self.optimizer = FusedAdam(
            group_pieces(self.pieces, config, ways=2 if in_views else 1),
            **arguments(config),
            dtype=None if remainders else torch.float32,
            master_weights=True if remainders else None,
            store_param_remainders=remainders,
            bias_correction=config.bias_correction,
            adam_w_mode=config.adam_w_mode,
            contract=variant.contract,
            backend=variant.backend,
        )
        self.masters: list[torch.Tensor | None] | None = None
        if variant.masters == "external":
            # assigned after construction, as Megatron does
            self.masters = [initial_master(parameter) for parameter in self._in_group_order()]
            self.optimizer.master_weights = self.masters

    def _pieces(self, model: nn.Module) -> list[Piece]:
        return whole_pieces(model)

    def _in_group_order(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(self, learning_rate: float) -> None:
        """Updates state and weights in FusedAdam's one pass; masters of ours must stay ours."""
        super().step(learning_rate)
        pairs = zip(self._in_group_order(), self.masters, strict=True) if self.masters else ()
        for parameter, master in pairs:
            if self.optimizer.state[parameter]["master_param"] is not master:
                raise RuntimeError("FusedAdam replaced a master of the list it was given")

    def state_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        """A piece's state in fp32, whatever format stores it."""
        state = self.optimizer.state[piece.tensor]
        return {
            quantity: self.optimizer.get_unscaled_state(piece.tensor, kind)
            for quantity, kind in QUANTITIES.items()
            if state[kind] is not None
        }


# --- ranks that share the step: each owns a part of every weight, as ZeRO-1 shards them


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
    return Piece(name, parameter, tensor, start, stop)


def bytes_of(parameter: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The bytes of elements of a weight as they lie, of an fp8 one its codes; a view."""
    held = parameter.data8 if isinstance(parameter, Float8Weight) else parameter.detach()
    return held.view(-1)[start:stop].view(torch.uint8)


class ShardedWeights(FusedWeights):
    """Owns a rank's shards of a model's weights through FusedAdam, and gathers the others'.

    The model is the same on every rank of the default process group, with the same gradients.
    """

    def _pieces(self, model: nn.Module) -> list[Piece]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        named = list(model.named_parameters())
        self.bounds = [shard_bounds(p.numel(), ranks, i) for i, (_, p) in enumerate(named)]
        return [
            shard_of(*item, *bounds[rank : rank + 2])
            for item, bounds in zip(named, self.bounds, strict=True)
        ]

    def step(self, learning_rate: float) -> None:
        """Updates this rank's shards, then gathers the weights."""
        super().step(learning_rate)
        self._gather()
        for piece in self.pieces:
            if isinstance(piece.source, Float8Weight):
                piece.source.values_changed()

    def _gather(self) -> None:
        """Completes the weights, of which each rank has its shards in place, in one collective."""
        owned = list(zip([piece.source for piece in self.pieces], self.bounds, strict=True))
        parts = [
            [bytes_of(parameter, *bounds[rank : rank + 2]) for parameter, bounds in owned]
            for rank in range(dist.get_world_size())
        ]
        sizes = [sum(part.numel() for part in own) for own in parts]
        own = torch.cat(parts[dist.get_rank()])
        # as many bytes from every rank as the largest has: gloo wants them equal
        mine = nn.functional.pad(own, (0, max(sizes) - len(own)))
        received = [torch.zeros_like(mine) for _ in parts]
        dist.all_gather(received, mine)
        for places, data in zip(parts, received, strict=True):
            for place in places:
                place.copy_(data[: place.numel()])
                data = data[place.numel() :]


# --- other optimizers


def transformer_engine(groups: list[dict[str, Any]], config: OptimizerConfig) -> Any:
    """TransformerEngine's FusedAdam with fp32 masters; ImportError where it is not installed."""
    return import_module("transformer_engine.pytorch.optimizers").FusedAdam(
        groups,
        **arguments(config),
        bias_correction=config.bias_correction,
        adam_w_mode=config.adam_w_mode,
        master_weights=True,
    )


LIBRARIES = {"transformer_engine": transformer_engine}


class PeerWeights(OptimizerWeights):
    """Owns a model's weights through another library's optimizer."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, variant: PeerVariant) -> None:
        self.pieces = whole_pieces(model)
        self.optimizer = LIBRARIES[variant.library](group_pieces(self.pieces, config), config)

    def state_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        """The state as it is; an fp32 weight is its own master."""
        state, own = self.optimizer.state[piece.tensor], dict(QUANTITIES)
        if piece.source.dtype == torch.float32:
            del own["master"]
        return {quantity: state[kind] for quantity, kind in own.items()}


# --- optimizers of matrices


def numbered_groups(
    pieces: Sequence[Piece], config: OptimizerConfig, layout: str
) -> list[dict[str, Any]]:
    """Param groups by decay; "groups": each three, from the last parameter on.

    Parameters keep their place in the model as their number.
    """
    groups: dict[tuple[float, int], dict[str, Any]] = {}
    numbered, ways = list(enumerate(pieces)), 1 if layout == "whole" else 3
    for number, piece in numbered if ways == 1 else reversed(numbered):
        decay = weight_decay_of(piece.source, config)
        own = groups.setdefault(
            (decay, number % ways), {"params": [], "param_numbers": [], "weight_decay": decay}
        )
        own["params"].append(piece.tensor)
        own["param_numbers"].append(number)
    return list(groups.values())


class MatrixWeights(FusedWeights):
    """Owns a model's weights, or a rank's rows of them, through an optimizer of matrices.

    With ranks the model is the same on each of the default process group, with the same gradients.
    """

    def __init__(self, model: nn.Module, variant: MatrixVariant) -> None:
        self.masters, self._has_rows = None, variant.ranks is not None
        self.pieces = rows_pieces(model) if self._has_rows else whole_pieces(model)

    def step(self, learning_rate: float) -> None:
        """Updates this rank's rows, then gathers the weights."""
        super().step(learning_rate)
        for piece in self.pieces if self._has_rows else ():
            own: Any = piece.tensor.detach()
            piece.source.detach().copy_(own.full_tensor())

    def whole(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A parameter's whole state, which every rank gathers."""
        own: Any = state
        return {n: each.full_tensor() for n, each in own.items()} if self._has_rows else state


class GaLoreWeights(MatrixWeights):
    """Owns a model's weights through GaLoreAdamW, which steps matrices by projected gradients."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        galore: GaLoreConfig,
        variant: GaLoreVariant,
    ) -> None:
        super().__init__(model, variant)
        self.optimizer = GaLoreAdamW(
            numbered_groups(self.pieces, config, variant.layout),
            **arguments(config),
            **galore.model_dump(),
            dtype=torch.float32,
            bias_correction=config.bias_correction,
            kernel=variant.kernel,
        )

    def state_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        """A parameter's state, its projection included."""
        state, kept = self.optimizer.state[piece.tensor], ("projection", "captured_energy")
        return self.whole(
            super().state_of(piece) | {name: state[name] for name in kept if name in state}
        )


class MuonWeights(MatrixWeights):
    """Owns a model's weights through FusedMuon, which leaves embeddings and norms to AdamW."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, variant: MuonVariant) -> None:
        super().__init__(model, variant)
        for piece in self.pieces:
            is_embedding = piece.name.endswith("embedding.weight")
            piece.tensor.use_muon = not is_embedding  # type: ignore[attr-defined]  # a mark
        own = arguments(config)
        self.optimizer = FusedMuon(
            numbered_groups(self.pieces, config, variant.layout),
            lr=own["lr"],
            betas=own["betas"],
            adam_eps=own["eps"],
            adjust_lr_fn="match_rms_adamw",
            dtype=torch.float32,
            precision=variant.precision,
            momentum_buffer_dtype=getattr(torch, variant.momentum, variant.momentum),
            backend=variant.backend,
        )

    def state_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        """A piece's state in fp32, by the rule that steps it."""
        state = self.optimizer.state[piece.tensor]
        names = {**QUANTITIES, "momentum_buffer": "momentum_buffer"}
        return self.whole(
            {
                quantity: self.optimizer.get_unscaled_state(piece.tensor, kind)
                for quantity, kind in names.items()
                if state.get(kind) is not None
            }
        )


class RowsPiece(Piece):
    """A parameter of which each rank has rows: `tensor` is a DTensor."""

    def take_gradient(self) -> None:
        """Gives the tensor this rank's rows of the parameter's gradient."""
        grad = self.source.grad
        self.tensor.grad = None if grad is None else rows_of(grad)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor of which each rank of the default process group has rows."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of(tensor.device.type, dist.get_world_size())
    return distribute_tensor(tensor.detach(), mesh, [Shard(0)], src_data_rank=None)


@cache
def mesh_of(device: str, ranks: int) -> Any:
    """The mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (ranks,))


def rows_pieces(model: nn.Module) -> list[Piece]:
    """This rank's rows of each parameter."""
    return [
        RowsPiece(name, parameter, nn.Parameter(rows_of(parameter)), 0, parameter.numel())
        for name, parameter in model.named_parameters()
    ]
