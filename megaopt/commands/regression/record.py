"""The record of a regression: all that is needed to judge it, and to repeat it, as JSON."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from megaopt.commands import environment
from megaopt.commands.regression.lockstep import Lane, Regression
from megaopt.commands.training.text import Corpus
from megaopt.source import Source

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


def build_record(regression: Regression, corpus: Corpus, source: Source) -> dict[str, Any]:
    """The record of a finished regression; losses are hexadecimal floats."""
    difference = regression.first_difference()
    described = environment.describe()
    return {
        "source": source,
        "versions": {key: described[key] for key in VERSIONS},
        "hardware": hardware(regression.device, described),
        "config": dataclasses.asdict(regression.config),
        "perturb": regression.perturb,
        "corpus": {"sha256": corpus.sha256, "bytes": corpus.tokens.numel()},
        "variants": {lane.variant.name: _lane_record(lane) for lane in regression.lanes},
        "identical": difference is None,
        "first_difference": None if difference is None else dataclasses.asdict(difference),
    }
