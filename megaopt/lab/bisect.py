"""`megaopt bisect`: what `git bisect run` asks of each commit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megaopt.recording.blame import Blame
from megaopt.recording.checks import RecordingError
from megaopt.recording.compare import compare
from megaopt.recording.files import Recording
from megaopt.recording.printable import short

GOOD, BAD, SKIP = 0, 1, 125
"""The statuses of a commit to `git bisect run`, which takes all but 125 from 1 to 127 for bad."""
PAUSE = 0.2
"""Seconds between looks at a recording that grows."""
PATIENCE = 10
"""Seconds that a command gets to end when it is told to."""


def bisect(good: Path, bad: Path, command: tuple[str, ...], /) -> int:
    """Tell `git bisect run` if a command trains as it did: 0 good, 1 bad, 125 skip, 128 stop.

    What cannot be done here ends the whole bisect, by 128: git takes 2 for a bad commit.

    Args:
        good: Folder of a recording of the good commit.
        bad: Folder of a recording of the bad one.
        command: What trains, after "--"; it is recorded, and ended where the two recordings part.

    Raises RecordingError where nothing can be said of any commit, as where good and bad do not
    part.
    """
    right, wrong = Recording(good), Recording(bad)
    parted = compare(right, wrong)
    if parted.blame is None or parted.blame.kind == "length":
        raise RecordingError(f"good and bad must differ in a step of both, got {parted.line}")
    step = parted.blame.step
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        _record(out, command, step)
        try:
            run = Recording(out)
        except RecordingError:
            print("skip: the command recorded nothing")
            return SKIP
        blame = _parting(right, run, step)
        if blame is not None:
            like = "as bad does" if _parting(wrong, run, step) is None else "otherwise than bad"
            print(short(f"bad: step {blame.step}: {blame.text} ({like})"))
            return BAD
        if step not in run.steps:
            print(f"skip: the command ended before step {step}")
            return SKIP
    print(f"good: the same up to step {step}")
    return GOOD


def _parting(a: Recording, b: Recording, step: int) -> Blame | None:
    """The first difference in the steps up to `step`; a run that ended there does not differ."""
    blame = compare(a, b).blame
    return blame if blame and blame.step <= step and blame.kind != "length" else None


def _record(out: Path, command: Sequence[str], step: int) -> None:
    """Runs a command under `megaopt record` until it has recorded a step, or ends."""
    record = [sys.executable, "-m", "megaopt", "record", "--out", str(out), "--", *command]
    process = subprocess.Popen(record, start_new_session=True)
    try:
        while process.poll() is None:
            with contextlib.suppress(RecordingError):
                if step in Recording(out).steps:
                    break
            time.sleep(PAUSE)
    finally:
        # it and what it started are asked to end, get a while, and what is left is ended
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
