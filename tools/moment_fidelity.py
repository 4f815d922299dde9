"""How near the moments of an optimizer stay to fp64's: our formats, and other libraries' 8 bits.

    python tools/moment_fidelity.py run OUT.json PICTURE.png --workers 4 [--steps 5000] [--rows 64]
    python tools/moment_fidelity.py draw OUT.json PICTURE.png    # and prints tables

Every optimizer steps one parameter with the same gradients; its moments, read by its library's own
functions, are compared with averages in fp64 of these gradients, which nothing brings back
together. Other libraries are measured on a GPU, where they are installed; on a CPU ours alone.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from followed_kinds import kinds
from followed_moments import (
    COLUMNS,
    HALVED,
    MOMENT_SCENARIOS,
    SMALLER,
    Follower,
    Gradients,
    follow,
    reading,
    spread,
)

from megaopt.commands.environment import describe
from megaopt.commands.source import describe_source, portable

SIZES = (1e-12, 1e-5, 1e4)
BETAS2 = (0.95, 0.99, 0.999, 0.9999)
BETAS1 = (0.9, 0.95, 0.99)
EPS = 1e-8
READINGS = {
    "stationary": "stationary",
    "spike": "after a spike",
    "drop, 2.5": "2.5 time constants after a drop",
    "half: gone, 2.5": "2.5 time constants after going to 0",
    "half: the others": "beside those gone to 0",
    "1,000x smaller": "1,000 times below the block's largest",
}
"""Of exp_avg_sq, and how the picture calls them."""
RMS = "rms of the update"


# --- the record


def _number(value: Any) -> float | None:
    return float(f"{float(value):.4g}") if abs(float(value)) < float("inf") else None


def _spread(ratio: torch.Tensor) -> dict[str, float | None]:
    """NaN counts as infinity; what is not finite is null."""
    ratio = ratio.nan_to_num(torch.inf, torch.inf, -torch.inf)
    names = ("low", "median", "high")
    return {
        "mean": _number(ratio.mean()),
        **{name: _number(each) for name, each in zip(names, spread(ratio), strict=True)},
    }


def _rows_of_a_run(name: str, beta2: float, found: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Of exp_avg_sq at all readings and sizes; of the updates at the middle size."""
    own = {"kind": name, "beta2": beta2}
    rows = [
        {**own, "what": what, "size": size, **_spread(ratio.sqrt()), "mean": _number(ratio.mean())}
        for what in READINGS
        for size, ratio in zip(SIZES, reading(what, found, MOMENT_SCENARIOS), strict=True)
    ]
    first, smaller = (MOMENT_SCENARIOS.index(each) for each in ("stationary", "1,000x smaller"))
    error = (found["errors"][first, 1].sum() / found["exact"][first, 1].sum()).sqrt()
    rms = (found["squares"] / found["exact"]).sqrt()[:, 1]
    rows.append({**own, "what": "update", "size": SIZES[1], "error": _number(error)})
    for what, ratio in ((RMS, rms[first]), (f"{RMS}, 1,000x smaller", rms[smaller, SMALLER])):
        rows.append({**own, "what": what, "size": SIZES[1], **_spread(ratio)})
    return rows


Task = tuple[tuple[str, ...], tuple[float, ...], tuple[float, float], int]
"""Scenarios, sizes, betas and steps, which all kinds go through together."""


def tasks(steps: int) -> list[Task]:
    """All of a record."""
    moments = [(MOMENT_SCENARIOS, SIZES, (0.9, beta2), steps) for beta2 in BETAS2]
    return moments + [(HALVED, SIZES[1:2], (beta1, 0.999), min(steps, 1500)) for beta1 in BETAS1]


def measured(task: Task, rows: int) -> list[dict[str, Any]]:
    """The rows of a record that come from a task."""
    scenarios, sizes, betas, steps = task
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{', '.join(scenarios)}: betas {betas}", flush=True)
    gradients = Gradients(scenarios, sizes, rows, steps, device)
    rest = {"betas": betas, "eps": EPS, "device": device}
    followers = {
        name: Follower(make, read, gradients.shape, **rest, **options)
        for name, (make, read, options) in kinds(device)[0].items()
    }
    results: list[dict[str, Any]] = []
    for name, found in follow(gradients, betas, followers, steps).items():
        if scenarios != HALVED:
            results += _rows_of_a_run(name, betas[1], found)
            continue
        for what, ratio in zip(HALVED, found["exp_avg"], strict=True):
            results.append({"kind": name, "beta1": betas[0], "what": what, **_spread(ratio)})
    return results


