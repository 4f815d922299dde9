"""State dicts that do not fit are refused before anything is changed."""

import copy

import pytest
import torch
from runs import (
    BF16,
    FORMATS,
    FP16_MASTER,
    MASTER,
    REMAINDERS,
    SHAPES,
    assert_same,
    parameters,
    snapshot,
    train,
)
from state_dicts import made

from megaopt import FusedAdam


def changed(position, **values_):
    def change(saved):
        target = saved["param_groups"] if position == "group" else saved["state"]
        target[0].update(values_)
        return saved

    return change


def without(*path):
    def change(saved):
        target = saved
        for key in path[:-1]:
            target = target[key]
        del target[path[-1]]
        return saved

    return change


def two_groups(saved):
    (group,) = saved["param_groups"]
    params = group["params"]
    saved["param_groups"] = [{**group, "params": params[:1]}, {**group, "params": params[1:]}]
    return saved


REFUSED = {
    "another_contract": (changed("group", contract="te"), r"contract='te'.*'ieee'"),
    "another_mode": (changed("group", adam_w_mode=False), r"group 0: .*adam_w_mode=False.*True"),
    "torchs_adam": (
        changed("group", decoupled_weight_decay=False),
        r"group 0: .*adam_w_mode=False.*True",
    ),
    "amsgrad": (changed("group", amsgrad=True), r"group 0: amsgrad=True.*allowed: False"),
    "maximize": (changed("group", maximize=True), r"group 0: maximize=True.*allowed: False"),
    "fewer_parameters": (changed("group", params=[0, 1, 2]), r"groups of \[3\].*\[4\]"),
    "more_groups": (two_groups, r"groups of \[1, 3\].*\[4\]"),
    "lr_nan": (changed("group", lr=float("nan")), r"group 0: lr=nan.*at least 0"),
    "step_of_another_kind": (changed("group", step=2.5), r"group 0: step=2\.5.*whole number"),
    "another_shape": (
        changed("state", exp_avg=torch.zeros(12)),
        r"parameter 0 of group 0: 'exp_avg' is torch.float32 of shape \(12,\).*\(3, 4\)",
    ),
    "another_format": (
        changed("state", exp_avg=torch.zeros(3, 4, dtype=BF16)),
        r"'exp_avg' is torch.bfloat16.*torch.float32",
    ),
    "remainders": (
        changed("state", master_param=torch.zeros(3, 4, dtype=torch.int16)),
        r"parameter 0 of group 0: 'master_param' is torch.int16.*allowed: torch.float32",
    ),
    "no_master": (changed("state", master_param=None), r"'master_param' is NoneType.*float32"),
    "a_scale_too_many": (changed("state", exp_avg_scale=torch.ones(1)), r"exp_avg_scale in the"),
    "a_moment_missing": (without("state", 0, "exp_avg_sq"), r"parameter 0 .*no 'exp_avg_sq'"),
    "a_state_of_no_parameter": (
        lambda saved: {**saved, "state": {**saved["state"], 9: saved["state"][0]}},
        "state 9 of the state dict belongs to no parameter",
    ),
    "no_groups": (without("param_groups"), "the state dict has no 'param_groups': found state"),
    "no_state": (without("state"), "the state dict has no 'state'"),
    "the_last_parameter": (
        lambda saved: {
            **saved,
            "state": {**saved["state"], 3: {**saved["state"][3], "exp_avg": torch.zeros(4)}},
        },
        r"parameter 3 of group 0: 'exp_avg'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refused_load_changes_nothing(change, message):
    source, target = made(MASTER), made(MASTER)
    target.master_weights = [torch.zeros(shape) for shape in SHAPES]
    train(source, 2)
    train(target, 3, first=5)
    saved = change(copy.deepcopy(source.state_dict()))
    before, objects = snapshot(target), list(target.state.values())
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(saved)
    assert_same(snapshot(target), before)
    assert all(a is b for a, b in zip(target.state.values(), objects, strict=True))


FOREIGN = {
    "unequal_step_counts": (
        lambda saved: saved["state"][1].update(step=torch.tensor(2.0)),
        r"group 0: .*step counts \[2, 3\]",
    ),
    "another_shape": (
        lambda saved: saved["state"][1].update(exp_avg=torch.zeros(7)),
        r"parameter 1 of group 0: 'exp_avg' is \(7,\)",
    ),
    "no_moment": (lambda saved: saved["state"][1].pop("exp_avg_sq"), r"'exp_avg_sq' is None"),
    "amsgrad": (lambda saved: saved["param_groups"][0].update(amsgrad=True), "amsgrad=True"),
    "maximize": (lambda saved: saved["param_groups"][0].update(maximize=True), "maximize=True"),
    "remainders_for_fp32_masters": (
        lambda saved: saved["state"][0].update(master_param=torch.zeros(3, dtype=torch.int16)),
        r"'master_param' is torch.int16 .*allowed: torch.float32",
    ),
}


@pytest.mark.parametrize(("change", "message"), FOREIGN.values(), ids=FOREIGN)
def test_a_refused_load_of_torchs_state_changes_nothing(change, message):
    theirs = torch.optim.AdamW(parameters([(3,), (4,)]))
    train(theirs, 3)
    ours = FusedAdam(parameters([(3,), (4,)]), **MASTER)
    train(ours, 1)
    saved, before = copy.deepcopy(theirs.state_dict()), snapshot(ours)
    change(saved)
    with pytest.raises(ValueError, match=message):
        ours.load_state_dict(saved)
    assert_same(snapshot(ours), before)


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        pytest.param(MASTER, {}, id="masters_and_none"),
        pytest.param({}, MASTER, id="none_and_masters"),
        pytest.param(MASTER, REMAINDERS, id="fp32_and_remainders"),
        pytest.param(REMAINDERS, MASTER, id="remainders_and_fp32"),
        pytest.param(FP16_MASTER, MASTER, id="fp16_and_fp32"),
        pytest.param(FORMATS["bf16_moments"], MASTER, id="bf16_moments_and_fp32"),
        pytest.param(MASTER, FORMATS["fp16_moments"], id="fp32_moments_and_fp16"),
        pytest.param(MASTER, FORMATS["fp8_moments"], id="fp32_moments_and_fp8"),
        pytest.param(FORMATS["fp8_moments"], MASTER, id="fp8_moments_and_fp32"),
    ],
)
def test_a_state_dict_of_another_format_is_refused(saved, own):
    source, target = made(saved), made(own)
    train(source, 1)
    train(target, 1)
    before = snapshot(target)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0: .*state dict"):
        target.load_state_dict(source.state_dict())
    assert_same(snapshot(target), before)
