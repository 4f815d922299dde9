"""State dicts of FusedMuon for torch.optim.Muon and AdamW, and for FusedMuon of other formats."""

import copy

import pytest
import torch
from handling import copy_weights, refused, train_all
from runs import (
    BF16,
    FP32,
    MASTER,
    REMAINDERS,
    assert_same,
    assert_same_run,
    parameters,
    params_of,
    snapshot,
    through_a_file,
    train,
)

from megaopt import FusedAdam, FusedMuon
from megaopt.float8 import RECIPES, Float8Weight

SHAPES = [(6, 4), (9,), (4, 8), (3, 5), (16, 256)]
NUMBERS = {"lr": 0.125, "weight_decay": 0.5, "momentum": 0.75, "ns_steps": 3}


def made(weights=FP32, **options):
    """A matrix, a vector and a matrix in one group, a matrix for AdamW and one for Muon."""
    params = [(f"p{i}", param) for i, param in enumerate(parameters(SHAPES, weights))]
    groups = [
        {"params": params[:3], "initial_lr": 0.25},
        {"params": params[3:4], "use_muon": False, "eps": 1e-5, "lr": 0.25},
        {"params": params[4:], "momentum": 0.5, "nesterov": False},
    ]
    return FusedMuon(groups, **{**NUMBERS, **options})


MUONS, ADAMWS = (0, 2, 4), (1, 3)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_torchs_muon_steps_on_with_the_same_bits(dtype, adjust):
    """Both under torch's contract; what torch was made with does not count."""
    shapes, own = [(6, 4), (40, 24), (3, 50)], {"lr": 0.25, "nesterov": False, "eps": 1e-3}
    groups = [{"params": parameters(shapes, dtype)[:1]}, {"params": parameters(shapes, dtype)[1:]}]
    groups[1].update(own)
    options = {"contract": "torch", "momentum_buffer_dtype": dtype, "adjust_lr_fn": adjust}
    ours = FusedMuon(groups, **NUMBERS, ns_coefficients=[(3, -4, 2)] * 3, **options)
    train(ours, 3)
    theirs = torch.optim.Muon([{"params": copy.deepcopy(each["params"])} for each in groups], 7.0)
    theirs.load_state_dict(through_a_file(ours.to_torch_state_dict()))
    numbers = {"ns_coefficients": (3.0, -4.0, 2.0), "adjust_lr_fn": adjust, "eps": 1e-7}
    asked = [{"nesterov": True, **NUMBERS, **numbers}, {**NUMBERS, **numbers, **own}]
    found = theirs.state_dict()["param_groups"]
    assert found == [
        {**one, "params": keys} for one, keys in zip(asked, [[0], [1, 2]], strict=True)
    ]
    before = copy.deepcopy(snapshot(ours)["weights"])
    for step in range(3, 6):
        train_all((ours, theirs), 1, step)
        assert_same(snapshot(theirs)["weights"], snapshot(ours)["weights"])
        for param, other in zip(params_of(theirs), params_of(ours), strict=True):
            buffers = [
                each.state[p]["momentum_buffer"] for each, p in ((theirs, param), (ours, other))
            ]
            assert_same(*buffers)
    with pytest.raises(AssertionError):
        assert_same(snapshot(ours)["weights"], before)


def test_each_rule_has_a_state_dict_of_its_own():
    """Whose parameters stand in their order, in groups that have some, with schedules' keys."""
    ours = made()
    train(ours, 3)
    names = [f"p{i}" for i in range(len(SHAPES))]
    for rule, places in (("muon", MUONS), ("adamw", ADAMWS)):
        found = ours.to_torch_state_dict(rule)
        assert [n for group in found["param_groups"] for n in group["param_names"]] == [
            names[place] for place in places
        ]
        assert [key for group in found["param_groups"] for key in group["params"]] == [
            *range(len(places))
        ]
        assert found["param_groups"][0]["initial_lr"] == 0.25
        states = snapshot(ours)["states"]
        moments = [{n: v for n, v in states[place].items() if v is not None} for place in places]
        saved = [dict(found["state"][key]) for key in range(len(places))]
        steps = [own.pop("step", None) for own in saved]
        assert steps == [None if rule == "muon" else torch.tensor(3.0)] * len(places)
        assert_same(saved, moments)


