"""`megaopt verify`: steps the cases wherever this machine can, and compares with the record."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.text import Text

from megaopt.kernels.backends import BACKENDS, why_not
from megaopt.kernels.contracts import CONTRACTS
from megaopt.kernels.files import replacing
from megaopt.lab import exits, source
from megaopt.lab.console import coloured, make_console, make_table, print_table, step_progress
from megaopt.lab.golden.cases import (
    ANY_MACHINE,
    CASES,
    NVIDIA_GPU,
    GoldenCase,
    Record,
    covering,
    packaged,
    render,
)
from megaopt.lab.golden.run import DIGITS, run
from megaopt.lab.regression.processes import apart
from megaopt.lab.toml_tables import ConfigError, require
from megaopt.recording.pair import differences

DESCRIBED = ("gpu", "compute_capability", "cuda_driver", "cuda_runtime", "torch", "triton")
"""The record's keys for the machine on which the part of NVIDIA GPUs was made."""
SHARED = ("megaopt", *DESCRIBED, "gpu_memory", "python", "cpu", "cores")
"""A shared report's keys for the machine: nothing that names a user, a host or a path."""


MOST_WORKERS = 12
"""Processes among which cases are shared where a GPU steps some.

Most of such a case is compiling, of which one process does one at a time: on the host of an H200
with an empty cache one process took 2.9 s for each, 19 of 89 in 55 s. On its 16 cores all 89 took
36 s by 8 processes, 30 and 31 s by 12, 34 and 36 s by 15.
"""

HOMES = {("triton", "cuda"): 2, ("reference", "cpu"): 1}
"""The device that each backend is meant for; the higher number is taken first."""

HEADINGS = ("part", "contract", "backend", "cases", "identical", "different", "unchecked")


class CaseOutcome(NamedTuple):
    """The result of a case's steps."""

    digests: Mapping[str, str]
    """The digest of each quantity; none where a step raised an error."""
    different: str | None
    """The quantities that are not those of the record, or the error; None where all is well."""


@dataclass
class GoldenTask:
    """The cases of a part under one contract, with one backend on one device, and their outcome."""

    part: str
    contract: str
    backend: str
    device: torch.device
    cases: Sequence[GoldenCase]
    reason: str | None
    """Why they are not checked here; None where they are."""
    chosen: Sequence[GoldenCase] = ()
    """The cases that are stepped."""
    outcomes: dict[str, CaseOutcome] = field(default_factory=dict)
    """The outcome of each case that was stepped."""

    @property
    def where(self) -> str:
        """Backend and device, as tables and messages have them."""
        return f"{self.backend} on {self.device.type}"

    @property
    def different(self) -> dict[str, str]:
        """Returns by case the quantities that differ from the record's, or what went wrong."""
        return {
            name: outcome.different for name, outcome in self.outcomes.items() if outcome.different
        }

    @property
    def row(self) -> tuple[str, ...]:
        """Returns the cells beneath HEADINGS."""
        cases, stepped, different = map(len, (self.cases, self.outcomes, self.different))
        counts = map(str, (cases, stepped - different, different, cases - stepped))
        return self.part, self.contract, self.where, *counts


def verify(
    *,
    record: Path | None = None,
    all: bool = False,
    only: tuple[str, ...] = (),
    backends: tuple[str, ...] = (),
    share: Path | None = None,
) -> int:
    """Step cases of the golden record with every backend that works here; compare their bits.

    By default few cases: of each contract one at least for each rule, format, master, quantizer and
    option, with the GPU's kernels where there are any, otherwise in plain torch; and with each
    other backend one for each optimizer. Half a minute on two cores.

    Args:
        record: Write the record anew to this file, and compare nothing.
        all: Step all cases with every backend: minutes.
        only: Names of the cases to step, or patterns of them ('ieee/adamw/bf16*'): all of these.
        backends: Names of the backends to check; all by default.
        share: Write to this file a report that can be posted, in Markdown: card, driver, versions,
            results and digests; no names of users or hosts, and no paths.

    Returns:
        0 where all that was checked is identical, or the record is written; 1 where something
        differs.

    Raises:
        ConfigError: a pattern is of no case, a backend unknown, one of these or `share` stands
            beside `record`, either file is a folder, or nothing can be checked here.
        OSError: a file cannot be written.
    """
    console, chosen, old = make_console(), choose(only, backends), packaged()
    for name, path in (("record", record), ("share", share)):
        require(path is None or not path.is_dir(), name, str(path), "a file, not a folder")
    if record is not None:
        if only or backends or share:
            words = "record must stand without only, backends and share: a record is whole"
            raise ConfigError(words)
        return _record(record, old, console)
    if share is not None:
        share.parent.mkdir(parents=True, exist_ok=True)
    # what is stepped where, and its outcomes
    tasks = plan(old, chosen, backends)
    if not (all or only):
        take_few(tasks)
    cases = [(task, case) for task in tasks if task.reason is None for case in task.chosen]
    jobs = []
    for task, case in cases:
        expected = old.digests[task.part][case.name]
        jobs.append(GoldenJob(task.part, case.name, task.backend, task.device, expected))
    has_gpu = any(task.device.type == "cuda" for task, _ in cases)
    workers = min(MOST_WORKERS, (os.cpu_count() or 1) - 1, len(jobs)) if has_gpu else 1
    with step_progress(console) as progress:
        stepped = outcomes_of(jobs, workers)
        outcomes = progress.track(stepped, len(jobs), description="stepping cases")
        for (task, case), one in zip(cases, outcomes, strict=True):
            task.outcomes[case.name] = one
    status = _tell(tasks, console)
    if share is not None:
        with replacing(share) as file:
            file.write("\n".join(report(tasks, old)).encode())
        console.print(f"written: {share}", soft_wrap=True, highlight=False)
    return status


