"""The device and the room that a run needs, and settings under which torch repeats itself.

A run that the machine cannot hold is refused before anything is built.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from megaopt.lab.config import MatrixVariant, ModelConfig, RunConfig, TrainingConfig, Variant
from megaopt.lab.toml_tables import ConfigError, require

LEAST_BYTES = 12
"""The bytes of a parameter in one variant: two fp32 moments, and a master or its like."""
LEAST_BYTES_OF_MATRICES = 4
"""The same of kinds "galore" and "muon", whose moments may be small: the master alone."""
MOST_HEAD_SIZE = 256
"""Elements of an attention head on a GPU, where flash attention takes no larger ones."""


def choose_device(config: TrainingConfig) -> torch.device:
    """The device that a config asks for.

    Raises:
        ConfigError: the config asks for a GPU and there is none.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device must be 'auto' or 'cpu' where no CUDA GPU is visible, got 'cuda'")
    name = "cuda" if available and config.device != "cpu" else "cpu"
    return torch.device(name)


@contextlib.contextmanager
def deterministic(cpu_threads: int) -> Iterator[None]:
    """Makes torch deterministic inside the block: algorithms, fp32 products, threads.

    cuBLAS reads its workspace setting when CUDA starts: enter the block before the first CUDA call.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    algorithms = torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    precision = torch.backends.cuda.matmul.fp32_precision
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(cpu_threads)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms)
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.fp32_precision = precision


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
