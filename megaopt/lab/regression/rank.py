"""The process of a rank: trains a job's steps of a variant and records its bits."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from megaopt.lab.regression import gpt
from megaopt.lab.regression.megatron import training as megatron
from megaopt.lab.regression.megatron.config import MegatronRun
from megaopt.lab.regression.parts import flip_master_bit, open_recording, rows_of
from megaopt.lab.regression.plan import AnyRun, TrainingJob
from megaopt.lab.training.determinism import deterministic


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
    # a rank that waits for another in a collective would outlive a parent that was killed
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
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


def _end_with(parent: Connection) -> None:
    parent.poll(None)
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
