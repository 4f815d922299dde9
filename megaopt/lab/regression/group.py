"""The processes of a job: started together, watched, and ended together where one fails.

torch.distributed.elastic.multiprocessing is not used: it takes the command's handler of Ctrl-C away
for good, and writes errors to stderr itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

from megaopt.lab.exits import DEBUG, wants_traceback
from megaopt.lab.regression.megatron.config import MegatronRun
from megaopt.lab.regression.rank import RankTask, serve

CAN_BLOCK = hasattr(signal, "pthread_sigmask")  # not on Windows
GRACE = 20.0  # seconds that ranks have to leave once all have recorded their last step
TOLD = 3000  # characters of a failed rank's log that its error repeats, at most
TRACEBACK = "Traceback (most recent call last)"

LONGEST_FOLDER = 70
"""Bytes of the folder for temporary files, at most, where a copy can be asked for: its socket lies
there, its path is 32 bytes longer, and Linux takes 107 in all, macOS 103."""


class RankError(RuntimeError):
    """A process of a variant failed."""


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Processes that are started within import nothing from the working directory (Python 3.11).

    Each begins as `python -c`, which looks there first, for multiprocessing itself too.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Processes that are started within do not hear Ctrl-C, which a terminal sends to all.

    Here it is heard when the context is left: blocked, and not ignored, so that none is lost.
    Another thread may get it all the same, hence the handler.
    """
    if not CAN_BLOCK:
        yield
        return
    # else it would be started with the first process, and unblocks Ctrl-C then
    resource_tracker.ensure_running()
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


class Group:
    """The ranks of a job, under way; whoever makes one ends it.

    Args:
        tasks: one for each rank.
    """

    def __init__(self, tasks: list[RankTask]) -> None:
        self.tasks, self.job = tasks, tasks[0].job
        self.processes: list[Any] = []
        self._counts: list[int | None] = [None for _ in tasks]
        # on the CPU copies of a process that has imported what they need: seconds of imports are
        # spent once, and as that one computes nothing, they are fresh; CUDA allows no copies
        in_copies = len(os.fsencode(tempfile.gettempdir())) <= LONGEST_FOLDER
        context: Any = multiprocessing.get_context("spawn")
        if tasks[0].device == "cpu" and in_copies:
            context = multiprocessing.get_context("forkserver")
            modules = [f"{__package__}.preload", f"{__package__}.megatron.preload"]
            is_megatron = isinstance(tasks[0].run, MegatronRun)
            context.set_forkserver_preload(modules if is_megatron else modules[:1])
        # threads that wait for each other turning would take the cores from processes beside them:
        # a step of a small GPT took 15 times as long; read when torch is imported
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        # its end tells the processes that the command has ended
        self._read_end, self._write_end = context.Pipe(duplex=False)
        self._context, self._moved = context, time.monotonic()

    def start(self) -> None:
        """Starts the processes, which do not hear Ctrl-C."""
        for task in self.tasks:
            arguments = {"target": serve, "args": (task, self._read_end), "name": task.name}
            self.processes.append(self._context.Process(**arguments))
            with apart(), deaf():
                self.processes[-1].start()

    @property
    def steps(self) -> int:
        """Returns the number of steps that rank 0 has recorded."""
        return self._counts[0] or 0

    def look(self) -> bool:
        """Returns whether the job has ended well.

        Raises:
            RankError: a rank failed, or none finished a step in time; the message ends with what it
                printed last.
        """
        # before the lines are read: what a process wrote before it ended is then among them
        gone = [not process.is_alive() for process in self.processes]
        files = [task.recording / f"rank-{task.rank}" / "scalars.jsonl" for task in self.tasks]
        # a line for each step; None: the rank has not begun
        counts = [file.read_bytes().count(b"\n") if file.exists() else None for file in files]
        before, self._counts = self._counts, counts
        if self._counts != before:
            self._moved = time.monotonic()
        silent = time.monotonic() - self._moved
        whole = [(count or 0) >= self.job.steps for count in self._counts]
        if all(whole):
            return all(gone) or silent > GRACE
        waiting = [task for task in self.tasks if not whole[task.rank]]
        if failed := [task for task in waiting if gone[task.rank]]:
            # the others may have failed because the first did: it wrote first
            first = min(failed, key=lambda task: task.log.exists() and task.log.stat().st_mtime)
            raise RankError(f"rank {first.rank} of {self.job.name} failed: {_told(first)}")
        patience = getattr(self.tasks[0].run, "patience", None)
        if patience is not None and silent > patience:
            raise RankError(
                f"{self.job.name}: nothing for {patience=} s; ranks {[t.rank for t in waiting]} "
                f"had not finished, rank {waiting[0].rank} said: {_told(waiting[0])}"
            )
        return False

    def end(self) -> None:
        """Ends the processes; none is left then."""
        for process in (process for process in self.processes if process.pid is not None):
            process.kill()
            process.join()
        self._read_end.close()
        self._write_end.close()


def _told(task: RankTask) -> str:
    text = task.log.read_text(encoding="utf-8", errors="replace") if task.log.exists() else ""
    # before the traceback there are other packages' warnings
    text = text[max(text.rfind(TRACEBACK), 0) :]
    if text.startswith(TRACEBACK) and not wants_traceback():
        # the error itself: frames and their code are indented
        lines = [line for line in text.split("\n")[1:] if not line.startswith(" ")]
        text = "\n".join(lines).strip() + f" ({DEBUG}=1 shows the traceback)"
    return text[-TOLD:].strip() or "nothing"
