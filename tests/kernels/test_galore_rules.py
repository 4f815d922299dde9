"""The rules of GaLore's step: kernel, twin and oracle, and scalars made on the device."""

import dataclasses

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from step_cases import (
    CURATED,
    GROUP,
    assert_all_agree,
    name_of,
    with_rule,
)

from megaopt.kernels.formats import NONE, WEIGHTS
from megaopt.kernels.rules.galore import GALORE_ADAMW, GALORE_APPLY, GALORE_DIRECTION
from megaopt.kernels.step.preparation import Request
from megaopt.kernels.step.prepare import TritonPreparation

RULES = (GALORE_ADAMW, GALORE_DIRECTION, GALORE_APPLY)
OWN = {**GROUP, "scale": 0.3}
COUNTS = [1, 0, 700]
FLOAT32 = WEIGHTS["float32"]


def formats_of(formats, rule):
    """Formats with which a rule is used: a direction has neither weight nor master."""
    if rule.name == "galore_direction":
        formats = dataclasses.replace(formats, grad=FLOAT32, weight=FLOAT32, master=NONE)
    return with_rule(formats, rule)


SOME = [
    pytest.param(formats, marks=[pytest.mark.slow] * (place % 9 > 0))
    for place, formats in enumerate(CURATED)
]


@pytest.mark.parametrize("formats", SOME, ids=name_of)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_kernel_twin_and_oracle_agree(rule, formats, device):
    for flag in (True, False):
        own = dataclasses.replace(formats_of(formats, rule), maximize=flag)
        assert_all_agree(own, rule, {**OWN, "bias_correction": flag}, COUNTS, device)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_scalars_made_on_the_device_are_the_hosts(bias_correction, device):
    groups = []
    for step, beta in ((1, 0.9), (2, 0.999), (7, 0.0), (1000, 0.9999), (99_999, 0.95)):
        numbers = {"lr": torch.tensor(0.003), "step": torch.tensor([step - 1], dtype=torch.int32)}
        numbers = {name: value.to(device) for name, value in numbers.items()}
        own = {"betas": (beta, beta), "bias_correction": bias_correction}
        groups.append({**OWN, **numbers, **own})
    host = [{**g, "lr": 0.003, "step": int(g["step"]) + 1} for g in groups]
    rows = np.array([GALORE_ADAMW.scalars(group) for group in host], dtype=np.float32)
    found, _ = TritonPreparation(GALORE_ADAMW, device).make(groups, len(groups), Request(), [])
    assert_same_bits(found.cpu(), torch.from_numpy(rows))
