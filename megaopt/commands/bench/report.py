"""What the bench leaves behind in words: a table and a record."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from megaopt.commands.bench.modes import Mode
from megaopt.commands.bench.results import Result, ratios
from megaopt.commands.console import make_table
from megaopt.commands.source import Source

__all__ = ["record_of", "table_of"]

HEADINGS = (
    "case", "bits", ">B/param", ">held", ">ms", ">of copy", ">wall", ">new grads", ">launches",
    ">scratch", "against: ours faster, ms / wall / new grads",
)  # fmt: skip


def table_of(results: Sequence[Result]) -> Table:
    """Return the figures as a table for the terminal."""
    title = (
        "the step against a same-run copy: bytes moved and held a parameter, ms on the device, "
        "wall ms, wall ms with new gradients, MiB of scratch"
    )
    table = make_table(title, HEADINGS)
    previous = None
    for result in results:
        if previous not in (None, result.case.tensors):
            table.add_section()
        previous = result.case.tensors
        table.add_row(result.case.name, _bits(result), *_cells(result), _against(result, results))
    return table


def _bits(result: Result) -> str:
    check = result.check
    if check is None:
        return ""
    if check.difference is not None:
        return "[red]differ[/red]"
    if check.against is None:
        return "unchecked"
    return "✓ reference" if check.against == "reference" else "✓ peer"


def _cells(result: Result) -> list[str]:
    figures, size = result.figures, f"{result.bytes_per_parameter:.4g}"
    if figures is None:
        return [size, "", "[red]no speed[/red]", *[""] * 5]
    return [
        size,
        f"{figures.held_bytes / figures.elements:.4g}",
        f"{figures.step_ms:.3f}",
        f"{figures.percent_of_copy:.1f}%",
        f"{figures.wall_ms:.3f}",
        f"{figures.wall_moved_ms:.3f}",
        "unknown" if figures.launches is None else str(figures.launches),
        f"{figures.scratch_bytes / 2**20:.1f}",
    ]


def _against(result: Result, results: Sequence[Result]) -> str:
    return "\n".join(
        f"{ratio.peer} {ratio.step:.2f}x / {ratio.wall:.2f}x / {ratio.wall_moved:.2f}x"
        for ratio in ratios(result, results)
    )


def record_of(
    results: Sequence[Result],
    source: Source,
    environment: Mapping[str, str | None],
    command: str,
    libraries: Mapping[str, str] | None = None,
    skipped: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return everything that was measured, and with what, ready for JSON.

    Args:
        results: Of the run, in its order.
        source: What describe_source gave when it began.
        environment: What environment.describe gave.
        command: The command line.
        libraries: Versions of the peers' libraries.
        skipped: Libraries that could not be imported, and why.
    """
    return {
        "source": source,
        "environment": dict(environment),
        "command": command,
        "libraries": dict(libraries or {}),
        "skipped": dict(skipped or {}),
        "sets": {result.case.tensors.name: result.case.tensors.description for result in results},
        "cases": [_case_record(result, results) for result in results],
    }


def _case_record(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    case, figures, check = result.case, result.figures, result.check
    ours = isinstance(case.subject, Mode)
    record: dict[str, Any] = {
        "case": case.name,
        "set": case.tensors.name,
        "ours" if ours else "peer": case.subject.name,
        "description": case.subject.description,
        "bytes_per_parameter": result.bytes_per_parameter,
        "problem": result.problem,
    }
    if isinstance(case.subject, Mode):
        record["contract"] = case.subject.contract
        if case.subject.recipe is not None:
            recipe = case.subject.recipe
            record |= {"scaling": recipe.scaling, "direct": recipe.direct}
        record["checked_against"] = check.against if check else None
        equal = None if check is None or check.against is None else check.difference is None
        record["equal"] = equal
    if figures is not None:
        record |= asdict(figures) | {
            "launches": figures.launches,
            "copy_bandwidth": figures.copy_bandwidth,
            "percent_of_copy": figures.percent_of_copy,
        }
        if ours:
            record["times_faster_than"] = [asdict(ratio) for ratio in ratios(result, results)]
    return record
