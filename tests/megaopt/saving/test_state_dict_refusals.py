"""State dicts that do not fit are refused before anything is changed."""

import copy

import pytest
import torch
from attacks import Before
from handling import made, refused
from runs import (
    BF16,
    FORMATS,
    FP16,
    MASTER,
    assert_same,
    parameters,
    snapshot,
    train,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megaopt import FusedAdam, FusedLion, FusedSGD

STOCHASTIC = {"exp_avg_dtype": "bfloat16_stochastic"}


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
    "amsgrad": (changed("group", amsgrad=True), r"group 0 .*: amsgrad must be False, got True"),
    "maximize": (changed("group", maximize=True), r"group 0 .*: maximize must be False, got True"),
    "fewer_parameters": (changed("group", params=[0, 1, 2]), r"groups of \[3\].*\[4\]"),
    "more_groups": (two_groups, r"groups of \[1, 3\].*\[4\]"),
    "lr_nan": (changed("group", lr=float("nan")), r"group 0: lr must be .* >= 0 .*got nan"),
    "step_of_another_kind": (changed("group", step=2.5), r"group 0: step must be .*, got 2\.5"),
    "another_shape": (
        changed("state", exp_avg=torch.zeros(12)),
        r"parameter 0 of group 0: 'exp_avg' .*\(3, 4\), got .*torch.float32.* \(12,\)",
    ),
    "another_format": (
        changed("state", exp_avg=torch.zeros(3, 4, dtype=BF16)),
        r"'exp_avg' .* must be torch.float32 .*, got a torch.bfloat16",
    ),
    "remainders": (
        changed("state", master_param=torch.zeros(3, 4, dtype=torch.int16)),
        r"parameter 0 of group 0: 'master_param' .*torch.float32.*, got a torch.int16",
    ),
    "no_master": (changed("state", master_param=None), r"'master_param' .*float32.*, got None"),
    "a_scale_too_many": (changed("state", exp_avg_scale=torch.ones(1)), r"exp_avg_scale in the"),
    "a_moment_missing": (without("state", 0, "exp_avg_sq"), r"parameter 0 .*no 'exp_avg_sq'"),
    "a_state_missing": (without("state", 1), r"parameter 1 .*must have its exp_avg and exp_avg_sq"),
    "an_empty_state": (
        lambda saved: {**saved, "state": {**saved["state"], 1: {}}},
        r"parameter 1 of group 0: the state dict must have its exp_avg and exp_avg_sq, got no",
    ),
    "a_key_twice": (changed("group", params=[0, 0, 2, 3]), r"a key of its own .*\[0, 0, 2, 3\]"),
    "a_gap": (
        lambda saved: {
            **changed("group", params=[0, 2, 3, 4])(saved),
            "state": {key + (key > 0): state for key, state in saved["state"].items()},
        },
        r"whole numbers without a gap, got \[0, 2, 3, 4\]",
    ),
    "no_step": (without("param_groups", 0, "step"), "group 0 .*must have a step count, got none"),
    "step_nan": (changed("group", step=torch.tensor(float("nan"))), r"step must be .*nan"),
    "step_negative": (changed("group", step=-1), "group 0: step must be a whole number"),
    "step_a_bool": (changed("group", step=True), "group 0: step must be .*, got True"),
    "lr_with_a_gradient": (
        changed("group", lr=torch.ones((), requires_grad=True)),
        "group 0: lr must be a finite number .*requires_grad=True",
    ),
    "bias_correction_text": (
        changed("group", bias_correction="no"),
        "group 0: bias_correction must be one of True, False, got 'no'",
    ),
    "bias_correction_a_tensor": (
        changed("group", bias_correction=torch.tensor(True)),
        r"group 0: bias_correction must be one of True, False, got tensor\(True\)",
    ),
    "on_meta": (
        changed("state", exp_avg=torch.zeros(3, 4, device="meta")),
        r"'exp_avg' .*must be torch.float32 of shape \(3, 4\), got .* on meta",
    ),
    "sparse": (
        changed("state", exp_avg=torch.zeros(3, 4).to_sparse()),
        r"'exp_avg' .*must be torch.float32 of shape \(3, 4\), got .*sparse_coo",
    ),
    "cannot_be_copied": (
        changed("group", mine=(each for each in [])),
        "group 0: 'mine' of the state dict must be what copy.deepcopy copies, got <generator",
    ),
    "no_dict": (lambda saved: None, "the state dict must be a dict .*, got None"),
    "groups_in_a_dict": (
        lambda saved: {**saved, "param_groups": {}},
        r"'param_groups' of the state dict must be a list of dicts, got \{\}",
    ),
    "a_state_of_no_parameter": (
        lambda saved: {**saved, "state": {**saved["state"], 9: saved["state"][0]}},
        "state 9 of the state dict belongs to no parameter",
    ),
    "no_groups": (without("param_groups"), "the state dict has no 'param_groups': found state"),
    "empty": (lambda saved: {}, "the state dict has no 'state': found an empty dict$"),
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
    target.master_weights = [p.detach().float() for p in target.param_groups[0]["params"]]
    train(source, 2)
    train(target, 3, first=5)
    saved, before = change(copy.deepcopy(source.state_dict())), Before(target)
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(saved)
    before.assert_same()


def test_who_keeps_no_masters_is_told_how_to_keep_them():
    weight = torch.nn.Parameter(torch.zeros(3, 4).bfloat16())
    source, target = (
        FusedAdam([weight], dtype=torch.float32),
        FusedAdam([weight], master_weights=False),
    )
    source.initialize_states()
    words = (
        r"'master_param' .*must be None, as this optimizer keeps none \(dtype=torch.float32 keeps"
    )
    with pytest.raises(ValueError, match=words):
        target.load_state_dict(source.state_dict())


FOREIGN = {
    "unequal_step_counts": (
        lambda saved: saved["state"][1].update(step=torch.tensor(2.0)),
        r"group 0: .*step counts \[2, 3\]",
    ),
    "no_step_count": (
        lambda saved: saved["state"][1].pop("step"),
        r"parameter 1 of group 0: the state dict has no 'step', which other states have",
    ),
    "another_shape": (
        lambda saved: saved["state"][1].update(exp_avg=torch.zeros(7)),
        r"parameter 1 of group 0: 'exp_avg' .*\(4,\), got .*\(7,\)",
    ),
    "no_moment": (
        lambda saved: saved["state"][1].pop("exp_avg_sq"),
        r"'exp_avg_sq' .* a tensor, got None",
    ),
    "amsgrad": (
        lambda saved: saved["param_groups"][0].update(amsgrad=True),
        "amsgrad must be False",
    ),
    "maximize": (
        lambda saved: saved["param_groups"][0].update(maximize=True),
        "maximize must be False",
    ),
    "remainders_for_fp32_masters": (
        lambda saved: saved["state"][0].update(master_param=torch.zeros(3, dtype=torch.int16)),
        r"'master_param' .*torch.float32, got a torch.int16",
    ),
}


@pytest.mark.parametrize("change", FOREIGN)
def test_a_refused_load_of_torchs_state_changes_nothing(change):
    """Also where parameters count their own steps, which need not be equal then."""
    theirs = torch.optim.AdamW(parameters([(3,), (4,)]))
    train(theirs, 3)
    saved, (spoil, message) = copy.deepcopy(theirs.state_dict()), FOREIGN[change]
    spoil(saved)
    for step_counts in ["group", "parameter"][: 1 if change == "unequal_step_counts" else 2]:
        ours = FusedAdam(parameters([(3,), (4,)]), step_counts=step_counts, **MASTER)
        train(ours, 1)
        with refused(ours, message):
            ours.load_state_dict(saved)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("kind", [FusedAdam, FusedLion, FusedSGD])
def test_a_run_of_the_other_sign_is_refused(kind, saved, steps):
    source, target = (kind(parameters(), lr=0.1, maximize=sign) for sign in (saved, not saved))
    train(source, steps)
    train(target, 1)
    message = f"parameter 0 of group 0: maximize of the state dict must be .*{not saved}, got"
    with refused(target, message):
        target.load_state_dict(source.state_dict())


def test_scales_without_the_contract_are_refused():
    """Codes without their scales would be taken for values."""
    source, target = made(FORMATS["fp8_moments"]), made(FORMATS["fp8_moments"])
    train(source, 1)
    saved = without("param_groups", 0, "contract")(source.state_dict())
    with refused(target, r"exp_avg_scale, exp_avg_sq_scale in the state dict"):
        target.load_state_dict(saved)


def named(names):
    return FusedAdam(list(zip(names, parameters(), strict=True)), **MASTER)


def test_states_of_other_names_are_refused():
    source, target = named("abcd"), named("abdc")
    train(source, 2)
    train(target, 1)
    message = r"group 0: param_names .*must be this optimizer's, \['a', 'b', 'd', 'c'\], got \['a'"
    with refused(target, message):
        target.load_state_dict(source.state_dict())
    saved = source.state_dict()
    del saved["param_groups"][0]["param_names"]
    target.load_state_dict(saved)
    assert target.param_groups[0]["param_names"] == ["a", "b", "d", "c"]


@pytest.mark.parametrize("names", ["abcd", ["a", "b"], ["a", "b", "c", 4], [["a"]] * 4, 5], ids=str)
def test_names_that_are_none_are_refused(names):
    source, target = made(MASTER), made(MASTER)
    train(source, 1)
    saved = changed("group", param_names=names)(copy.deepcopy(source.state_dict()))
    with refused(target, r"group 0 .*param_names must be a list of 4 names"):
        target.load_state_dict(saved)


@pytest.mark.parametrize("names", [False, True], ids=["by place", "flattened by names"])
@pytest.mark.parametrize(("saved", "loaded"), [(BF16, FP16), (FP16, BF16)], ids=str)
@pytest.mark.parametrize("kind", ["kahan", "kahan_stochastic"])
def test_compensations_of_weights_of_another_dtype_are_refused(kind, saved, loaded, names):
    """They are bf16 beside either; one of fp32 weights is no hindrance."""

    def built(dtype):
        model = torch.nn.Linear(3, 2).to(dtype)
        model.bias.data = model.bias.data.float()
        optimizer = FusedAdam(model.parameters(), master_weights=True, master_weight_dtype=kind)
        train(optimizer, 1)
        return model, optimizer

    given = StateDictOptions(flatten_optimizer_state_dict=True)

    def load(target, state):
        model, optimizer = target
        if names:
            set_optimizer_state_dict(model, optimizer, state, options=given)
        else:
            optimizer.load_state_dict(state)

    model, optimizer = built(saved)
    state = optimizer.state_dict()
    if names:
        state = get_optimizer_state_dict(model, optimizer, options=given)
    other = built(loaded)
    name, own = (str(dtype).removeprefix("torch.") for dtype in (saved, loaded))
    message = f"parameter 0 of group 0: 'kahan_beside' of the state dict must be '{own}', its dtype"
    with refused(other[1], f"{message}, got '{name}'"):
        load(other, copy.deepcopy(state))
    same = built(saved)
    load(same, state)
    assert_same(snapshot(same[1])["states"], snapshot(optimizer)["states"])


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adadelta", "RMSprop"])
@pytest.mark.parametrize("steps", [0, 2])
def test_state_dicts_of_other_kinds_of_optimizer_are_refused(kind, steps):
    """Also those without a state, which plain SGD never has."""
    theirs = getattr(torch.optim, kind)(parameters([(3, 4)]), lr=0.5)
    train(theirs, steps)
    optimizer = FusedAdam(parameters([(3, 4)]), lr=1e-3, dtype=torch.float32)
    train(optimizer, 2)
    with refused(optimizer, r"group 0 of the state dict has no .*betas"):
        optimizer.load_state_dict(theirs.state_dict())


def test_sgd_with_momentum_is_told_by_its_numbers():
    """Its states have no step count, which is not what is wrong."""
    theirs = torch.optim.SGD(parameters([(3, 4)]), lr=0.5, momentum=0.9)
    train(theirs, 1)
    with refused(FusedAdam(parameters([(3, 4)])), "has no betas, eps, and so is another kind of"):
        FusedAdam(parameters([(3, 4)])).load_state_dict(theirs.state_dict())


def test_adams_state_dict_is_refused_by_sgd():
    theirs = torch.optim.AdamW(parameters([(3, 4)]), lr=0.5)
    with pytest.raises(ValueError, match=r"group 0 of the state dict has no .*momentum"):
        FusedSGD(parameters([(3, 4)]), lr=0.1).load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("wrong", [torch.ones(2), 5, "0, 1", {0: 1}], ids=repr)
def test_param_numbers_beside_names_that_are_no_list_are_refused(wrong):
    options = {"param_numbers": [5, 6]}
    model = torch.nn.Linear(3, 2)
    optimizer = FusedAdam([{"params": [*model.parameters()], **options}], seed=3, **STOCHASTIC)
    train(optimizer, 1)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    saved["param_groups"][0]["param_numbers"] = wrong
    with refused(optimizer, r"group 0: param_numbers of the state dict must be a list"):
        optimizer.load_state_dict(saved)


def test_a_tensor_in_the_place_of_kahan_beside_is_refused():
    optimizer = FusedAdam(
        parameters([(3, 4)]), lr=0.1, master_weights=True, master_weight_dtype="kahan"
    )
    train(optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["kahan_beside"] = torch.ones(2)
    with pytest.raises(ValueError, match="'kahan_beside' of the state dict must be"):
        optimizer.load_state_dict(saved)