class GoldenJob(NamedTuple):
    """A case to step and compare."""

    part: str
    name: str
    backend: str
    device: torch.device
    expected: Mapping[str, str] | None
    """Digests by quantity, as `outcome` takes them."""


def outcomes_of(jobs: Sequence[GoldenJob], workers: int) -> Iterator[CaseOutcome]:
    """The outcomes of jobs, in their order; workers: processes that step them, 1 is this one."""
    if workers < 2:
        yield from map(_outcome_of, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with apart(), context.Pool(workers, _begin_worker) as pool:
        yield from pool.imap(_outcome_of, jobs)


def _begin_worker() -> None:
    """Begins a process that steps cases beside others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    # torch would take all cores in each: of 16, with 12 processes that compile kernels, Muon's case
    # in plain torch took 39 s on an H200's host
    torch.set_num_threads(1)


def _outcome_of(job: GoldenJob) -> CaseOutcome:
    case = next(case for case in CASES[job.part] if case.name == job.name)
    return outcome(case, job.backend, job.device, job.expected)


def _record(path: Path, old: Record, console: Console) -> int:
    """Writes a record: any machine's part by the reference, a GPU's by its kernels.

    What an NVIDIA GPU alone keeps stays as it was on a machine without one.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    contracts = sorted({case.contract for case in CASES[NVIDIA_GPU]})
    reasons = [why_not("triton", CONTRACTS[name], device) for name in contracts]
    reason = next(filter(None, reasons), None)
    digests, made_on = {**old.digests}, old.made_on
    places = {ANY_MACHINE: ("reference", torch.device("cpu"))}
    if reason is None:
        places[NVIDIA_GPU] = ("triton", device)
        made_on = {name: source.describe()[name] for name in DESCRIBED}
    with step_progress(console) as progress:
        for part, place in places.items():
            cases = progress.track(CASES[part], description="stepping cases")
            digests[part] = {case.name: run(case, *place) for case in cases}
    path.write_text(render(Record(digests, made_on)), encoding="utf-8")
    console.print(f"written: {path}", soft_wrap=True, highlight=False)
    if reason is not None:
        console.print(f"{NVIDIA_GPU}: left as it was, {reason}", soft_wrap=True)
    return exits.DONE


def _tell(tasks: Sequence[GoldenTask], console: Console) -> int:
    """Prints the outcomes: the table, what was not checked, what differs; the exit status."""
    headings = [*HEADINGS[:3], *(f">{heading}" for heading in HEADINGS[3:])]
    table, lines = make_table("the golden record", headings), list[str | Text]()
    for task in tasks:
        *before, different, left_out = task.row
        table.add_row(*before, coloured("red", different) if task.different else "0", left_out)
        if task.reason is not None:
            lines.append(f"not checked here: {task.contract}, {task.where}: {task.reason}")
    print_table(console, table)
    stepped = sum(len(task.outcomes) for task in tasks)
    possible = sum(len(task.cases) for task in tasks if task.reason is None)
    if stepped < possible:
        lines.append(
            f"stepped {stepped} of the {possible} cases that can be checked here: each rule, "
            "format, master, quantizer, option, contract and backend at least once; "
            "megaopt verify --all steps all"
        )
    status = exits.DONE
    for task in tasks:
        for name, quantities in task.different.items():
            words = f": {name}: {quantities} ({task.where})"
            lines.append(coloured("red", "different", words))
            status = exits.DIFFERENT
    if status == exits.DONE and stepped:
        lines.append(coloured("green", "identical", ": all that was checked here, bit for bit"))
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    if not stepped:
        raise ConfigError("nothing was checked here")
    return status


def report(tasks: Sequence[GoldenTask], record: Record) -> Iterator[str]:
    """The lines of what a user may post, in Markdown.

    Of an error it has the class alone: a message may name a path.
    """
    wrong = sum(len(task.different) for task in tasks)
    yield f"# megaopt verify: {f'{wrong} differ' if wrong else 'identical'}"
    here = {name: source.describe()[name] for name in SHARED}
    here["golden record"] = _digest(render(record))
    yield from _markdown(("here", ""), ((name, value or "none") for name, value in here.items()))
    rows, reasons, different = [], [], []
    for task in tasks:
        # one digest of all of a task's, the same on each machine with the same bits
        digests = sorted((name, *sorted(o.digests.items())) for name, o in task.outcomes.items())
        rows.append((*task.row, _digest(repr(digests)) if digests else ""))
        if task.reason is not None:
            reasons.append((*task.row[:3], task.reason.partition(" (")[0]))
        for name, quantities in task.different.items():
            words = [f"{key} {digest}" for key, digest in task.outcomes[name].digests.items()]
            different.append((name, task.where, ", ".join(words) or quantities.partition(":")[0]))
    yield from _markdown((*HEADINGS, "digest of all"), rows)
    yield from _markdown((*HEADINGS[:3], "why not checked"), reasons)
    headings = ("case", "backend", "not identical: digests here, or the error")
    yield from _markdown(headings, different)
    yield "\n<details><summary>cases that were stepped</summary>\n\n```"
    yield from sorted({name for task in tasks for name in task.outcomes})
    yield "```\n\n</details>\n"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:DIGITS]


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table; nothing without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if lines:
        yield from ("", f"| {' | '.join(headings)} |", "|---" * len(headings) + "|", *lines)


