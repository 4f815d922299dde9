"""`megaopt muon bench`: whole steps of FusedMuon and of other Muons, beside floors, in turn."""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console
from rich.table import Table
from torch.nn import Parameter

from megaopt.commands import exits
from megaopt.commands.bench.measure import (
    MOST_STEPS,
    Copy,
    Figures,
    measure,
    product_speed,
    record_of_figures,
    wall_ms,
)
from megaopt.commands.bench.report import (
    FLOOR,
    KINDS,
    draw_bars,
    free_memory,
    make_figure,
    require_gpu,
    write,
)
from megaopt.commands.bench.sets import TensorSet
from megaopt.commands.bench.subjects import Subject
from megaopt.commands.console import make_console, make_table
from megaopt.commands.regression.group import deaf
from megaopt.commands.regression.outputs import make_folder
from megaopt.commands.source import describe_source, made_with
from megaopt.commands.toml_tables import require
from megaopt.kernels.matrix.products import BF16

TITLE = (
    "Muon's step: ms on the device; floor: the fewest operations at a large product's speed, and a "
    "copy of its bytes; host: ms of step() until it returns"
)
HEADINGS = (
    "set", "optimizer", "what", ">ms", ">rounds", ">of floor", ">host", ">wall", ">launches",
    ">scratch MiB", ">slower than ours",
)  # fmt: skip
BYTES = 20
"""What a step must move of a parameter: bf16 gradient and weight, fp32 master and momentum, twice.
"""
LONGEST = 500
"""Characters of an error that are kept."""


# --- what is timed


class Masters:
    """Another library's optimizer of fp32 masters, between copies of gradients and of weights.

    Trainers keep bf16 weights so, as no other Muon has masters.
    """

    def __init__(
        self, make: Callable[..., Any], parameters: Sequence[Parameter], **options: Any
    ) -> None:
        self._parameters = parameters
        self._masters = [Parameter(each.detach().float()) for each in parameters]
        for master in self._masters:
            master.grad = torch.empty_like(master)
        self._own = make(self._masters, **options)

    @property
    def state(self) -> dict[Parameter, dict[str, Any]]:
        """The library's state of each parameter, and its `master_param`."""
        pairs = zip(self._parameters, self._masters, strict=True)
        return {p: {**self._own.state[m], "master_param": m.detach()} for p, m in pairs}

    @torch.no_grad()
    def step(self) -> None:
        """One step of all: gradients to fp32, the library's step, weights from masters."""
        copy: Any = torch._foreach_copy_  # whose types know no lists of parameters
        copy([each.grad for each in self._masters], [each.grad for each in self._parameters])
        self._own.step()
        copy(self._parameters, self._masters)


def _subject(
    name: str, title: str, description: str, module: str = "megaopt", **options: Any
) -> Subject:
    is_ours = module == "megaopt"
    return Subject(
        name=name,
        title=title,
        description=description,
        module=module,
        kind="FusedMuon" if is_ours else "Muon",
        around=None if is_ours else Masters,
        options={"dtype": torch.float32, **options} if is_ours else options,
        bytes_per_parameter=BYTES,
    )


def _subjects() -> Iterator[Subject]:
    yield _subject("ours", "FusedMuon, bf16", "bf16, standard form", method="standard")
    yield _subject("ours-fp16", "FusedMuon, fp16", "fp16, form by shape", precision="fp16")
    yield _subject("torch", "torch.optim.Muon, bf16", "bf16, one after another", "torch.optim")
    module = "emerging_optimizers.orthogonalized_optimizers.muon"
    own: dict[str, Any] = {"nesterov": True, "coefficient_type": "simple"}
    yield _subject("emerging", "Emerging-Optimizers, bf16", "bf16, fp32 between", module, **own)
    row = ("emerging-syrk", "the same, syrk", "the same by syrk", module)
    yield _subject(*row, use_syrk=True, **own)
    yield _subject("dion", "dion, bf16", "bf16, stacked by shape", "dion", nesterov=True)
    row = ("dion-triton", "the same, Triton", "the same by Triton", "dion")
    yield _subject(*row, nesterov=True, use_triton=True)
    words, module = "fp16, Gram's form by quack", "gram_newton_schulz"
    row = (module.replace("_", "-"), "gram-newton-schulz, fp16", words, module)
    yield _subject(*row, nesterov=True)


SUBJECTS = {each.name: each for each in _subjects()}
"""All have momentum 0.95, nesterov and 5 steps; coefficients, which cost none, are others."""


def _llama(layers: int) -> list[tuple[int, int]]:
    attention = [(4096, 4096)] * 2 + [(1024, 4096)] * 2
    return (attention + [(14336, 4096)] * 2 + [(4096, 14336)]) * layers


