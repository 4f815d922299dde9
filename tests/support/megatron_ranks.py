"""Processes that train with Megatron-Core over gloo: started once, they run case after case."""

import multiprocessing
import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron_cpu import pretend_cuda

PATIENCE = 300


def serve(rank, world, meeting, parent):
    """A rank's process: calls what the parent sends, until None."""
    try:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        torch.set_num_threads(1)
        pretend_cuda()
        dist.init_process_group(
            "gloo", f"file://{meeting}", timedelta(seconds=PATIENCE), world_size=world, rank=rank
        )
        while (call := parent.recv()) is not None:
            function, args, kwargs = call
            parent.send(function(*args, **kwargs))
        dist.destroy_process_group()
    except Exception:
        parent.send(RankError(f"rank {rank} of {world}:\n{traceback.format_exc()}"))


class RankError(RuntimeError):
    """A rank raised; the others may be waiting for it."""


class Ranks:
    """`world` processes, until they are closed."""

    def __init__(self, world, folder):
        context = multiprocessing.get_context("spawn")
        meeting = f"{folder}/meeting.{world}.{len(os.listdir(folder))}"
        self.world, self.pipes, self.processes = world, [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, world, meeting, theirs))
            process.start()
            theirs.close()  # so that a dead process is noticed
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, function, *args, **kwargs):
        """What a module's function returns in each of the processes."""
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        replies = []
        for rank, pipe in enumerate(self.pipes):
            try:
                reply = pipe.recv() if pipe.poll(PATIENCE) else RankError(f"rank {rank}: no answer")
            except EOFError:
                reply = RankError(f"rank {rank} of {self.world} died")
            if isinstance(reply, RankError):
                self.end()
                raise reply
            replies.append(reply)
        return replies

    def is_alive(self):
        return all(process.is_alive() for process in self.processes)

    def close(self):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(20)
        self.end()

    def end(self):
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
