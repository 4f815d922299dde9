"""The pictures of a regression: losses, and beneath them what differs; times of the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megaopt.kernels.files import replacing
from megaopt.lab.regression.megatron.config import StockVariant
from megaopt.lab.regression.outcome import TrialOutcome, earliest

# Okabe and Ito's palette: told apart by colour-blind readers too
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BASELINE_COLOURS = ("#9AA5B1", "#D9B382", "#B7C9A8", "#C3B1D9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MARKERS_PER_CURVE = 8


def _draw_column(upper: Any, lower: Any, outcomes: Sequence[TrialOutcome], in_short: bool) -> None:
    """Baselines as broad pale lines, variants as markers that take turns along them.

    Beneath them the differences, and the first of them in words; in short for a narrow column.
    """
    baselines = [outcome for outcome in outcomes if outcome.baseline is None]
    variants = [outcome for outcome in outcomes if outcome.baseline is not None]
    for number, outcome in enumerate(baselines):
        colour, label = BASELINE_COLOURS[number % len(BASELINE_COLOURS)], outcome.trial.short_name
        # the later baseline is the narrower, so that both show where they coincide
        steps, width = range(1, len(outcome.losses) + 1), 6 - 3 * min(number, 1)
        label = f"{label} (baseline)"
        upper.plot(steps, outcome.losses, color=colour, linewidth=width, label=label)
    is_equal = True
    for number, outcome in enumerate(variants):
        every = max(1, len(outcome.losses) // MARKERS_PER_CURVE)
        style: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 6,
            "markeredgecolor": "white",
            "markeredgewidth": 0.7,
            "linewidth": 0.9,
            "markevery": (number * every // len(variants), every),
            "label": outcome.trial.short_name,
        }
        baseline_losses = outcome.baseline.losses if outcome.baseline else ()
        pairs = zip(outcome.losses, baseline_losses, strict=False)
        differences = [loss - baseline_loss for loss, baseline_loss in pairs]
        upper.plot(range(1, len(outcome.losses) + 1), outcome.losses, **style)
        lower.plot(range(1, len(differences) + 1), differences, **style)
        is_equal &= bool(outcome.losses) and not any(differences)
    lower.axhline(0, color="#444444", linewidth=0.6, zorder=0)
    lower.set_xlabel("step")
    losses = [loss for outcome in variants for loss in outcome.losses if math.isfinite(loss)]
    if is_equal and losses:
        # where all differences are zero, how small one would be that still counts
        unit = float(np.spacing(np.float32(np.median(losses))))
        lower.set_ylim(-2.5 * unit, 2.5 * unit)
        lower.set_yticks([-2 * unit, -unit, 0, unit, 2 * unit])
        lower.set_yticklabels(["-2 ulp", "-1 ulp", "0", "+1 ulp", "+2 ulp"])
        lower.text(
            0.995, 0.04, f"1 ulp = {unit:.2g}, the fp32 spacing at the median loss",
            transform=lower.transAxes, ha="right", va="bottom", fontsize=9, color="#555555",
        )  # fmt: skip
    first = earliest(outcome.difference for outcome in variants)
    if first is not None:
        # a line at the first step at which any bit differs, which may be none of a loss
        lower.axvline(first.step, color="#444444", linewidth=0.9, linestyle="--", zorder=0)
        is_late = first.step > max(len(outcome.losses) for outcome in variants) / 2
        lower.annotate(
            f"first difference: step {first.step}",
            (first.step, 0.97), xycoords=lower.get_xaxis_transform(),
            xytext=(-4 if is_late else 4, 0), textcoords="offset points",
            ha="right" if is_late else "left", va="top", fontsize=9, color="#444444",
        )  # fmt: skip
        where = "" if in_short else f", {first.variant}, {first.tensor}"
        title = f"first at step {first.step}{where}"
    else:
        title = "none, in any bit" + ("" if in_short else " of any loss, weight or state")
    title = f"Difference{'' if in_short else ' from the baseline'}: {title}"
    lower.set_title(title if variants else "Nothing was compared", loc="left")
    for axes in (upper, lower):
        axes.grid(color="#E3E6EA", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


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
        single = len(recipes) == 1
        _draw_column(upper, lower, column, in_short=not single)
        upper.set_title("Loss of every variant" if single else f"Losses: {recipe}", loc="left")
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
