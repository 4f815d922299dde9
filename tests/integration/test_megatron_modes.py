"""Lion and SGD in Megatron's distributed optimizer, and its precision-aware fields beside fp8."""

import megatron_memory
import megatron_modes as modes
import pytest
import torch
from how_to import needs
from megatron_gpt import HAS_KEYS, Case, train

pytestmark = needs("megatron")

MODES = ("main_shards", "precision_aware")


def case_of(name, mode, **more):
    settings = {"clip_grad": 0.0, "overlap": False, "config": {"optimizer": name}}
    return Case(plug=mode, **{**settings, **more})


@pytest.mark.skipif(not HAS_KEYS, reason="release 0.16 saves Adam's moments alone")
@pytest.mark.parametrize(
    ("name", "mode"), [("lion", "main_shards"), ("sgd", "precision_aware"), ("sgd", "main_shards")]
)
def test_other_rules_step_as_they_do_alone(pools, tmp_path, name, mode):
    keys = {"lion": ("exp_avg",), "sgd": ("momentum_buffer",)}[name]
    expected, _ = pools(2)(modes.alone, case_of(name, mode), name)
    for found in pools(2)(modes.plugged, case_of(name, mode), tmp_path / "a"):
        assert found["keys"] == keys
        assert found["weights"] == found["loaded"] == expected
        assert found["same"]


AWARE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16}
DELAYED = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"


@pytest.mark.parametrize("delayed", [True, False])
def test_precision_aware_with_masters_of_megatrons(pools, delayed):
    """As beside fp8 parameters; with delayed scaling it has gradients clipped in their dtype."""
    options = {"exp_avg_dtype": torch.bfloat16, "round_scaled_grads": delayed}
    settings = {"plug": "main_shards", "clip_grad": 0.2, "fp32_grads": False}
    config = {**AWARE, DELAYED: delayed}
    found = pools(2)(modes.train_aware, Case(config=config, **settings))
    assert found == pools(2)(modes.train_aware, Case(options=options, **settings))
    assert found[0]["dtype"] == torch.bfloat16
    assert found[0]["rounds"] is delayed


BF16 = torch.bfloat16
STATES = {
    "fp32": {},
    "bf16": {"options": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}},
    "blocks": {"options": {"exp_avg_dtype": "block64_e4m3", "exp_avg_sq_dtype": "block64_e5m3"}},
    "host": {"config": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}},
}


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        pytest.param(mode, name, marks=[pytest.mark.slow] * ((place + number) % 2))
        for number, mode in enumerate(MODES)
        for place, name in enumerate(STATES)
    ],
)
def test_saves_and_loads_take_the_state_and_a_bucket_at_most(pools, tmp_path, mode, name):
    """Megatron issue 7288: a resume made the state twice. Decoded values go to the host.

    Decoding and encoding takes another three fp32 copies of one shard at most, and some scales.
    """
    case = Case(plug=mode, hidden=64, inner=128, buckets=20000, **STATES[name])
    for found in pools(2)(megatron_memory.bytes_of, case, tmp_path / "a"):
        is_fp32 = name in ("fp32", "host")
        most = found["bucket"] if is_fp32 else 4 * found["shard"] + 64
        assert found["in_place"] is is_fp32
        assert found["save"] <= most
        assert found["template"] <= found["state"] + most
        assert found["load"] <= most


@pytest.mark.parametrize("mode", MODES)
def test_an_asynchronous_save_leaves_states_in_pinned_memory(pools, mode):
    """And what is written is the state at the save, whatever is stepped meanwhile."""
    settings = {"plug": mode, "overlap": False}
    straight = pools(2)(train, Case(**settings), 2)
    found = pools(2)(megatron_memory.steps_beside_a_writer, Case(**settings, **STATES["host"]))
    for (steps, count, same), expected in zip(found, straight, strict=True):
        assert steps == expected["steps"]
        assert count > 9
        assert same
