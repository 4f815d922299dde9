"""The picture of what the optimizer steps took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megaopt.commands.regression.megatron.config import StockVariant
from megaopt.commands.regression.megatron.regression import Outcome
from megaopt.commands.regression.picture import BASELINE_COLOURS, COLOURS, save


def draw_times(path: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """Writes a PNG: a bar for each trial, the median of its optimizer steps in milliseconds."""
    results = [each.result for each in outcomes if each.result is not None]
    figure = Figure(figsize=(11, 1.8 + 0.42 * len(results)), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    times = [1000 * result.median("optimizer_seconds") for result in results]
    stock = [isinstance(result.trial.variant, StockVariant) for result in results]
    colours = [BASELINE_COLOURS[0] if each else COLOURS[0] for each in stock]
    bars = axes.barh(range(len(results)), times, color=colours)
    axes.bar_label(bars, fmt="%.2f", padding=4)
    ranks = [result.trial.jobs[-1].ranks for result in results]
    names = [result.trial.name for result in results]
    labels = [f"{name} ({count})" for name, count in zip(names, ranks, strict=True)]
    axes.set_yticks(range(len(results)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(times))
    axes.set_xlabel("optimizer step, norm and clip included: ms, median of the slowest rank")
    axes.set_title("Megatron's step grey, ours blue; ranks in brackets", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontweight="bold")
    save(path, figure)
