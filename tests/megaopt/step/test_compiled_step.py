"""torch.compile leaves a step as it is: the bits are those of a loop that is not compiled."""

import functools
import subprocess
import sys

import pytest
import torch
from runs import assert_same_run

from megaopt import FusedAdam, FusedMuon


def trained(kind, compiled):
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16).bfloat16()
    optimizer = kind(model.parameters(), lr=1e-2, dtype=torch.float32)

    def step(x):
        model(x).square().mean().backward()
        optimizer.step(clip_norm=1.0)
        optimizer.zero_grad()

    step = torch.compile(step, backend="eager") if compiled else step
    for batch in torch.randn(3, 4, 16).bfloat16():
        step(batch)
    return optimizer


@pytest.mark.parametrize("kind", [FusedAdam, FusedMuon])
def test_a_compiled_loop_steps_as_a_plain_one_without_a_warning(kind):
    """The suite makes an error of each of the warnings that tracing a step gave."""
    assert_same_run(trained(kind, compiled=True), trained(kind, compiled=False))


def test_a_loop_that_is_not_compiled_does_not_import_torchs_compiler():
    loop = """
import sys, torch
from megaopt import FusedAdam
weight = torch.nn.Parameter(torch.ones(4))
optimizer = FusedAdam([weight])
for _ in range(2):
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", loop], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


WRAPPED = ("add_param_group", "zero_grad", "state_dict")


def test_what_others_put_around_torchs_methods_is_called(monkeypatch):
    """Of the base class, at any time, as tracers do; with functools.wraps, too."""
    called = []

    def around(method):
        @functools.wraps(method)
        def heard(*args, **named):
            called.append(method.__name__)
            return method(*args, **named)

        return heard

    for name in WRAPPED:
        monkeypatch.setattr(
            torch.optim.Optimizer, name, around(getattr(torch.optim.Optimizer, name))
        )
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(4))])
    optimizer.zero_grad()
    optimizer.state_dict()
    assert called == [*WRAPPED]
