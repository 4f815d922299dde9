"""A process group of one rank, in a process that may have one already."""

from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def group_of_one(backend, folder):
    """Of this process alone; the bench's, which lasts as long as its process, is ended before."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, f"file://{folder}/meeting", world_size=1, rank=0)
    try:
        yield
    finally:
        dist.destroy_process_group()
