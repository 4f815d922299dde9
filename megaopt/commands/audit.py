"""`megaopt audit`: a recording held to the laws of its optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megaopt.commands.console import make_console
from megaopt.commands.exits import DIFFERENT, DONE, REFUSED
from megaopt.kernels.files import write_json
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
        write_json(json, as_json(recording, report))
    show(make_console(), recording, report)
    return {True: DONE, False: DIFFERENT, None: REFUSED}[report.obeys]


def as_json(recording: Recording, report: Report) -> dict[str, Any]:
    """The report for programs; docs/audit.md has the schema."""
    return {
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


def classes(recording: Recording) -> list[str]:
    """The full names of the optimizers' classes, each once."""
    names = [optimizer["class"] for rank in recording.ranks for optimizer in rank.optimizers]
    return list(dict.fromkeys(names))


def show(console: Console, recording: Recording, report: Report) -> None:
    """Prints the verdict, then what does not obey, then what was not checked."""
    console.print(verdict(recording, report), highlight=False, style="bold")
    if report.findings:
        first = report.findings[0].step
        rows = [finding for finding in report.findings if finding.step == first]
        console.print(table(f"step {first}", rows))
        if report.findings[-1].step > first:
            for line in sums(report.findings):
                console.print(line, highlight=False)
    for why, names in report.not_checked.items():
        console.print(f"not checked, as {why}: {shown(names)}", highlight=False)
    if report.moved:
        rates = sorted(report.moved.values())
        console.print(
            f"their last update: {rates[0]:.3g} to {rates[-1]:.3g} of the weights", highlight=False
        )


def verdict(recording: Recording, report: Report) -> str:
    """One line that says whether the run's optimizers obey."""
    names = ", ".join(name.rpartition(".")[2] for name in classes(recording)) or "the optimizer"
    if report.obeys is None:
        return f"{names}: nothing could be checked in {report.steps} steps"
    if report.obeys:
        equal = f", {report.equal_bits} of them to the bit" if report.equal_bits else ""
        return (
            f"{names} obeys its law in {report.steps} steps: {report.checked} updates of tensors"
            f"{equal}"
        )
    tensors = {finding.name for finding in report.findings}
    first = report.findings[0]
    return (
        f"{names} does not obey its law from step {first.step} on: {first.explanation} "
        f"({shown(tensors)})"
    )


def table(title: str, findings: Iterable[AuditFinding]) -> Table:
    """The findings of a step, those with the largest difference first."""
    findings_table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("tensor", "quantity", "explanation", "update / law's", "off / rounding"):
        findings_table.add_column(column)
    ordered = sorted(findings, key=lambda finding: -(finding.off or 0.0))
    for finding in ordered[:MOST]:
        ratio = "" if finding.ratio is None else f"{finding.ratio:.3f}"
        off = "" if finding.off is None else f"{finding.off:.3g}"
        findings_table.add_row(finding.name, finding.quantity, finding.explanation, ratio, off)
    if len(ordered) > MOST:
        findings_table.add_row(f"and {len(ordered) - MOST} more")
    return findings_table


def sums(findings: Iterable[AuditFinding]) -> Iterable[str]:
    """A line for each explanation: its steps and tensors."""
    by_explanation: dict[str, list[AuditFinding]] = defaultdict(list)
    for finding in findings:
        by_explanation[finding.explanation].append(finding)
    for explanation, group in by_explanation.items():
        steps, names = [finding.step for finding in group], {finding.name for finding in group}
        yield f"{explanation}: steps {min(steps)} to {max(steps)}, {shown(names)}"


def shown(names: Iterable[str]) -> str:
    """Returns the number of tensors, and some of their names."""
    ordered = sorted(names)
    more = ", ..." if len(ordered) > 3 else ""
    count = "1 tensor" if len(ordered) == 1 else f"{len(ordered)} tensors"
    return f"{count}: {', '.join(ordered[:3])}{more}"
