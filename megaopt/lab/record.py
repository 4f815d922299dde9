"""`megaopt record`: runs a command whose training processes are recorded, without a change."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

from megaopt.lab.compared import read_names
from megaopt.lab.exits import INTERRUPTED, how_to_install
from megaopt.lab.toml_tables import ConfigError, require
from megaopt.recording.preload import VARIABLE

PRELOAD = Path(__file__).parents[1] / "recording" / "preload"
"""The folder that goes on PYTHONPATH."""

NOTHING = (
    "no step of a torch.optim.Optimizer ran, or Python was started with -S, -I or -E, or a process"
    " trained that was forked after it had imported torch"
)


def record(
    command: tuple[str, ...],
    /,
    *,
    out: Path = Path("out/recording"),
    level: Literal["loss", "step", "blocks", "modules"] = "step",
    every: int = 1,
    samples: int = 10,
    keep: str = "",
    map: Path | None = None,
    vocabulary: int | None = None,
    audit: bool = False,
) -> int:
    """Run a command, as `megaopt record -- torchrun train.py`, and record its optimizers' steps.

    The exit status is the command's; 128 and the signal's number where one ended it.

    Args:
        command: Behind --: the command and its arguments.
        out: Folder for the recording; each rank writes to one of its own there.
        level: loss: losses, options, random states, batches; step: also digests and samples of
            gradients, weights, masters, moments; blocks: also outputs of blocks and their
            gradients; modules: of all modules.
        every: Record each step that this divides, and the first.
        samples: From step 101 on, sample elements at steps that this divides.
        keep: Steps of which whole tensors are written, as 100,200-210.
        map: JSON file of canonical names by the names that parameters have.
        vocabulary: Rows of Megatron's embedding that are not padding.
        audit: Hold the recording to the optimizers' laws afterwards; then the status is audit's.

    Raises:
        ConfigError: a recording is there already, a number is out of range, keep has no steps, or
            safetensors, which keeps them, is not installed.
        RecordingError: map has no names.
        OSError: the folder cannot be made.
    """
    for name, value in (("every", every), ("samples", samples), ("vocabulary", vocabulary)):
        require(value is None or value >= 1, name, value, "a whole number >= 1")
    if any(out.glob("rank-*")):
        raise ConfigError(f"out must be a folder without a recording, got {str(out)!r}")
    ranges = []
    for part in filter(None, keep.split(",")):
        first, _, last = part.partition("-")
        last = last or first
        is_range = first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)
        if not is_range:
            raise ConfigError(f"keep must be steps from 1 on, as 100,200-210, got {keep!r}")
        ranges.append((int(first), int(last) + 1))
    if ranges and importlib.util.find_spec("safetensors") is None:
        where = f"where safetensors is not installed ({how_to_install('record')})"
        raise ConfigError(f"keep must be left out {where}, got {keep!r}")
    settings = {
        "out": str(out.absolute()), "level": level, "every": every, "samples": samples,
        "keep": ranges, "names": map and read_names(map), "vocabulary": vocabulary,
    }  # fmt: skip
    paths = [str(PRELOAD), *filter(None, [os.environ.get("PYTHONPATH")])]
    changed = {VARIABLE: json.dumps(settings), "PYTHONPATH": os.pathsep.join(paths)}
    out.mkdir(parents=True, exist_ok=True)
    child = subprocess.Popen(command, env={**os.environ, **changed})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to both
    signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
    status = child.wait()
    if not any(out.glob("rank-*")):
        print(f"megaopt: nothing was recorded: {NOTHING}", file=sys.stderr)
    elif status in (-signal.SIGINT, INTERRUPTED):
        print(f"megaopt: interrupted; {out} has the steps before", file=sys.stderr)
    if audit and not status:
        from megaopt.lab.audit import audit as hold

        return hold(out)
    return 128 - status if status < 0 else status
