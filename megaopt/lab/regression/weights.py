"""Owners of a model's weights: an optimizer, of the parameters as they are or of pieces of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from megaopt.float8 import Float8Weight
from megaopt.lab.config import OptimizerConfig
from megaopt.lab.regression.parts import Part, part

QUANTITIES = {
    "master_param": "master",
    **{name: name for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")},
}
"""The names of a state's tensors that are recorded in fp32, by their keys in the state."""
BESIDE = ("projection", "captured_energy")
"""The keys of a state's tensors that are recorded as they are."""


@dataclass(frozen=True, slots=True, eq=False)
class ParameterPiece:
    """A parameter, or a piece of it, as an optimizer is given it."""

    name: str
    """Name of the parameter in the model."""
    source: nn.Parameter
    """The model's parameter."""
    tensor: torch.Tensor
    """The parameter itself; or a view, shard or master of elements of it that lie together."""
    start: int = 0
    """The first of these elements."""

    def take_gradient(self) -> None:
        """Gives the tensor its part of the parameter's gradient, in its own dtype."""
        if self.tensor is not self.source and self.source.grad is not None:
            grad = self.source.grad.view(-1)[self.start : self.start + self.tensor.numel()]
            self.tensor.grad = grad.to(self.tensor.dtype).view(self.tensor.shape)

    def spread(self) -> None:
        """Completes the parameter after a step from what this rank and the others have of it."""


def whole_pieces(model: nn.Module) -> list[ParameterPiece]:
    """The parameters as they are."""
    return [ParameterPiece(name, p, p) for name, p in model.named_parameters()]


def group_pieces(
    pieces: Iterable[ParameterPiece], config: OptimizerConfig, ways: int = 1
) -> list[dict[str, Any]]:
    """Param groups: matrices, which decay, and norm weights, each kind dealt out `ways` ways."""
    groups: dict[tuple[float, int], list[torch.Tensor]] = {}
    for number, piece in enumerate(pieces):
        decay = config.weight_decay if piece.source.ndim >= 2 else 0.0
        groups.setdefault((decay, number % ways), []).append(piece.tensor)
    return [{"params": params, "weight_decay": decay} for (decay, _), params in groups.items()]


class OptimizerWeights:
    """Updates a model's weights from its gradients by an optimizer of their pieces.

    Args:
        pieces: those of a parameter follow each other.
        optimizer: a torch.optim.Optimizer of the pieces' tensors.
    """

    def __init__(self, pieces: list[ParameterPiece], optimizer: Any) -> None:
        self.pieces, self.optimizer = pieces, optimizer

    def step(self, learning_rate: float) -> None:
        """Updates state and weights from the gradients that the model's parameters hold."""
        for piece in self.pieces:
            piece.take_gradient()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        for piece in self.pieces:
            piece.tensor.grad = None
            piece.spread()

    def weights_of(self, piece: ParameterPiece) -> dict[str, torch.Tensor]:
        """Returns the recorded tensors of a weight: itself, or those that make up an fp8 weight."""
        if not isinstance(piece.source, Float8Weight):
            return {"weight": piece.source}
        tensors = piece.source.tensors()
        return {"codes": tensors.pop("data8"), **tensors}

    def state_of(self, piece: ParameterPiece) -> dict[str, torch.Tensor]:
        """A piece's state by quantity, in fp32 whatever format stores it.

        An fp32 weight is its own master. Of DTensors every rank gathers the whole.
        """
        state, quantities = self.optimizer.state[piece.tensor], dict(QUANTITIES)
        if piece.source.dtype == torch.float32:
            del quantities["master_param"]
        tensors: dict[str, Any] = {
            quantity: self.optimizer.get_unscaled_state(piece.tensor, kind)
            for kind, quantity in quantities.items()
            if state.get(kind) is not None
        }
        tensors |= {name: state[name] for name in BESIDE if name in state}
        return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}

    def parts(self) -> Iterator[Part]:
        """The weights, whole, and the state of the pieces."""
        for name, pieces in groupby(self.pieces, lambda piece: piece.name):
            for number, piece in enumerate(pieces):
                if number == 0:
                    weights = self.weights_of(piece).items()
                    yield from (part(name, *entry) for entry in weights)
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
