"""State dicts for torch.optim.AdamW and Adam: loaded, stepped on, and taken back, bit for bit."""

import copy

import pytest
import torch
from bits import assert_same_bits
from handling import both_modes, copy_weights, train_all
from runs import (
    BF16,
    FP16,
    FP32,
    assert_same,
    parameters,
    params_of,
    snapshot,
    through_a_file,
    train,
)

from megaopt import FusedAdam
from megaopt.float8 import RECIPES, Float8Weight

SHAPES = [(3, 4), (), (0,), (5,)]
HYPER = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
THEIRS = {True: torch.optim.AdamW, False: torch.optim.Adam}
both_rules = pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])


def made(cls=FusedAdam, dtype=FP32, **options):
    """Two groups, the second with numbers of its own."""
    params = parameters(SHAPES, dtype)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.01, "weight_decay": 0.0}]
    return cls(groups, **{**HYPER, **options})


def assert_torch_has(theirs, ours, count):
    """Step counts and moments of torch's optimizer are the values of ours."""
    for other, param in zip(params_of(theirs), params_of(ours), strict=True):
        state = theirs.state[other]
        assert state["step"].dtype == FP32
        assert state["step"].item() == count
        for name in ("exp_avg", "exp_avg_sq"):
            value = ours.get_unscaled_state(param, name)
            assert_same_bits(state[name], value.to(other.dtype), name)


@both_rules
@both_modes
def test_torch_loads_it_and_steps_on(adam_w_mode, capturable):
    """torch's own arithmetic, from the same numbers: as if torch had had them from the start."""
    ours = made(adam_w_mode=adam_w_mode, capturable=capturable)
    train(ours, 3)
    cls = THEIRS[adam_w_mode]
    theirs = made(cls)
    copy_weights(ours, theirs)
    theirs.load_state_dict(through_a_file(ours.to_torch_state_dict()))
    assert_torch_has(theirs, ours, 3)
    plain = made(cls)
    copy_weights(ours, plain)
    for param, other in zip(params_of(plain), params_of(ours), strict=True):
        moments = {name: ours.state[other][name].clone() for name in ("exp_avg", "exp_avg_sq")}
        plain.state[param] = {"step": torch.tensor(3.0), **moments}
    for group in theirs.param_groups:
        group["capturable"] = False  # torch has it on a GPU alone
        group["lr"] = float(group["lr"])
    for group, own in zip(plain.param_groups, theirs.param_groups, strict=True):
        group["lr"] = own["lr"]
    train_all((theirs, plain), 2, first=3)
    assert_same(
        [param.detach() for param in params_of(theirs)], [*map(torch.detach, params_of(plain))]
    )
    assert all(theirs.state[param]["step"].item() == 5 for param in params_of(theirs))


@both_rules
def test_groups_are_as_torch_makes_them(adam_w_mode):
    ours, theirs = made(adam_w_mode=adam_w_mode), made(THEIRS[adam_w_mode])
    assert ours.to_torch_state_dict() == theirs.state_dict()


@both_rules
def test_a_schedules_keys_stay(adam_w_mode):
    ours = made(adam_w_mode=adam_w_mode)
    torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 0.5)
    group = ours.to_torch_state_dict()["param_groups"][1]
    assert (group["lr"], group["initial_lr"], group["params"]) == (0.005, 0.01, [2, 3])


@both_rules
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_it_comes_back_with_the_same_bits(adam_w_mode, dtype):
    """Through torch's optimizer too, where moments have the weight's dtype, as torch keeps them."""
    moments = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype} if dtype is not FP16 else {}
    ours = made(dtype=dtype, adam_w_mode=adam_w_mode, **moments)
    train(ours, 3)
    before = copy.deepcopy(snapshot(ours))
    theirs = made(THEIRS[adam_w_mode], dtype)
    theirs.load_state_dict(ours.to_torch_state_dict())
    ways = [ours.to_torch_state_dict()]
    if dtype is not FP16:  # whose moments torch would round
        ways.append(theirs.state_dict())
    for state_dict in ways:
        back = made(dtype=dtype, adam_w_mode=adam_w_mode, **moments)
        copy_weights(ours, back)
        back.load_state_dict(through_a_file(state_dict))
        found = snapshot(back)
        assert_same(found["weights"], before["weights"])
        assert_same(found["states"], before["states"])
        assert [group["step"] for group in back.param_groups] == [3, 3]
        train(back, 2, first=3)
        straight = copy.deepcopy(ours)
        train(straight, 2, first=3)
        assert_same(snapshot(back)["weights"], snapshot(straight)["weights"])


@pytest.mark.parametrize("dtype", [FP16, torch.float8_e4m3fn], ids=str)
def test_moments_with_a_scale_are_given_as_numbers(dtype):
    ours = made(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    train(ours, 2)
    theirs = made(torch.optim.AdamW)
    theirs.load_state_dict(ours.to_torch_state_dict())
    assert_torch_has(theirs, ours, 2)
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in theirs.state.values())


def test_what_torch_trained_comes_back():
    """torch's state after its own steps, in our optimizer and out again."""
    theirs = made(torch.optim.AdamW)
    train(theirs, 3)
    saved = copy.deepcopy(theirs.state_dict())
    ours = made()
    ours.load_state_dict(saved)
    found = ours.to_torch_state_dict()
    assert found["param_groups"] == saved["param_groups"]
    for key, state in saved["state"].items():
        assert set(found["state"][key]) == set(state)
        for name, value in state.items():
            assert_same_bits(found["state"][key][name], value, f"{key} {name}")


def test_parameters_without_a_state_have_none():
    ours = made(makes_states="stepped")
    params = params_of(ours)
    params[0].grad = torch.ones_like(params[0])
    ours.step()
    ours.state[params[3]]  # a look makes an entry
    assert set(ours.to_torch_state_dict()["state"]) == {0}


def test_masters_are_left_out_on_purpose_alone():
    ours = made(dtype=BF16, master_weights=True)
    train(ours, 2)
    with pytest.raises(
        ValueError, match=r"parameter 0 of group 0: drop_masters must be True, as to"
    ):
        ours.to_torch_state_dict()
    packed = ours.to_torch_state_dict(drop_masters=True)
    theirs = made(torch.optim.AdamW, BF16)
    copy_weights(ours, theirs)
    theirs.load_state_dict(packed)
    assert_torch_has(theirs, ours, 2)
    train(theirs, 1, first=2)


def without(**changes):
    def change(optimizer):
        optimizer.param_groups[1].update(changes)

    return change


def half_a_state(optimizer):
    del optimizer.state[params_of(optimizer)[0]]["exp_avg_sq"]


REFUSED = {
    "bias_correction": (
        without(bias_correction=False),
        "group 1: bias_correction must be True, as",
    ),
    "lr": (without(lr=None), "group 1: lr must be a finite number >= 0 in fp32, got None"),
    "steps": (
        without(step=2**24 + 1),
        "group 1: step must be <= 16777216, as torch counts in fp32",
    ),
    "half": (half_a_state, "parameter 0 of group 0: its state must have exp_avg, exp_avg_sq, got"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_torch_has_not_is_refused(change, message):
    ours = made()
    train(ours, 1)
    change(ours)
    with pytest.raises(ValueError, match=message):
        ours.to_torch_state_dict()


def test_fp8_weights_are_refused():
    weight = Float8Weight.from_values(torch.ones(4, 32), RECIPES["current"])
    ours = FusedAdam([torch.nn.Parameter(weight)])
    ours.initialize_states()
    with pytest.raises(ValueError, match="the weight must not be in fp8, which torch cannot step"):
        ours.to_torch_state_dict()
