"""The variants under test: FusedAdam on a model's parameters, in whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from megaopt import FusedAdam
from megaopt.commands.config import FusedVariant, OptimizerConfig
from megaopt.commands.regression.float8 import initial_master, weight_tensors
from megaopt.commands.regression.parts import Part, part
from megaopt.commands.regression.unfused import weight_decay_of

QUANTITIES = {"master": "master_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""What is recorded of a state, and what FusedAdam calls it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """What the optimizer is given: a parameter of the model, or a flat view of a part of it."""

    name: str
    """Name of the parameter in the model."""
    source: nn.Parameter
    """The model's parameter."""
    tensor: torch.Tensor
    """The parameter itself, or a view, or shard, of elements start to stop of its memory."""
    start: int
    stop: int

    def take_gradient(self) -> None:
        """Points the view's gradient into the gradient of the model's parameter."""
        if self.tensor is not self.source:
            gradient = self.source.grad
            part = None if gradient is None else gradient.view(-1)[self.start : self.stop]
            self.tensor.grad = part


def whole_pieces(name: str, parameter: nn.Parameter) -> Iterator[Piece]:
    """The parameter as it is."""
    yield Piece(name=name, source=parameter, tensor=parameter, start=0, stop=parameter.numel())


def unaligned_pieces(name: str, parameter: nn.Parameter) -> Iterator[Piece]:
    """Two flat views like the shards of a distributed optimizer.

    They meet at an odd element, so that the second is not aligned to 16 bytes, while the model goes
    on computing with the whole, aligned weight: its products are those of the other variants.
    """
    flat = parameter.detach().view(-1)
    middle = min(flat.numel(), flat.numel() // 2 | 1)
    for start, stop in ((0, middle), (middle, flat.numel())):
        view = nn.Parameter(flat[start:stop])
        yield Piece(name=name, source=parameter, tensor=view, start=start, stop=stop)


def group_pieces(
    pieces: Sequence[Piece], config: OptimizerConfig, ways: int
) -> list[dict[str, Any]]:
    """Param groups: pieces that decay and pieces that do not, each kind dealt out `ways` ways."""
    groups: dict[tuple[float, int], list[torch.Tensor]] = {}
    for number, piece in enumerate(pieces):
        key = (weight_decay_of(piece.source, config), number % ways)
        groups.setdefault(key, []).append(piece.tensor)
    return [{"params": params, "weight_decay": decay} for (decay, _), params in groups.items()]


def build_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig, variant: FusedVariant
) -> FusedAdam:
    """FusedAdam as a config and a variant say."""
    remainders = variant.masters == "remainders"
    return FusedAdam(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        dtype=None if remainders else torch.float32,
        master_weights=True if remainders else None,
        store_param_remainders=remainders,
        bias_correction=config.bias_correction,
        adam_w_mode=config.adam_w_mode,
        contract=variant.contract,
        backend=variant.backend,
    )


class OptimizerWeights:
    """Owns a model's weights through an optimizer of their pieces."""

    optimizer: Any
    pieces: list[Piece]
    """Those of a parameter follow each other."""

    def step(self, learning_rate: float) -> None:
        """Updates state and weights in the optimizer's own step."""
        for piece in self.pieces:
            piece.take_gradient()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        for piece in self.pieces:
            piece.tensor.grad = None

    def state_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        """A piece's state in fp32, whatever format stores it."""
        state = self.optimizer.state[piece.tensor]
        return {
            quantity: self.optimizer.get_unscaled_state(piece.tensor, kind)
            for quantity, kind in QUANTITIES.items()
            if state[kind] is not None
        }

    def parts(self) -> Iterator[Part]:
        """The weights, whole, and the state of the pieces."""
        for name, pieces in groupby(self.pieces, lambda piece: piece.name):
            for number, piece in enumerate(pieces):
                if number == 0:
                    weights = weight_tensors(piece.source)
                    yield from (part(name, *each) for each in weights.items())
                whole = None if piece.tensor is piece.source else piece.source.shape
                for quantity, tensor in self.state_of(piece).items():
                    yield part(name, quantity, tensor, whole, piece.start)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's own, exact to the bit."""
        self.optimizer.load_state_dict(state_dict)


class FusedWeights(OptimizerWeights):
    """Owns a model's weights through FusedAdam, as a variant says."""

    optimizer: FusedAdam

    def __init__(self, model: nn.Module, config: OptimizerConfig, variant: FusedVariant) -> None:
        in_views = variant.layout == "groups_and_views"
        split = unaligned_pieces if in_views else whole_pieces
        self.pieces = [p for item in model.named_parameters() for p in split(*item)]
        groups = group_pieces(self.pieces, config, ways=2 if in_views else 1)
        self.optimizer = build_optimizer(groups, config, variant)
        self.masters: list[torch.Tensor | None] | None = None
        if variant.masters == "external":
            # assigned after construction, as Megatron does
            self.masters = [
                None if parameter.dtype == torch.float32 else initial_master(parameter)
                for parameter in self._in_group_order()
            ]
            self.optimizer.master_weights = self.masters

    def _in_group_order(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(self, learning_rate: float) -> None:
        """Updates state and weights in FusedAdam's one pass; masters of ours must stay ours."""
        super().step(learning_rate)
        if self.masters is not None:
            for parameter, master in zip(self._in_group_order(), self.masters, strict=True):
                if self.optimizer.state[parameter]["master_param"] is not master:
                    raise RuntimeError("FusedAdam replaced a master of the list it was given")