def run(steps: int, rows: int, workers: int = 1) -> dict[str, Any]:
    """All kinds, all betas, in so many processes: the record.

    Raises ValueError where a library would keep fp32 moments, as all do below 4,096 elements, or
    where blocks of 256 would lie in two scenarios.
    """
    if rows < 16 or rows % 2:
        raise ValueError(f"rows must be even and at least 16, got {rows}")
    measure = partial(measured, rows=rows)
    if workers == 1:
        found = list(map(measure, tasks(steps)))
    else:  # the host's time counts: tensors are small, and torchao compiles anew for all betas
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            found = list(pool.map(measure, tasks(steps)))
    _, versions, skipped = kinds("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "command": portable(["python", *sys.argv]),
        "source": describe_source(),
        "environment": describe(),
        "versions": versions,
        "skipped": skipped,
        "steps": steps,
        "coordinates": rows * COLUMNS,
        "eps": EPS,
        "results": [row for each in found for row in each],
    }


# --- table and picture


def table(record: dict[str, Any], sizes: tuple[float, ...] = SIZES[1:2]) -> str:
    """A row a kind: medians and in brackets 5 and 95% of the coordinates, as a page shows them.

    Of all betas, and these sizes of gradients, those whose median is the farthest from 1; of the
    updates, which are measured at one size, the largest error.
    """
    columns = {**READINGS, "update": "error of the update"}
    columns |= {what: what for what in (RMS, f"{RMS}, 1,000x smaller")}
    columns |= {what: f"exp_avg, {what}" for what in HALVED}
    rows = [["moments", *columns.values()], ["---"] * (len(columns) + 1)]
    shown = [row for row in record["results"] if row.get("size", SIZES[1]) in sizes]
    for kind in dict.fromkeys(row["kind"] for row in shown):
        own = [row for row in shown if row["kind"] == kind]
        cells = [_cell([row for row in own if row["what"] == what]) for what in columns]
        rows.append([kind, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(rows: list[dict[str, Any]]) -> str:
    if "error" in rows[0]:
        return f"{_worst([row['error'] for row in rows]):.0%}"
    farthest = max(rows, key=lambda row: abs(math.log(_worst([row["median"]]) or 1e-300)))
    low, middle, high = (_worst([farthest[key]]) for key in ("low", "median", "high"))
    return f"{middle:.3g} ({low:.2g} to {high:.2g})"


def _worst(values: list[float | None]) -> float:
    """The largest; what is not finite is null in a record."""
    return max(math.inf if value is None else value for value in values)


def draw(record: dict[str, Any], picture: Path) -> None:
    """Medians and 90% of the coordinates; a colour a beta. What lies outside is at the edge."""
    from matplotlib.figure import Figure

    rows = record["results"]
    names = list(dict.fromkeys(row["kind"] for row in rows))
    figure = Figure(figsize=(17, 8.5), dpi=130, layout="constrained")
    panels = list(figure.subplots(2, 4, sharey=True).flat)
    shown = {**READINGS, "update": "relative error of the update", HALVED[0]: "exp_avg, halved"}
    for panel, (what, title) in zip(panels, shown.items(), strict=True):
        for row in rows:
            if row["what"] != what or row.get("size", SIZES[1]) != SIZES[1]:
                continue
            betas = BETAS1 if "beta1" in row else BETAS2
            place = betas.index(row.get("beta1", row.get("beta2")))
            low, middle, high = (row.get(key) for key in ("low", "median", "high"))
            line = (row["error"],) if what == "update" else (low, middle, high)
            line = [min(max(50 if each is None else each, 0.02), 50) for each in line]
            height, colour = names.index(row["kind"]) + 0.16 * (place - 1.5), f"C{place}"
            panel.plot((line[0], line[-1]), (height, height), color=colour, linewidth=1.5)
            panel.plot(line[len(line) // 2], height, "o", color=colour, markersize=4)
        panel.axvline(0.15 if what == "update" else 1, color="black", linewidth=0.5)
        panel.set_xscale("log")
        panel.set_xlim(0.02, 50)
        panel.set_title(title, fontsize=9)
    for panel in panels[:6]:
        panel.set_xlabel("root of exp_avg_sq / fp64's", fontsize=8)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    for panel, name, betas in ((panels[0], "beta2", BETAS2), (panels[7], "beta1", BETAS1)):
        for place, beta in enumerate(betas):
            panel.plot([], [], "o", color=f"C{place}", label=f"{name} {beta}")
        panel.legend(fontsize=7)
    figure.savefig(picture)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    own = commands.add_parser("run")
    own.add_argument("record", type=Path)
    own.add_argument("picture", type=Path)
    own.add_argument("--steps", type=int, default=5000)
    own.add_argument("--rows", type=int, default=64, help="of 128 coordinates, a scenario and size")
    own.add_argument("--workers", type=int, default=1, help="processes")
    own = commands.add_parser("draw")
    own.add_argument("record", type=Path)
    own.add_argument("picture", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        record = run(given.steps, given.rows, given.workers)
        given.record.write_text(json.dumps(record), encoding="utf-8")
    record = json.loads(given.record.read_text(encoding="utf-8"))
    draw(record, given.picture)
    for sizes in (SIZES[1:2], SIZES):
        print(f"\nGradients of {', '.join(map(str, sizes))}\n\n{table(record, sizes)}")


if __name__ == "__main__":
    main()
