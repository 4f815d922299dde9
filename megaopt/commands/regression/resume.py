"""Stopping a variant, and continuing it in a fresh process whose results come back by file."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import torch

from megaopt import checkpoint
from megaopt.commands.config import ConfigError, RunConfig, Variant
from megaopt.commands.regression.compare import as_integers, from_integers
from megaopt.commands.regression.outputs import about_file
from megaopt.commands.regression.processes import Child
from megaopt.commands.training.trainer import Snapshot, Trainer


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
    _save(path, payload)


def _save(path: Path, payload: dict[str, Any]) -> None:
    try:
        checkpoint.save(path, payload)
    except OSError as error:
        raise about_file(error, path) from error


def load_trainer(path: Path, config: RunConfig, variant: Variant, trainer: Trainer) -> None:
    """Loads a checkpoint into a fresh trainer of the same run.

    Raises:
        ConfigError: the checkpoint is of another run.
        CheckpointError: the file cannot be read.
    """
    payload = checkpoint.load(path)
    expected, saved = describe(config, variant), payload.get("run")
    if not isinstance(saved, dict) or "trainer" not in payload:
        raise ConfigError(f"resume must be a checkpoint of `megaopt train`, got {str(path)!r}")
    for key, value in expected.items():
        if saved.get(key) != value:
            own, other = _apart(key, value, saved.get(key))
            raise ConfigError(
                f"resume must be a checkpoint of this run, whose {own}, got {str(path)!r}, "
                f"whose {other}"
            )
    trainer.load_state_dict(payload["trainer"])


def _apart(key: str, own: Any, other: Any) -> tuple[str, str]:
    """What tells two descriptions apart: of two dataclasses of a kind the fields that differ."""
    (kind, ours), (other_kind, others) = _fields(own), _fields(other)
    if kind is None or kind != other_kind or ours.keys() != others.keys():
        return f"{key} is {own}", f"{key} is {other}"
    names = [name for name in ours if ours[name] != others[name]]
    told = [
        " and ".join(f"{key}.{name} is {each[name]}" for name in names) for each in (ours, others)
    ]
    return told[0], told[1]


def _fields(described: Any) -> tuple[str | None, dict[str | None, str]]:
    """A dataclass's name and its fields' values, out of its repr; None for what is none."""
    try:
        call = ast.parse(str(described), mode="eval").body
    except SyntaxError:
        return None, {}
    if not isinstance(call, ast.Call):
        return None, {}
    return ast.unparse(call.func), {each.arg: ast.unparse(each.value) for each in call.keywords}


def save_result(path: Path, losses: list[float], snapshot: Snapshot) -> None:
    """Writes what a continued run hands back; tensors as integers, so that no bit is touched."""
    tensors = {
        name: {
            kind: (str(tensor.dtype), as_integers(tensor).cpu()) for kind, tensor in kinds.items()
        }
        for name, kinds in snapshot.items()
    }
    _save(path, {"losses": [loss.hex() for loss in losses], "tensors": tensors})


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


class FreshRun:
    """`megaopt train --resume` to the config's last step; leaving the context ends its process.

    Args:
        config_path: of the run.
        variant: its name.
        path: the checkpoint to continue; the process's files are made beside it.
    """

    def __init__(self, config_path: Path, variant: str, path: Path) -> None:
        self.variant, path = variant, path.resolve()
        self._result = path.with_suffix(".result")
        command = [sys.executable, "-m", "megaopt", "train", str(config_path.resolve())]
        # in one word: a name may begin with a dash
        command += [f"--variant={variant}", f"--resume={path}", f"--result={self._result}"]
        # not where the user stands: with `-m`, that folder comes first on the import path
        self._child = Child(command, path.parent, path.with_suffix(".said"))

    def __enter__(self) -> FreshRun:
        self._child.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._child.__exit__(*error)

    def wait(self, device: torch.device) -> tuple[list[float], Snapshot]:
        """The losses of the continued steps, and the final weights and state on device.

        Raises:
            ResumeError: the process failed; the message ends with what it said.
        """
        status, said = self._child.wait()
        if status != 0:
            end = said.strip()[-2000:]
            raise ResumeError(f"variant {self.variant!r}: the fresh process failed: {end}")
        return load_result(self._result, device)
