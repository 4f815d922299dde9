"""A checkpoint of hard values, damage to files, and a disk that is full."""

import contextlib
import resource

import torch
from runs import assert_same

from megaopt.saving import checkpoint

INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# the patterns where a careless cast would show: signed zero, subnormals, infinities, NaN with
# payloads (quiet and signalling), ordinary values
PATTERNS_16 = [0x0000, 0x8000, 0x0001, 0x7C00, 0xFC00, 0x7F80, 0x7FC1, 0x7F81, 0xFFFF, 0x3C01]
PATTERNS_32 = [0, 1 << 31, 1, 0x7F800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x3F800001]


def of_patterns(patterns, dtype):
    width = 8 * dtype.itemsize
    signed = [p - (1 << width) if p >= 1 << (width - 1) else p for p in patterns]
    return torch.tensor(signed, dtype=INTEGER_OF[dtype.itemsize]).view(dtype)


def example():
    return {
        "step": 7,
        "name": "run",
        "groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1]}],
        "state": {
            "bf16": of_patterns(PATTERNS_16, torch.bfloat16),
            "fp16": of_patterns(PATTERNS_16, torch.float16),
            "fp8": of_patterns([0x00, 0x80, 0x01, 0x7E, 0xFE, 0x7F, 0xFF], torch.float8_e4m3fn),
            "int16": of_patterns(PATTERNS_16, torch.int16),
            "fp32": of_patterns(PATTERNS_32, torch.float32),
            "none": None,
        },
    }


def is_refused(path, content, expected):
    """Whether the content is refused as a checkpoint; fails if it gives anything but `expected`."""
    path.unlink(missing_ok=True)  # some file systems wait for the disk where a file is overwritten
    path.write_bytes(content)
    try:
        found = checkpoint.load(path)
    except checkpoint.CheckpointError:
        return True
    assert_same(found, expected)
    return False


def flipped(content, position, bit):
    damaged = bytearray(content)
    damaged[position] ^= 1 << bit
    return bytes(damaged)


@contextlib.contextmanager
def full_disk(size):
    """No file of this process can be written beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
