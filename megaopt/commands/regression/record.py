"""The record of a regression: all that is needed to judge it, and to repeat it, as JSON."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from megaopt.commands import environment
from megaopt.commands.config import RunConfig
from megaopt.commands.regression.compare import Difference
from megaopt.commands.regression.lockstep import Regression, Trial
from megaopt.commands.regression.megatron.config import MegatronRun
from megaopt.commands.source import Source
from megaopt.commands.training.text import Corpus

VERSIONS = ("megaopt", "python", "torch", "triton", "cuda_runtime", "cuda_driver")


def made_with(
    run: RunConfig | MegatronRun, device: torch.device, corpus: Corpus, source: Source
) -> dict[str, Any]:
    """What a record begins with: source, versions, hardware, config and text."""
    described = environment.describe()
    return {
        "source": source,
        "versions": {key: described[key] for key in VERSIONS},
        "hardware": {
            "device": device.type,
            "triton_interpreter": os.environ.get("TRITON_INTERPRET") == "1",
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            **{key: value for key, value in described.items() if key not in VERSIONS},
        },
        "config": run.model_dump(),
        "corpus": {"sha256": corpus.sha256, "bytes": corpus.tokens.numel()},
    }


def recorded(difference: Difference | None) -> dict[str, Any] | None:
    """All that is known of a difference; of a fingerprint there is no index."""
    if difference is None:
        return None
    return {k: value for k, value in dataclasses.asdict(difference).items() if value is not None}


def _trial_record(trial: Trial) -> dict[str, Any]:
    baseline = trial.variant.baseline
    return {
        "recipe": trial.variant.recipe,
        "baseline": baseline,
        "identical": None if baseline is None else trial.difference is None,
        "first_difference": recorded(trial.difference),
        "losses": [loss.hex() for loss in trial.losses],
        "sha256": trial.sha256,
    }


def build_record(regression: Regression, corpus: Corpus, source: Source) -> dict[str, Any]:
    """The record of a finished regression; losses are hexadecimal floats."""
    difference = regression.first_difference()
    return {
        **made_with(regression.config, regression.device, corpus, source),
        "perturb": regression.perturb,
        "variants": {trial.variant.name: _trial_record(trial) for trial in regression.trials},
        "identical": difference is None,
        "first_difference": recorded(difference),
    }
