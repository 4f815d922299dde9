"""DTensors with states in host memory: steps, checkpoints and values are those of the card's."""

import fsdp2_blocks
import pytest
import torch
import torch.distributed as dist
from fake_pinning import FakePinning
from fsdp2_blocks import BLOCKS, SHAPES
from fsdp2_ranks import build, snapshot, train
from runs import BF16, MASTER, REMAINDERS, assert_same
from torch.distributed.tensor import DTensor

from megaopt.kernels.host_memory import pinned_by

# What ranks do with DTensors whose states are in host memory: each as on a card.

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
        return snapshot(optimizer), placed, len(pinning.sizes)


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


HYPER = {"lr": 0.01, "weight_decay": 0.1, "weights": BF16}
KINDS = {"fp32": {**HYPER, **MASTER}, "blocks": {**HYPER, **REMAINDERS, **BLOCKS}}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_sharded_steps_are_whole_steps(on_ranks, options):
    expected = fsdp2_blocks.trained(options, 3, clip_norm=0.5)
    for found, is_placed, allocations in on_ranks(2, trained, options, 3):
        assert_same(found, expected)
        assert is_placed
        assert allocations == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("devices", [("cpu", None), (None, "cpu"), ("cpu", "cpu")], ids=str)
def test_checkpoints_load_wherever_states_are(on_ranks, tmp_path, devices, flat):
    options, folder = KINDS["blocks"], str(tmp_path / "checkpoint")
    found = on_ranks(2, resumed, options, 2, 1, folder, flat, devices)
    for loaded, after in found:
        assert_same(loaded, fsdp2_blocks.trained(options, 2))
        assert_same(after, fsdp2_blocks.trained(options, 3))


def test_values_and_full_state_dicts(on_ranks):
    options = KINDS["fp32"]  # gloo cannot send the 16 bits of remainders
    for same, after in on_ranks(2, read_and_set, options):
        assert all(same)
        assert_same(after, fsdp2_blocks.trained(options, 3))
