"""The variants under test: FusedAdam on a model's parameters, in whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megaopt import FusedAdam
from megaopt.commands.bits import Snapshot
from megaopt.commands.config import FusedVariant, OptimizerConfig
from megaopt.commands.regression.float8 import initial_master, weight_tensors
from megaopt.commands.training.trainer import weight_decay_of
from megaopt.float8 import Float8Weight

STATE_KINDS = ("master_param", "exp_avg", "exp_avg_sq")


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


def group_pieces(pieces: list[Piece], config: OptimizerConfig, ways: int) -> list[dict[str, Any]]:
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
    """Owns a model's weights through an optimizer."""

    optimizer: Any

    def _step(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

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
        self.names = [name for name, _ in model.named_parameters()]
        self.pieces = [p for item in model.named_parameters() for p in split(*item)]
        groups = group_pieces(self.pieces, config, ways=2 if in_views else 1)
        self.optimizer = build_optimizer(groups, config, variant)
        self.external_masters: list[torch.Tensor | None] | None = None
        if variant.masters == "external":
            self._hand_over_masters()

    def _parameters_in_group_order(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _hand_over_masters(self) -> None:
        """Assigns masters of our own after construction, as Megatron does."""
        self.external_masters = [
            None if parameter.dtype == torch.float32 else initial_master(parameter)
            for parameter in self._parameters_in_group_order()
        ]
        self.optimizer.master_weights = self.external_masters

    def _check_masters_are_ours(self) -> None:
        if self.external_masters is None:
            return
        pairs = zip(self._parameters_in_group_order(), self.external_masters, strict=True)
        for parameter, master in pairs:
            if self.optimizer.state[parameter]["master_param"] is not master:
                raise RuntimeError("FusedAdam replaced a master of the list it was given")

    def step(self, learning_rate: float) -> None:
        """Updates state and weights in FusedAdam's one pass."""
        for piece in self.pieces:
            piece.take_gradient()
        self._step(learning_rate)
        self.optimizer.zero_grad(set_to_none=True)
        self._check_masters_are_ours()

    def _state_of(self, piece: Piece, kind: str) -> torch.Tensor | None:
        """A piece's state in fp32, whatever format stores it; None where it has none."""
        if self.optimizer.state[piece.tensor][kind] is None:
            return None
        return self.optimizer.get_unscaled_state(piece.tensor, kind)

    def snapshot(self) -> Snapshot:
        """The weights and the state, in whole tensors by the model's names."""
        pieces_of: dict[str, list[Piece]] = {name: [] for name in self.names}
        for piece in self.pieces:
            pieces_of[piece.name].append(piece)
        result: Snapshot = {}
        for name, pieces in pieces_of.items():
            source = pieces[0].source.detach()
            result[name] = weight_tensors(source)
            for kind in STATE_KINDS:
                parts = [self._state_of(piece, kind) for piece in pieces]
                tensors = [part.reshape(-1) for part in parts if part is not None]
                if tensors:
                    whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
                    result[name][kind] = whole.view(source.shape)
        return result

    def flip_master_bit(self) -> None:
        """Flips the lowest mantissa bit of one element in the middle of the first fp32 master.

        An fp8 weight's, where there is one.
        """
        plain_last = sorted(self.pieces, key=lambda p: not isinstance(p.source, Float8Weight))
        for piece in plain_last:
            master = self.optimizer.state[piece.tensor]["master_param"]
            if master is not None and master.dtype == torch.float32:
                bits = master.view(torch.int32).view(-1)
                bits[bits.numel() // 2] ^= 1
                return
        raise RuntimeError("this variant holds no fp32 master")
