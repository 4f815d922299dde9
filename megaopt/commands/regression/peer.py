"""Baselines of other libraries: their own optimizer owns the model's weights."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from megaopt.commands.config import OptimizerConfig, PeerVariant
from megaopt.commands.regression.fused import (
    QUANTITIES,
    OptimizerWeights,
    Piece,
    group_pieces,
    whole_pieces,
)


def transformer_engine(groups: list[dict[str, Any]], config: OptimizerConfig) -> Any:
    """TransformerEngine's FusedAdam with fp32 masters; ImportError where it is not installed."""
    optimizers = import_module("transformer_engine.pytorch.optimizers")
    return optimizers.FusedAdam(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        bias_correction=config.bias_correction,
        adam_w_mode=config.adam_w_mode,
        master_weights=True,
    )


LIBRARIES = {"transformer_engine": transformer_engine}


class PeerWeights(OptimizerWeights):
    """Owns a model's weights through another library's optimizer."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, variant: PeerVariant) -> None:
        self.pieces = [p for item in model.named_parameters() for p in whole_pieces(*item)]
        self.optimizer = LIBRARIES[variant.library](group_pieces(self.pieces, config, 1), config)

    def state_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        """The state as it is; an fp32 weight is its own master."""
        own = dict(QUANTITIES)
        if piece.source.dtype == torch.float32:
            del own["master"]
        state = self.optimizer.state[piece.tensor]
        return {quantity: state[kind] for quantity, kind in own.items()}
