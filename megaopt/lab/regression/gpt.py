"""The GPT of megaopt.lab.training as a regression trains it, with any owner of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from megaopt.float8 import RECIPES, scaled_matmul, to_float8
from megaopt.lab.config import (
    FusedVariant,
    GaLoreVariant,
    MuonVariant,
    PeerVariant,
    RunConfig,
    UnfusedVariant,
    Variant,
)
from megaopt.lab.regression.fake_quantize import FakeQuantizedLinear
from megaopt.lab.regression.fused import fused, galore, muon, peer
from megaopt.lab.regression.parts import Part
from megaopt.lab.regression.unfused import UnfusedWeights
from megaopt.lab.regression.weights import OptimizerWeights
from megaopt.lab.source import about_file
from megaopt.lab.toml_tables import ConfigError
from megaopt.lab.training.model import build_model
from megaopt.lab.training.text import batches_of, load_corpus
from megaopt.recording.files import hexadecimal
from megaopt.recording.pair import differences, flat
from megaopt.saving import checkpoint

if TYPE_CHECKING:
    from megaopt.lab.regression.processes import RankTask


class GptTraining:
    """A model and the owner of its weights; all variants of a config start with the same bits.

    Args:
        config: the run.
        variant: one of it; those with ranks have met in the default process group.
        device: where to train.

    Raises:
        ConfigError: the variant cannot run here, its backend being absent, say.
    """

    def __init__(self, config: RunConfig, variant: Variant, device: torch.device) -> None:
        self.config, self.variant, self.device = config, variant, device
        self.batches = batches_of(config, load_corpus())
        self.model = build_model(config.model, config.seed, device)
        self.scaled = config.float8 is not None and config.float8.scaled_matmul
        if variant.recipe is not None and not isinstance(variant, UnfusedVariant):
            to_float8(self.model, RECIPES[variant.recipe], filter=in_a_block)
        elif variant.recipe is not None:  # a baseline's weights are cast to fp8 at every use
            for name, layer in list(self.model.named_modules()):
                if in_a_block(name, layer):
                    owner, _, attribute = name.rpartition(".")
                    replacement = FakeQuantizedLinear(layer.weight, variant.recipe, self.scaled)
                    setattr(self.model.get_submodule(owner), attribute, replacement)
        try:
            self.owner: OptimizerWeights = OWNERS[type(variant)](self.model, config, variant)
        except (ValueError, ImportError, RuntimeError) as error:
            raise ConfigError(f"variant = {variant.name!r} cannot run here: {error}") from error
        self.steps_done = 0

    def step(self, number: int) -> dict[str, Any]:
        """Trains on a step's batch; the loss is that before the update, in nats."""
        inputs, targets = (tensor.to(self.device) for tensor in self.batches.at(number))
        with scaled_matmul(self.scaled):
            loss = self.model(inputs, targets)
        loss.backward()
        config, rate = self.config.optimizer, self.config.optimizer.learning_rate
        if number < config.warmup_steps:
            rate = rate * number / config.warmup_steps
        self.owner.step(rate)
        self.model.zero_grad(set_to_none=True)
        self.steps_done = number
        return {"losses": [hexadecimal(loss.item())], "grad_norm": None}

    def parts(self) -> Iterator[Part]:
        """Weights and state."""
        return self.owner.parts()

    def about(self) -> dict[str, Any]:
        """The variant."""
        return {"variant": self.variant.model_dump()}

    def save(self, path: Path) -> None:
        """Writes a checkpoint; an OSError names it."""
        state = {"step": self.steps_done, "model": self.model.state_dict()}
        state["optimizer"] = self.owner.state_dict()
        try:
            checkpoint.save(path, {"run": describe(self.config, self.variant), "training": state})
        except OSError as error:
            raise about_file(error, path) from error

    def load(self, path: Path, check: bool = False) -> None:
        """Continues a checkpoint.

        Args:
            path: of `save`'s.
            check: whether the checkpoint may be of another run or variant, to be refused.

        Raises:
            ConfigError: the checkpoint is of another run.
            CheckpointError: the file cannot be read.
        """
        payload = checkpoint.load(path)
        if check:
            saved, expected = payload.get("run"), describe(self.config, self.variant)
            if not isinstance(saved, dict) or "training" not in payload:
                allowed = "a checkpoint of `megaopt train`"
                raise ConfigError(f"resume must be {allowed}, got {str(path)!r}")
            for key, expected_value, saved_value in differences(flat(expected), flat(saved)):
                raise ConfigError(
                    f"resume must be a checkpoint of this run, whose {key} is {expected_value!r}, "
                    f"got {str(path)!r}, whose {key} is {saved_value!r}"
                )
        state = payload["training"]
        self.model.load_state_dict(state["model"])
        self.owner.load_state_dict(state["optimizer"])
        self.steps_done = state["step"]


def in_a_block(name: str, module: nn.Module) -> bool:
    """The linear layers of the blocks; the output matrix, which is the embedding, stays bf16."""
    return isinstance(module, nn.Linear) and name.startswith("blocks.")


OWNERS: dict[type, Any] = {
    UnfusedVariant: lambda model, run, variant: UnfusedWeights(model, run.optimizer, variant),
    PeerVariant: peer,
    FusedVariant: fused,
    GaLoreVariant: galore,
    MuonVariant: muon,
}
"""The functions that make of a model, a run and a variant the owner of the weights."""


def build(task: RankTask) -> GptTraining:
    """The training of a rank's process, which meets the others where its variant has ranks."""
    run, variant = task.run, task.job.variant
    assert isinstance(run, RunConfig)
    assert isinstance(variant, Variant)
    if getattr(variant, "ranks", None) is not None:
        ranks, rank = task.job.ranks, task.rank
        dist.init_process_group("gloo", task.meeting, world_size=ranks, rank=rank)
    return GptTraining(run, variant, torch.device(task.device))


def describe(config: RunConfig, variant: Variant) -> dict[str, Any]:
    """Returns what must be the same where a checkpoint is loaded: all that its bits depend on."""
    description = config.model_dump(
        include={"seed", "batch_size", "model", "optimizer", "float8", "galore"}
    )
    return description | {"variant": variant.model_dump()}
