"""torch.distributed.checkpoint asks an optimizer for its states before the first step."""

import warnings

import pytest
import torch
from handling import both_backends
from runs import BF16, FP32, assert_same, parameters, snapshot, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from megaopt import FusedAdam, FusedLion, FusedMuon, FusedSGD, GaLoreAdamW

KINDS = {
    "adam": (FusedAdam, {}),
    "lion": (FusedLion, {}),
    "sgd": (FusedSGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "muon": (FusedMuon, {}),
    "galore": (GaLoreAdamW, {}),
}


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weights = nn.ParameterList(parameters([(4, 6), (5,)], dtype))


@both_backends
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_question_for_states_is_no_step(kind, dtype, backend):
    """Of plain tensors too: the run goes on as one that was not asked."""
    kind, options = KINDS[kind]
    options = {**options, "dtype": torch.float32, "backend": backend}
    pair = [(model := Model(dtype), kind(model.parameters(), **options)) for _ in range(2)]
    asked, plain = (optimizer for _, optimizer in pair)
    found = get_optimizer_state_dict(pair[0][0], asked)
    assert all(group["step"] == 0 for group in asked.param_groups)
    assert found["state"]
    for optimizer in (asked, plain):
        train(optimizer, 3)
    assert_same(snapshot(asked), snapshot(plain))


@pytest.mark.parametrize("policy", ["refresh", "error"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_that_come_after_the_question_are_the_masters(kind, policy):
    """No step has written these masters: nothing was written between steps."""
    kind, options = KINDS[kind]
    options = {**options, "dtype": torch.float32, "on_external_write": policy}
    model, other = Model(BF16), Model(BF16)
    optimizer = kind(model.parameters(), **options)
    get_optimizer_state_dict(model, optimizer)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(-2)
    model.load_state_dict(other.state_dict())
    expected = kind(other.parameters(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (optimizer, expected):
            train(each, 2)
    assert_same(snapshot(optimizer), snapshot(expected))
    with torch.no_grad():
        next(model.parameters()).mul_(3)
    train_again = lambda: train(optimizer, 1, first=2)  # noqa: E731
    if policy == "error":
        with pytest.raises(RuntimeError, match="must not be written between steps"):
            train_again()
    else:
        with pytest.warns(UserWarning, match="was written outside the optimizer"):
            train_again()
