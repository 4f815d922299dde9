"""`megaopt audit`: a recording held to the laws of its optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megaopt.kernels.files import write_json
from megaopt.lab.console import make_console
from megaopt.lab.exits import DIFFERENT, DONE, REFUSED
from megaopt.recording.audit import Audit, AuditFinding, Report
from megaopt.recording.files import Recording

MOST = 20
"""Rows of a table."""


def audit(folder: Path, /, *, json: Path | None = None) -> int:
    """Hold each step of a recording to the law of its optimizer, without a reference run.

    Exit status: 0 every step obeys, 1 some do not, 2 nothing could be checked.

    Args:
        folder: What megaopt record or megaopt.Recorder wrote.
        json: Write the whole report to this file.

    Raises RecordingError where there is none.
    """
    recording = Recording(folder)
    report = Audit(recording).run()
    if json is not None:
        # for programs; docs/audit.md has the schema
        content = {
            "schema": 1,
            "optimizers": classes(recording),
            "obeys": report.obeys,
            "steps": report.steps,
            "checked": report.checked,
            "equal_bits": report.equal_bits,
            "findings": [finding._asdict() for finding in report.findings],
            "not_checked": {why: sorted(names) for why, names in report.not_checked.items()},
            "moved": report.moved,
        }
        write_json(json, content)
    show(make_console(), recording, report)
    return {True: DONE, False: DIFFERENT, None: REFUSED}[report.obeys]


def classes(recording: Recording) -> list[str]:
    """The full names of the optimizers' classes, each once."""
    names = [optimizer["class"] for rank in recording.ranks for optimizer in rank.optimizers]
    return list(dict.fromkeys(names))


def show(console: Console, recording: Recording, report: Report) -> None:
    """Prints the verdict, then what does not obey, then what was not checked."""
    names = ", ".join(name.rpartition(".")[2] for name in classes(recording)) or "the optimizer"
    findings = report.findings
    if report.obeys is None:
        verdict = f"{names}: nothing could be checked in {report.steps} steps"
    elif report.obeys:
        equal = f", {report.equal_bits} of them to the bit" if report.equal_bits else ""
        updates = f"{report.checked} updates of tensors{equal}"
        verdict = f"{names} obeys its law in {report.steps} steps: {updates}"
    else:
        where = f"from step {findings[0].step} on: {findings[0].explanation}"
        tensors = shown({finding.name for finding in findings})
        verdict = f"{names} does not obey its law {where} ({tensors})"
    console.print(verdict, highlight=False, style="bold")
    if findings:
        # those of the first step, the largest difference first
        first = findings[0].step
        table = Table(title=f"step {first}", title_justify="left", box=None, pad_edge=False)
        for column in ("tensor", "quantity", "explanation", "update / law's", "off / rounding"):
            table.add_column(column)
        rows = [finding for finding in findings if finding.step == first]
        for finding in sorted(rows, key=lambda finding: -(finding.off or 0.0))[:MOST]:
            ratio = "" if finding.ratio is None else f"{finding.ratio:.3f}"
            off = "" if finding.off is None else f"{finding.off:.3g}"
            table.add_row(finding.name, finding.quantity, finding.explanation, ratio, off)
        if len(rows) > MOST:
            table.add_row(f"and {len(rows) - MOST} more")
        console.print(table)
        # of all steps, where there are more, a line for each explanation
        by_explanation: dict[str, list[AuditFinding]] = defaultdict(list)
        for finding in findings if findings[-1].step > first else ():
            by_explanation[finding.explanation].append(finding)
        for explanation, group in by_explanation.items():
            steps = [finding.step for finding in group]
            tensors = shown({finding.name for finding in group})
            line = f"{explanation}: steps {min(steps)} to {max(steps)}, {tensors}"
            console.print(line, highlight=False)
    for why, unchecked in report.not_checked.items():
        console.print(f"not checked, as {why}: {shown(unchecked)}", highlight=False)
    if report.moved:
        rates = sorted(report.moved.values())
        line = f"their last update: {rates[0]:.3g} to {rates[-1]:.3g} of the weights"
        console.print(line, highlight=False)


def shown(names: Iterable[str]) -> str:
    """Returns the number of tensors, and some of their names."""
    ordered = sorted(names)
    more = ", ..." if len(ordered) > 3 else ""
    count = "1 tensor" if len(ordered) == 1 else f"{len(ordered)} tensors"
    return f"{count}: {', '.join(ordered[:3])}{more}"
