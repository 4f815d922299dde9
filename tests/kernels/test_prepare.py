"""What a step reads before it starts: scalars made on the device beside the host's, controls."""

import math

import numpy as np
import pytest
import torch
from bits import assert_same_bits

from megaopt.kernels.formats import GRADS
from megaopt.kernels.norm.launch import NormPlan, tables_of
from megaopt.kernels.norm.reference import accumulate_reference
from megaopt.kernels.rules import RULES
from megaopt.kernels.rules.adam_torch import table_of_powers
from megaopt.kernels.step.controls import COEFFICIENT, COUNT, GRAD_SCALE, INVERSE_SCALE, SKIP
from megaopt.kernels.step.preparation import ReferencePreparation, Request
from megaopt.kernels.step.prepare import TritonPreparation

BETAS = [0.0, 0.5, 0.9, 0.95, 0.999, 0.9999, 1 - 2.0**-30]
STEPS = [*range(1, 41), 1000, 99_999, 2**31 - 2]
PREPARATIONS = {"reference": ReferencePreparation, "triton": TritonPreparation}
IEEE = RULES["adamw", "ieee"]


def group(step, betas=(0.9, 0.95), device="cpu", lr=3e-3, **changes):
    """A group as the optimizer has it under capturable, before its step number `step`."""
    return {
        "lr": torch.tensor(lr, device=device),
        "step": torch.tensor([step - 1], dtype=torch.int32, device=device),
        "betas": betas,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "bias_correction": True,
        **changes,
    }


def on_the_host(rule, groups):
    """The rule's scalars of the coming step, fp32 [groups, 9]."""
    rows = [rule.scalars({**g, "lr": float(g["lr"]), "step": int(g["step"]) + 1}) for g in groups]
    return torch.from_numpy(np.array(rows, dtype=np.float32))


def assert_scalars_agree(rule, groups, device):
    expected, steps = on_the_host(rule, groups), [int(g["step"]) + 1 for g in groups]
    found, controls = TritonPreparation(rule, device).make(groups, len(groups), Request(), [])
    assert controls is None
    assert_same_bits(found.cpu(), expected, f"steps {steps}, betas {groups[0]['betas']}")
    assert [int(g["step"]) for g in groups] == steps


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("rule", "bias_correction"),
    [
        pytest.param(IEEE, True, id="adamw"),
        pytest.param(RULES["adam", "ieee"], False, id="adam, no correction"),
        pytest.param(IEEE, False, id="adamw, no correction", marks=pytest.mark.slow),
        pytest.param(RULES["adam", "ieee"], True, id="adam", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("beta", BETAS)
def test_scalars_made_on_the_device_are_the_hosts(rule, beta, bias_correction, device):
    others = BETAS[1:] + BETAS[:1]
    groups = [
        group(step, (beta, others[index % 7]), device, bias_correction=bias_correction)
        for index, step in enumerate(STEPS)
    ]
    assert_scalars_agree(rule, groups, device)


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 0.0},
        {"lr": 1e-41},
        {"eps": 0.0},
        {"eps": 1e-41},
        {"eps": 1 + 2.0**-24 + 2.0**-40},
        {"weight_decay": 0.0},
        {"weight_decay": 1 / 3},
        {"eps": 1, "weight_decay": 0},
    ],
    ids=str,
)
def test_numbers_of_a_group_are_rounded_as_on_the_host(changes, device):
    assert_scalars_agree(IEEE, [group(step, device=device, **changes) for step in (1, 7)], device)


