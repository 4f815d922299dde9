"""torch's hooks and profilers hear of every step, and the step alone runs where there are none."""

import json

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megaopt import FusedAdam
from megaopt.kernels import native

RANGE = "Optimizer.step#FusedAdam.step"


# without the extension no step is without torch's hooks
pytestmark = [
    pytest.mark.usefixtures("looks"),
    pytest.mark.parametrize("looks", ["native"], indirect=True),
]


@pytest.fixture
def optimizer():
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    stepped = FusedAdam([param], lr=1e-3)
    stepped.step()
    return stepped


def entered(optimizer, monkeypatch):
    """Whether a step enters torch's range."""
    heard = []
    enter = torch.autograd.profiler.record_function.__enter__

    def noted(self):
        heard.append(self.name)
        return enter(self)

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.profiler.record_function, "__enter__", noted)
        optimizer.step()
    return heard == [RANGE]


def test_nobody_hears_of_a_step(optimizer, monkeypatch):
    assert not entered(optimizer, monkeypatch)
    monkeypatch.setenv(native.SWITCH, "0")
    assert entered(optimizer, monkeypatch)


@pytest.mark.parametrize(
    "register",
    [
        lambda own: own.register_step_pre_hook,
        lambda own: own.register_step_post_hook,
        lambda own: register_optimizer_step_pre_hook,
        lambda own: register_optimizer_step_post_hook,
    ],
)
def test_hooks_are_called(optimizer, monkeypatch, register):
    called = []
    handle = register(optimizer)(lambda own, args, named: called.append((own, args[1:], named)))
    optimizer.step(clip_norm=1.0)
    handle.remove()
    assert called == [(optimizer, (), {"clip_norm": 1.0})]
    assert not entered(optimizer, monkeypatch)


def test_a_hook_of_the_closure_is_called(optimizer):
    called = []

    def closure():
        optimizer.register_step_post_hook(lambda *_: called.append(None))

    optimizer.step(closure)
    optimizer.step(closure=closure)
    assert len(called) == 3


def test_a_profile_has_the_step(optimizer):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert [e.name for e in profile.events() if e.is_user_annotation] == [RANGE]


def test_an_observer_has_the_step(optimizer, tmp_path):
    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(str(tmp_path / "trace.json"))
    observer.start()
    optimizer.step()
    observer.stop()
    observer.unregister_callback()
    names = [node["name"] for node in json.loads((tmp_path / "trace.json").read_text())["nodes"]]
    assert names.count(RANGE) == 1