_gpt = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12
_experts = ([(1408, 2048)] * 2 + [(2048, 1408)]) * 64
SETS = {
    "L": TensorSet.of_shapes("L", "4 layers of Llama-3-8B", _llama(4)),
    "G": TensorSet.of_shapes("G", "GPT of 124M", _gpt),
    "E": TensorSet.of_shapes("E", "64 experts of 1408 x 2048", _experts),
}


def operations(tensors: TensorSet) -> int:
    """The fewest floating-point operations known of 5 steps of all matrices: Gram's form.

    Of short side s and long side l: two X X^T of s^2 l, as they are symmetric, two Q X of 2 s^2 l,
    and 14 products [s, s], each symmetric, of s^3.
    """
    sides = (sorted(shape) for shape in tensors.shapes)
    return sum(6 * short**2 * long + 14 * short**3 for short, long in sides)


def floor_bytes(tensors: TensorSet) -> int:
    """Bytes that a step must move."""
    return BYTES * sum(tensors.sizes)


# --- its run


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

    tensors: TensorSet
    subject: Subject
    rounds: Sequence[Measured]
    problem: str | None = None

    @property
    def middle(self) -> Measured | None:
        """The round of median time, the slower of two."""
        own = sorted(self.rounds, key=lambda each: each.figures.step_ms)
        return own[len(own) // 2] if own else None

    @property
    def floor_ms(self) -> float:
        """Milliseconds of the operations and then of a copy of the bytes; NaN without a round."""
        found = self.middle
        if found is None:
            return math.nan
        moving = floor_bytes(self.tensors) / found.figures.copy_bandwidth
        return 1e3 * (operations(self.tensors) / found.speed + moving)


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
    require_gpu("muon bench")
    source, console = describe_source(), make_console()
    make_folder(out)
    skipped = [name for name in only if not SUBJECTS[name].is_installed]
    for name in skipped:
        console.print(f"skipped: {name}: {SUBJECTS[name].package} is not installed", markup=False)
    turns = list(itertools.product(sets, range(rounds), [n for n in only if n not in skipped]))
    results = _in_turn(turns, patience, seconds or math.inf, repetitions, console)
    cases = [record_of(each) for each in results]
    record = made_with(source) | {"skipped": skipped, "cases": cases}
    picture = partial(draw, cases, record["environment"]["gpu"])
    write(console, out, record, [table_of(results)], {"speed.png": picture})
    failed = any(each.subject.is_ours and not each.rounds for each in results)
    return exits.DIFFERENT if failed else exits.DONE


def _in_turn(
    turns: Sequence[tuple[str, int, str]],
    patience: float,
    seconds: float,
    most: int,
    console: Console,
) -> list[Result]:
    """What all turns gave, each of a set, a round and an optimizer, which has its own process."""
    workers = {name: Worker(partial(measured, name)) for _, _, name in turns}
    found: dict[tuple[str, str], list[Measured]] = {(own, name): [] for own, _, name in turns}
    problems: dict[tuple[str, str], str] = {}
    gone: dict[str, str] = {}
    last = time.monotonic() + seconds
    try:
        for tensors, _, name in turns:
            key = tensors, name
            if name in gone or time.monotonic() > last:
                problems.setdefault(key, gone.get(name, "not begun in time"))
                continue
            try:
                own: Measured = workers[name].ask((tensors, most), patience)
            except Failed as error:
                problems[key] = str(error)
                if workers[name].is_over:
                    gone[name] = f"its process ended with set {tensors}"
                console.print(f"{tensors}, {name}: {error}", style="red", markup=False)
                continue
            found[key].append(own)
            words = f"{tensors}, {name}: {own.figures.step_ms:.3f} ms"
            console.print(words, markup=False, highlight=False)
    finally:
        for worker in workers.values():
            worker.end()
    return [Result(SETS[k[0]], SUBJECTS[k[1]], own, problems.get(k)) for k, own in found.items()]


def measured(name: str, question: tuple[str, int]) -> Measured:
    """One round of a case, in its process: (one of SETS, the most steps behind a time)."""
    (tensors, most), subject = question, SUBJECTS[name]
    device = torch.device("cuda", torch.cuda.current_device())
    free_memory()
    speed, own = product_speed(device, BF16), SETS[tensors]
    instance = subject.instance(own, device)
    figures = replace(measure(instance, Copy(device), most), bytes=floor_bytes(own))
    host = wall_ms(instance.optimizer.step, lambda: None, figures.repetitions, waits=False)
    if any(bool(each.isnan().any()) for each in instance.parameters):
        raise RuntimeError("weights became NaN")
    version = "" if subject.is_ours else subject.version()
    del instance
    free_memory()  # for the next one's process
    return Measured(figures, host, speed, version)


def record_of(result: Result) -> dict[str, Any]:
    """A case, ready for JSON: of the middle round, and the times of all."""
    own, found = result.tensors, result.middle
    record: dict[str, Any] = {"set": own.description, "optimizer": result.subject.name}
    record |= {"what": result.subject.description, "problem": result.problem}
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
        named = result.tensors.name, result.subject.name, result.subject.description
        table.add_row(*named, *_cells(result, results))
    return table


def _cells(result: Result, results: Sequence[Result]) -> list[str]:
    found = result.middle
    if found is None:
        return ["[red]no time[/red]", *[""] * 7]
    figures = found.figures
    ours = [r.middle for r in results if r.tensors == result.tensors and r.subject.is_ours]
    best = min((each.figures.step_ms for each in ours if each), default=None)
    return [
        f"{figures.step_ms:.3f}",
        " ".join(f"{each.figures.step_ms:.1f}" for each in result.rounds),
        f"{100 * result.floor_ms / figures.step_ms:.1f}%",
        f"{found.host_ms:.2f}",
        f"{figures.wall_ms:.3f}",
        "unknown" if figures.launches is None else str(figures.launches),
        f"{figures.scratch_bytes / 2**20:.0f}",
        "" if result.subject.is_ours or best is None else f"{figures.step_ms / best:.2f}x",
    ]


def draw(cases: Sequence[Mapping[str, Any]], hardware: str | None) -> Figure:
    """Milliseconds of a record's cases as horizontal bars, a field for each set."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        groups.setdefault(case["set"], []).append(case)
    heights = [1 + len(own) for own in groups.values()]
    title = "One step of Muon: bf16 weights and gradients, fp32 masters and momentum"
    figure = make_figure(title, (10, 1.6 + 0.3 * sum(heights)), dpi=120)
    fields = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, own in zip(fields, groups.values(), strict=True):
        _draw_set(axes, own)
    fields[-1].set_xlabel(f"ms of one step on one {hardware}; shorter is better", fontsize=9)
    shown = "fewest operations known, at the speed of torch's large product, and a copy"
    marks = [*KINDS, Line2D([], [], color=FLOOR, linestyle="--", label=shown)]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _draw_set(axes: Axes, cases: Sequence[Mapping[str, Any]]) -> None:
    """The fastest first; below them those without a time."""
    cases = sorted(cases, key=lambda case: case.get("step_ms", math.inf))
    times = [case.get("step_ms", 0.0) for case in cases]
    subjects = [SUBJECTS[case["optimizer"]] for case in cases]
    notes = [
        f" {ms:.3g} ms" if ms else f" {(case['problem'] or '')[:60]}"
        for case, ms in zip(cases, times, strict=True)
    ]
    named = [(each.title, each.is_ours) for each in subjects]
    bars = [(t, ms, own, note) for (t, own), ms, note in zip(named, times, notes, strict=True)]
    draw_bars(axes, range(len(bars)), bars)
    floors = [case["floor_ms"] for case in cases if "floor_ms" in case]
    if floors:
        axes.axvline(min(floors), color=FLOOR, linewidth=1.2, linestyle="--")
    axes.set_xlim(0, 1.15 * max([*times, 1e-9]))
    axes.invert_yaxis()
    own = next(each for each in SETS.values() if each.description == cases[0]["set"])
    title = f"{own.description}: {len(own.sizes)} matrices, {sum(own.sizes) / 1e6:.0f}e6 parameters"
    axes.set_title(title, loc="left", fontsize=9, style="italic", color="#555555")
    axes.tick_params(labelsize=8)


# --- a process that may fail, hang or be ended without harm to this one


class Failed(RuntimeError):
    """The work raised an error, took too long, or ended its process."""


class Worker:
    """A process that calls a function for each question; it does not hear Ctrl-C. End it.

    Args:
        work: what answers a question; it and all questions and answers can be pickled.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA allows no copies
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(work, theirs))
        with deaf():
            self._process.start()
        theirs.close()

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer to a question; Failed where there is none, and after so many seconds."""
        try:
            self._pipe.send(question)
            there = self._pipe.poll(seconds)
            is_done, found = self._pipe.recv() if there else (False, None)
        except (EOFError, OSError):
            self.end()
            raise Failed("its process ended") from None
        if not there:
            self.end()
            raise Failed(f"no answer within {seconds:g} seconds")
        if not is_done:
            raise Failed(found)
        return found

    @property
    def is_over(self) -> bool:
        """Whether the process has ended."""
        return not self._process.is_alive()

    def end(self) -> None:
        """Ends the process, and what it has started."""
        if self._process.is_alive() and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError, AttributeError):  # before its _serve
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(work: Callable[[Any], Any], pipe: Connection) -> None:
    if hasattr(os, "setsid"):  # not on Windows
        os.setsid()
    with contextlib.suppress(EOFError, OSError):  # nobody asks any more
        while True:
            pipe.send(_answered(work, pipe.recv()))


def _answered(work: Callable[[Any], Any], question: Any) -> tuple[bool, Any]:
    try:
        return True, work(question)
    except Exception as error:  # another library fails in its own way
        return False, f"{type(error).__name__}: {error}"[:LONGEST]