@pytest.mark.parametrize("seed", [0, 1, 2**16 - 1, 2**63, 2**64 - 1, 0x1234_5678_9ABC_DEF0])
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_what_random_bits_are_made_of_is_the_hosts(name, seed, device):
    """Behind the rule's own numbers; not in the row of a rule that draws nothing."""
    more = {"momentum": 0.9, "dampening": 0.1}
    steps = [1, 2**16 - 1, 2**16, 2**16 + 1, 99_999, 2**31 - 2]
    groups = [group(step, device=device, seed=seed ^ step, **more) for step in steps]
    rule = RULES[name, "ieee"]
    expected = [
        rule.drawing.row({**g, "lr": float(g["lr"]), "step": int(g["step"]) + 1}) for g in groups
    ]
    for row, step in zip(expected, steps, strict=True):
        own = seed ^ step
        pieces = [own % 2**16, own // 2**16 % 2**16, own // 2**32 % 2**16, own // 2**48]
        assert row[rule.row_length :] == (*pieces, step % 2**16, step // 2**16)
    found, _ = TritonPreparation(rule.drawing, device).make(groups, len(groups), Request(), [])
    assert_same_bits(found.cpu(), torch.from_numpy(np.array(expected, dtype=np.float32)))
    assert rule.width == rule.row_length == rule.drawing.row_length


@pytest.mark.parametrize("name", PREPARATIONS)
def test_a_skipped_step_draws_again(name, device):
    """The row is that of the step that will come."""
    groups = [group(5, device=device, seed=77)]
    rows = []
    for found in (1.0, 1.0, 0.0, 0.0):
        preparation = PREPARATIONS[name](IEEE.drawing, device)
        request = Request(found_inf=number(found, device))
        rows.append(torch.as_tensor(preparation.make(groups, len(groups), request, [])[0]).cpu())
    for row in rows[1:3]:
        assert_same_bits(row, rows[0])
    assert rows[3][0, -2] == 6


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("beta", BETAS[:-1])
def test_contract_torchs_scalars_are_the_hosts(beta, bias_correction, device):
    """On a CPU both sides take torch's pow there, in tables that were made at different lengths.

    The host's tables have POWERS steps each, the device's all that matter.
    """
    steps = [*range(1, 41), 1000, 4095, 4096, 99_999, 2**31 - 2]
    changes = {"device": device, "bias_correction": bias_correction}
    groups = [group(step, (beta, BETAS[(i % 5) + 1]), **changes) for i, step in enumerate(steps)]
    assert_scalars_agree(RULES["adamw", "torch"], groups, device)


def test_contract_torchs_table_ends_where_powers_no_longer_count(device):
    """From its end on 1 - beta**step is 1, so that a power of 0 stands for all of them."""
    for beta in (0.0, 0.5, 0.95, 0.9999):
        table = table_of_powers(beta, device)
        last = torch.pow(torch.tensor(beta), torch.tensor(float(len(table))))
        assert 1 - last == 1
        assert beta < 0.9 or 1 - table[int(len(table) * 0.9)] < 1


def test_contract_torch_refuses_a_beta_whose_table_would_not_fit(device):
    with pytest.raises(ValueError, match=r"beta must be .*capturable=True, got 0.99999999\d*, of"):
        table_of_powers(1 - 2.0**-30, device)


# --- controls


class Gradients:
    """In a plan's place: gradients alone."""

    def __init__(self, *values, dtype=torch.float32, device="cpu"):
        self.grads = [torch.tensor(value, dtype=dtype, device=device) for value in values]

    def accumulate(self, bins):
        if bins.device.type == "cpu":
            accumulate_reference(self.grads, bins)
        else:
            NormPlan(GRADS[self.grads[0].dtype]).accumulate(*tables_of(self.grads), bins)


def made(name, request, plans=(), device="cpu", groups=None):
    preparation = PREPARATIONS[name](IEEE, torch.device(device))
    rows = len(groups or "1")
    scalars, controls = preparation.make(groups, rows, request.on(torch.device(device)), plans)
    if controls is not None:
        assert controls.shape == (rows, COUNT)
        assert_same_bits(controls, controls[:1].expand(rows, -1).contiguous())
        controls = controls[0]
    return preparation, scalars, controls


def number(value, device="cpu"):
    return torch.tensor(value, dtype=torch.float32, device=device)


@pytest.mark.parametrize("name", PREPARATIONS)
@pytest.mark.parametrize("scale", [1.0, 2.0**16, 3.0, 1e-3, 2.0**-130, 2.0**127, math.inf, 7.1e37])
def test_the_inverse_scale_is_rounded_once(name, scale, device):
    _, _, controls = made(name, Request(grad_scale=number(scale, device)), device=device)
    assert_same_bits(controls[GRAD_SCALE].cpu(), number(scale))
    with np.errstate(over="ignore"):
        inverse = np.float32(np.float64(1) / np.float64(np.float32(scale)))
    assert_same_bits(controls[INVERSE_SCALE].cpu(), torch.tensor(inverse))
    assert controls[COEFFICIENT] == 1
    assert controls[SKIP] == 0


@pytest.mark.parametrize("name", PREPARATIONS)
def test_nothing_asked_gives_no_controls(name, device):
    assert made(name, Request(), device=device)[1:] == (None, None)


@pytest.mark.parametrize("name", PREPARATIONS)
@pytest.mark.parametrize("found", [0.0, -0.0, 1.0, 2.0, math.inf, math.nan])
def test_anything_but_zero_skips(name, found, device):
    _, _, controls = made(name, Request(found_inf=number(found, device)), device=device)
    assert bool(controls[SKIP]) is (found != 0)


# norm, clip_norm
CLIPPED = [
    ([3.0, 4.0], 1.0),
    ([3.0, 4.0], 5.0),
    ([3.0, 4.0], 5.000002),
    ([3.0, 4.0], 1e9),
    ([0.1, 0.2, 0.3], 0.1),
    ([1e-7], 1e-7),
    ([1e-6], 2e-6),
    ([0.0], 1.0),
    ([1e-45], 1e-30),
    ([3e38, 3e38], 1.0),
    ([math.inf], 1.0),
    ([math.nan, 1.0], 1.0),
    ([math.nan, math.inf], 3.0),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("scale", [None, 1024.0, 3.0])
@pytest.mark.parametrize("name", PREPARATIONS)
@pytest.mark.parametrize(("values", "clip_norm"), CLIPPED, ids=str)
def test_the_coefficient_is_clip_grad_norms(name, values, clip_norm, scale, device):
    """Each operation in fp64 and rounded to fp32: one rounding, as 53 >= 2 * 24 + 2."""
    request = Request(clip_norm=clip_norm, grad_scale=scale and number(scale, device))
    preparation, _, controls = made(name, request, [Gradients(values, device=device)], device)
    with np.errstate(all="ignore"):
        norm = np.float32(math.hypot(*np.float32(values).tolist()))
        if any(map(math.isnan, values)):
            norm = np.float32(math.nan)
        if scale:
            norm = np.float32(np.float64(norm) * np.float64(np.float32(1 / scale)))
        total = np.float32(np.float64(norm) + np.float64(np.float32(1e-6)))
        coefficient = np.float32(np.float64(np.float32(clip_norm)) / np.float64(total))
        coefficient = np.float32(1) if coefficient > 1 else coefficient
    assert preparation.measured
    assert_same_bits(preparation.norm.cpu().nan_to_num(-1), torch.tensor(norm).nan_to_num(-1))
    found = controls[COEFFICIENT].cpu()
    assert_same_bits(found.nan_to_num(-1), torch.tensor(coefficient).nan_to_num(-1))
    assert controls[SKIP] == 0


@pytest.mark.parametrize("name", PREPARATIONS)
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("value", [1.0, 3e38, math.inf, -math.inf, math.nan])
def test_an_infinity_in_any_batch_skips(name, place, value, device):
    """A norm that is too large for fp32 is no infinity among the gradients."""
    values = [[3e38, 1.0], [2.0], [1.0] * 40]
    values[place][-1] = value
    plans = [Gradients(each, device=device) for each in values]
    _, _, controls = made(name, Request(skip_nonfinite=True), plans, device)
    assert bool(controls[SKIP]) is not math.isfinite(value)
    assert controls[COEFFICIENT] == 1


@pytest.mark.parametrize("name", PREPARATIONS)
def test_a_measure_starts_anew(name, device):
    preparation = PREPARATIONS[name](IEEE, device)
    request = Request(clip_norm=1.0, skip_nonfinite=True)
    for value, skip in ((math.nan, True), (3.0, False), (math.inf, True), (4.0, False)):
        _, controls = preparation.make(None, 1, request, [Gradients([value], device=device)])
        assert bool(controls[0, SKIP]) is skip
    assert preparation.norm == 4


@pytest.mark.parametrize("name", PREPARATIONS)
@pytest.mark.parametrize("skip", [False, True])
def test_a_skipped_step_is_not_counted(name, skip, device):
    groups = [group(step, device=device) for step in (1, 5, 2**31 - 2)]
    expected = on_the_host(IEEE, groups)
    steps = [int(each["step"]) for each in groups]
    request = Request(found_inf=number(float(skip), device))
    _, scalars, controls = made(name, request, device=device, groups=groups)
    assert [int(each["step"]) for each in groups] == [step + (not skip) for step in steps]
    assert bool(controls[SKIP]) is skip
    found = scalars if isinstance(scalars, torch.Tensor) else torch.tensor(scalars)
    assert_same_bits(found.cpu(), expected)


def test_a_group_is_read_anew_at_every_step(device):
    """The table of addresses is uploaded once; a replay reads lr, step and the other numbers."""
    preparation, groups = TritonPreparation(IEEE, device), [group(1, device=device)]
    for lr in (1e-3, 5e-4, 0.0):
        groups[0]["lr"].fill_(lr)
        expected = on_the_host(IEEE, groups)
        assert_same_bits(preparation.make(groups, 1, Request(), [])[0].cpu(), expected)
    groups[0]["betas"] = (0.5, 0.5)
    groups.append(group(9, device=device))
    expected = on_the_host(IEEE, groups)
    assert_same_bits(preparation.make(groups, 2, Request(), [])[0].cpu(), expected)