def choose(only: Sequence[str], backends: Sequence[str]) -> dict[str, list[GoldenCase]]:
    """The cases by part.

    Args:
        only: patterns of names (fnmatch); none means all.
        backends: checked only.

    Raises:
        ConfigError: a pattern is that of no case, or a backend is none.
    """
    for backend in backends:
        require(backend in BACKENDS, "backends", backend, f"of {', '.join(BACKENDS)}")
    names = [case.name for cases in CASES.values() for case in cases]
    words = f"a pattern of one of the {len(names)} names of cases, as 'ieee/adamw/bf16*' is"
    for pattern in only:
        require(any(fnmatchcase(name, pattern) for name in names), "only", pattern, words)
    chosen = {name for name in names if any(fnmatchcase(name, p) for p in only or ("*",))}
    return {part: [case for case in CASES[part] if case.name in chosen] for part in CASES}


def plan(
    record: Record, chosen: Mapping[str, list[GoldenCase]], backends: Sequence[str] = ()
) -> list[GoldenTask]:
    """Returns the tasks to check, and those not to be checked here; no backends mean all.

    A contract that none of these backends serves is among those not to be checked.
    """
    tasks = []
    for part, cases in chosen.items():
        for name in dict.fromkeys(case.contract for case in cases):
            subset = [case for case in cases if case.contract == name]
            serving = CONTRACTS[name].backends
            candidates = [backend for backend in serving if not backends or backend in backends]
            # the CPU and the first GPU; the GPU alone where there is one and the contract needs it
            devices = [torch.device("cuda", 0)] if torch.cuda.is_available() else []
            if not (devices and CONTRACTS[name].needs_gpu):
                devices.insert(0, torch.device("cpu"))
            for device in devices:
                for backend in candidates or serving:
                    reason = why_not(backend, CONTRACTS[name], device)
                    reason = reason or why_not_compared(record, part)
                    reason = reason if candidates else "its backend was not asked for"
                    tasks.append(GoldenTask(part, name, backend, device, subset, reason, subset))
    return tasks


def take_few(tasks: Sequence[GoldenTask]) -> None:
    """Leaves each task few of its cases: one of each contract's covers all features of cases.

    That is the GPU's kernels, or without them plain torch on the CPU: Triton's interpreter is slow.
    The others cover the optimizers.
    """
    checked = [task for task in tasks if task.reason is None]
    for contract in dict.fromkeys(task.contract for task in checked):
        alike = [task for task in checked if task.contract == contract]
        first = max(alike, key=lambda task: HOMES.get((task.backend, task.device.type), 0))
        for task in alike:
            task.chosen = covering(task.cases, lambda case: {case.kind.optimizer})
        first.chosen = covering(first.cases, lambda case: case.features)


def why_not_compared(record: Record, part: str) -> str | None:
    """Why digests made here cannot be those of a part of the record; None where they must be."""
    if part == ANY_MACHINE:
        return None
    here = source.describe()["compute_capability"]
    recorded = record.made_on.get("compute_capability")
    if here != recorded:
        return f"recorded on compute capability {recorded}, the GPU here has {here}"
    return None


def outcome(
    case: GoldenCase, backend: str, device: torch.device, expected: Mapping[str, str] | None
) -> CaseOutcome:
    """Steps a case and compares.

    Args:
        case: what is stepped.
        backend: "triton" or "reference".
        device: where.
        expected: digests by quantity; None where they are not known: steps alone are asked for.
    """
    try:
        digests = run(case, backend, device)
    # a step that fails where it did not is what this looks for
    except Exception as error:
        return CaseOutcome({}, f"{type(error).__name__}: {error}")
    unlike = () if expected is None else differences(expected, digests)
    return CaseOutcome(digests, ", ".join(difference.name for difference in unlike) or None)
