"""`megaopt golden`: a small file of what a run gave, and other runs held to it."""

from __future__ import annotations

from pathlib import Path

from megaopt.commands.console import make_console
from megaopt.commands.diff import STATUS, print_table, tell
from megaopt.commands.exits import DIFFERENT, DONE, REFUSED
from megaopt.recording import golden as values
from megaopt.recording.files import Recording
from megaopt.saving.files import write_json


def golden(action: str, file: Path, run: Path, because: str = "", megatron: bool = False) -> int:
    """Makes, checks or updates a file of golden values.

    Returns:
        0 where it is written, or the run is the same; 1 where it differs; 2 where there is no entry
        for the run's environment and it differs from the nearest.
    """
    recording = Recording(run)
    if action == "check":
        return _check_megatron(file, recording) if megatron else _check(file, recording)
    if megatron:
        write_json(file, values.megatron_values(recording))
    elif action == "make":
        values.make(file, recording)
    else:
        values.refuse_changes(file)
        values.update(file, recording, because)
    print(f"written: {file}")
    return DONE


def _check(file: Path, recording: Recording) -> int:
    found, console = values.check(file, recording), make_console()
    status = STATUS[found.comparison.verdict]
    if found.is_own or not status:
        tell(found.comparison, console)
        return status
    console.print(found.line, highlight=False, markup=False)
    rows = [
        (what, str(step), repr(mine), repr(theirs), f"{abs(theirs - mine) / (abs(mine) or 1):.2g}")
        for what, step, mine, theirs in found.drift
    ]
    columns = ("norm of samples", "step", "golden", "now", "relative")
    print_table(console, "beside another environment", columns, rows)
    return REFUSED


def _check_megatron(file: Path, recording: Recording) -> int:
    lines = values.check_megatron(file, recording)
    for line in lines:
        print(f"different: {line}")
    if not lines:
        print("same: all metrics that both have")
    return DIFFERENT if lines else DONE
