"""Faults planted in optimizers are found at the first step that has them, by their names."""

from dataclasses import replace

import pytest
import torch
from wrong_steps import SGD, AdamW, Model, audited

from megaopt.recording.audit import law
from megaopt.recording.laws import LAWS, adam, sgd


@pytest.fixture(autouse=True)
def own_laws():
    before = dict(LAWS)
    law(AdamW)(adam)
    law(SGD, starts_as_zeros=(), starts_as_grad=("momentum_buffer",))(sgd)
    yield
    LAWS.clear()
    LAWS.update(before)


FAULTS = [
    "step count +1",
    "step count -1",
    "no bias correction",
    "weight decay twice",
    "no weight decay",
    "L2 decay for decoupled",
    "eps inside the root",
    "eps beside the uncorrected root",
    "betas swapped",
    "clipped twice",
    "sign of the gradient",
    "sign of the update",
    "moments of the step before",
    "exp_avg_sq not updated",
    "lr of the next step",
    "lr of group",
    "skipped",
    "stale master",
    "the weight is not its master's cast",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_at_its_first_step(tmp_path, fault):
    model = Model(dtype=torch.bfloat16 if "master" in fault else torch.float32)
    first, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": rest, "lr": 3e-3}]
    optimizer = AdamW(groups, fault=fault, since=3)

    def schedule(step):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.following = optimizer.param_groups[0]["lr"] * 0.9

    report = audited(tmp_path, model, optimizer, 5, between=schedule)
    assert report.obeys is False
    found = report.findings[0]
    name = fault.replace("+1", "+ 1").replace("-1", "- 1")
    assert (found.step, found.explanation.startswith(name)) == (3, True), str(found)


@pytest.mark.parametrize(
    ("claims", "done", "name"),
    [
        ({"nesterov": True}, {"momentum": 0.9}, "nesterov off"),
        ({"nesterov": False}, {"momentum": 0.9, "nesterov": True}, "nesterov on"),
        ({"dampening": 0.5}, {"momentum": 0.9}, "no dampening"),
        ({"weight_decay": 0.1}, {"weight_decay": 0.2}, "weight decay twice"),
        ({"weight_decay": 0.1}, {"momentum": 0.9}, "no weight decay"),
        ({"lr": 0.1}, {"lr": 0.05}, "clipped twice"),
        ({"maximize": True}, {"momentum": 0.9}, "sign of the gradient"),
    ],
)
def test_faults_of_sgd(tmp_path, claims, done, name):
    model = Model()
    report = audited(tmp_path, model, SGD(model.parameters(), claims, **{"lr": 0.1, **done}), 3)
    found = report.findings[0]
    # a buffer starts as the gradient: dampening and momentum show from the second step on
    assert found.step == (2 if name == "no dampening" else 1)
    assert found.explanation.startswith(name), str(found)


def test_a_rate_that_nobody_names_shows_as_a_ratio(tmp_path):
    model = Model()
    optimizer = AdamW(model.parameters(), decay=0.0)
    law(AdamW)(lambda sample: adam(replace(sample, options={**sample.options, "lr": 4e-3})))
    found = audited(tmp_path, model, optimizer, 2).findings[0]
    assert (found.explanation, f"{found.ratio:.3f}") == ("unexplained", "0.250")


def test_the_same_optimizer_without_a_fault_obeys(tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        model = Model(dtype=dtype)
        report = audited(tmp_path / str(dtype), model, AdamW(model.parameters()), 30)
        assert report.obeys is True
        assert report.checked == 90
