"""Megatron-Core on the CPU, in processes of tests that do nothing else."""

import contextlib
import logging
import os
import warnings

import torch

from megaopt.commands.regression.megatron import cpu


class Stream(cpu.NoStream):
    """What Megatron makes for several instances of the distributed optimizer."""

    def __init__(self, device=None):
        self.device = device


def prepare():
    """What a rank does before it meets the others."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    pretend_cuda()


def pretend_cuda():
    """Lets this process run Megatron-Core on the CPU; its own warnings are not ours to heed."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    cpu.pretend_cuda()
    torch.cuda.Stream = Stream
    torch.cuda.stream = contextlib.nullcontext
