"""The settings under which torch gives the same bits at every run, and their undoing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from megaopt.lab.config import TrainingConfig
from megaopt.lab.toml_tables import ConfigError


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
