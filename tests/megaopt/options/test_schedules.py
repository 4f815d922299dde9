"""torch's schedules over an lr that is a tensor, and optimizers of one parameter each in hooks."""

import pytest
import torch
from runs import FP32, assert_same, parameters, values
from torch.optim import lr_scheduler

from megaopt import FusedAdam, FusedLion, FusedMuon, FusedSGD

SCHEDULES = {
    "lambda": lambda own: lr_scheduler.LambdaLR(own, lambda step: 0.9**step),
    "multiplicative": lambda own: lr_scheduler.MultiplicativeLR(own, lambda step: 0.9),
    "step": lambda own: lr_scheduler.StepLR(own, 2, 0.5),
    "multistep": lambda own: lr_scheduler.MultiStepLR(own, [1, 3], 0.5),
    "constant": lambda own: lr_scheduler.ConstantLR(own, 0.5, 2),
    "linear": lambda own: lr_scheduler.LinearLR(own, 0.25, 1.0, 3),
    "exponential": lambda own: lr_scheduler.ExponentialLR(own, 0.9),
    "cosine": lambda own: lr_scheduler.CosineAnnealingLR(own, 4),
    "cosine, warm restarts": lambda own: lr_scheduler.CosineAnnealingWarmRestarts(own, 2),
    "polynomial": lambda own: lr_scheduler.PolynomialLR(own, 4, 2.0),
    "one cycle": lambda own: lr_scheduler.OneCycleLR(own, 0.1, 8, cycle_momentum=False),
    "cyclic": lambda own: lr_scheduler.CyclicLR(own, 0.01, 0.1, 2, cycle_momentum=False),
    "sequential": lambda own: lr_scheduler.SequentialLR(
        own, [lr_scheduler.LinearLR(own, 0.1, 1.0, 2), lr_scheduler.StepLR(own, 1, 0.5)], [2]
    ),
    "plateau": lambda own: lr_scheduler.ReduceLROnPlateau(own, patience=0, factor=0.5),
}
SHAPES = [(3, 4), (5,)]


def give(params, step):
    for index, param in enumerate(params):
        param.grad = values(param.shape, 100 * step + index)


def lrs_of(optimizer, params, schedule, name):
    """The lr of six steps."""
    found = []
    for step in range(6):
        give(params, step)
        optimizer.step()
        found.append(float(optimizer.param_groups[0]["lr"]))
        schedule.step(*([1.0] if name == "plateau" else []))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_write_an_lr_that_is_a_tensor(name):
    """The tensor stays, as a CUDA graph reads it, and its numbers and the bits are a host lr's."""
    found, expected, theirs = (parameters(SHAPES, FP32) for _ in range(3))
    ours = FusedAdam(found, lr=0.05, capturable=True)
    plain = FusedAdam(expected, lr=0.05)
    torchs = torch.optim.AdamW(theirs, lr=torch.tensor(0.05))
    lr = ours.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor)
    own = lrs_of(ours, found, SCHEDULES[name](ours), name)
    assert ours.param_groups[0]["lr"] is lr
    assert own == lrs_of(torchs, theirs, SCHEDULES[name](torchs), name)
    schedule = SCHEDULES[name](plain)
    for step in range(6):
        give(expected, step)
        plain.param_groups[0]["lr"] = own[step]
        plain.step()
    assert_same(found, expected)
    assert len(set(own)) > 1
    del schedule


@pytest.mark.parametrize("kind", [FusedAdam, FusedLion, FusedSGD, FusedMuon])
def test_an_optimizer_for_each_parameter_in_its_hook(kind):
    """As torch's tutorial has it: each steps when its gradient is there, and frees it."""
    sides = []
    for in_hooks in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        params = list(model.parameters())
        each = {param: kind([param], lr=0.01) for param in params}
        together = [kind([param], lr=0.01) for param in params]

        def step(param, each=each):
            each[param].step()
            each[param].zero_grad()

        if in_hooks:
            for param in params:
                param.register_post_accumulate_grad_hook(step)
        for number in range(3):
            model(values((5, 4), number)).square().sum().backward()
            if in_hooks:
                assert all(param.grad is None for param in params)
                continue
            for optimizer in together:
                optimizer.step()
                optimizer.zero_grad()
        sides.append(params)
    assert_same(*sides)
