"""What ranks do with DTensors whose states are in host memory: each as on a card."""

import fsdp2_blocks
import torch
import torch.distributed as dist
from fake_pinning import FakePinning
from fsdp2_blocks import SHAPES
from fsdp2_ranks import build, train
from torch.distributed.tensor import DTensor

from megaopt.kernels.host_memory import pinned_by

APART = {"state_device": "cpu"}


def is_in_place(optimizer, pinning):
    """Whether the shards of all states but scales are in pinned memory, and DTensors."""
    return all(
        isinstance(value, DTensor)
        and (
            name.endswith("_scale")
            or not value.to_local().numel()
            or pinning.is_pinned(value.to_local())
        )
        for state in optimizer.state.values()
        for name, value in state.items()
        if value is not None
    )


def trained(options, steps):
    """What all ranks have after some steps; whether it is in its place; how often it was pinned."""
    pinning = FakePinning()
    with pinned_by(pinning):
        model, optimizer = build({**options, **APART}, shapes=SHAPES)
        train(model, optimizer, steps, clip_norm=0.5)
        placed = is_in_place(optimizer, pinning)
        return fsdp2_blocks.snapshot(optimizer), placed, len(pinning.sizes)


def resumed(options, steps, more, folder, flat, devices):
    """Saved with states in one place, loaded with states in another."""
    before, after = ({**options, "state_device": device} for device in devices)
    with pinned_by(FakePinning()):
        fsdp2_blocks.save(before, steps, folder, flat)
        dist.barrier()
        return fsdp2_blocks.load_and_train(after, more, steps, folder, flat)


def read_and_set(options):
    """As fsdp2_blocks.read_and_set, and by way of a whole state on rank 0."""
    with pinned_by(FakePinning()), torch.no_grad():
        same = fsdp2_blocks.read_and_set({**options, **APART})
        return same, fsdp2_blocks.through_full_state({**options, **APART}, 2, 1)
