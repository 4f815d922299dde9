"""Processes in which Megatron-Core runs on the CPU."""

import contextlib
import functools
import itertools
import logging
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from megatron_gpt import MADE, megatron
from ranks import Ranks

from megaopt.lab.regression.megatron import cpu

_place: list[int] = []
"""This process's number among all of its pool, and how many have met."""


def among(world, meeting, function, *arguments):
    """Calls a function on the first ranks, which meet anew where others had met; else None.

    meeting: a file that is not there yet.
    """
    _place[:] = _place or [dist.get_rank(), dist.get_world_size()]
    rank, met = _place
    if world != met:
        megatron("parallel_state").destroy_model_parallel()
        MADE.clear()
        dist.destroy_process_group()
        if rank >= world:
            dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
        else:
            dist.init_process_group("gloo", f"file://{meeting}", world_size=world, rank=rank)
        _place[1] = world
    return function(*arguments) if rank < world else None


# Megatron-Core on the CPU, in processes of tests that do nothing else.


class Stream(cpu.NoStream):
    """A CUDA stream, which Megatron makes for several instances of the distributed optimizer."""

    def __init__(self, device=None):
        self.device = device


def prepare():
    """Prepares a rank to run Megatron-Core on the CPU, before it meets the others."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    pretend_cuda()


def pretend_cuda():
    """Lets this process run Megatron-Core on the CPU; its own warnings are not ours to heed."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    cpu.pretend_cuda()
    torch.cuda.Stream = Stream
    torch.cuda.stream = contextlib.nullcontext


@pytest.fixture(scope="session")
def pools(tmp_path_factory):
    """For each number of ranks what calls a function on so many processes.

    The same ones for all tests and numbers: each takes seconds to import Megatron.
    """

    started, counter = {}, itertools.count()

    def run(world, function, *arguments):
        size = max(world, 3)
        if size not in started or started[size].failed:
            folder = tmp_path_factory.mktemp("ranks")
            started[size] = Ranks(size, folder, prepare, fresh=True, patience=300)
        meeting = tmp_path_factory.getbasetemp() / f"meeting-{next(counter)}"
        return started[size](among, world, meeting, function, *arguments)[:world]

    yield lambda world: functools.partial(run, world)
    for each in started.values():
        each.close()


@pytest.fixture(scope="session")
def once(pools):
    """Runs of so many ranks, each made once: such as those of Megatron's own optimizer."""
    kept = {}

    def run(world, function, *arguments):
        key = (world, function, repr(arguments))
        if key not in kept:
            kept[key] = pools(world)(function, *arguments)
        return kept[key]

    return run
