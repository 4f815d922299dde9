"""The record of a regression: all that is needed to judge it, and to repeat it, as JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megaopt.lab.regression.megatron.config import MegaoptVariant, MegatronRun, StockVariant
from megaopt.lab.regression.megatron.traffic import bytes_per_parameter
from megaopt.lab.regression.megatron.training import settings
from megaopt.lab.regression.outcome import TrialOutcome
from megaopt.lab.regression.regression import Regression, is_installed
from megaopt.lab.source import Source, describe
from megaopt.lab.training.text import Corpus
from megaopt.recording.environment import installed

VERSIONS = ("megaopt", "python", "torch", "triton", "cuda_runtime", "cuda_driver")
PACKAGES = ("megatron-core", "transformer_engine", "apex")
TIMES = {"optimizer_milliseconds": "optimizer_seconds", "step_milliseconds": "seconds"}
SIZES = ("state_bytes", "peak_bytes", "optimizer_extra_bytes", "allocated_bytes")


def measured(regression: Regression, outcome: TrialOutcome) -> dict[str, Any]:
    """Times, memory, and the bytes that a step should move."""
    run, variant = regression.run, outcome.trial.variant
    assert isinstance(run, MegatronRun)
    assert isinstance(variant, (StockVariant, MegaoptVariant))
    fused_clip = is_installed("transformer_engine") or is_installed("apex")
    # each rank of the last job, and how much of the weights it steps
    lines, summaries = outcome.lines(outcome.measured[-1]), []
    for rank, line in zip(outcome.recordings[-1].ranks, lines, strict=True):
        places = [value.place for value in rank.values if value.quantity == "weight"]
        summary = {
            **rank.run["training"],
            "state_bytes": line["state_bytes"],
            "owned_elements": sum(place[3] for place in places if place),
        }
        summaries.append(summary)
    return {
        **{key: 1000 * outcome.median(name) for key, name in TIMES.items()},
        "measured_steps": len(outcome.measured),
        **{key: outcome.largest(key) for key in SIZES},
        "bytes_per_parameter": bytes_per_parameter(run, variant, fused_clip),
        "ranks": outcome.trial.jobs[-1].ranks,
        "summaries": summaries,
    }


def times_of(regression: Regression) -> dict[str, Any]:
    """Joins the medians of each variant's runs: their median, least and most.

    of_baseline is the median over that of the baseline, which has runs between these.
    """
    times: dict[str, Any] = {}
    for variant in regression.run.runs:
        runs = [e for e in regression.outcomes if e.trial.variant == variant and e.is_timed]
        for key, name in TIMES.items() if runs else ():
            ms = [1000 * outcome.median(name) for outcome in runs]
            spread = {"median": statistics.median(ms), "least": min(ms), "most": max(ms)}
            times.setdefault(variant.name, {"runs": len(runs)})[key] = spread
    for variant in regression.run.runs:
        for key in TIMES if variant.name in times else ():
            spread, baseline = times[variant.name][key], times.get(variant.baseline or "")
            spread["of_baseline"] = spread["median"] / baseline[key]["median"] if baseline else None
    return times


def build_record(regression: Regression, corpus: Corpus, source: Source) -> dict[str, Any]:
    """The record of a regression so far; losses and norms are hexadecimal floats."""
    described = describe()
    versions = {key: described[key] for key in VERSIONS}
    of_megatron: dict[str, Any] = {}
    if isinstance(regression.run, MegatronRun):
        versions |= {name: installed(name) for name in PACKAGES}
        of_megatron = {"settings": settings()}
    variants: dict[str, dict[str, Any]] = {}
    for outcome in regression.outcomes:
        trial, difference = outcome.trial, outcome.difference
        compared = trial.baseline is not None and outcome.failure is None
        record: dict[str, Any] = {
            "variant": trial.variant.name,
            "recipe": trial.recipe,
            "baseline": trial.baseline,
            "identical": difference is None if compared else None,
            "first_difference": difference and dataclasses.asdict(difference),
            "failure": outcome.failure,
        }
        if outcome.ran:
            last = trial.jobs[-1].last
            norms = [outcome.lines(step)[0]["grad_norm"] for step in range(1, last + 1)]
            record["losses"] = [loss.hex() for loss in outcome.losses]
            record |= {"grad_norms": norms, "digests": outcome.digests(last)}
        if outcome.is_timed:
            record["measured"] = measured(regression, outcome)
        variants[trial.name] = record
    first = regression.first_difference()
    finished = len(regression.outcomes) == len(regression.trials)
    return {
        "source": source,
        "versions": versions,
        "hardware": {
            "device": regression.device,
            "triton_interpreter": os.environ.get("TRITON_INTERPRET") == "1",
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            **{key: value for key, value in described.items() if key not in VERSIONS},
        },
        "config": regression.run.model_dump(),
        "corpus": {"sha256": corpus.sha256, "bytes": corpus.tokens.numel()},
        **of_megatron,
        "perturb": regression.perturb,
        "variants": variants,
        "times": times_of(regression),
        "finished": finished,
        "identical": finished and first is None and not regression.failed,
        "first_difference": first and dataclasses.asdict(first),
    }


# --- final losses that were recorded of a config, on processors of several kinds

# The text is the same everywhere, and so is the optimizer's arithmetic (`megaopt verify`). Matrix
# products are torch's and the processor's. So a run's losses are the recorded ones wherever those
# products are, and others elsewhere, which is no fault: nothing here decides about an exit status.
FILE = Path(__file__).with_name("losses.json")


def recorded() -> dict[str, Any]:
    """Returns by config its file's SHA-256, torch's version, losses by processor and variant."""
    records: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return records


def digest_of(config_path: Path) -> str:
    """SHA-256 of a config's text, whatever its line ends."""
    return hashlib.sha256(config_path.read_text(encoding="utf-8").encode()).hexdigest()


def describe_losses(config_path: Path, losses: Mapping[str, float]) -> str:
    """A line about a run's final losses, by variant.

    Args:
        config_path: of the run.
        losses: of all variants.
    """
    record = recorded().get(config_path.stem)
    if record is None or record["config"] != digest_of(config_path):
        return "losses: none are recorded of this config"
    hexadecimals = {name: loss.hex() for name, loss in losses.items()}
    for processor, recorded_losses in record["losses"].items():
        if recorded_losses == hexadecimals:
            return (
                f"losses: those recorded with {processor} and torch {record['torch']}, to the bit"
            )
    kinds = ", ".join(record["losses"])
    return (
        f"losses: not those recorded with torch {record['torch']} ({kinds}): matrix products have "
        "other bits here, which is no fault"
    )
