"""Muon inside Megatron-Core, which runs here on the CPU, over gloo, in 1, 2 and 3 processes."""

import importlib.util
from dataclasses import replace

import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from megatron_gpt import HAS_KEYS, Case
from megatron_muon import (
    layer_wise,
    load_and_train,
    muon_config,
    names_owned,
    step_given_gradients,
    train,
    train_and_save,
)

NESTEROV = "muon_nesterov" if HAS_KEYS else "muon_use_nesterov"
OTHERS = {
    NESTEROV: True,
    "muon_momentum": 0.8,
    "muon_scale_mode": "unit_rms_norm",
    "muon_num_ns_steps": 3,
}
ON_OWNERS = {"config": layer_wise()}
SETTINGS = {
    "bf16": {},
    "bf16 gradients": {"fp32_grads": False, "clip_grad": 0.1},
    "unclipped": {"clip_grad": 0.0},
    "zeros counted": {"counts_zeros": True, "fp32_grads": False},
    "fp32": {"dtype": torch.float32},
    "reduced in the backward pass": {"overlap": True, "gathers_late": False},
    "query groups": {"heads": 4, "groups": 2},
    "QKV as one": {"config": muon_config(muon_split_qkv=False)},
    "other numbers": {"config": muon_config(**OTHERS)},
    "matched": {"config": muon_config(muon_extra_scale_factor=0.2)},
    "Adam": {"adam_w_mode": False},
    "decoupled lr": {"decoupled_lr": 0.5},
    "experts": {"experts": 2},
    "pipeline": {"pipeline": 2},
    "virtual pipeline": {"pipeline": 2, "virtual": 2},
    "tensor parallel": {"tensor_parallel": 2},
    "on owners": ON_OWNERS,
    "on owners, bf16 gradients": {"fp32_grads": False, "counts_zeros": True, **ON_OWNERS},
    "experts on owners": {"experts": 2, **ON_OWNERS},
}
def case_of(plug=None, **settings):
    own = {"shards": False, "overlap": False, "config": muon_config(), **settings}
    return Case(plug=plug, **{"options": {"contract": "eo"} if plug else {}, **own})


@pytest.mark.parametrize("name", SETTINGS)
def test_contract_eo_has_every_bit_of_megatrons_own(pools, once, name):
    expected = once(2, train, case_of(**SETTINGS[name]), 3)
    found = pools(2)(train, case_of("main_shards", **SETTINGS[name]), 3)
    assert found == expected
    assert len({step[0] for step in found[0]["steps"]}) == 3
    kinds = {frozenset(state) for state in found[0]["states"].values()}
    assert kinds == {
        frozenset({"param", "momentum_buffer"}), frozenset({"param", "exp_avg", "exp_avg_sq"})
    }  # fmt: skip


@pytest.mark.parametrize("contract", ["ieee", "eo"])
def test_owners_move_no_bit(pools, contract):
    """Without clipping: the norm adds up in other orders."""
    one = case_of("main_shards", clip_grad=0.0, options={"contract": contract})
    owned = replace(one, config=layer_wise())
    (whole,) = pools(1)(step_given_gradients, one)
    for world, case in ((2, one), (2, owned), (3, owned)):
        assert pools(world)(step_given_gradients, case) == [whole] * world


def test_owners_have_whole_weights_of_their_own(pools):
    """Else the test above could compare copies."""
    found = pools(3)(names_owned, case_of("main_shards", config=layer_wise()))
    names = [name for own in found for name in own]
    assert all(found)
    assert len(names) == len(set(names))


# --- checkpoints

METADATA = {"chained_optim_avoid_prefix": True}


@pytest.mark.parametrize("config", [muon_config(), layer_wise()], ids=["on all", "on owners"])
def test_resuming_equals_going_straight_on(pools, once, tmp_path, config):
    case = case_of("main_shards", config=config)
    straight = pools(2)(train, case, 4)
    saved = pools(2)(train_and_save, case, tmp_path / "a", METADATA)
    back = pools(2)(load_and_train, case, tmp_path / "a", METADATA)
    assert [each["loaded"] for each in back] == saved
    assert [each["steps"] for each in back] == [each["steps"][2:] for each in straight]
    assert [each["states"] for each in back] == [each["states"] for each in straight]
    for world in (1, 3):
        for other in pools(world)(load_and_train, case, tmp_path / "a", METADATA):
            assert other["loaded"] == saved[0]


def test_what_megatrons_own_saved_is_loaded(pools, once, tmp_path):
    straight = once(2, train, case_of(), 4)
    saved = pools(2)(train_and_save, case_of(), tmp_path / "a", METADATA)
    back = pools(2)(load_and_train, case_of("main_shards"), tmp_path / "a", METADATA)
    assert [each["loaded"] for each in back] == saved
    assert [each["steps"] for each in back] == [each["steps"][2:] for each in straight]
    assert [each["states"] for each in back] == [each["states"] for each in straight]
