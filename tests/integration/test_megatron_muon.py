"""Muon inside Megatron-Core, which runs here on the CPU, over gloo, in 1, 2 and 3 processes."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from megatron_gpt import Case
from megatron_muon import layer_wise, muon_config, train

SETTINGS = {
    "bf16": {},
    "bf16 gradients": {"fp32_grads": False, "clip_grad": 0.1},
    "fp32": {"dtype": torch.float32},
    "query groups": {"heads": 4, "groups": 2},
    "layer-wise": {"config": layer_wise()},
}


def case_of(plug=None, **settings):
    own = {"shards": False, "overlap": False, "config": muon_config(), **settings}
    options = {"contract": "eo"} if plug else {}
    return Case(plug=plug, options=options, **own)


@pytest.mark.parametrize("name", SETTINGS)
def test_contract_eo_has_every_bit_of_megatrons_own(pools, once, name):
    expected = once(2, train, case_of(**SETTINGS[name]), 3)
    found = pools(2)(train, case_of("main_shards", **SETTINGS[name]), 3)
    assert found == expected
