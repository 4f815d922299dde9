"""What TransformerEngine's users and Megatron do with a FusedAdam."""

import pytest
import torch
from bits import assert_same_bits
from runs import (
    BF16,
    FP32,
    MASTER,
    assert_same_run,
    parameters,
    train,
    values,
)

from megaopt import FusedAdam


def test_the_groups_count_their_steps_from_construction():
    params = parameters([(3,), (4,)])
    optimizer = FusedAdam([{"params": params[:1]}, {"params": []}])
    assert [group["step"] for group in optimizer.param_groups] == [0, 0]
    train(optimizer, 2)
    optimizer.add_param_group({"params": params[1:]})
    assert [group["step"] for group in optimizer.param_groups] == [2, 2, 0]
    train(optimizer, 1)
    steps = [group["step"] for group in optimizer.param_groups]
    assert steps == [3, 3, 1]
    assert {type(step) for step in steps} == {int}


def test_a_group_that_is_empty_on_this_rank_counts_and_its_count_is_used():
    optimizer = FusedAdam([{"params": parameters([(3,)])}, {"params": []}])
    train(optimizer, 2)
    late, alone = parameters([(3,)]), parameters([(3,)])
    optimizer.param_groups[1]["params"] = late
    expected = FusedAdam(alone)
    expected.param_groups[0]["step"] = 2
    train(optimizer, 1)
    alone[0].grad = late[0].grad
    expected.step()
    assert_same_bits(late[0].detach(), alone[0].detach())


@pytest.mark.parametrize("when", ["at_construction", "later"])
def test_decoupled_gradients_are_read_instead_of_grad(when):
    found = FusedAdam(parameters([(5,)]), use_decoupled_grad=when == "at_construction", **MASTER)
    expected = FusedAdam(parameters([(5,)]), **MASTER)
    found.use_decoupled_grad = True
    (param,), (other,) = (o.param_groups[0]["params"] for o in (found, expected))
    for step in range(2):
        param.grad = torch.full((5,), 100.0, dtype=BF16)  # not to be read
        param.decoupled_grad = values((5,), step, BF16)
        other.grad = values((5,), step, BF16)
        found.step()
        expected.step()
    assert_same_run(found, expected)


def test_without_the_option_decoupled_gradients_are_not_read():
    optimizer = FusedAdam(parameters([(5,)]))
    (param,) = optimizer.param_groups[0]["params"]
    param.decoupled_grad = torch.ones(5, dtype=BF16)
    before = param.detach().clone()
    optimizer.step()
    assert_same_bits(param.detach(), before)
    assert not optimizer.state[param]["exp_avg"].any()


@pytest.mark.parametrize("decoupled", [False, True], ids=["grad", "decoupled_grad"])
def test_zero_grad_drops_or_zeroes_what_the_step_reads(decoupled):
    params = parameters([(3,), (4,)])
    optimizer = FusedAdam(params, use_decoupled_grad=decoupled)
    name = "decoupled_grad" if decoupled else "grad"

    def give():
        setattr(params[0], name, torch.ones(3, dtype=BF16))
        return getattr(params[0], name)

    kept = give()
    optimizer.zero_grad(set_to_none=False)
    assert getattr(params[0], name) is kept
    assert_same_bits(kept, torch.zeros(3, dtype=BF16))
    assert getattr(params[1], name, None) is None
    given = give()
    optimizer.zero_grad()
    assert [getattr(param, name) for param in params] == [None, None]
    assert_same_bits(given, torch.ones(3, dtype=BF16), "a gradient that was dropped")


def test_zero_grad_leaves_decoupled_gradients_that_the_step_does_not_read():
    (param,) = parameters([(3,)])
    param.decoupled_grad = torch.ones(3, dtype=BF16)
    FusedAdam([param]).zero_grad()
    assert param.decoupled_grad is not None


def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned():
    (param,) = parameters([(3,)], FP32)
    optimizer, calls = FusedAdam([param]), []
    plain = FusedAdam([torch.nn.Parameter(param.detach().clone())])

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    expected = (param.detach() ** 2).sum()
    twin = plain.param_groups[0]["params"][0]
    twin.grad = 2 * twin.detach()
    loss = optimizer.step(closure)
    assert plain.step() is None
    assert_same_bits(loss.detach(), expected)
    assert calls == [True]
    assert_same_run(optimizer, plain)


def test_the_attributes_that_megatron_fsdp_writes():
    """It sets both after construction, before the first step."""
    optimizer = FusedAdam(parameters([(5,)]), master_weights=True)
    optimizer.master_weights = False
    optimizer.use_decoupled_grad = True
    (param,) = optimizer.param_groups[0]["params"]
    param.decoupled_grad = torch.ones(5)
    optimizer.step()
    assert optimizer.state[param]["master_param"] is None
    assert optimizer.param_groups[0]["step"] == 1
