"""One training step, for any optimizer that owns a model's weights."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from megaopt.commands.bits import Snapshot
from megaopt.commands.config import OptimizerConfig
from megaopt.commands.training.model import GPT
from megaopt.float8 import scaled_matmul


class WeightOwner(Protocol):
    """Whatever updates a model's weights from its gradients."""

    def step(self, learning_rate: float) -> None:
        """Updates state and weights from the gradients that the model's parameters hold."""

    def snapshot(self) -> Snapshot:
        """Weights and state in whole tensors, without a copy where they lie so already."""

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights that a resumed run needs."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; the model's weights are in place already."""


def weight_decay_of(parameter: torch.Tensor, config: OptimizerConfig) -> float:
    """The decay of one parameter: matrices decay, norm weights do not."""
    return config.weight_decay if parameter.ndim >= 2 else 0.0


class Trainer:
    """A model and the owner of its weights, advanced one batch at a time.

    Args:
        model: what is trained.
        owner: of its weights.
        config: the hyper-parameters.
        scaled: whether fp8 weights multiply by `megaopt.float8.scaled_matmul`.
    """

    def __init__(
        self, model: GPT, owner: WeightOwner, config: OptimizerConfig, scaled: bool = False
    ) -> None:
        self.model = model
        self.owner = owner
        self.config = config
        self.scaled = scaled
        self.steps_done = 0

    def train_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        """Trains on a batch; the loss before the update, an fp32 value in nats."""
        device = next(self.model.parameters()).device
        inputs, targets = (tensor.to(device) for tensor in batch)
        with scaled_matmul(self.scaled):
            loss = self.model(inputs, targets)
        loss.backward()
        self.steps_done += 1
        self.owner.step(self.config.learning_rate_at(self.steps_done))
        self.model.zero_grad(set_to_none=True)
        return float(loss.item())

    def state_dict(self) -> dict[str, Any]:
        """Step count, weights and optimizer state."""
        return {
            "step": self.steps_done,
            "model": self.model.state_dict(),
            "optimizer": self.owner.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.model.load_state_dict(state_dict["model"])
        self.owner.load_state_dict(state_dict["optimizer"])
        self.steps_done = state_dict["step"]
