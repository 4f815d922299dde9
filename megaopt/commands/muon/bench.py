"""`megaopt muon bench`: whole steps of FusedMuon and of other Muons, beside floors, in turn."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from rich.table import Table

from megaopt.commands import exits
from megaopt.commands.bench.command import why_not
from megaopt.commands.bench.instance import build
from megaopt.commands.bench.measure import (
    MOST_STEPS,
    Copy,
    Figures,
    measure,
    record_of_figures,
    wall_ms,
)
from megaopt.commands.bench.peers import version_of
from megaopt.commands.bench.results import FAILED, OURS, PEER
from megaopt.commands.console import make_console, make_table, print_table
from megaopt.commands.galore.bench import FLOOR, product_speed
from megaopt.commands.muon import peers
from megaopt.commands.muon.peers import SETS, SUBJECTS, floor_bytes, operations
from megaopt.commands.muon.worker import Failed, Worker
from megaopt.commands.regression.outputs import make_folder
from megaopt.commands.regression.picture import save
from megaopt.commands.source import describe_source, made_with
from megaopt.commands.toml_tables import ConfigError, require
from megaopt.kernels.matrix.products import BF16
from megaopt.saving.files import write_json

TITLE = (
    "Muon's step: ms on the device; floor: the fewest operations at a large product's speed, and a "
    "copy of its bytes; host: ms of step() until it returns"
)
HEADINGS = (
    "set", "optimizer", "what", ">ms", ">rounds", ">of floor", ">host", ">wall", ">launches",
    ">scratch MiB", ">slower than ours",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """What one round of a case gave."""

    figures: Figures
    """`bytes` are those of `floor_bytes`."""
    host_ms: float
    """Median milliseconds of step() until it returns, the device idle before."""
    speed: float
    """Operations per second of a large bf16 product of torch's, in the same process just before."""
    version: str


