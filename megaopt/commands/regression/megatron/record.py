"""The record of a Megatron-Core regression, as JSON."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from megaopt.commands import environment
from megaopt.commands.regression.megatron.rank import settings
from megaopt.commands.regression.megatron.regression import Outcome, Regression, is_installed
from megaopt.commands.regression.megatron.result import Result
from megaopt.commands.regression.megatron.traffic import bytes_per_parameter
from megaopt.commands.regression.record import made_with, recorded
from megaopt.commands.source import Source
from megaopt.commands.training.text import Corpus

PACKAGES = ("megatron-core", "transformer_engine", "apex")


def measured(regression: Regression, result: Result) -> dict[str, Any]:
    """Times, memory, and the bytes that a step should move."""
    fused_clip = is_installed("transformer_engine") or is_installed("apex")
    variant = result.trial.variant
    return {
        "optimizer_milliseconds": 1000 * result.median("optimizer_seconds"),
        "step_milliseconds": 1000 * result.median("seconds"),
        "measured_steps": len(result.measured),
        "state_bytes": result.state_bytes,
        "peak_bytes": result.largest("peak_bytes"),
        "optimizer_extra_bytes": result.largest("optimizer_extra_bytes"),
        "allocated_bytes": result.largest("allocated_bytes"),
        "bytes_per_parameter": bytes_per_parameter(regression.run, variant, fused_clip),
        "ranks": result.trial.jobs[-1].ranks,
        "summaries": result.summaries,
    }


TIMES = {"optimizer_milliseconds": "optimizer_seconds", "step_milliseconds": "seconds"}


def times_of(regression: Regression) -> dict[str, Any]:
    """Joins the medians of each variant's runs: their median, least and most.

    of_baseline is the median over that of the baseline, which has runs between these.
    """
    found: dict[str, Any] = {}
    for variant in regression.run.variant:
        outcomes = regression.outcomes.values()
        results = [e.result for e in outcomes if e.result and e.trial.variant == variant]
        if results:
            spreads = {key: spread_of(results, name) for key, name in TIMES.items()}
            found[variant.name] = {"runs": len(results), **spreads}
    for variant in regression.run.variant:
        for key in TIMES if variant.name in found else ():
            own, other = found[variant.name][key], found.get(variant.baseline or "")
            own["of_baseline"] = own["median"] / other[key]["median"] if other else None
    return found


def spread_of(results: list[Result], name: str) -> dict[str, float]:
    """Median, least and most of the results' medians, in milliseconds."""
    medians = [1000 * result.median(name) for result in results]
    return {"median": statistics.median(medians), "least": min(medians), "most": max(medians)}


def outcome_record(regression: Regression, outcome: Outcome) -> dict[str, Any]:
    """What is known of a trial."""
    difference, result = outcome.difference, outcome.result
    compared = outcome.trial.baseline is not None and outcome.failure is None
    record: dict[str, Any] = {
        "variant": outcome.trial.variant.name,
        "baseline": outcome.trial.baseline,
        "identical": difference is None if compared else None,
        "first_difference": recorded(difference),
        "failure": outcome.failure,
    }
    if result is None:
        return record
    last = [rank["fingerprints"] for rank in result.steps[-1].ranks]
    return {
        **record,
        "losses": [loss.hex() for loss in result.losses],
        "grad_norms": [step.ranks[0]["grad_norm"] for step in result.steps],
        "fingerprints": {name: bits for each in last for name, bits in each.items()},
        "measured": measured(regression, result),
    }


def build_record(regression: Regression, corpus: Corpus, source: Source) -> dict[str, Any]:
    """The record of a regression so far; losses and norms are hexadecimal floats."""
    difference = regression.first_difference()
    finished = len(regression.outcomes) == len(regression.trials)
    record = made_with(regression.run, torch.device(regression.device), corpus, source)
    record["versions"] |= {name: environment.installed_version(name) for name in PACKAGES}
    return {
        **record,
        "settings": settings(),
        "perturb": regression.perturb,
        "variants": {
            name: outcome_record(regression, outcome)
            for name, outcome in regression.outcomes.items()
        },
        "times": times_of(regression),
        "finished": finished,
        "identical": finished and difference is None and not regression.failed,
        "first_difference": recorded(difference),
    }
