"""The elementwise rules of Muon's step: kernel, twin and oracle, and scalars made on the device."""

import dataclasses

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from step_cases import CURATED, GROUP, assert_all_agree, name_of, with_rule

from megaopt.kernels.formats import NONE, WEIGHTS
from megaopt.kernels.rules.muon import MUON_APPLY, MUON_DIRECTION, PEER_DIRECTION
from megaopt.kernels.step.preparation import Request
from megaopt.kernels.step.prepare import TritonPreparation

COUNTS = [1, 0, 700]
SOME = [
    pytest.param(formats, marks=[pytest.mark.slow] * (place % 9 > 0))
    for place, formats in enumerate(CURATED)
]


@pytest.mark.parametrize("formats", SOME, ids=name_of)
@pytest.mark.parametrize("rule", [MUON_DIRECTION, MUON_APPLY], ids=lambda rule: rule.name)
def test_kernel_twin_and_oracle_agree(rule, formats, device):
    for nesterov in (True, False):
        own = with_rule(formats, rule)
        if rule is MUON_DIRECTION:  # neither weight nor master
            own = dataclasses.replace(own, weight=WEIGHTS["bfloat16"], master=NONE)
        own = dataclasses.replace(own, maximize=nesterov)
        assert_all_agree(own, rule, {**GROUP, "nesterov": nesterov}, COUNTS, device)


@pytest.mark.parametrize("rule", [MUON_DIRECTION, PEER_DIRECTION], ids=lambda rule: rule.name)
def test_scalars_made_on_the_device_are_the_hosts(rule, device):
    groups = []
    for momentum, nesterov, decay in ((0.95, True, 0.1), (0.0, False, 0.0), (0.999, True, 300.0)):
        numbers = {"lr": torch.tensor(0.003), "step": torch.tensor([4], dtype=torch.int32)}
        own = {name: value.to(device) for name, value in numbers.items()}
        own |= {"momentum": momentum, "nesterov": nesterov, "weight_decay": decay}
        groups.append(own)
    lr = float(torch.tensor(0.003))
    rows = np.array([rule.scalars({**g, "lr": lr}) for g in groups], dtype=np.float32)
    found, _ = TritonPreparation(rule, device).make(groups, len(groups), Request(), [])
    assert_same_bits(found.cpu(), torch.from_numpy(rows))
