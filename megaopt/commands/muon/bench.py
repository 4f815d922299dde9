"""`megaopt muon bench`: whole steps of FusedMuon and of other Muons, beside floors, in turn."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from megaopt.commands import exits
from megaopt.commands.bench import report
from megaopt.commands.bench.measure import (
    MOST_STEPS,
    Copy,
    Record,
    measure,
    product_speed,
    wall_ms,
    with_rates,
)
from megaopt.commands.bench.report import Columns
from megaopt.commands.bench.sets import Shape, TensorSet
from megaopt.commands.bench.subjects import Subject
from megaopt.commands.bench.workers import Failed, Worker
from megaopt.commands.console import make_console
from megaopt.commands.regression.outputs import make_folder
from megaopt.commands.source import describe_source, made_with
from megaopt.commands.toml_tables import require
from megaopt.kernels.galore.products import BF16

TITLE = (
    "Muon's step: ms on the device; floor: the fewest operations at a large product's speed, and a "
    "copy of its bytes; host: ms of step() until it returns"
)
BYTES = 20
"""The bytes that a step must move of a parameter: bf16 gradient and weight; fp32 master and
momentum, both twice."""


# --- what is timed


class Masters:
    """Another library's optimizer of fp32 masters, between copies of gradients and of weights.

    Trainers keep bf16 weights so, as no other Muon has masters.
    """

    def __init__(
        self, make: Callable[..., Any], parameters: Sequence[Parameter], **options: Any
    ) -> None:
        self._parameters = parameters
        self._masters = [Parameter(parameter.detach().float()) for parameter in parameters]
        for master in self._masters:
            master.grad = torch.empty_like(master)
        self._optimizer = make(self._masters, **options)

    @property
    def state(self) -> dict[Parameter, dict[str, Any]]:
        """The library's state of each parameter, and its `master_param`."""
        pairs = zip(self._parameters, self._masters, strict=True)
        return {p: {**self._optimizer.state[m], "master_param": m.detach()} for p, m in pairs}

    @torch.no_grad()
    def step(self) -> None:
        """Steps all parameters: gradients to fp32, the library's step, weights from masters."""
        copy: Any = torch._foreach_copy_  # whose types know no lists of parameters
        grads = [[tensor.grad for tensor in kind] for kind in (self._masters, self._parameters)]
        copy(*map(_local, grads))
        self._optimizer.step()
        copy(_local(self._parameters), _local(self._masters))


