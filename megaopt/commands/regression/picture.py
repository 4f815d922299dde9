"""The pictures of a regression: losses, and beneath them what differs; times of the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megaopt.commands.regression.megatron.config import StockVariant
from megaopt.commands.regression.outcome import TrialOutcome, earliest
from megaopt.kernels.files import replacing

# Okabe and Ito's palette: told apart by colour-blind readers too
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BASELINE_COLOURS = ("#9AA5B1", "#D9B382", "#B7C9A8", "#C3B1D9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MARKERS_PER_CURVE = 8


def _plot(axes: Any, values: Sequence[float], **style: Any) -> None:
    """A value for each step, from 1."""
    axes.plot(range(1, len(values) + 1), values, **style)


def _style(number: int, outcome: TrialOutcome, variants: Sequence[TrialOutcome]) -> dict[str, Any]:
    every = max(1, len(outcome.losses) // MARKERS_PER_CURVE)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 6,
        "markeredgecolor": "white",
        "markeredgewidth": 0.7,
        "linewidth": 0.9,
        "markevery": (number * every // max(1, len(variants)), every),
        "label": outcome.trial.short_name,
    }


def _differences(outcome: TrialOutcome) -> list[float]:
    if outcome.baseline is None or not outcome.baseline.losses:
        return []
    return [a - b for a, b in zip(outcome.losses, outcome.baseline.losses, strict=True)]


def _mark_first_difference(axes: Any, variants: Sequence[TrialOutcome]) -> None:
    """A line at the first step at which any bit differs, which may be none of a loss."""
    difference = earliest(outcome.difference for outcome in variants)
    if difference is None:
        return
    step = difference.step
    axes.axvline(step, color="#444444", linewidth=0.9, linestyle="--", zorder=0)
    is_late = step > max(len(outcome.losses) for outcome in variants) / 2
    axes.annotate(
        f"first difference: step {step}",
        (step, 0.97), xycoords=axes.get_xaxis_transform(),
        xytext=(-4 if is_late else 4, 0), textcoords="offset points",
        ha="right" if is_late else "left", va="top", fontsize=9, color="#444444",
    )  # fmt: skip


def _scale_to_one_unit(axes: Any, variants: Sequence[TrialOutcome]) -> None:
    """Shows, where all differences are zero, how small one would be that still counts."""
    losses = [loss for outcome in variants for loss in outcome.losses if math.isfinite(loss)]
    if not losses:
        return
    unit = float(np.spacing(np.float32(np.median(losses))))
    axes.set_ylim(-2.5 * unit, 2.5 * unit)
    axes.set_yticks([-2 * unit, -unit, 0, unit, 2 * unit])
    axes.set_yticklabels(["-2 ulp", "-1 ulp", "0", "+1 ulp", "+2 ulp"])
    axes.text(
        0.995, 0.04, f"1 ulp = {unit:.2g}, the fp32 spacing at the median loss",
        transform=axes.transAxes, ha="right", va="bottom", fontsize=9, color="#555555",
    )  # fmt: skip


def _summary(variants: Sequence[TrialOutcome], in_short: bool = False) -> str:
    """Describes the first difference; in short for a narrow column."""
    first = earliest(outcome.difference for outcome in variants)
    if not variants:
        return "Nothing was compared"
    if first is None and in_short:
        return "Difference: none, in any bit"
    if first is None:
        return "Difference from the baseline: none, in any bit of any loss, weight or state"
    if in_short:
        return f"Difference: first at step {first.step}"
    where = f"step {first.step}, {first.variant}, {first.tensor}"
    return f"Difference from the baseline: first at {where}"


def _draw_column(upper: Any, lower: Any, outcomes: Sequence[TrialOutcome]) -> None:
    """Baselines as broad pale lines, variants as markers that take turns along them.

    Beneath them the differences.
    """
    baselines, variants = _parted(outcomes)
    for number, outcome in enumerate(baselines):
        colour = BASELINE_COLOURS[number % len(BASELINE_COLOURS)]
        # the later baseline is the narrower, so that both show where they coincide
        style = {"color": colour, "linewidth": 6 - 3 * min(number, 1)}
        _plot(upper, outcome.losses, label=f"{outcome.trial.short_name} (baseline)", **style)
    for number, outcome in enumerate(variants):
        style = _style(number, outcome, variants)
        _plot(upper, outcome.losses, **style)
        _plot(lower, _differences(outcome), **style)
    lower.axhline(0, color="#444444", linewidth=0.6, zorder=0)
    lower.set_xlabel("step")
    if all(outcome.losses and not any(_differences(outcome)) for outcome in variants):
        _scale_to_one_unit(lower, variants)
    _mark_first_difference(lower, variants)
    for axes in (upper, lower):
        axes.grid(color="#E3E6EA", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


def _parted(outcomes: Sequence[TrialOutcome]) -> tuple[list[TrialOutcome], list[TrialOutcome]]:
    """Baselines, and what is compared with them."""
    baselines = [outcome for outcome in outcomes if outcome.baseline is None]
    return baselines, [outcome for outcome in outcomes if outcome.baseline is not None]


def draw_losses(path: Path, title: str, outcomes: Sequence[TrialOutcome]) -> None:
    """Writes the picture as PNG: loss curves above, differences from the baselines beneath.

    Under [float8] in a column for each recipe.
    """
    recipes = list(dict.fromkeys(outcome.trial.recipe for outcome in outcomes))
    figure = Figure(figsize=(7 + 4 * len(recipes), 7.5), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(2, len(recipes), sharex=True, height_ratios=(2, 1), squeeze=False)
    for recipe, upper, lower in zip(recipes, *rows, strict=True):
        column = [outcome for outcome in outcomes if outcome.trial.recipe == recipe]
        _draw_column(upper, lower, column)
        single = len(recipes) == 1
        upper.set_title("Loss of every variant" if single else f"Losses: {recipe}", loc="left")
        lower.set_title(_summary(_parted(column)[1], in_short=not single), loc="left")
    rows[0][0].set_ylabel("loss (nats per byte)")
    rows[1][0].set_ylabel("loss: variant - baseline")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    labels = rows[0][0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside right upper", frameon=False, fontsize=10)
    save(path, figure)


def draw_times(path: Path, title: str, outcomes: Sequence[TrialOutcome]) -> None:
    """Writes a PNG: a bar for each trial, the median of its optimizer steps in milliseconds."""
    figure = Figure(figsize=(11, 1.8 + 0.42 * len(outcomes)), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    times = [1000 * outcome.median("optimizer_seconds") for outcome in outcomes]
    stock = [isinstance(outcome.trial.variant, StockVariant) for outcome in outcomes]
    colours = [BASELINE_COLOURS[0] if is_stock else COLOURS[0] for is_stock in stock]
    bars = axes.barh(range(len(outcomes)), times, color=colours)
    axes.bar_label(bars, fmt="%.2f", padding=4)
    labels = [f"{outcome.trial.name} ({outcome.trial.jobs[-1].ranks})" for outcome in outcomes]
    axes.set_yticks(range(len(outcomes)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(times))
    axes.set_xlabel("optimizer step, norm and clip included: ms, median of the slowest rank")
    axes.set_title("Megatron's step grey, ours blue; ranks in brackets", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontweight="bold")
    save(path, figure)


def save(path: Path, figure: Figure) -> None:
    """Writes a picture as PNG."""
    with replacing(path) as file:
        figure.savefig(file, format="png")
