"""The processes of a job, one for each rank: what each does, and how they are watched and ended.

They start together, and end together where one fails. torch.distributed.elastic.multiprocessing is
not used: it takes the command's handler of Ctrl-C away for good, and writes to stderr itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from megaopt.lab.exits import DEBUG, wants_traceback
from megaopt.lab.regression import gpt
from megaopt.lab.regression.megatron import training as megatron
from megaopt.lab.regression.megatron.config import MegatronRun
from megaopt.lab.regression.parts import flip_master_bit, open_recording, rows_of
from megaopt.lab.regression.plan import AnyRun, TrainingJob
from megaopt.lab.training.machine import deterministic

CAN_BLOCK = hasattr(signal, "pthread_sigmask")  # not on Windows
GRACE = 20.0  # seconds that ranks have to leave once all have recorded their last step
TOLD = 3000  # characters of a failed rank's log that its error repeats, at most
TRACEBACK = "Traceback (most recent call last)"

LONGEST_FOLDER = 70
"""Bytes of the folder for temporary files, at most, where a copy can be asked for: its socket lies
there, its path is 32 bytes longer, and Linux takes 107 in all, macOS 103."""


# --- the process of a rank: trains a job's steps of a variant and records its bits


@dataclass(frozen=True, slots=True)
class RankTask:
    """The task of a rank's process."""

    run: AnyRun
    job: TrainingJob
    device: str
    """ "cuda" or "cpu"."""
    folder: Path
    """The folder where the ranks of all jobs meet, write and save."""
    rank: int
    perturb: int | None = None
    """Step after which this rank flips one bit of a master; None: never."""

    @property
    def name(self) -> str:
        """The job's name and the rank."""
        return f"{self.job.name}-rank{self.rank}"

    @property
    def recording(self) -> Path:
        """The folder of the job's recording; its files are in a folder rank-0, rank-1 ..."""
        return self.folder / self.job.name

    @property
    def log(self) -> Path:
        """The file of what it prints."""
        return self.folder / f"{self.name}.log"

    @property
    def meeting(self) -> str:
        """Returns the address of the file by which the job's ranks meet."""
        return f"file://{self.folder / self.job.name}.meeting"


def serve(task: RankTask, parent: Connection) -> None:
    """The process's life: exit status 1 and a traceback in its log where anything fails."""
    log = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    # processes that Megatron spawns to save would import the command's main module, torch and all
    sys.modules["__main__"] = ModuleType("__main__")

    def end_with_parent() -> None:
        parent.poll(None)
        os._exit(1)

    # a rank that waits for another in a collective would outlive a parent that was killed
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        with deterministic(task.run.cpu_threads):
            train(task)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # not sys.exit: what waits for the other ranks at exit may wait for ever
        os._exit(1)


def build(task: RankTask) -> gpt.GptTraining | megatron.MegatronTraining:
    """A rank's training, from the seed; the ranks have met."""
    return megatron.build(task) if isinstance(task.run, MegatronRun) else gpt.build(task)


def train(task: RankTask) -> None:
    """Makes the steps of a job, recording each."""
    job, training = task.job, build(task)
    if job.load is not None:
        training.load(task.folder / job.load)
    about = job.ranks, training.about()
    with closing(open_recording(task.recording, task.rank, *about)) as writer:
        for step in range(job.first, job.last + 1):
            scalars = training.step(step)
            if step == task.perturb:
                flip_master_bit(training.parts())
            rows = rows_of(training.parts(), writer, training.device)
            if step in job.save_after:
                training.save(task.folder / f"{job.name}-after-{step}")
            writer.step(step, 0, scalars, rows)


# --- the command's side


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
