"""Variants that GaLoreAdamW trains: matrices by projections of their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megaopt import GaLoreAdamW
from megaopt.commands.config import GaLoreConfig, GaLoreVariant, OptimizerConfig
from megaopt.commands.regression.fused import OptimizerWeights, Piece, whole_pieces
from megaopt.commands.regression.unfused import weight_decay_of

KEPT = ("projection", "captured_energy")


class GaLoreWeights(OptimizerWeights):
    """Owns a model's weights through GaLoreAdamW, as a variant says."""

    optimizer: GaLoreAdamW

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        galore: GaLoreConfig,
        variant: GaLoreVariant,
    ) -> None:
        self.pieces = [p for item in model.named_parameters() for p in whole_pieces(*item)]
        self.optimizer = GaLoreAdamW(
            self._groups(config, galore, ways=1 if variant.layout == "whole" else 3),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            dtype=torch.float32,
            rank=galore.rank,
            update_proj_gap=galore.update_proj_gap,
            scale=galore.scale,
            refresh=galore.refresh,
            stagger=galore.stagger,
            bias_correction=config.bias_correction,
            kernel=variant.kernel,
        )

    def _groups(
        self, config: OptimizerConfig, galore: GaLoreConfig, ways: int
    ) -> list[dict[str, Any]]:
        """Param groups by decay, each dealt out `ways` ways, from the last parameter on with more.

        Parameters keep their place in the model as their number; vectors have no rank.
        """
        groups: dict[tuple[float, int], dict[str, Any]] = {}
        numbered = list(enumerate(self.pieces))
        for number, piece in numbered if ways == 1 else reversed(numbered):
            decay = weight_decay_of(piece.source, config)
            own = groups.setdefault(
                (decay, number % ways), {"params": [], "param_numbers": [], "weight_decay": decay}
            )
            own["params"].append(piece.tensor)
            own["param_numbers"].append(number)
        return list(groups.values())

    def state_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        """A parameter's state, its projection included."""
        state = self.optimizer.state[piece.tensor]
        return super().state_of(piece) | {name: state[name] for name in KEPT if name in state}
