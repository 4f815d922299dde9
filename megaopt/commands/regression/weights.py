"""Owners of a model's weights: an optimizer, of the parameters as they are or of pieces of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from megaopt.commands.config import OptimizerConfig
from megaopt.commands.regression.parts import Part, part
from megaopt.float8 import Float8Weight


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What an optimizer is given of a parameter."""

    name: str
    """Name of the parameter in the model."""
    source: nn.Parameter
    """The model's parameter."""
    tensor: torch.Tensor
    """The parameter itself; or a view, shard or master of elements start to stop of it."""
    start: int
    stop: int

    def take_gradient(self) -> None:
        """Gives the tensor its part of the parameter's gradient, in its own dtype."""
        if self.tensor is not self.source and self.source.grad is not None:
            grad = self.source.grad.view(-1)[self.start : self.stop]
            self.tensor.grad = grad.to(self.tensor.dtype).view(self.tensor.shape)


def whole_pieces(model: nn.Module) -> list[Piece]:
    """The parameters as they are."""
    return [Piece(name, p, p, 0, p.numel()) for name, p in model.named_parameters()]


def weight_decay_of(parameter: torch.Tensor, config: OptimizerConfig) -> float:
    """The decay of one parameter: matrices decay, norm weights do not."""
    return config.weight_decay if parameter.ndim >= 2 else 0.0


def group_pieces(
    pieces: Iterable[Piece], config: OptimizerConfig, ways: int = 1
) -> list[dict[str, Any]]:
    """Param groups: pieces that decay and pieces that do not, each kind dealt out `ways` ways."""
    groups: dict[tuple[float, int], list[torch.Tensor]] = {}
    for number, piece in enumerate(pieces):
        key = (weight_decay_of(piece.source, config), number % ways)
        groups.setdefault(key, []).append(piece.tensor)
    return [{"params": params, "weight_decay": decay} for (decay, _), params in groups.items()]


class OptimizerWeights:
    """Updates a model's weights from its gradients by an optimizer of their pieces."""

    optimizer: Any
    pieces: list[Piece]
    """Those of a parameter follow each other."""

    def step(self, learning_rate: float) -> None:
        """Updates state and weights from the gradients that the model's parameters hold."""
        for piece in self.pieces:
            piece.take_gradient()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        for piece in self.pieces:
            piece.tensor.grad = None

    def weights_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        """What is recorded of a weight: itself, or what an fp8 weight is made of."""
        if not isinstance(piece.source, Float8Weight):
            return {"weight": piece.source}
        tensors = piece.source.tensors()
        return {"codes": tensors.pop("data8"), **tensors}

    def state_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        """A piece's state, by quantity."""
        raise NotImplementedError

    def parts(self) -> Iterator[Part]:
        """The weights, whole, and the state of the pieces."""
        for name, pieces in groupby(self.pieces, lambda piece: piece.name):
            for number, piece in enumerate(pieces):
                if number == 0:
                    weights = self.weights_of(piece).items()
                    yield from (part(name, *each) for each in weights)
                whole = None if piece.tensor is piece.source else piece.source.shape
                for quantity, tensor in self.state_of(piece).items():
                    yield part(name, quantity, tensor, whole, piece.start)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights that a resumed run needs."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; the model's weights are in place already."""
        self.optimizer.load_state_dict(state_dict)
