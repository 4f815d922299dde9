"""Steps in which no parameter has a gradient: they move nothing, and say so once."""

import warnings

import kinds
import one_rank
import pytest
import torch
from runs import parameters, params_of, train
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megaopt import FusedAdam, FusedMuon, release_gradients

KINDS = ["fp32_masters", "lion", "momentum", "muon", "counts apart"]


def told(which=""):
    return pytest.warns(UserWarning, match=f"none of the . parameters has a gradient.*{which}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_gradients_says_so_once(kind):
    optimizer = kinds.made(kind, backend="reference")
    with told("make the optimizer after them"):
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        train(optimizer, 1)
        optimizer.zero_grad()
        optimizer.step()


def test_one_after_steps_with_gradients_says_so_too():
    optimizer = kinds.made("fp32_masters", backend="reference")
    train(optimizer, 2)
    optimizer.zero_grad()
    with told():
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "decoupled"), [("main_grad", False), ("decoupled_grad", False), ("grad", True)]
)
def test_it_says_where_gradients_are(name, decoupled):
    optimizer = FusedAdam(parameters(), backend="reference", use_decoupled_grad=decoupled)
    for param in params_of(optimizer):
        setattr(param, name, torch.ones_like(param))
    with told(rf"gradients in \.{name}, which"):
        optimizer.step()


def test_an_optimizer_made_before_fully_shard_is_told_of(tmp_path):
    with one_rank.group_of_one("gloo", tmp_path):
        model = torch.nn.Linear(4, 4)
        optimizer = FusedAdam(model.parameters(), backend="reference")
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model(torch.ones(2, 4)).sum().backward()
        with told("fully_shard"):
            optimizer.step()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options", [{}, {"use_decoupled_grad": True}])
@pytest.mark.parametrize("frozen", [False, True])
def test_torchs_question_for_states_is_no_such_step(options, frozen):
    model = torch.nn.Linear(4, 4).requires_grad_(not frozen)
    get_optimizer_state_dict(model, FusedAdam(model.parameters(), backend="reference", **options))


def test_released_gradients_are_gone_at_the_step():
    model = torch.nn.Linear(4, 4)
    optimizer = FusedMuon(model.parameters(), backend="reference")
    release_gradients(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_an_optimizer_without_parameters_has_nothing_to_say():
    """As a rank's that has no part of any."""
    optimizer = FusedAdam([{"params": []}], backend="reference")
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
