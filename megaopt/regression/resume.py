"""Stopping a variant, and continuing it in a fresh process whose results come back by file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from megaopt import checkpoint
from megaopt.config import ConfigError, RunConfig, Variant
from megaopt.regression.compare import as_integers, from_integers
from megaopt.training.trainer import Snapshot, Trainer


class ResumeError(RuntimeError):
    """The fresh process failed."""


def describe(config: RunConfig, variant: Variant) -> dict[str, Any]:
    """What must be the same where a checkpoint is loaded again: all that its bits depend on."""
    return {
        "model": repr(config.model),
        "optimizer": repr(config.optimizer),
        "float8": repr(config.float8),
        "variant": repr(variant),
        "seed": config.seed,
        "batch_size": config.batch_size,
    }


def save_trainer(path: Path, config: RunConfig, variant: Variant, trainer: Trainer) -> None:
    """Writes a checkpoint from which `load_trainer` continues with the same bits."""
    payload = {"run": describe(config, variant), "trainer": trainer.state_dict()}
    checkpoint.save(path, payload)


def load_trainer(path: Path, config: RunConfig, variant: Variant, trainer: Trainer) -> None:
    """Loads a checkpoint into a fresh trainer of the same run.

    Raises:
        ConfigError: the checkpoint is of another run.
        CheckpointError: the file cannot be read.
    """
    payload = checkpoint.load(path)
    expected, saved = describe(config, variant), payload.get("run")
    if not isinstance(saved, dict) or "trainer" not in payload:
        raise ConfigError(
            f"resume = {str(path)!r} is not allowed: no checkpoint of `megaopt train`"
        )
    for key, value in expected.items():
        if saved.get(key) != value:
            raise ConfigError(
                f"resume = {str(path)!r} is not allowed: its {key} is {saved.get(key)}, "
                f"but the config's is {value}"
            )
    trainer.load_state_dict(payload["trainer"])


def save_result(path: Path, losses: list[float], snapshot: Snapshot) -> None:
    """Writes what a continued run hands back; tensors as integers, so that no bit is touched."""
    tensors = {
        name: {
            kind: (str(tensor.dtype), as_integers(tensor).cpu()) for kind, tensor in kinds.items()
        }
        for name, kinds in snapshot.items()
    }
    checkpoint.save(path, {"losses": [loss.hex() for loss in losses], "tensors": tensors})


def load_result(path: Path, device: torch.device) -> tuple[list[float], Snapshot]:
    """Reads what `save_result` wrote, onto a device."""
    payload = checkpoint.load(path)
    snapshot = {
        name: {
            kind: from_integers(tensor, dtype, device) for kind, (dtype, tensor) in kinds.items()
        }
        for name, kinds in payload["tensors"].items()
    }
    return [float.fromhex(loss) for loss in payload["losses"]], snapshot


def continue_in_fresh_process(
    config_path: Path, variant: str, path: Path, device: torch.device
) -> tuple[list[float], Snapshot]:
    """Runs `megaopt train --resume` to the config's last step.

    Returns:
        The losses of the continued steps, and the final weights and state on device.

    Raises:
        ResumeError: the process failed; the message ends with what it said.
    """
    config_path, path = config_path.resolve(), path.resolve()
    result = path.with_suffix(".result")
    command = [sys.executable, "-m", "megaopt", "train", str(config_path), "--variant", variant]
    command += ["--resume", str(path), "--result", str(result)]
    # not where the user stands: with `-m`, that folder comes first on the import path
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise ResumeError(f"variant = {variant!r}: the fresh process failed: {said[-2000:]}")
    return load_result(result, device)
