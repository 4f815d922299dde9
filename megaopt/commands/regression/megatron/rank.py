"""What a rank's process does: trains a job's steps of a variant and writes down its bits.

A line of JSON for each step, as soon as it is made, and one at the end with the bytes of memory.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megaopt.commands.bits import loss_bits
from megaopt.commands.regression.megatron import checkpoint, state
from megaopt.commands.regression.megatron.config import MegatronRun, StockVariant
from megaopt.commands.regression.megatron.cpu import pretend_cuda
from megaopt.commands.regression.megatron.model import (
    ForwardStep,
    build_gpt,
    connect,
    megatron,
    transformer_config,
    wrap,
)
from megaopt.commands.regression.megatron.optimizer import (
    Schedule,
    build_optimizer,
    distributed_optimizers,
)
from megaopt.commands.regression.megatron.plan import Job
from megaopt.commands.regression.processes import print_into
from megaopt.commands.training.text import Batches, Corpus, batches_of

SETTINGS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""The settings under which a run repeats itself on GPUs; those of the environment go first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a rank's process is told."""

    run: MegatronRun
    job: Job
    rank: int
    device: str
    """ "cuda" or "cpu"."""
    folder: Path
    """Where the ranks of all jobs meet, write and save."""
    perturb: int | None = None
    """Step after which this rank flips one bit of a master; None: never."""

    @property
    def lines(self) -> Path:
        """The file of what it writes down."""
        return self.folder / f"{self.job.name}-rank{self.rank}.jsonl"

    @property
    def log(self) -> Path:
        """The file of what it prints."""
        return self.folder / f"{self.job.name}-rank{self.rank}.log"

    @property
    def tokens(self) -> Path:
        """The file of the text, the same for all."""
        return self.folder / "tokens.npy"


def settings() -> dict[str, str]:
    """SETTINGS, but for what the environment says otherwise."""
    return {key: os.environ.get(key, value) for key, value in SETTINGS.items()}


# --- the process


def serve(task: Task, parent: Connection) -> None:
    """The process's life: exit status 1 and a traceback in its log where anything fails."""
    print_into(task.log)
    # processes that Megatron spawns to save would import the command's main module, torch and all
    sys.modules["__main__"] = ModuleType("__main__")
    # a rank that waits for another in a collective would outlive a parent that was killed
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        os.environ.update(settings())
        ranks = str(task.job.ranks)
        os.environ.update(RANK=str(task.rank), LOCAL_RANK=str(task.rank), WORLD_SIZE=ranks)
        device = _meet(task)
        Training(task, device).train()
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


def _meet(task: Task) -> torch.device:
    """Takes the rank's device and meets the others."""
    device = torch.device("cpu")
    if task.device == "cuda":
        device = torch.device("cuda", task.rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(task.run.cpu_threads)
    # a warning and no refusal: Megatron calls operations that are marked without need
    torch.use_deterministic_algorithms(True, warn_only=True)
    # else every torch.empty would be filled, within the time taken
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False
    if device.type == "cpu":
        pretend_cuda()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        f"file://{task.folder / task.job.name}.meeting",
        timedelta(seconds=task.run.patience),
        world_size=task.job.ranks,
        rank=task.rank,
    )
    megatron("parallel_state").initialize_model_parallel(
        tensor_model_parallel_size=task.run.megatron.tensor_parallel,
        pipeline_model_parallel_size=task.run.megatron.pipeline_parallel,
    )
    torch.manual_seed(task.run.seed)
    if device.type == "cuda":
        megatron("tensor_parallel").model_parallel_cuda_manual_seed(task.run.seed)
    return device


# --- the training


