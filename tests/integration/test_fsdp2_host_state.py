"""DTensors with states in host memory: steps, checkpoints and values are those of the card's."""

import fsdp2_blocks
import host_state_ranks
import pytest
from fsdp2_blocks import BLOCKS
from runs import BF16, MASTER, REMAINDERS, assert_same

HYPER = {"lr": 0.01, "weight_decay": 0.1, "weights": BF16}
KINDS = {"fp32": {**HYPER, **MASTER}, "blocks": {**HYPER, **REMAINDERS, **BLOCKS}}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_sharded_steps_are_whole_steps(on_ranks, options):
    expected = fsdp2_blocks.trained(options, 3, clip_norm=0.5)
    for found, is_placed, allocations in on_ranks(2, host_state_ranks.trained, options, 3):
        assert_same(found, expected)
        assert is_placed
        assert allocations == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("devices", [("cpu", None), (None, "cpu"), ("cpu", "cpu")], ids=str)
def test_checkpoints_load_wherever_states_are(on_ranks, tmp_path, devices, flat):
    options, folder = KINDS["blocks"], str(tmp_path / "checkpoint")
    found = on_ranks(2, host_state_ranks.resumed, options, 2, 1, folder, flat, devices)
    for loaded, after in found:
        assert_same(loaded, fsdp2_blocks.trained(options, 2))
        assert_same(after, fsdp2_blocks.trained(options, 3))


def test_values_and_full_state_dicts(on_ranks):
    options = KINDS["fp32"]  # gloo cannot send the 16 bits of remainders
    for same, after in on_ranks(2, host_state_ranks.read_and_set, options):
        assert all(same)
        assert_same(after, fsdp2_blocks.trained(options, 3))
