"""Baselines of other libraries: their own optimizer owns the model's weights."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from megaopt.commands.bits import Snapshot
from megaopt.commands.config import OptimizerConfig, PeerVariant
from megaopt.commands.regression.fused import OptimizerWeights, group_pieces, whole_pieces

MOMENTS = ("exp_avg", "exp_avg_sq")


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
        self.parameters = dict(model.named_parameters())
        pieces = [p for item in self.parameters.items() for p in whole_pieces(*item)]
        groups = group_pieces(pieces, config, ways=1)
        self.optimizer = LIBRARIES[variant.library](groups, config)

    def step(self, learning_rate: float) -> None:
        """Updates state and weights in the library's own step."""
        self._step(learning_rate)

    def snapshot(self) -> Snapshot:
        """The weights and the state; an fp32 weight is its own master."""
        result: Snapshot = {}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state[parameter]
            result[name] = {"weight": parameter.detach()}
            if parameter.dtype != torch.float32:
                result[name]["master_param"] = state["master_param"]
            result[name] |= {kind: state[kind] for kind in MOMENTS}
        return result
