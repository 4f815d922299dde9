"""The limits of a run: one that the machine cannot hold is refused before anything is built."""

from __future__ import annotations

import os

import torch

from megaopt.lab.config import MatrixVariant, ModelConfig, RunConfig, Variant
from megaopt.lab.toml_tables import ConfigError, require

LEAST_BYTES = 12
"""The bytes of a parameter in one variant: two fp32 moments, and a master or its like."""
LEAST_BYTES_OF_MATRICES = 4
"""The same of kinds "galore" and "muon", whose moments may be small: the master alone."""
MOST_HEAD_SIZE = 256
"""Elements of an attention head on a GPU, where flash attention takes no larger ones."""


def count_parameters(model: ModelConfig) -> int:
    """Elements of all parameters of training.model.GPT."""
    block = 12 * model.width**2 + 2 * model.width
    return (model.vocabulary_size + model.context + 1) * model.width + model.layers * block


def least_bytes(config: RunConfig, variant: Variant) -> int:
    """Bytes that a variant needs at least, with one batch and its logits."""
    tokens = config.batch_size * config.model.context
    batch = tokens * (8 + 4 * config.model.vocabulary_size)
    least = LEAST_BYTES_OF_MATRICES if isinstance(variant, MatrixVariant) else LEAST_BYTES
    return batch + least * count_parameters(config.model)


def require_room(config: RunConfig, variant: Variant, device: torch.device) -> None:
    """Raises a ConfigError where a variant of a run cannot train on a device."""
    require_memory(least_bytes(config, variant), device)
    if device.type == "cuda":
        size = config.model.width // config.model.heads
        allowed = f"at most {MOST_HEAD_SIZE} on a GPU"
        require(size <= MOST_HEAD_SIZE, "model.width divided by model.heads", size, allowed)


def require_memory(needed: int, device: torch.device) -> None:
    """Raises a ConfigError where a device has less memory than is needed; in bytes."""
    memory = memory_of(device)
    if memory is not None and needed > memory:
        raise ConfigError(
            f"model and batch_size must be small enough for the {memory / 2**30:.1f} GiB of memory "
            f"on this {device.type}, got a run that needs at least {needed / 2**30:.1f} GiB"
        )


def memory_of(device: torch.device) -> int | None:
    """Bytes of a device's memory; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
