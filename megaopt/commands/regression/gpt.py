"""The GPT of megaopt.commands.training as a regression trains it, with any owner of its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from megaopt.commands.config import (
    ConfigError,
    FusedVariant,
    GaLoreVariant,
    PeerVariant,
    RunConfig,
    UnfusedVariant,
    Variant,
)
from megaopt.commands.regression.float8 import (
    FakeQuantizedAdam,
    fake_quantize_model,
    quantize_model,
)
from megaopt.commands.regression.fused import FusedWeights
from megaopt.commands.regression.galore import GaLoreWeights
from megaopt.commands.regression.outputs import about_file
from megaopt.commands.regression.parts import Part
from megaopt.commands.regression.peer import PeerWeights
from megaopt.commands.regression.shards import ShardedWeights
from megaopt.commands.regression.unfused import UnfusedAdam
from megaopt.commands.training.model import GPT, build_model
from megaopt.commands.training.text import batches_of, load_corpus
from megaopt.float8 import scaled_matmul
from megaopt.recording.files import hexadecimal
from megaopt.saving import checkpoint

if TYPE_CHECKING:
    from megaopt.commands.regression.rank import Task


class WeightOwner(Protocol):
    """Whatever updates a model's weights from its gradients."""

    def step(self, learning_rate: float) -> None:
        """Updates state and weights from the gradients that the model's parameters hold."""

    def parts(self) -> Iterable[Part]:
        """Weights and state, as they lie."""

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights that a resumed run needs."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; the model's weights are in place already."""


class Training:
    """A model and the owner of its weights; all variants of a config start with the same bits.

    Args:
        config: the run.
        variant: one of it; those with ranks have met in the default process group.
        device: where to train.

    Raises:
        ConfigError: the variant cannot run here, its backend being absent, say.
        CorpusError: the text is too short for the config's context.
    """

    def __init__(self, config: RunConfig, variant: Variant, device: torch.device) -> None:
        self.config, self.variant, self.device = config, variant, device
        self.batches = batches_of(config, load_corpus())
        self.model = build_model(config.model, config.seed, device)
        self.scaled = config.float8 is not None and config.float8.scaled_matmul
        if isinstance(variant, UnfusedVariant) and variant.recipe is not None:
            fake_quantize_model(self.model, variant.recipe, self.scaled)
        elif variant.recipe is not None:
            quantize_model(self.model, variant.recipe)
        try:
            self.owner = build_owner(self.model, config, variant)
        except (ValueError, ImportError, RuntimeError) as error:
            raise ConfigError(f"variant = {variant.name!r} cannot run here: {error}") from error
        self.steps_done = 0

    def step(self, number: int) -> dict[str, Any]:
        """Trains on a step's batch; the loss is that before the update, in nats."""
        inputs, targets = (tensor.to(self.device) for tensor in self.batches.at(number))
        with scaled_matmul(self.scaled):
            loss = self.model(inputs, targets)
        loss.backward()
        self.owner.step(self.config.optimizer.learning_rate_at(number))
        self.model.zero_grad(set_to_none=True)
        self.steps_done = number
        return {"losses": [hexadecimal(loss.item())], "grad_norm": None}

    def parts(self) -> Iterable[Part]:
        """Weights and state of the owner."""
        return self.owner.parts()

    def about(self) -> dict[str, Any]:
        """The variant."""
        return {"variant": dataclasses.asdict(self.variant)}

    def save(self, path: Path) -> None:
        """Writes a checkpoint; an OSError names it."""
        state = {
            "step": self.steps_done,
            "model": self.model.state_dict(),
            "optimizer": self.owner.state_dict(),
        }
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
            require_run(path, payload, describe(self.config, self.variant))
        state = payload["training"]
        self.model.load_state_dict(state["model"])
        self.owner.load_state_dict(state["optimizer"])
        self.steps_done = state["step"]


def build_owner(model: GPT, config: RunConfig, variant: Variant) -> WeightOwner:
    """What steps a variant's weights."""
    if isinstance(variant, UnfusedVariant):
        kind = UnfusedAdam if variant.recipe is None else FakeQuantizedAdam
        return kind(model, config.optimizer, variant)
    if isinstance(variant, PeerVariant):
        return PeerWeights(model, config.optimizer, variant)
    if isinstance(variant, GaLoreVariant):
        assert config.galore is not None  # as the config was checked
        return GaLoreWeights(model, config.optimizer, config.galore, variant)
    owner = FusedWeights if variant.ranks is None else ShardedWeights
    return owner(model, config.optimizer, variant)


def build(task: Task) -> Training:
    """The training of a rank's process, which meets the others where its variant has ranks."""
    run, variant = task.run, task.job.variant
    assert isinstance(run, RunConfig)
    if isinstance(variant, FusedVariant) and variant.ranks is not None:
        meeting, ranks = f"file://{task.meeting}", task.job.ranks
        dist.init_process_group("gloo", meeting, world_size=ranks, rank=task.rank)
    return Training(run, variant, torch.device(task.device))


# --- checkpoints of other runs


def describe(config: RunConfig, variant: Variant) -> dict[str, Any]:
    """What must be the same where a checkpoint is loaded again: all that its bits depend on."""
    tables = {"model": config.model, "optimizer": config.optimizer, "float8": config.float8}
    tables |= {"galore": config.galore, "variant": variant}
    keys = {"seed": config.seed, "batch_size": config.batch_size}
    for name, table in tables.items():
        own = {} if table is None else dataclasses.asdict(table)
        keys |= {f"{name}.{key}": value for key, value in own.items()}
    return keys


def require_run(path: Path, payload: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises a ConfigError where a checkpoint is of another run, and names the first difference."""
    saved = payload.get("run")
    if not isinstance(saved, dict) or "training" not in payload:
        raise ConfigError(f"resume must be a checkpoint of `megaopt train`, got {str(path)!r}")
    for key in {**expected, **saved}:
        own, other = expected.get(key), saved.get(key)
        if own != other:
            raise ConfigError(
                f"resume must be a checkpoint of this run, whose {key} is {own!r}, got "
                f"{str(path)!r}, whose {key} is {other!r}"
            )
