"""A checkpoint of hard values, damage to files, and a disk that is full."""

import contextlib
import resource


@contextlib.contextmanager
def full_disk(size):
    """No file of this process can be written beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