def test_the_part_of_adamw_is_that_of_fused_adam():
    """So that torch.optim.AdamW goes on from it as saving/test_torch_state.py shows."""
    ours = made(adam_eps=1e-6)
    vector, matrix = (copy.deepcopy(params_of(ours)[place]) for place in ADAMWS)
    groups = [{"params": [vector], "eps": 1e-6, "lr": 0.125}, {"params": [matrix], "eps": 1e-5}]
    expected = FusedAdam(groups, 0.25, (0.9, 0.95), weight_decay=0.5)
    for step in range(3):
        train(ours, 1, step)
        for param, place in zip(params_of(expected), ADAMWS, strict=True):
            param.grad = params_of(ours)[place].grad.clone()
        expected.step()
    found, theirs = ours.to_torch_state_dict("adamw"), expected.to_torch_state_dict()
    assert_same(found["state"], theirs["state"])
    for group in found["param_groups"]:
        del group["param_names"]
    del found["param_groups"][0]["initial_lr"]
    assert found["param_groups"] == theirs["param_groups"]
    torch.optim.AdamW(copy.deepcopy(params_of(expected))).load_state_dict(
        {**found, "param_groups": [{**found["param_groups"][0], "params": [0, 1]}]}
    )


def test_two_state_dicts_become_one_again():
    """As docs/how-to/muon.md joins those of torch's optimizers."""
    ours = made()
    train(ours, 2)
    muon, adamw = (ours.to_torch_state_dict(rule) for rule in ("muon", "adamw"))
    order = [*MUONS, *ADAMWS]
    params = [params_of(ours)[place] for place in order]
    groups = [
        {"params": params[:2]}, {"params": params[2:3]},
        {"params": params[3:4], "use_muon": False}, {"params": params[4:], "use_muon": False},
    ]  # fmt: skip
    back = FusedMuon(groups)
    shifted = [{**g, "params": [3 + key for key in g["params"]]} for g in adamw["param_groups"]]
    states = {**muon["state"], **{3 + key: own for key, own in adamw["state"].items()}}
    back.load_state_dict({"state": states, "param_groups": [*muon["param_groups"], *shifted]})
    for param in params:
        assert_same(back.state[param], ours.state[param])
    assert [group["eps"] for group in back.param_groups] == [1e-7, 1e-7, 1e-8, 1e-5]


# --- other formats of ours

