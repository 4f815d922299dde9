"""The record of a regression: all that is needed to judge it, and to repeat it, as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from megaopt import environment
from megaopt.regression.lockstep import Lane, Regression
from megaopt.regression.outputs import about_file
from megaopt.training.text import Corpus

VERSIONS = ("megaopt", "python", "torch", "triton", "cuda_runtime", "cuda_driver")


def hardware(device: torch.device, described: dict[str, str | None]) -> dict[str, Any]:
    """What the run computed on."""
    return {
        "device": device.type,
        "triton_interpreter": os.environ.get("TRITON_INTERPRET") == "1",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        **{key: value for key, value in described.items() if key not in VERSIONS},
    }


def _lane_record(lane: Lane) -> dict[str, Any]:
    baseline = lane.variant.baseline
    difference = lane.difference
    return {
        "recipe": lane.variant.recipe,
        "baseline": baseline,
        "identical": None if baseline is None else difference is None,
        "first_difference": None if difference is None else dataclasses.asdict(difference),
        "losses": [loss.hex() for loss in lane.losses],
        "sha256": lane.sha256,
    }


def build_record(regression: Regression, corpus: Corpus) -> dict[str, Any]:
    """The record of a finished regression; losses are hexadecimal floats."""
    difference = regression.first_difference()
    described = environment.describe()
    return {
        "versions": {key: described[key] for key in VERSIONS},
        "hardware": hardware(regression.device, described),
        "config": dataclasses.asdict(regression.config),
        "perturb": regression.perturb,
        "corpus": {
            "sha256": corpus.sha256,
            "bytes": corpus.tokens.numel(),
            "files": corpus.files,
        },
        "variants": {lane.variant.name: _lane_record(lane) for lane in regression.lanes},
        "identical": difference is None,
        "first_difference": None if difference is None else dataclasses.asdict(difference),
    }


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Writes JSON so that a reader sees the old file or the whole new one, never a part.

    Raises:
        OSError: the file cannot be written; it names `path`.
    """
    text = json.dumps(record, indent=2) + "\n"
    try:
        _replace(path, text)
    except OSError as error:
        raise about_file(error, path) from error


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
