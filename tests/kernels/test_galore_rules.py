"""The rules of GaLore's step: kernel, twin and oracle, and scalars made on the device."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from mutants import mutant
from step_cases import (
    CURATED,
    GROUP,
    assert_all_agree,
    name_of,
    with_rule,
)

from megaopt import kernels
from megaopt.kernels.formats import NONE, WEIGHTS
from megaopt.kernels.rules.galore import GALORE_ADAMW, GALORE_APPLY, GALORE_DIRECTION
from megaopt.kernels.step.preparation import Request, TritonPreparation

RULES = (GALORE_ADAMW, GALORE_DIRECTION, GALORE_APPLY)
OWN = {**GROUP, "scale": 0.3}
COUNTS = [1, 0, 700]
SOURCE = Path(kernels.__path__[0]) / "rules" / "galore.py"
FLOAT32 = WEIGHTS["float32"]


def formats_of(formats, rule):
    """Formats with which a rule is used: a direction has neither weight nor master."""
    if rule.name == "galore_direction":
        formats = dataclasses.replace(formats, grad=FLOAT32, weight=FLOAT32, master=NONE)
    return with_rule(formats, rule)


@pytest.mark.parametrize("formats", CURATED[::9], ids=name_of)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_kernel_twin_and_oracle_agree(rule, formats, device):
    for bias_correction in (True, False):
        group = {**OWN, "bias_correction": bias_correction}
        assert_all_agree(formats_of(formats, rule), rule, group, COUNTS, device)


@pytest.mark.slow
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("formats", CURATED, ids=name_of)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_format(rule, formats, maximize, device):
    own = dataclasses.replace(formats_of(formats, rule), maximize=maximize)
    assert_all_agree(own, rule, OWN, COUNTS, device)


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


# Each is a change of the kernel or of its twin that the comparison has to notice.
MUTANTS = {
    "no scale": ('    step_size = lr * float(group["scale"])', "    step_size = lr"),
    "no bias correction": ('    if group["bias_correction"]:', "    if False:"),
    "bias correction of the next step": (
        '(1.0 - power(beta1, group["step"]))', '(1.0 - power(beta1, group["step"] + 1))',
    ),
    "kernel: eps under the root": (
        "tl.math.sqrt_rn(exp_avg_sq) + eps", "tl.math.sqrt_rn(exp_avg_sq + eps)",
    ),
    "kernel: decay first": (
        "    param = param - step_size * grad\n    param = param - decay * param\n",
        "    param = param - decay * param\n    param = param - step_size * grad\n",
    ),
    "kernel: decay of the weight before": (
        "    param = param - step_size * grad\n    param = param - decay * param\n",
        "    param = param - step_size * grad - decay * param\n",
    ),
    "twin: eps under the root": ("    root = exp_avg_sq", "    root = (exp_avg_sq + scalars[6])"),
    "twin: decay first": (
        "    param = param - grad * step_size\n    return param - param * decay, ()",
        "    param = param - param * decay\n    return param - grad * step_size, ()",
    ),
    "twin: the root in fp32": (
        "exp_avg_sq.double().sqrt()", "(exp_avg_sq * (1 + 2**-23)).sqrt()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_noticed(change, tmp_path, device):
    module = mutant(SOURCE, change, tmp_path)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_both_agree(module, device)


def assert_both_agree(module, device):
    plain = next(each for each in CURATED if name_of(each).startswith("float32-float32-none-f"))
    for rule in (module.GALORE_DIRECTION, module.GALORE_APPLY):
        assert_all_agree(formats_of(plain, rule), rule, OWN, COUNTS, device)
