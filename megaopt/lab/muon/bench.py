"""`megaopt muon bench`: whole steps of FusedMuon and of other Muons, beside floors, in turn."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from megaopt.kernels.galore.products import BF16
from megaopt.lab import exits
from megaopt.lab.bench import report
from megaopt.lab.bench.measure import (
    MOST_STEPS,
    Copy,
    Record,
    free_memory,
    measure,
    product_speed,
    time_steps,
    with_rates,
)
from megaopt.lab.bench.report import Bar, BenchRun, Columns
from megaopt.lab.bench.sets import Shape, TensorSet
from megaopt.lab.bench.subjects import Subject
from megaopt.lab.bench.workers import Failed, Team

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


EMERGING = "emerging_optimizers.orthogonalized_optimizers.muon"
SIMPLE = {"nesterov": True, "coefficient_type": "simple"}
SYRK, TRITON = {**SIMPLE, "use_syrk": True}, {"nesterov": True, "use_triton": True}
GRAM = "gram_newton_schulz"
GRAM_WORDS = ("gram-newton-schulz, fp16", "fp16, Gram's form by quack")
SUBJECTS = {
    subject.name: subject
    for subject in (
        _subject("ours", "FusedMuon, bf16", "bf16, standard form", method="standard"),
        _subject("ours-fp16", "FusedMuon, fp16", "fp16, form by shape", precision="fp16"),
        _subject("torch", "torch.optim.Muon, bf16", "bf16, one after another", "torch.optim"),
        _subject("emerging", "Emerging-Optimizers, bf16", "bf16, fp32 between", EMERGING, **SIMPLE),
        _subject("emerging-syrk", "the same, syrk", "the same by syrk", EMERGING, **SYRK),
        _subject("dion", "dion, bf16", "bf16, stacked by shape", "dion", nesterov=True),
        _subject("dion-triton", "the same, Triton", "the same by Triton", "dion", **TRITON),
        _subject("gram-newton-schulz", *GRAM_WORDS, GRAM, nesterov=True),
    )
}
"""All have momentum 0.95, nesterov and 5 steps; coefficients, which cost none, are others."""


_llama = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
_gpt = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
_expert = [(1408, 2048)] * 2 + [(2048, 1408)]
SETS = {
    "L": TensorSet.of_shapes("L", "4 layers of Llama-3-8B", _llama * 4),
    "G": TensorSet.of_shapes("G", "GPT of 124M", _gpt * 12),
    "E": TensorSet.of_shapes("E", "64 experts of 1408 x 2048", _expert * 64),
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
    report.require_names("sets", sets, SETS)
    report.require_names("only", only, SUBJECTS)
    report.require_counts(rounds=rounds, patience=patience, repetitions=repetitions)
    report.require_gpu("muon bench")
    bench = BenchRun(out, seconds)
    skipped = [name for name in only if not SUBJECTS[name].is_installed]
    bench.skip(f"{name}: {SUBJECTS[name].package} is not installed" for name in skipped)
    names = [name for name in only if name not in skipped]
    cases = _in_turn(bench, sets, names, rounds, patience, repetitions)
    bench.record |= {"skipped": skipped, "cases": cases}
    tables = [report.table_of(TITLE, cases, NAMED, _timed(cases))]
    bench.end(tables, {"speed.png": partial(draw, bench.record)})
    failed = [case for case in cases if _is_ours(case) and not report.is_timed(case)]
    return exits.DIFFERENT if failed else exits.DONE


def _in_turn(
    bench: BenchRun,
    sets: Sequence[str],
    names: Sequence[str],
    rounds: int,
    patience: float,
    most: int,
) -> list[Record]:
    """The records of all optimizers on all sets; in each round of a set all take their turn.

    An optimizer that lost its process, and any after the run's seconds, is not asked.
    """
    teams = {name: Team([partial(measured, name)]) for name in dict.fromkeys(names)}
    figures: dict[tuple[str, str], list[Record]] = {}
    problems: dict[tuple[str, str], str] = {}
    gone: dict[str, str] = {}
    try:
        for tensors, _, name in itertools.product(sets, range(rounds), names):
            key = tensors, name
            times = figures.setdefault(key, [])
            if name in gone or bench.is_late():
                problems.setdefault(key, gone.get(name, "not begun in time"))
                continue
            try:
                times += teams[name].ask((tensors, most), patience)
                words = f"{tensors}, {name}: {times[-1]['step_ms']:.3f} ms"
                bench.console.print(words, highlight=False)
            except Failed as error:
                problems[key] = str(error)
                if teams[name].is_over:
                    gone[name] = f"its process ended with set {tensors}"
                bench.console.print(f"{tensors}, {name}: {error}", style="red")
    finally:
        for team in teams.values():
            team.end()
    return [record_of(*key, times, problems.get(key)) for key, times in figures.items()]


def measured(name: str, question: tuple[str, int]) -> Record:
    """Measures one round of a case, in its process: (one of SETS, the most steps behind a time).

    Returns:
        The figures, with the bytes of the floor; host_ms, median milliseconds of step() until it
        returns, the device idle before; speed, operations per second of a large bf16 product of
        torch's just before; version, of the library.
    """
    (tensors, most), subject = question, SUBJECTS[name]
    device = torch.device("cuda", torch.cuda.current_device())
    free_memory()
    speed, tensor_set = product_speed(device, BF16), SETS[tensors]
    instance = subject.instance(tensor_set, device)
    figures = with_rates(measure(instance, Copy(device), most) | {"bytes": floor_bytes(tensor_set)})
    times = time_steps(instance.optimizer.step, figures["repetitions"], device)
    figures |= {"host_ms": statistics.median(times.host), "speed": speed}
    if any(bool(parameter.isnan().any()) for parameter in instance.parameters):
        raise RuntimeError("weights became NaN")
    figures["version"] = "" if subject.is_ours else subject.version()
    del instance
    free_memory()  # for the next one's process
    return figures


def floor_ms(case: Record, speed: float) -> float:
    """Milliseconds of a case: its operations at a speed per second, then a copy of its bytes."""
    moving: float = case["floor_bytes"] / case["copy_bandwidth"]
    return 1e3 * (float(case["operations"]) / speed + moving)


def record_of(
    tensors: str, name: str, rounds: Sequence[Record], problem: str | None = None
) -> Record:
    """The record of a case: of the round of median time, the slower of two; and all times."""
    tensor_set = SETS[tensors]
    record: Record = {"set": tensor_set.description, "optimizer": name}
    record |= {"what": SUBJECTS[name].description, "problem": problem}
    record |= {"floor_bytes": floor_bytes(tensor_set), "operations": operations(tensor_set)}
    if rounds:
        in_order = sorted(rounds, key=itemgetter("step_ms"))
        record |= in_order[len(rounds) // 2]
        record["floor_ms"] = floor_ms(record, record["speed"])
        record["rounds_ms"] = [figures["step_ms"] for figures in rounds]
    return record


# --- table and picture


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
    """Milliseconds as bars, a field for each set, the fastest first; those without a time last."""
    fields: dict[str, list[Bar]] = {}
    floors: dict[str, float] = {}
    by_set: dict[str, list[Record]] = {}
    for case in record["cases"]:
        by_set.setdefault(case["set"], []).append(case)
    for cases in by_set.values():
        tensors = _set_of(cases[0])
        count, size = len(tensors.sizes), sum(tensors.sizes) / 1e6
        heading = f"{tensors.description}: {count} matrices, {size:.0f}e6 parameters"
        fields[heading] = []
        for case in sorted(cases, key=lambda case: case.get("step_ms", math.inf)):
            ms, title = case.get("step_ms", 0.0), SUBJECTS[case["optimizer"]].title
            note = f" {ms:.3g} ms" if ms else f" {(case['problem'] or '')[:60]}"
            fields[heading].append(Bar(title, ms, _is_ours(case), note))
        if timed := [case["floor_ms"] for case in cases if report.is_timed(case)]:
            floors[heading] = min(timed)
    return report.draw_bars(
        "One step of Muon: bf16 weights and gradients, fp32 masters and momentum",
        f"ms of one step on one {record['environment']['gpu']}; shorter is better",
        fields,
        floors=floors,
        floor_label="fewest operations known, at the speed of torch's large product, and a copy",
    )
