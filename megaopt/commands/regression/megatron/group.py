"""The processes of a job: started together, watched, and ended together where one fails."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaopt.commands.exits import DEBUG, wants_traceback
from megaopt.commands.regression.megatron.rank import Task, serve
from megaopt.commands.regression.processes import Processes, RankError, printed

PAUSE = 0.1
"""Seconds between two looks at the processes."""
GRACE = 20.0
"""Seconds that ranks have to leave once all have written their last line."""
TOLD = 3000
"""Characters of a failed rank's log that its error repeats, at most."""
TRACEBACK = "Traceback (most recent call last)"

PRELOADED = ["megaopt.commands.regression.megatron.preload"]


LONGEST_FOLDER = 70
"""Bytes of the folder for temporary files, at most, where a copy can be asked for: its socket lies
there, its path is 32 bytes longer, and Linux takes 107 in all, macOS 103."""


def context_for(device: str) -> Any:
    """How processes are made: on the CPU as copies of one that has imported Megatron-Core.

    That one computes nothing, so that they are fresh, and 5 s of imports are spent once. CUDA
    allows no copies.
    """
    if device == "cuda" or len(os.fsencode(tempfile.gettempdir())) > LONGEST_FOLDER:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_group(tasks: list[Task], on_step: Callable[[int], None]) -> None:
    """Runs the ranks of a job to their end; calls on_step with each step that rank 0 finished.

    Raises:
        RankError: a rank failed, or none finished a step in time; the message ends with what it
            printed last. No process is left then.
    """
    context = context_for(tasks[0].device)
    # its end tells them that the command has ended
    own, theirs = context.Pipe(duplex=False)
    with own, theirs, Processes(context, daemon=False) as processes:
        for task in tasks:
            processes.start(task.lines.stem, serve, task, own)
        _watch(tasks, processes, on_step)
        # what they had to tell is written
        processes.join(GRACE)


def _watch(tasks: list[Task], processes: Processes, on_step: Callable[[int], None]) -> None:
    """Until every rank has written its last line."""
    patience = tasks[0].run.patience
    watched = [Lines(task.lines) for task in tasks]
    moved = time.monotonic()
    while not all(lines.finished for lines in watched):
        # before the lines are read: what a process wrote before it ended is then among them
        ended = [not process.is_alive() for process in processes.all]
        news = [lines.look() for lines in watched]
        for step in news[0]:
            on_step(step)
        if any(news) or any(lines.began for lines in watched):
            moved = time.monotonic()
        rows = zip(tasks, ended, watched, strict=True)
        failed = [task for task, gone, lines in rows if gone and not lines.finished]
        if failed:
            # the others may have failed because the first did: it wrote first
            first = min(failed, key=_last_word)
            raise RankError(f"rank {first.rank} of {first.job.name} failed: {_told(first)}")
        if time.monotonic() - moved > patience:
            waiting = [
                t.rank for t, lines in zip(tasks, watched, strict=True) if not lines.finished
            ]
            raise RankError(
                f"{tasks[0].job.name}: nothing for {patience=} s; ranks {waiting} had not "
                f"finished, rank {waiting[0]} said: {_told(tasks[waiting[0]])}"
            )
        time.sleep(PAUSE)


def _last_word(task: Task) -> float:
    return task.log.stat().st_mtime if task.log.exists() else 0.0


def _told(task: Task) -> str:
    text = printed(task.log)
    # before the traceback there are other packages' warnings
    text = text[max(text.rfind(TRACEBACK), 0) :]
    if text.startswith(TRACEBACK) and not wants_traceback():
        # the error itself: frames and their code are indented
        lines = [line for line in text.split("\n")[1:] if not line.startswith(" ")]
        text = "\n".join(lines).strip() + f" ({DEBUG}=1 shows the traceback)"
    return text[-TOLD:].strip() or "nothing"


class Lines:
    """A rank's file, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, 0
        self.began = self.finished = False

    def look(self) -> list[int]:
        """The steps that were finished since the last look; `began`: it did start since then."""
        self.began = False
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.place)
            *whole, _part = file.read().split(b"\n")
        self.place += sum(len(line) + 1 for line in whole)
        lines = [json.loads(line) for line in whole]
        self.began = any("started" in line for line in lines)
        self.finished = self.finished or any("summary" in line for line in lines)
        return [line["step"] for line in lines if "step" in line]