CHANGES = {
    "bf16 momentum": ({}, {"momentum_buffer_dtype": BF16}),
    "blocks": ({"momentum_buffer_dtype": "block_e4m3_nearest"}, {}),
    "fp16": ({"momentum_buffer_dtype": torch.float16, "exp_avg_dtype": torch.float16}, {}),
    "contract": ({"contract": "eo"}, {}),
    "second moment": ({"second_moment": "normuon", "momentum_buffer_dtype": BF16},
                      {"second_moment": "normuon"}),
    "adamw's": ({}, {"exp_avg_sq_dtype": BF16}),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_other_formats_are_refused_and_loaded_through_both(before, after):
    """Values are those of the new formats; numbers of groups and step counts go along."""
    old, new = made(**before), made(**after, lr=1.0)
    train(old, 2)
    copy_weights(old, new)
    with refused(new, "format of|contract|state_formats|no 'momentum_buffer|of shape"):
        new.load_state_dict(old.state_dict())
    new.load_state_dict(through_a_file(old.to_torch_state_dict("both")))
    for param, other in zip(params_of(new), params_of(old), strict=True):
        for name in old.state[other]:
            if name.endswith("_scale") or old.state[other][name] is None:
                continue
            if name == "variance_neuron":
                assert_same(new.state[param][name], old.state[other][name])
                continue
            asked = after.get(f"{name}_dtype", FP32)
            value = old.get_unscaled_state(other, name).to(asked).float()
            assert_same(new.get_unscaled_state(param, name), value)
    kept = ("lr", "eps", "momentum", "step", "initial_lr", "use_muon", "nesterov")
    for group, own in zip(new.param_groups, old.param_groups, strict=True):
        assert [group.get(key) for key in kept] == [own.get(key) for key in kept]
    train(new, 1, 2)


def test_the_same_formats_go_on_through_both_as_through_a_state_dict():
    """Also to contract torch and back, which counts the steps of each parameter."""
    ours = FusedMuon(parameters([(6, 4), (5, 8)], FP32), seed=3, **NUMBERS)
    train(ours, 3)
    middle = FusedMuon(copy.deepcopy(params_of(ours)), contract="torch")
    middle.load_state_dict(ours.to_torch_state_dict("both"))
    back = FusedMuon(copy.deepcopy(params_of(ours)))
    back.load_state_dict(middle.to_torch_state_dict("both"))
    assert_same_run(back, ours)
    train_all((back, ours), 2, 3)
    assert_same_run(back, ours)


def test_masters_go_along_by_hand():
    """As docs/how-to/torch.md has it for FusedAdam."""
    old, new = made(BF16, **MASTER), made(BF16, **REMAINDERS)
    train(old, 2)
    with pytest.raises(ValueError, match="parameter 'p0': drop_masters must be True, as torch"):
        old.to_torch_state_dict("both")
    new.load_state_dict(old.to_torch_state_dict("both", drop_masters=True))
    for param, other in zip(params_of(new), params_of(old), strict=True):
        master = old.get_unscaled_state(other, "master_param")
        new.set_scaled_state(param, "master_param", master)
        assert_same(new.get_unscaled_state(param, "master_param"), master)
        for name in old.state[other].keys() - {"master_param"}:
            assert_same(new.state[param][name], old.state[other][name])


# --- refusals


def fp8():
    weight = Float8Weight.from_values(torch.ones(32, 32), RECIPES["current"])
    optimizer = FusedMuon([{"params": [torch.nn.Parameter(weight)], "use_muon": False}])
    optimizer.initialize_states()
    return optimizer


def stepped(shape=(6, 4), group=None, **options):
    optimizer = FusedMuon([{"params": parameters([shape], FP32), **(group or {})}], **options)
    train(optimizer, 1)
    return optimizer


def half_a_state():
    optimizer = made()
    train(optimizer, 1)
    del optimizer.state[params_of(optimizer)[1]]["exp_avg_sq"]
    return optimizer


REFUSED = {
    "two rules": (made, None, "rule must be 'muon', for torch.optim.Muon, and in a second call"),
    "rule": (made, "sgd", "rule must be one of None, muon, adamw, both, got 'sgd'"),
    "fp8": (fp8, "adamw", "the weight must not be in fp8, which torch cannot step"),
    "sizes": (lambda: stepped(group={"split_sizes": (2, 4)}), "muon",
              r"group 0, for torch.optim.Muon: split_sizes must be None .*, got \(2, 4\)"),
    "set": (lambda: stepped(ns_coefficients="quintic"), None, "ns_coefficients must be the same"),
    "factor": (lambda: stepped(adjust_lr_fn=0.5), None, "adjust_lr_fn must be one of None, 'or"),
    "normuon": (lambda: stepped(second_moment="normuon"), None, "second_moment must be None"),
    "batch": (lambda: stepped((2, 3, 4)), None, "0: its parameters must be of two dimensions"),
    "sign": (lambda: stepped(maximize=True), None, "maximize must be False for torch.optim.Muon"),
    "lr": (lambda: FusedMuon(parameters([(2, 3)], FP32), None), None, "group 0: lr must be a fin"),
    "steps": (lambda: stepped((9,), {"step": 2**24}), "adamw", "group 0: step must be <= 16777216"),
    "half": (half_a_state, "both", "parameter 'p1': its state must have exp_avg, exp_avg_sq, got"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "rule", "message"), REFUSED.values(), ids=REFUSED)
def test_what_torch_has_not_is_refused(given, rule, message):
    optimizer = given()
    with refused(optimizer, message):
        optimizer.to_torch_state_dict(rule)


def test_another_sign_is_refused():
    with pytest.raises(ValueError, match="maximize must be False, got True"):
        stepped().load_state_dict(stepped(maximize=True).to_torch_state_dict("both"))
