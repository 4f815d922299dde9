"""Builds the trainer of a variant: the model with its seed's weights, and their owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from megaopt.commands.config import (
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
from megaopt.commands.regression.peer import PeerWeights
from megaopt.commands.regression.unfused import UnfusedAdam
from megaopt.commands.toml_tables import ConfigError
from megaopt.commands.training.model import GPT, build_model
from megaopt.commands.training.trainer import Trainer, WeightOwner

V = TypeVar("V", bound=Variant)


def build_trainer(config: RunConfig, variant: Variant, device: torch.device) -> Trainer:
    """A fresh trainer; all variants of a config start with the same bits.

    Raises:
        ConfigError: the variant cannot run here, its backend being absent, say.
    """
    if isinstance(variant, FusedVariant) and variant.ranks is not None:
        raise ConfigError(
            f"variant must be one without ranks, which train in `megaopt regress` only, got "
            f"{variant.name!r} with {variant.ranks} ranks"
        )
    return build_trainer_with(config, variant, device, _build_owner)


def build_trainer_with(
    config: RunConfig,
    variant: V,
    device: torch.device,
    build_owner: Callable[[GPT, RunConfig, V], WeightOwner],
) -> Trainer:
    """A fresh trainer, as build_trainer makes it, of any variant and with the given owner."""
    model = build_model(config.model, config.seed, device)
    scaled = config.float8 is not None and config.float8.scaled_matmul
    if isinstance(variant, UnfusedVariant) and variant.recipe is not None:
        fake_quantize_model(model, variant.recipe, scaled)
    elif variant.recipe is not None:
        quantize_model(model, variant.recipe)
    try:
        owner = build_owner(model, config, variant)
    except (ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"variant = {variant.name!r} cannot run here: {error}") from error
    return Trainer(model, owner, config.optimizer, scaled)


def _build_owner(model: GPT, config: RunConfig, variant: Variant) -> WeightOwner:
    if isinstance(variant, UnfusedVariant):
        kind = UnfusedAdam if variant.recipe is None else FakeQuantizedAdam
        return kind(model, config.optimizer, variant)
    if isinstance(variant, PeerVariant):
        return PeerWeights(model, config.optimizer, variant)
    if isinstance(variant, GaLoreVariant):
        assert config.galore is not None  # as the config was checked
        return GaLoreWeights(model, config.optimizer, config.galore, variant)
    return FusedWeights(model, config.optimizer, variant)
