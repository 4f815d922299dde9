"""to_float8 says what it did, a model shows it, and an optimizer made too early is told."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

import megaopt


def model():
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 17)).bfloat16()


def test_layers_that_nobody_chose_to_leave_are_named(caplog):
    with caplog.at_level(logging.INFO, "megaopt"):
        megaopt.to_float8(model(), "current")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "to_float8: 1 linear layers have fp8 weights now (current); 1 stay as they are, as a size "
        "is no multiple of 16: 2 (17 x 48)"
    )


def test_layers_that_a_filter_left_are_no_warning(caplog):
    with caplog.at_level(logging.INFO, "megaopt"):
        megaopt.to_float8(model(), "current", filter=lambda name, layer: name == "0")
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("to_float8: 1 linear layers have fp8 weights now")


def test_a_printed_model_shows_what_is_in_fp8():
    net = megaopt.to_float8(model(), "block_128x128")
    lines = str(net).splitlines()
    assert "(0): Float8Linear(in_features=32" in lines[1]
    assert "fp8 weight=block_128x128" in lines[1]
    assert "(2): Linear(" in lines[3]
    assert "fp8" not in lines[3]
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert str(again) == str(net)
        x = torch.randn(3, 32).bfloat16()
        assert torch.equal(again(x), net(x))


class Own(nn.Linear):
    pass


def test_a_class_of_a_users_own_stays():
    net = megaopt.to_float8(Own(32, 32), "current")
    assert type(net) is Own


@pytest.mark.parametrize("stepped_before", [False, True])
def test_an_optimizer_of_the_weights_before_is_told_at_its_next_step(stepped_before):
    net = model()
    optimizer = megaopt.FusedAdam(net.parameters(), dtype=torch.float32, backend="reference")
    x = torch.randn(4, 32).bfloat16()
    if stepped_before:
        net(x).sum().backward()
        optimizer.step()
    megaopt.to_float8(net, "current")
    optimizer.zero_grad()
    net(x).sum().backward()
    message = r"parameter 0 of group 0 must be a weight of the model.*replaced, '0\.weight'"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
