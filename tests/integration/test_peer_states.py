"""The comparison with a peer's states fails where one is other, missing or too many."""

import types

import pytest
import torch
from parity import assert_same_state

from megaopt import FusedAdam

FP16 = torch.float16


def stepped(make):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(count)) for count in (5, 3)]
    optimizer = make(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return params, optimizer


@pytest.fixture
def pair():
    """Ours, and a peer with TransformerEngine's place for scales, with the same bits."""

    def ours(params):
        return FusedAdam(params, lr=0.1, exp_avg_dtype=FP16, exp_avg_sq_dtype=torch.float8_e4m3fn)

    params, optimizer = stepped(ours)
    twins, twin = stepped(ours)
    states, scales = {}, {}
    for param in twins:
        own = twin.state[param]
        codes = own["exp_avg_sq"].view(torch.uint8)
        float8 = types.SimpleNamespace(_data=codes, _scale_inv=own["exp_avg_sq_scale"])
        states[param] = {"exp_avg": own["exp_avg"], "exp_avg_sq": float8}
        scales[param] = {"exp_avg": own["exp_avg_scale"], "exp_avg_sq": torch.ones(1)}
    peer = types.SimpleNamespace(state=states, _scales=scales)
    return twins, params, peer, optimizer


def test_equal_states_pass(pair):
    assert_same_state(*pair)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"])
def test_a_state_that_is_other_or_missing_is_found(pair, name):
    _, params, _, optimizer = pair
    state = optimizer.state[params[1]]
    changed = state[name].clone()
    changed.view(torch.uint8)[0] ^= 1
    state[name], kept = changed, state[name]
    with pytest.raises(AssertionError, match=f"{name} 1: 1 of"):
        assert_same_state(*pair)
    state[name] = kept
    assert_same_state(*pair)
    del state[name]
    with pytest.raises(AssertionError, match=rf"weight 1 has the states .*, not .*'{name}'"):
        assert_same_state(*pair)


def test_a_state_that_the_peer_lacks_is_found(pair):
    _, params, _, optimizer = pair
    optimizer.state[params[0]]["master_param"] = params[0].detach().clone()
    with pytest.raises(AssertionError, match=r"weight 0 has the states .*master_param"):
        assert_same_state(*pair)


def test_no_states_at_all_are_found():
    sides = [stepped(lambda params: torch.optim.AdamW(params, lr=0.1)) for _ in range(2)]
    for _, optimizer in sides:
        optimizer.state.clear()
    (theirs, peer), (ours, optimizer) = sides
    with pytest.raises(AssertionError, match=r"weight 0 has the states \[\]"):
        assert_same_state(theirs, ours, peer, optimizer)
