"""Moments in blocks on the public interface: which have them, what is kept, what goes with them."""

import copy
from itertools import pairwise

import block_oracle
import numpy as np
import pytest
import torch
from bits import assert_same_bits
from runs import (
    BF16,
    FP32,
    MASTER,
    REMAINDERS,
    assert_same,
    parameters,
    params_of,
    snapshot,
    through_a_file,
    train,
    values,
)

from megaopt import FusedAdam, FusedLion, FusedSGD

BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
BLOCKS64 = {"exp_avg_dtype": "block64_e4m3", "exp_avg_sq_dtype": "block64_e5m3"}
NEAREST = {"exp_avg_dtype": "block_e4m3_nearest", "exp_avg_sq_dtype": "block_e5m3_nearest"}
STOCHASTIC = {"weight_rounding": "stochastic"}
# rows of whole blocks, of whole blocks of 64 or of none, and a small one
SHAPES = [(40, 128), (33, 256), (10,), (40, 192)]
KINDS = {
    "adam": (FusedAdam, {**BLOCKS, **STOCHASTIC}),
    "adam, masters": (FusedAdam, {**NEAREST, **MASTER}),
    "adam, remainders": (FusedAdam, {**BLOCKS64, **REMAINDERS}),
    "adam, 24 bits": (FusedAdam, {**BLOCKS, "master_weight_dtype": "remainder8"}),
    "adam, Kahan": (FusedAdam, {**BLOCKS64, "master_weight_dtype": "kahan_stochastic"}),
    "adam, exp_avg_sq": (FusedAdam, {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": "block_e5m3"}),
    "amsgrad": (FusedAdam, {**NEAREST, "amsgrad": True}),
    "lion": (FusedLion, {"exp_avg_dtype": "block_e4m3", **MASTER}),
    "sgd": (FusedSGD, {"momentum": 0.9, "nesterov": True, "momentum_buffer_dtype": "block64_e4m3"}),
}
HYPER = {"lr": 2e-3, "weight_decay": 0.1}


def made(kind, params=None, **more):
    optimizer, options = KINDS[kind]
    if isinstance(options.get("master_weight_dtype"), str):
        options = {**options, "master_weights": True}
    params = parameters(SHAPES) if params is None else params
    return optimizer(params, **{**HYPER, **options, **more})


# --- which moments are in blocks


@pytest.mark.parametrize("block", [128, 64])
@pytest.mark.parametrize(
    ("shape", "is_kept"),
    [
        ((64, 128), True),
        ((63, 65), False),
        ((64, 100), False),  # blocks would go from row to row
        ((1, 4097), False),
        ((1, 4224), True),
        ((4, 4, 256), True),
        ((8, 8, 64), True),
        ((65536,), True),
        ((65537,), True),
        ((65535,), False),
        ((), False),
        ((0, 5000), False),
    ],
    ids=str,
)
def test_small_parameters_keep_fp32_moments(shape, is_kept, block):
    param = torch.nn.Parameter(values(shape, 0, BF16))
    optimizer = FusedAdam([param], **(BLOCKS if block == 128 else BLOCKS64))
    train(optimizer, 1)
    own = optimizer.state[param]
    for name in ("exp_avg", "exp_avg_sq"):
        assert own[name].dtype == (torch.uint8 if is_kept else FP32)
        assert own[name].shape == param.shape
        assert (f"{name}_scale" in own) == is_kept
        if is_kept:
            rows = [shape[0]] if len(shape) > 1 else []
            count = -(-param.numel() // block)
            assert own[f"{name}_scale"].shape == (*rows, count // (rows or [1])[0])
            assert own[f"{name}_scale"].dtype == torch.uint8


def test_small_parameters_step_as_with_fp32_moments():
    found = FusedAdam(parameters(), **HYPER, **BLOCKS)
    expected = FusedAdam(parameters(), **HYPER)
    train(found, 3)
    train(expected, 3)
    for own, other in zip(params_of(found), params_of(expected), strict=True):
        assert_same_bits(own, other)
        assert_same(dict(found.state[own]), dict(expected.state[other]))


# --- backends


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_parameters_that_are_not_contiguous(backend):
    """Blocks follow the elements row by row, wherever they lie."""
    whole = parameters(SHAPES[:2])
    turned = [torch.nn.Parameter(param.detach().t().contiguous().t()) for param in whole]
    assert not turned[0].is_contiguous()
    expected, found = (
        made("adam", whole, backend="reference"),
        made("adam", turned, backend=backend),
    )
    train(expected, 3)
    train(found, 3)
    for own, other in zip(params_of(found), params_of(expected), strict=True):
        assert_same_bits(own, other)
        for name, tensor in expected.state[other].items():
            if tensor is not None:
                assert_same_bits(found.state[own][name].contiguous(), tensor, name)


def test_parts_of_a_parameter_are_the_whole():
    """Parts that know where they lie, from blocks' beginnings on."""
    whole = torch.nn.Parameter(values((5000,), 0, BF16))
    cuts = [0, 128, 128 * 9, 5000]
    parts = []
    for first, end in pairwise(cuts):
        parts.append(torch.nn.Parameter(whole.detach()[first:end].clone()))
        parts[-1].megaopt_first_element = first
    for each in (whole, *parts):
        each.megaopt_whole_shape = (50, 100)
        each.megaopt_number = 4
    one, many = made("adam", [whole]), made("adam", parts)
    for step in range(3):
        whole.grad = values((5000,), 50 + step, BF16)
        for part, (first, end) in zip(parts, pairwise(cuts), strict=True):
            part.grad = whole.grad[first:end].clone()
        one.step()
        many.step()
    assert_same_bits(torch.cat([part.detach() for part in parts]), whole.detach())
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
        found = torch.cat([many.state[part][name] for part in parts])
        assert_same_bits(found, one.state[whole][name], name)


# --- what is kept


def test_values_that_are_read_are_the_oracles():
    optimizer = made("adam")
    train(optimizer, 2)
    for param in params_of(optimizer)[:2]:
        own = optimizer.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            code, scale = own[name].view(-1).numpy(), own[f"{name}_scale"].view(-1).numpy()
            expected = torch.from_numpy(block_oracle.decode(BLOCKS[f"{name}_dtype"], code, scale))
            assert_same_bits(optimizer.get_unscaled_state(param, name), expected.view(param.shape))
            assert_same_bits(
                optimizer.get_unscaled_state(param, f"{name}_scale"), own[f"{name}_scale"]
            )


def by_hand(name, value):
    """What is stored without a draw: as nearest, ties up."""
    half = np.full(value.numel(), 0x8000)
    code, scale = block_oracle.encode(name, value.reshape(-1).numpy(), 0, half)
    return torch.from_numpy(code).view(value.shape), torch.from_numpy(scale)


@pytest.mark.parametrize("options", [BLOCKS, BLOCKS64, NEAREST], ids=lambda o: o["exp_avg_dtype"])
def test_the_state_of_torch_is_loaded_and_given_back(options):
    theirs = torch.optim.AdamW(parameters(SHAPES, FP32), **HYPER)
    train(theirs, 2)
    ours = FusedAdam(parameters(SHAPES, FP32), **HYPER, **options)
    ours.load_state_dict(theirs.state_dict())
    for param, other in zip(params_of(ours), params_of(theirs), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            value = theirs.state[other][name]
            if f"{name}_scale" not in ours.state[param]:
                assert_same_bits(ours.state[param][name], value)
            else:
                code, scale = by_hand(options[f"{name}_dtype"], value)
                assert_same_bits(ours.state[param][name], code, name)
                assert_same_bits(ours.state[param][f"{name}_scale"].view(-1), scale, name)
    back = torch.optim.AdamW(parameters(SHAPES, FP32), **HYPER)
    back.load_state_dict(through_a_file(ours.to_torch_state_dict()))
    for other, param in zip(params_of(back), params_of(ours), strict=True):
        assert set(back.state[other]) == {"step", "exp_avg", "exp_avg_sq"}
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(back.state[other][name], ours.get_unscaled_state(param, name), name)


def test_groups_say_what_the_optimizer_does():
    optimizer = made("adam", seed=9)
    assert [group["seed"] for group in optimizer.param_groups] == [9]
    assert [group["contract"] for group in optimizer.param_groups] == ["ieee"]
    nearest = FusedAdam(parameters(SHAPES), **NEAREST)
    assert "seed" not in nearest.param_groups[0]  # nothing draws


# --- refusals

REFUSED = {
    "exp_avg has a sign": (
        lambda p: FusedAdam(p, exp_avg_dtype="block_e5m3"),
        r"exp_avg_dtype must be one of block_e4m3, .*has a sign, got 'block_e5m3'",
    ),
    "exp_avg_sq is never negative": (
        lambda p: FusedAdam(p, exp_avg_sq_dtype="block64_e4m3"),
        r"exp_avg_sq_dtype must be one of block_e5m3, .*never negative, got 'block64_e4m3'",
    ),
    "lion": (
        lambda p: FusedLion(p, exp_avg_dtype="block_e5m3_nearest"),
        r"exp_avg_dtype must be one of .*has a sign, got 'block_e5m3_nearest'",
    ),
    "sgd": (
        lambda p: FusedSGD(p, momentum=0.9, momentum_buffer_dtype="block_e5m3"),
        r"momentum_buffer_dtype must be one of .*has a sign, got 'block_e5m3'",
    ),
    "contract torch": (
        lambda p: FusedAdam(p, contract="torch", **NEAREST),
        r"exp_avg_dtype='block_e4m3_nearest'.* must not be given with contract='torch'",
    ),
    "contract torch and draws": (
        lambda p: FusedAdam(p, contract="torch", **BLOCKS),
        r"contract='torch' must round to nearest.*exp_avg_dtype='block_e4m3'",
    ),
    "two sizes": (
        lambda p: FusedAdam(p, exp_avg_dtype="block_e4m3", exp_avg_sq_dtype="block64_e5m3"),
        r"blocks of one size, got exp_avg_dtype='block_e4m3', exp_avg_sq_dtype='block64_e5m3'",
    ),
    "scaled fp16 beside": (
        lambda p: FusedAdam(p, exp_avg_dtype="block_e4m3", exp_avg_sq_dtype=torch.float16),
        r"exp_avg_dtype='block_e4m3' must not be given beside exp_avg_sq_dtype='scaled_float16'",
    ),
    "scaled fp8 beside": (
        lambda p: FusedAdam(p, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype="block_e5m3"),
        r"exp_avg_sq_dtype='block_e5m3' must not be given beside exp_avg_dtype=",
    ),
    "scaled masters": (
        lambda p: FusedAdam(p, master_weights=True, master_weight_dtype=torch.float16, **BLOCKS),
        r"must not be given beside master_weight_dtype=torch.float16",
    ),
    "amsgrad and draws": (
        lambda p: FusedAdam(p, amsgrad=True, **BLOCKS),
        r"exp_avg_sq_dtype must round to nearest with amsgrad=True, got 'block_e5m3'",
    ),
    "another name": (
        lambda p: FusedAdam(p, exp_avg_dtype="block32_e4m3"),
        r"exp_avg_dtype must be .*block_e4m3.*, got 'block32_e4m3'",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together_is_refused(make, message):
    params = parameters(SHAPES)
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match=message):
        make(params)
    assert_same([param.detach() for param in params], before)
    assert all(not vars(param) for param in params)


def damage(saved, how):
    state = saved["state"][0]
    if how == "no scale":
        del state["exp_avg_scale"]
    elif how == "too few scales":
        state["exp_avg_scale"] = state["exp_avg_scale"][:-1]
    elif how == "scales of fp32":
        state["exp_avg_sq_scale"] = state["exp_avg_sq_scale"].float()
    else:
        state["exp_avg"] = state["exp_avg"].view(-1)[:-1]


@pytest.mark.parametrize("how", ["too few scales", "scales of fp32", "too few codes"])
def test_a_state_that_does_not_fit_is_refused(how):
    optimizer = made("adam")
    train(optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    damage(saved, how)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="parameter 0 of group 0"):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer), before)


def test_scales_are_not_set_by_themselves():
    optimizer = made("adam")
    train(optimizer, 1)
    param, before = params_of(optimizer)[0], snapshot(optimizer)
    own = optimizer.state[param]["exp_avg_scale"]
    for value in (own.clone(), torch.ones(1)):
        with pytest.raises(ValueError, match="exp_avg_scale"):
            optimizer.set_scaled_state(param, "exp_avg_scale", value)
    assert_same(snapshot(optimizer), before)