@dataclass(frozen=True)
class Result:
    """One optimizer on one set: the middle round of those that succeeded, or why there is none."""

    tensors: str
    """One of SETS."""
    subject: str
    """One of SUBJECTS."""
    rounds: tuple[Measured, ...]
    problem: str | None = None

    @property
    def middle(self) -> Measured | None:
        """The round of median time, the slower of two."""
        own = sorted(self.rounds, key=lambda each: each.figures.step_ms)
        return own[len(own) // 2] if own else None

    @property
    def floor_ms(self) -> float:
        """Milliseconds of the operations and then of a copy of the bytes; NaN without a round."""
        found, tensors = self.middle, SETS[self.tensors]
        if found is None:
            return math.nan
        moving = floor_bytes(tensors) / found.figures.copy_bandwidth
        return 1e3 * (operations(tensors) / found.speed + moving)

    @property
    def is_ours(self) -> bool:
        """Whether it is of this package."""
        return SUBJECTS[self.subject].package == peers.OURS


def main(
    *,
    sets: tuple[str, ...] = tuple(SETS),
    only: tuple[str, ...] = tuple(SUBJECTS),
    rounds: int = 2,
    patience: int = 60,
    seconds: int = 0,
    repetitions: int = MOST_STEPS,
    out: Path = Path("out/muon"),
) -> int:
    """Time FusedMuon's step beside other libraries' Muon: bf16 weights, fp32 masters and momentum.

    Each optimizer has a process of its own; in each round of a set all take their turn.

    Args:
        sets: L: 28 matrices of four of Llama-3-8B's layers; G: 48 of a GPT of 124M; E: 192 of 64
            experts.
        only: ours (bf16), ours-fp16; torch, emerging, emerging-syrk, dion, dion-triton,
            gram-newton-schulz, where they are installed.
        rounds: How often each is measured; the middle one counts.
        patience: Seconds that an optimizer has for a set in a round; one that takes longer, as some
            that try many kernels, has no time and is not asked again.
        seconds: After so many nothing more is begun; 0: no limit.
        repetitions: Steps behind a time, at most.
        out: Folder for the record and the picture.

    Returns:
        0 where every case of ours was measured, 1 where one was not.

    Raises:
        ConfigError: an argument is empty or out of its range, or there is no CUDA GPU on which the
            kernels run.
        OSError: the record or the picture cannot be written.
    """
    for name, values, table in (("sets", sets, SETS), ("only", only, SUBJECTS)):
        unknown = next((each for each in values if each not in table), None)
        require(unknown is None and len(values) > 0, name, unknown, f"of {', '.join(table)}")
    for name, value in (("rounds", rounds), ("patience", patience), ("repetitions", repetitions)):
        require(value >= 1, name, value, "a whole number >= 1")
    if reason := why_not():
        raise ConfigError(f"muon bench cannot run here: {reason}")
    source, console = describe_source(), make_console()
    make_folder(out)
    skipped = [name for name in only if not SUBJECTS[name].is_there]
    for name in skipped:
        console.print(f"skipped: {name}: {SUBJECTS[name].package} is not installed", markup=False)
    asked = _Asked(patience, seconds or math.inf, repetitions, console)
    results = asked.all(sets, [name for name in only if name not in skipped], rounds)
    print_table(console, table_of(results))
    record = made_with(source) | {
        "skipped": skipped,
        "cases": [record_of(each) for each in results],
    }
    write_json(out / "record.json", record)
    draw(out / "speed.png", bars_of(results), record["environment"]["gpu"])
    console.print(f"{out / 'record.json'}, {out / 'speed.png'}", markup=False)
    return exits.DIFFERENT if any(r.is_ours and not r.rounds for r in results) else exits.DONE


class _Asked:
    """The processes of a run, and what they answer."""

    def __init__(self, patience: float, seconds: float, most: int, console: Any) -> None:
        self._patience, self._most, self._console = patience, most, console
        self._last = time.monotonic() + seconds
        self._problems: dict[tuple[str, str], str] = {}
        self._gone: dict[str, str] = {}

    def all(self, sets: Sequence[str], names: Sequence[str], rounds: int) -> list[Result]:
        """All cases, set by set: each round asks one optimizer after the other."""
        workers = {name: Worker(partial(measured, name)) for name in names}
        found: dict[tuple[str, str], list[Measured]] = {(s, n): [] for s in sets for n in names}
        try:
            for tensors in sets:
                for name in list(names) * rounds:
                    if (own := self._ask(workers[name], tensors, name)) is not None:
                        found[tensors, name].append(own)
        finally:
            for worker in workers.values():
                worker.end()
        return [Result(*k, tuple(own), self._problems.get(k)) for k, own in found.items()]

    def _ask(self, worker: Worker, tensors: str, name: str) -> Measured | None:
        key = tensors, name
        if name in self._gone or time.monotonic() > self._last:
            self._problems.setdefault(key, self._gone.get(name, "not begun in time"))
            return None
        try:
            found: Measured = worker.ask((tensors, self._most), self._patience)
        except Failed as error:
            self._problems[key] = str(error)
            if worker.is_over:
                self._gone[name] = f"its process ended with set {tensors}"
            self._console.print(f"{tensors}, {name}: {error}", style="red", markup=False)
            return None
        words = f"{tensors}, {name}: {found.figures.step_ms:.3f} ms"
        self._console.print(words, markup=False, highlight=False)
        return found


def measured(name: str, question: tuple[str, int]) -> Measured:
    """One round of a case, in its process: (one of SETS, the most steps behind a time)."""
    (tensors, most), subject = question, SUBJECTS[name]
    device = torch.device("cuda", torch.cuda.current_device())
    gc.collect()  # an optimizer can be part of a reference cycle
    torch.cuda.empty_cache()
    speed, own = product_speed(device, BF16), SETS[tensors]
    instance = build(subject.make, own, torch.bfloat16, device)
    figures = replace(measure(instance, Copy(device), most), bytes=floor_bytes(own))
    host = wall_ms(instance.optimizer.step, lambda: None, figures.repetitions, waits=False)
    if any(bool(each.isnan().any()) for each in instance.parameters):
        raise RuntimeError("weights became NaN")
    version = "" if subject.package == peers.OURS else version_of(subject.package)
    del instance
    gc.collect()
    torch.cuda.empty_cache()  # for the next one's process
    return Measured(figures, host, speed, version)


def record_of(result: Result) -> dict[str, Any]:
    """A case, ready for JSON: of the middle round, and the times of all."""
    own, found, subject = SETS[result.tensors], result.middle, SUBJECTS[result.subject]
    record: dict[str, Any] = {"set": own.description, "optimizer": result.subject}
    record |= {"what": subject.description, "problem": result.problem}
    record |= {"floor_bytes": floor_bytes(own), "operations": operations(own)}
    if found is not None:
        record |= record_of_figures(found.figures)
        record |= {"host_ms": found.host_ms, "speed": found.speed, "floor_ms": result.floor_ms}
        record |= {"version": found.version}
        record["rounds_ms"] = [each.figures.step_ms for each in result.rounds]
    return record


def table_of(results: Sequence[Result]) -> Table:
    """Times beside the floor and our fastest, as a table for the terminal."""
    table = make_table(TITLE, HEADINGS)
    for result in results:
        if result.subject == results[0].subject and result is not results[0]:
            table.add_section()
        named = result.tensors, result.subject, SUBJECTS[result.subject].description
        table.add_row(*named, *_cells(result, results))
    return table


def _cells(result: Result, results: Sequence[Result]) -> list[str]:
    found = result.middle
    if found is None:
        return ["[red]no time[/red]", *[""] * 7]
    figures, ours = found.figures, best_of_ours(result.tensors, results)
    return [
        f"{figures.step_ms:.3f}",
        " ".join(f"{each.figures.step_ms:.1f}" for each in result.rounds),
        f"{100 * result.floor_ms / figures.step_ms:.1f}%",
        f"{found.host_ms:.2f}",
        f"{figures.wall_ms:.3f}",
        "unknown" if figures.launches is None else str(figures.launches),
        f"{figures.scratch_bytes / 2**20:.0f}",
        "" if result.is_ours or ours is None else f"{figures.step_ms / ours:.2f}x",
    ]


def best_of_ours(tensors: str, results: Sequence[Result]) -> float | None:
    """Milliseconds of our fastest form on a set; None where there is none."""
    own = [r.middle for r in results if r.tensors == tensors and r.is_ours]
    return min((each.figures.step_ms for each in own if each), default=None)


class Bar(NamedTuple):
    """What a picture shows of a case."""

    tensors: str
    subject: str
    ms: float | None
    floor_ms: float | None = None
    problem: str | None = None


def bars_of(results: Sequence[Result]) -> list[Bar]:
    """A bar for each case; without a round it has no time."""
    times = [(r.middle.figures.step_ms, r.floor_ms) if r.middle else (None, None) for r in results]
    return [
        Bar(each.tensors, each.subject, ms, floor_ms, each.problem)
        for each, (ms, floor_ms) in zip(results, times, strict=True)
    ]


def draw(path: Path, bars: Sequence[Bar], hardware: str | None) -> None:
    """Draws milliseconds as horizontal bars into a PNG file, a field for each set."""
    names = list(dict.fromkeys(each.tensors for each in bars))
    heights = [1 + sum(each.tensors == name for each in bars) for name in names]
    figure = Figure(figsize=(10, 1.6 + 0.3 * sum(heights)), dpi=120, layout="constrained")
    fields = figure.subplots(len(names), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, name in zip(fields, names, strict=True):
        _draw_set(axes, [each for each in bars if each.tensors == name])
    fields[-1].set_xlabel(f"ms of one step on one {hardware}; shorter is better", fontsize=9)
    title = "One step of Muon: bf16 weights and gradients, fp32 masters and momentum"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    shown = "fewest operations known, at the speed of torch's large product, and a copy"
    marks = [
        Patch(color=OURS, label="megaopt"),
        Patch(color=PEER, label="other libraries"),
        Line2D([], [], color=FLOOR, linestyle="--", label=shown),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save(path, figure)


def _draw_set(axes: Axes, bars: Sequence[Bar]) -> None:
    """The fastest first; below them those without a time."""
    bars = sorted(bars, key=lambda each: each.ms or math.inf)
    times = [each.ms or 0.0 for each in bars]
    ours = [SUBJECTS[each.subject].package == peers.OURS for each in bars]
    axes.barh(range(len(bars)), times, color=[OURS if own else PEER for own in ours])
    axes.set_yticks(range(len(bars)), [SUBJECTS[each.subject].title for each in bars], fontsize=8)
    for row, each in enumerate(bars):
        note = f" {each.ms:.3g} ms" if each.ms else f" {(each.problem or '')[:60]}"
        colour = "black" if each.ms else FAILED
        axes.text(each.ms or 0, row, note, va="center", fontsize=8, color=colour)
    floors = [each.floor_ms for each in bars if each.floor_ms]
    if floors:
        axes.axvline(min(floors), color=FLOOR, linewidth=1.2, linestyle="--")
    axes.set_xlim(0, 1.15 * max([*times, 1e-9]))
    axes.invert_yaxis()
    own = SETS[bars[0].tensors]
    title = f"{own.description}: {len(own.sizes)} matrices, {sum(own.sizes) / 1e6:.0f}e6 parameters"
    axes.set_title(title, loc="left", fontsize=9, style="italic", color="#555555")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
