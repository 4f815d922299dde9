"""bitsandbytes' checkpoints; test_drop_in_classes.py has the rest of its names."""

import pytest
import stopped
import torch
from runs import FP32, assert_same, assert_same_run, parameters, snapshot, train, values

from megaopt.integration import bitsandbytes

LARGE = [(33, 128), (5,)]
NAMES = ["Adam", "Adam8bit", "AdamW", "AdamW8bit", "Lion", "Lion8bit"]
each_class = pytest.mark.parametrize("name", NAMES)


def coded(shape, seed, number, block):
    code = (values(shape, seed) * 60).abs().to(torch.uint8)
    amax = values((-(-shape.numel() // block),), seed + 1).abs()
    table = torch.linspace(-1.0 if number == 1 else 0.0, 1, 256)
    exact = table[code.long()] * amax[torch.arange(shape.numel()) // block].view(shape)
    return {f"state{number}": code, f"qmap{number}": table, f"absmax{number}": amax}, exact


@pytest.mark.parametrize(("block", "nested"), [(256, True), (2048, False)])
@each_class
def test_bitsandbytes_checkpoints_load_by_their_values(name, nested, block):
    large, small = parameters(LARGE)
    moments = ("exp_avg",) if "Lion" in name else ("exp_avg", "exp_avg_sq")
    states, exact = [{}, {}], [{}, {}]
    for number, moment in enumerate(moments, 1):
        tensors, exact[0][moment] = coded(large.shape, number, number, block)
        states[0].update(tensors)
        exact[1][moment] = values(small.shape, 5 + number).abs()
        states[1][f"state{number}"] = exact[1][moment]
    wrapped = [{"__bnb_optimizer_quant_state__": own} if nested else own for own in states]
    numbers = {"lr": 0.125, "betas": (0.8, 0.95), "weight_decay": 0.25}
    theirs = {"eps": 0.0 if "Lion" in name else 1e-6, "alpha": 0.0, "t_alpha": None}
    saved = {
        "state": {key: {"step": 7, **own} for key, own in enumerate(wrapped)},
        "param_groups": [{**numbers, **theirs, "t_beta3": None, "params": [0, 1]}],
    }
    found = getattr(bitsandbytes, name)([large, small])
    found.load_state_dict(saved)
    expected = getattr(bitsandbytes, name)(parameters(LARGE))
    (own,) = expected.param_groups
    own.update({**numbers, "step": 7, **({} if "Lion" in name else {"eps": 1e-6})})
    for param, state in zip(own["params"], exact, strict=True):
        expected.initialize_state(param)
        for moment, value in state.items():
            expected.set_scaled_state(param, moment, value)
    assert_same_run(found, expected)
    train(found, 2)
    train(expected, 2)
    assert_same_run(found, expected)


def test_what_users_keep_in_bitsandbytes_states_is_kept():
    large, _ = parameters(LARGE)
    tensors, _ = coded(large.shape, 1, 1, 256)
    state = {"step": 7, "ema": torch.ones(2), "max1": torch.ones(1), "unorm_vec": torch.ones(1)}
    group = {"lr": 0.125, "betas": (0.8, 0.95), "weight_decay": 0.25, "params": [0]}
    optimizer = bitsandbytes.Lion([large])
    with pytest.warns(UserWarning, match="'ema' of the state dict is kept, and no step reads it"):
        optimizer.load_state_dict({"state": {0: {**state, **tensors}}, "param_groups": [group]})
    assert {*optimizer.state[large]} == {"exp_avg", "master_param", "ema"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"absmax1": None}, "state 0: absmax1 must be a number for each block of 256 elements"),
        ({"absmax1": torch.ones(5)}, "state 0: absmax1 must be .*, got a torch.float32 tensor of"),
        ({"qmap1": None}, "state 0: qmap1 must be a tensor of 256 values, got None"),
        ({"qmap1": torch.ones(16)}, "state 0: qmap1 must be a tensor of 256 values, got a torch"),
    ],
)
def test_states_that_are_not_block_wise_are_refused(change, message):
    (large, _) = parameters(LARGE)
    found = bitsandbytes.Lion8bit([large])
    before = snapshot(found)
    state = {"step": 1, **coded(large.shape, 1, 1, 256)[0], **change}
    group = {"lr": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.0, "eps": 0.0, "params": [0]}
    with pytest.raises(ValueError, match=message):
        found.load_state_dict({"state": {0: state}, "param_groups": [group]})
    assert_same(snapshot(found), before)


# --- beside bitsandbytes itself


def decoded(state, number):
    """A moment of theirs as they read it."""
    own = (state[f"absmax{number}"], state[f"qmap{number}"], 256, FP32)
    return torch.ops.bitsandbytes.dequantize_blockwise(state[f"state{number}"], *own)


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit"])
def test_exp_avg_sq_is_no_further_from_fp64_than_theirs(name):
    peer = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    kinds = getattr(bitsandbytes, name), getattr(peer.optim, name)
    stopped.assert_no_further(*kinds, lambda state: decoded(state, 2))


@pytest.mark.parametrize("name", ["SGD", "SGD8bit", "SGD32bit"])
def test_checkpoints_of_sgd_load_by_their_values(name):
    large, small = parameters(LARGE)
    tensors, exact = coded(large.shape, 1, 1, 256)
    buffer = values(small.shape, 6)
    group = {"lr": 0.125, "betas": (0.75, 0.0), "eps": 0.0, "weight_decay": 0.25, "alpha": 0.0}
    saved = {
        "state": {0: {"step": 7, **tensors}, 1: {"step": 7, "state1": buffer}},
        "param_groups": [{**group, "t_alpha": None, "t_beta3": None, "params": [0, 1]}],
    }
    found = getattr(bitsandbytes, name)([large, small], lr=0.5, momentum=0.9)
    found.load_state_dict(saved)
    numbers = {"lr": 0.125, "momentum": 0.75, "weight_decay": 0.25}
    expected = getattr(bitsandbytes, name)(parameters(LARGE), **numbers)
    (own,) = expected.param_groups
    for param, value in zip(own["params"], (exact, buffer), strict=True):
        expected.initialize_state(param)
        expected.set_scaled_state(param, "momentum_buffer", value)
    own["step"] = found.param_groups[0]["step"]
    assert_same_run(found, expected)
    train(found, 2)
    train(expected, 2)
    assert_same_run(found, expected)