class Training:
    """A rank's model, optimizer and text, and the steps of its job."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.device = task, device
        run, job = task.run, task.job
        self.config = transformer_config(run, device)
        gpt = build_gpt(run, self.config, device)
        self.chunk = wrap(run, job.variant, self.config, gpt)
        self.optimizer = build_optimizer(run, job.variant, self.chunk)
        connect(self.config, self.chunk, self.optimizer)
        self.schedule = Schedule(run, self.optimizer)
        groups = megatron("parallel_state")
        self.forward_step = ForwardStep(
            _batches(task),
            groups.get_data_parallel_rank(),
            groups.get_data_parallel_world_size(),
            run.megatron.micro_batch_size,
            device,
        )
        self.tensor_rank = groups.get_tensor_model_parallel_rank()
        self.stage = groups.get_pipeline_model_parallel_rank()
        if job.load is not None:
            checkpoint.load(task.folder / job.load, self.chunk, self.optimizer)
            if isinstance(job.variant, StockVariant) and job.variant.cast_after_load:
                checkpoint.cast_masters(self.chunk, self.optimizer)

    def train(self) -> None:
        """Makes the steps, writing a line for each."""
        job = self.task.job
        with self.task.lines.open("w", encoding="utf-8") as lines:
            _write(lines, {"started": True})
            for step in range(job.first, job.last + 1):
                _write(lines, {"step": step, **self._step(step)})
                if step in job.save_after:
                    folder = self.task.folder / job.checkpoint(step)
                    checkpoint.save(folder, self.chunk, self.optimizer)
            _write(lines, {"summary": self._summary()})

    def _step(self, step: int) -> dict[str, Any]:
        memory, began = Memory(self.device), time.perf_counter()
        losses = self._backward(step)
        memory.note()
        self.schedule.set(step)
        # so that no rank waits for another within the time taken
        dist.barrier()
        _synchronize(self.device)
        start = time.perf_counter()
        _, norm, _ = self.optimizer.step()
        _synchronize(self.device)
        stop = time.perf_counter()
        memory.note()
        if step == self.task.perturb:
            state.flip_master_bit(self.chunk, self.optimizer)
        return {
            "losses": losses,
            "grad_norm": float(norm).hex(),
            "fingerprints": self._fingerprints(),
            "optimizer_seconds": stop - start,
            "seconds": stop - began,
            **memory.noted(),
        }

    def _backward(self, step: int) -> list[str]:
        """Gradients of all micro batches; the fp32 bits of the losses."""
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        forward_backward = megatron("pipeline_parallel.schedules").get_forward_backward_func()
        told = forward_backward(
            forward_step_func=self.forward_step,
            data_iterator=self.forward_step.data(step),
            model=[self.chunk],
            num_microbatches=self.forward_step.micro_batches,
            seq_length=self.task.run.model.context,
            micro_batch_size=self.task.run.megatron.micro_batch_size,
            forward_only=False,
        )
        losses = [each["loss"] for each in told]  # of the last pipeline stage alone
        return [loss_bits(loss) for loss in torch.stack(losses).tolist()] if losses else []

    def _fingerprints(self) -> dict[str, str]:
        found = state.fingerprints(self.chunk, self.optimizer)
        # the same on all data-parallel ranks: the first ones write them
        if self.forward_step.rank > 0:
            return {}
        own = self.task.run.megatron
        part = f" (tensor-parallel rank {self.tensor_rank})" if own.tensor_parallel > 1 else ""
        part += f" (pipeline stage {self.stage})" if own.pipeline_parallel > 1 else ""
        return {name + part: value for name, value in found.items()}

    def _summary(self) -> dict[str, Any]:
        distributed = distributed_optimizers(self.optimizer)
        return {
            "owned_elements": state.owned_elements(self.chunk, self.optimizer),
            "state_bytes": state.state_bytes(self.optimizer),
            "parameters": sum(p.numel() for p in self.chunk.module.parameters()),
            "buckets": [
                [bucket.grad_data.numel() for bucket in buffer.buckets]
                for buffer in self.chunk.buffers
            ],
            "inner_optimizer": type(distributed[0].optimizer).__qualname__,
        }


def _batches(task: Task) -> Batches:
    # copied on write, so that torch does not warn of memory that cannot be written
    tokens = torch.from_numpy(np.load(task.tokens, mmap_mode="c"))
    return batches_of(task.run, Corpus(tokens=tokens, sha256=""))


def _write(lines: Any, line: Mapping[str, Any]) -> None:
    lines.write(json.dumps(line) + "\n")
    lines.flush()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Memory:
    """Peaks of the GPU's memory between notes; nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: list[int] = []
        self.allocated: list[int] = []
        self._reset()

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def note(self) -> None:
        """Ends a part of the step: the passes first, the optimizer step second."""
        if self.device.type == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated(self.device))
            self.allocated.append(torch.cuda.memory_allocated(self.device))
            self._reset()

    def noted(self) -> dict[str, int]:
        """Bytes: of the step's peak, above what is there before the optimizer step, and after."""
        if not self.peaks:
            return {}
        return {
            "peak_bytes": max(self.peaks),
            "optimizer_extra_bytes": self.peaks[1] - self.allocated[0],
            "allocated_bytes": self.allocated[1],
        }
