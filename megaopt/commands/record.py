"""`megaopt record`: runs a command whose training processes are recorded, without a change."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megaopt.commands.compared import read_names
from megaopt.commands.toml_tables import ConfigError
from megaopt.recording.runner import VARIABLE

PRELOAD = Path(__file__).parents[1] / "recording" / "preload"
"""The folder that goes on PYTHONPATH."""

NOTHING = "no step of a torch.optim.Optimizer ran, or Python was started with -S, -I or -E"


def record(
    command: Sequence[str], out: Path, keep: str, names: Path | None, audit: bool, **options: Any
) -> int:
    """Runs a command and returns its exit status; 128 and the signal's number where one ended it.

    Args:
        command: and its arguments.
        out: folder of the recording.
        keep: steps whose tensors are kept, as "100,200-210".
        names: JSON file of canonical names.
        audit: hold the recording to the optimizers' laws afterwards, where the command succeeded.
        options: more of a recorder's, which JSON can hold.

    Raises ConfigError for a recording that is there already, numbers out of range, and steps that
    are none; RecordingError for a file of other names; OSError for a folder that cannot be made.
    """
    for name in ("every", "samples"):
        if options[name] < 1:
            raise ConfigError(f"{name} must be a whole number >= 1, got {options[name]}")
    if any(out.glob("rank-*")):
        raise ConfigError(f"out must be a folder without a recording, got {str(out)!r}")
    given = {"out": str(out.absolute()), "keep": list(steps_of(keep)), **options}
    if names is not None:
        given["names"] = read_names(names)
    paths = [str(PRELOAD), *filter(None, [os.environ.get("PYTHONPATH")])]
    changed = {VARIABLE: json.dumps(given), "PYTHONPATH": os.pathsep.join(paths)}
    out.mkdir(parents=True, exist_ok=True)
    child = subprocess.Popen(command, env={**os.environ, **changed})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to both
    signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
    status = child.wait()
    if not any(out.glob("rank-*")):
        print(f"megaopt: nothing was recorded: {NOTHING}", file=sys.stderr)
    if audit and not status:
        from megaopt.commands.audit import audit as hold

        return hold(out, None)
    return 128 - status if status < 0 else status


def steps_of(keep: str) -> Iterator[tuple[int, int]]:
    """The first step and the one after the last of each range in a text as "100,200-210"."""
    for each in filter(None, keep.split(",")):
        first, _, last = each.partition("-")
        numbers = first, last or first
        if not all(map(str.isdecimal, numbers)) or not 0 < int(first) <= int(numbers[1]):
            raise ConfigError(f"keep must be steps from 1 on, as 100,200-210, got {keep!r}")
        yield int(first), int(numbers[1]) + 1
