"""Builds the trainer of a variant: the model with its seed's weights, and their owner."""

from __future__ import annotations

import torch

from megaopt.config import ConfigError, PeerVariant, RunConfig, UnfusedVariant, Variant
from megaopt.regression.fused import FusedWeights
from megaopt.regression.peer import PeerWeights
from megaopt.regression.unfused import UnfusedAdam
from megaopt.training.model import GPT, build_model
from megaopt.training.trainer import Trainer, WeightOwner


def build_trainer(config: RunConfig, variant: Variant, device: torch.device) -> Trainer:
    """A fresh trainer; all variants of a config start with the same bits.

    Raises:
        ConfigError: the variant cannot run here, its backend being absent, say.
    """
    model = build_model(config.model, config.seed, device)
    try:
        owner = _build_owner(model, config, variant)
    except (ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"variant = {variant.name!r} cannot run here: {error}") from error
    return Trainer(model, owner, config.optimizer)


def _build_owner(model: GPT, config: RunConfig, variant: Variant) -> WeightOwner:
    if isinstance(variant, UnfusedVariant):
        return UnfusedAdam(model, config.optimizer, variant)
    if isinstance(variant, PeerVariant):
        return PeerWeights(model, config.optimizer, variant)
    return FusedWeights(model, config.optimizer, variant)