def _local(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Returns this rank's parts of tensors."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


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
    options: dict[str, Any] = {"nesterov": True, "coefficient_type": "simple"}
    yield _subject("emerging", "Emerging-Optimizers, bf16", "bf16, fp32 between", module, **options)
    row = ("emerging-syrk", "the same, syrk", "the same by syrk", module)
    yield _subject(*row, use_syrk=True, **options)
    yield _subject("dion", "dion, bf16", "bf16, stacked by shape", "dion", nesterov=True)
    row = ("dion-triton", "the same, Triton", "the same by Triton", "dion")
    yield _subject(*row, nesterov=True, use_triton=True)
    words, module = "fp16, Gram's form by quack", "gram_newton_schulz"
    row = (module.replace("_", "-"), "gram-newton-schulz, fp16", words, module)
    yield _subject(*row, nesterov=True)


SUBJECTS = {subject.name: subject for subject in _subjects()}
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
    """The fewest floating-point operations known of 5 steps of all matrices."""
    return sum(map(operations_of, tensors.shapes))


def operations_of(shape: Shape) -> int:
    """Returns the operations of one matrix, in Gram's form.

    Of short side s and long side l: two X X^T of s^2 l, as they are symmetric, two Q X of 2 s^2 l,
    and 14 products [s, s], each symmetric, of s^3.
    """
    short, long = sorted(shape)
    return 6 * short**2 * long + 14 * short**3


def floor_bytes(tensors: TensorSet) -> int:
    """Bytes that a step must move."""
    return BYTES * sum(tensors.sizes)


# --- its run


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
        unknown = next((value for value in values if value not in table), None)
        require(unknown is None and len(values) > 0, name, unknown, f"of {', '.join(table)}")
    for name, value in (("rounds", rounds), ("patience", patience), ("repetitions", repetitions)):
        require(value >= 1, name, value, "a whole number >= 1")
    report.require_gpu("muon bench")
    source, console = describe_source(), make_console()
    make_folder(out)
    skipped = [name for name in only if not SUBJECTS[name].is_installed]
    for name in skipped:
        console.print(f"skipped: {name}: {SUBJECTS[name].package} is not installed")
    names = [name for name in only if name not in skipped]
    turns = list(itertools.product(sets, range(rounds), names))
    cases = _in_turn(names, turns, patience, seconds or math.inf, repetitions, console)
    record = made_with(source) | {"skipped": skipped, "cases": cases}
    tables = [report.table_of(TITLE, cases, NAMED, _timed(cases))]
    report.write(console, out, record, tables, {"speed.png": partial(draw, record)})
    failed = [case for case in cases if _is_ours(case) and not report.is_timed(case)]
    return exits.DIFFERENT if failed else exits.DONE


def _in_turn(
    names: Sequence[str],
    turns: Sequence[tuple[str, int, str]],
    patience: float,
    seconds: float,
    most: int,
    console: Console,
) -> list[Record]:
    """The records of all turns, each of a set, a round and an optimizer.

    An optimizer that lost its process, and any after so many seconds, is not asked.
    """
    workers = {name: Worker(partial(measured, name)) for name in dict.fromkeys(names)}
    records: dict[tuple[str, str], list[Record]] = {
        (tensors, name): [] for tensors, _, name in turns
    }
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
                figures: Record = workers[name].ask((tensors, most), patience)
            except Failed as error:
                problems[key] = str(error)
                if workers[name].is_over:
                    gone[name] = f"its process ended with set {tensors}"
                console.print(f"{tensors}, {name}: {error}", style="red")
                continue
            records[key].append(figures)
            words = f"{tensors}, {name}: {figures['step_ms']:.3f} ms"
            console.print(words, highlight=False)
    finally:
        for worker in workers.values():
            worker.end()
    return [record_of(*key, rounds, problems.get(key)) for key, rounds in records.items()]


def measured(name: str, question: tuple[str, int]) -> Record:
    """Measures one round of a case, in its process: (one of SETS, the most steps behind a time).

    Returns:
        The figures, with the bytes of the floor; host_ms, median milliseconds of step() until it
        returns, the device idle before; speed, operations per second of a large bf16 product of
        torch's just before; version, of the library.
    """
    (tensors, most), subject = question, SUBJECTS[name]
    device = torch.device("cuda", torch.cuda.current_device())
    report.free_memory()
    speed, tensor_set = product_speed(device, BF16), SETS[tensors]
    instance = subject.instance(tensor_set, device)
    figures = with_rates(measure(instance, Copy(device), most) | {"bytes": floor_bytes(tensor_set)})
    count = figures["repetitions"]
    figures["host_ms"] = wall_ms(instance.optimizer.step, lambda: None, count, waits=False)
    if any(bool(parameter.isnan().any()) for parameter in instance.parameters):
        raise RuntimeError("weights became NaN")
    figures["speed"] = speed
    figures["version"] = "" if subject.is_ours else subject.version()
    del instance
    report.free_memory()  # for the next one's process
    return figures


def floor_ms(case: Record, speed: float) -> float:
    """Milliseconds of a case: its operations at a speed per second, then a copy of its bytes."""
    moving: float = case["floor_bytes"] / case["copy_bandwidth"]
    return 1e3 * (float(case["operations"]) / speed + moving)


def record_of(
    tensors: str, name: str, rounds: Sequence[Record], problem: str | None = None
) -> Record:
    """The record of a case: of the round of median time, the slower of two; and all times."""
    tensor_set, moved = SETS[tensors], floor_bytes(SETS[tensors])
    record: Record = {"set": tensor_set.description, "optimizer": name}
    record |= {"what": SUBJECTS[name].description, "problem": problem}
    record |= {"floor_bytes": moved, "operations": operations(tensor_set)}
    if rounds:
        in_order = sorted(rounds, key=itemgetter("step_ms"))
        record |= in_order[len(rounds) // 2]
        record["floor_ms"] = floor_ms(record, record["speed"])
        record["rounds_ms"] = [figures["step_ms"] for figures in rounds]
    return record


def _is_ours(case: Record) -> bool:
    return SUBJECTS[case["optimizer"]].is_ours


def _set_of(case: Record) -> TensorSet:
    return next(tensor_set for tensor_set in SETS.values() if tensor_set.description == case["set"])


NAMED: Columns = {
    "set": lambda case: _set_of(case).name,
    "optimizer": itemgetter("optimizer"),
    "what": itemgetter("what"),
}


def _timed(cases: Sequence[Record]) -> Columns:
    """The columns of times; the last one compares them with the fastest of ours on the set."""
    best: dict[str, float] = {}
    for case in cases:
        if _is_ours(case) and report.is_timed(case):
            best[case["set"]] = min(case["step_ms"], best.get(case["set"], math.inf))

    def slower(case: Record) -> str:
        is_beside_ours = case["set"] in best and not _is_ours(case)
        return f"{case['step_ms'] / best[case['set']]:.2f}x" if is_beside_ours else ""

    return {
        **report.MS,
        ">rounds": lambda case: " ".join(f"{ms:.1f}" for ms in case["rounds_ms"]),
        **report.OF_FLOOR,
        ">host": lambda case: f"{case['host_ms']:.2f}",
        **report.WALL,
        **report.LAUNCHES,
        ">slower than ours": slower,
    }


def draw(record: Record) -> Figure:
    """Milliseconds as horizontal bars, a field for each set."""
    groups: dict[str, list[Record]] = {}
    for case in record["cases"]:
        groups.setdefault(case["set"], []).append(case)
    heights = [1 + len(cases) for cases in groups.values()]
    title = "One step of Muon: bf16 weights and gradients, fp32 masters and momentum"
    figure = report.make_figure(title, (10, 1.6 + 0.3 * sum(heights)), dpi=120)
    fields = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, cases in zip(fields, groups.values(), strict=True):
        _draw_set(axes, cases)
    label = f"ms of one step on one {record['environment']['gpu']}; shorter is better"
    fields[-1].set_xlabel(label, fontsize=9)
    shown = "fewest operations known, at the speed of torch's large product, and a copy"
    marks = [*report.KINDS, Line2D([], [], color=report.FLOOR, linestyle="--", label=shown)]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _draw_set(axes: Axes, cases: Sequence[Record]) -> None:
    """The fastest first; below them those without a time."""
    bars = []
    for case in sorted(cases, key=lambda case: case.get("step_ms", math.inf)):
        ms, title = case.get("step_ms", 0.0), SUBJECTS[case["optimizer"]].title
        note = f" {ms:.3g} ms" if ms else f" {(case['problem'] or '')[:60]}"
        bars.append((title, ms, _is_ours(case), note))
    report.draw_bars(axes, range(len(bars)), bars)
    if floors := [case["floor_ms"] for case in cases if report.is_timed(case)]:
        axes.axvline(min(floors), color=report.FLOOR, linewidth=1.2, linestyle="--")
    axes.set_xlim(0, 1.15 * max(1e-9, *(ms for _, ms, _, _ in bars)))
    axes.invert_yaxis()
    tensor_set = _set_of(cases[0])
    title = (
        f"{tensor_set.description}: {len(tensor_set.sizes)} matrices, "
        f"{sum(tensor_set.sizes) / 1e6:.0f}e6 parameters"
    )
    axes.set_title(title, loc="left", fontsize=9, style="italic", color="#555555")
    axes.tick_params(labelsize=8)
