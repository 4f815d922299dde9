"""The files by which a variant is stopped and continued, and hands back what it trained."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch

from megaopt.commands.bits import Snapshot, pack, unpack
from megaopt.commands.config import RunConfig, Variant
from megaopt.commands.regression.outputs import about_file
from megaopt.commands.toml_tables import ConfigError
from megaopt.commands.training.trainer import Trainer
from megaopt.saving import checkpoint


def describe(config: RunConfig, variant: Variant) -> dict[str, Any]:
    """What must be the same where a checkpoint is loaded again: all that its bits depend on."""
    return {
        "model": repr(config.model),
        "optimizer": repr(config.optimizer),
        "float8": repr(config.float8),
        "galore": repr(config.galore),
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
    _save(path, {"losses": [loss.hex() for loss in losses], "tensors": pack(snapshot)})


def load_result(path: Path, device: torch.device) -> tuple[list[float], Snapshot]:
    """Reads what `save_result` wrote, onto a device."""
    payload = checkpoint.load(path)
    losses = [float.fromhex(loss) for loss in payload["losses"]]
    return losses, unpack(payload["tensors"], device)
