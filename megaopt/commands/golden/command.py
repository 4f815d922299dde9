"""`megaopt verify`: checks this installation against the golden record."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megaopt.commands.bench.report import print_table
from megaopt.commands.console import step_progress
from megaopt.commands.golden.cases import ANY_MACHINE, CASES, NVIDIA_GPU
from megaopt.commands.golden.check import (
    Outcome,
    check,
    choose,
    matches,
    plan,
    record_anew,
    why_not_recorded,
)
from megaopt.commands.golden.record import Record, packaged, write

__all__ = ["verify"]

BAD_INPUT = 2


def verify(
    record: Path | None = None, only: Sequence[str] = (), backends: Sequence[str] = ()
) -> int:
    """Steps the cases of the record with every backend that works here, and compares.

    Args:
        record: writes the file anew, here, and compares nothing.
        only: patterns of the names of cases to check; none means all.
        backends: the backends to check; none means all.

    Returns:
        0 where all that was checked is identical, or the record is written; 1 where something
        differs; 2 for a pattern of no case, an unknown backend, either beside `record`, a record
        that cannot be read, or where nothing can be checked here.
    """
    console = Console()
    try:
        chosen = choose(only, backends)
        if record is not None and (only or backends):
            raise ValueError("record must stand without only and backends: a record is whole")
        old = packaged()
    except ValueError as error:
        print(f"megaopt: {error}", file=sys.stderr)
        return BAD_INPUT
    if record is not None:
        return _record(record, old, console)
    tasks = plan(old, chosen, backends)
    total = sum(len(task.cases) for task in tasks if task.reason is None)
    with step_progress(console) as progress:
        bar = progress.add_task("stepping cases", total=total)
        outcomes = [
            check(task, old.digests[task.part], lambda: progress.advance(bar))
            if task.reason is None
            else Outcome(task)
            for task in tasks
        ]
    print_table(console, _table(outcomes))
    for task in tasks:
        if task.reason is not None:
            line = f"not checked here: {task.contract}, {task.where}: {task.reason}"
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    strays = {name: what for name, what in old.strays().items() if matches(name, only)}
    return _report(outcomes, strays, console)


def _record(path: Path, old: Record, console: Console) -> int:
    reason = why_not_recorded()
    parts = CASES if reason is None else (ANY_MACHINE,)
    with step_progress(console) as progress:
        bar = progress.add_task("stepping cases", total=sum(len(CASES[part]) for part in parts))
        write(path, record_anew(old, lambda: progress.advance(bar)))
    console.print(f"written: {path}", soft_wrap=True, highlight=False, markup=False)
    if reason is not None:
        console.print(f"{NVIDIA_GPU}: left as it was, {reason}", soft_wrap=True, markup=False)
    return 0


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="the golden record", title_justify="left")
    for name in ("part", "contract", "backend"):
        table.add_column(name, no_wrap=True)
    for name in ("cases", "identical", "different", "unchecked"):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        task, count = outcome.task, len(outcome.different)
        left_out = len(task.cases) - outcome.identical - count
        different = f"[red]{count}[/]" if count else "0"
        counts = (str(len(task.cases)), str(outcome.identical), different, str(left_out))
        table.add_row(task.part, task.contract, task.where, *counts)
    return table


def _report(outcomes: Sequence[Outcome], strays: Mapping[str, str], console: Console) -> int:
    different = [
        f"{name}: {what} ({outcome.task.where})"
        for outcome in outcomes
        for name, what in outcome.different.items()
    ]
    different += [f"{name}: {what}" for name, what in strays.items()]
    for line in different:
        console.print(f"[red]different[/]: {escape(line)}", soft_wrap=True, highlight=False)
    if not different and not any(outcome.identical for outcome in outcomes):
        print("megaopt: nothing was checked here", file=sys.stderr)
        return BAD_INPUT
    if not different:
        console.print("[green]identical[/]: all that was checked here, bit for bit")
    return 1 if different else 0
