"""State dicts of other libraries' Muon in FusedMuon, and what of them is refused."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from handling import refused
from runs import (
    BF16,
    FP32,
    MASTER,
    assert_same,
    give_gradients,
    parameters,
    params_of,
    snapshot,
    train,
    values,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megaopt import FusedAdam, FusedMuon, FusedSGD

SHAPES = [(6, 4), (4, 8), (3, 5), (9,)]
"""Two matrices for Muon, and a matrix and a vector for AdamW."""


def made(**options):
    first, second, third, fourth = parameters(SHAPES, FP32)
    groups = [
        {"params": [first, second]},
        {"params": [third, fourth], "use_muon": False, "eps": 1e-10, "lr": 0.25},
    ]
    return FusedMuon(groups, 0.125, 0.5, **options)


MOMENTUM = [values(shape, 40 + i) for i, shape in enumerate(SHAPES)]
SQUARES = [values(shape, 50 + i).square() for i, shape in enumerate(SHAPES)]


def state_dict(*groups, states):
    """Of two groups of two parameters each."""
    keyed = [{**group, "params": [2 * i, 2 * i + 1]} for i, group in enumerate(groups)]
    return {"state": dict(enumerate(states)), "param_groups": keyed}


def adam_state(i, step=3):
    return {"exp_avg": MOMENTUM[i], "exp_avg_sq": SQUARES[i], "step": step}


def kellerjordan():
    """Of MuonWithAuxAdam."""
    muon = {"lr": 0.0625, "momentum": 0.75, "weight_decay": 0.25, "use_muon": True}
    adam = {
        "lr": 0.03125,
        "betas": (0.5, 0.75),
        "eps": 1e-9,
        "weight_decay": 0.0,
        "use_muon": False,
    }
    states = [{"momentum_buffer": MOMENTUM[i]} for i in range(2)]
    return state_dict(muon, adam, states=[*states, adam_state(2), adam_state(3)])


def dion(factor=4.0):
    """Of dion's Muon; its momentum is a sum, here of momentum 0.75."""
    own = {"mu": 0.75, "beta1": 0.5, "beta2": 0.75, "cautious_wd": False, "step": 3,
           "nesterov": True, "flatten": False, "adjust_lr": "spectral_norm"}  # fmt: skip
    muon = {**own, "lr": 0.0625, "weight_decay": 0.25, "epsilon": 1e-7, "algorithm": "muon"}
    adam = {**own, "lr": 0.03125, "weight_decay": 0.0, "epsilon": 1e-9, "algorithm": "adamw"}
    states = [{"momentum": MOMENTUM[i] * factor} for i in range(2)]
    states += [{"momentum": MOMENTUM[i], "variance": SQUARES[i]} for i in (2, 3)]
    return state_dict(muon, adam, states=states)


def moonlight():
    """Of Moonlight's example, which has one group for all; here the same two."""
    own = {"wd": 0.25, "momentum": 0.75, "nesterov": True, "ns_steps": 5,
           "adamw_betas": (0.5, 0.75), "adamw_eps": 1e-9}  # fmt: skip
    states = [{"use_muon": True, "momentum_buffer": MOMENTUM[i] * 4.0} for i in range(2)]
    for i in (2, 3):
        moments = {"moment1": MOMENTUM[i], "moment2": SQUARES[i]}
        states.append({"use_muon": False, **moments, "step": 3})
    return state_dict({**own, "lr": 0.0625}, {**own, "lr": 0.03125}, states=states)


OTHERS = {"kellerjordan": kellerjordan, "dion": dion, "moonlight": moonlight}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_states_of_others_load(name, dtype):
    """Momenta of sums are warned of, and become averages: here both are the same numbers."""
    optimizer = made(momentum_buffer_dtype=dtype)
    given = OTHERS[name]()
    before = copy.deepcopy(given)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.load_state_dict(given)
    assert len(seen) == (name != "kellerjordan")
    assert all("is a sum of gradients" in str(each.message) for each in seen)
    assert_same(given, before)
    muon, adam = optimizer.param_groups
    assert (muon["lr"], muon["momentum"], muon["weight_decay"]) == (0.0625, 0.75, 0.25)
    assert (adam["lr"], adam["betas"], adam["eps"]) == (0.03125, (0.5, 0.75), 1e-9)
    assert adam["step"] == 3
    states = snapshot(optimizer)["states"]
    assert_same([own["momentum_buffer"] for own in states[:2]], [m.to(dtype) for m in MOMENTUM[:2]])
    assert_same([own["exp_avg"] for own in states[2:]], MOMENTUM[2:])
    assert_same([own["exp_avg_sq"] for own in states[2:]], SQUARES[2:])
    train(optimizer, 1)


def test_adamws_part_goes_on_as_fused_adam_does():
    optimizer = made()
    optimizer.load_state_dict(kellerjordan())
    expected = FusedAdam(parameters(SHAPES, FP32)[2:], 0.03125, (0.5, 0.75), 1e-9, 0.0)
    part = kellerjordan()
    states, group = {0: part["state"][2], 1: part["state"][3]}, part["param_groups"][1]
    group = {**group, "params": [0, 1]}
    expected.load_state_dict({"state": states, "param_groups": [group]})
    give_gradients(params_of(optimizer), 0)
    for param, other in zip(params_of(expected), params_of(optimizer)[2:], strict=True):
        param.grad = other.grad.clone()
    for each in (optimizer, expected):
        each.step()
    assert_same(snapshot(optimizer)["weights"][2:], snapshot(expected)["weights"])
    assert_same(snapshot(optimizer)["states"][2:], snapshot(expected)["states"])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_a_run_of_torchs_muon_goes_on(dtype):
    """With its groups' numbers and its momentum, in the formats that are here."""
    params = parameters(SHAPES[:3], dtype)
    theirs = torch.optim.Muon(params, 0.5, 0.25, 0.75, ns_steps=3, adjust_lr_fn="match_rms_adamw")
    train(theirs, 2)
    options = MASTER if dtype == BF16 else {}
    optimizer = FusedMuon([copy.deepcopy(param) for param in params], **options)
    optimizer.load_state_dict(theirs.state_dict())
    (group,) = optimizer.param_groups
    expected = {**theirs.param_groups[0], "params": group["params"]}
    assert {name: group[name] for name in expected} == expected
    found = [own["momentum_buffer"] for own in snapshot(optimizer)["states"]]
    assert_same(found, [theirs.state[param]["momentum_buffer"].float() for param in params])
    train(optimizer, 1)


def test_the_second_moment_of_dions_normuon_loads():
    given, rows = dion(), [torch.rand(6, 1), torch.rand(4, 1)]
    for state, second in zip(given["state"].values(), rows, strict=False):
        state["variance_neuron"] = second
    given["param_groups"][0]["muon_beta2"] = 0.95
    optimizer = made(second_moment="normuon")
    with pytest.warns(UserWarning, match="is a sum of gradients"):
        optimizer.load_state_dict(given)
    found = [own["variance_neuron"] for own in snapshot(optimizer)["states"][:2]]
    assert_same(found, [second.flatten() for second in rows])


def without_steps():
    given = kellerjordan()
    del given["state"][3]["step"], given["state"][2]["step"]
    return given


def of_lion():
    given = dion()
    given["param_groups"][1]["algorithm"] = "lion"
    return given


def of(kind, **options):
    """The state dict of another optimizer, after a step."""
    params = parameters(SHAPES, FP32)
    theirs = kind([{"params": params[:2]}, {"params": params[2:]}], **options)
    train(theirs, 1)
    return theirs.state_dict()


def with_second_moment():
    given = kellerjordan()
    given["state"][0]["variance_neuron"] = torch.ones(6)
    return given


SGD, ADAMW, SUMS = torch.optim.SGD, torch.optim.AdamW, {"lr": 0.1, "momentum": 0.9}


REFUSED = {
    "no step": (without_steps, "state 2 of the state dict must have a step count beside"),
    "lion": (of_lion, "group 1 of the state dict: algorithm must be one of muon, adamw"),
    "sgd": (lambda: of(SGD, **SUMS), "group 0 of the state dict: 'dampening' must be left out"),
    "ours": (lambda: of(FusedSGD, **SUMS), "'dampening' must be left out: it is SGD's"),
    "rmsprop": (lambda: of(torch.optim.RMSprop, momentum=0.9), "'centered' must be left out"),
    "normuon": (with_second_moment, "'variance_neuron' in the state dict; allowed with second_mom"),
    "adamw": (lambda: of(ADAMW), "0 of group 0: 'momentum_buffer' of the state dict must"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_muon_cannot_go_on_from_is_refused(given, message):
    optimizer = made()
    train(optimizer, 1)
    with refused(optimizer, message):
        optimizer.load_state_dict(given())


@pytest.mark.parametrize("by_muon", [True, False])
def test_a_parameter_that_changes_its_rule_is_refused_until_its_state_goes(by_muon):
    (own,) = parameters([(6, 4)], FP32)
    optimizer = FusedMuon([{"params": [own], "use_muon": by_muon}])
    train(optimizer, 1)
    optimizer.param_groups[0]["use_muon"] = not by_muon
    give_gradients([own], 1)
    with refused(optimizer, "its state must have .* of another rule"):
        optimizer.step()
    del optimizer.state[own]
    optimizer.step()
    assert ("exp_avg" in optimizer.state[own]) == by_muon


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("own", "saved"), [(False, True), (False, None), (True, False)])
def test_a_load_does_not_change_the_rule_that_a_group_asks_for(own, saved, steps):
    target, source = (
        FusedMuon([{"params": parameters([(6, 4)], FP32), "use_muon": each}])
        for each in (own, saved)
    )
    train(source, steps)
    message = f"group 0: use_muon of the state dict must be .* {own}, by which .* got {saved}"
    with refused(target, message):
        target.load_state_dict(source.state_dict())


@pytest.mark.parametrize(
    ("own", "saved", "shape"),
    [(None, False, (6, 4)), (True, None, (6, 4)), (False, None, (6,)), (None, True, (6, 4))],
)
def test_a_load_may_change_what_a_group_says_of_it(own, saved, shape):
    """One that says nothing is told by the state dict; one that steps the same has asked for it."""
    target, source = (
        FusedMuon([{"params": parameters([shape], FP32), "use_muon": each}])
        for each in (own, saved)
    )
    train(source, 1)
    target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["use_muon"] is saved
    assert_same(snapshot(target)["states"], snapshot(source)["states"])


def test_a_key_of_sgds_in_a_group_is_saved_and_loaded():
    with pytest.warns(UserWarning, match="'dampening' is kept"):
        optimizer = FusedMuon([{"params": parameters(SHAPES, FP32), "dampening": 0.5}])
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["dampening"] == 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (8, 0)], ids=str)
def test_an_empty_matrix_is_stepped_in_every_format(shape, dtype):
    beside, alone = parameters([(4, 8)], BF16), parameters([(4, 8)], BF16)
    (empty,) = parameters([shape], BF16)
    options = {"momentum_buffer_dtype": dtype, "master_weight_dtype": torch.float16}
    for own in ([*beside, empty], alone):
        train(FusedMuon(own, master_weights=True, **options), 2)
    assert torch.equal(*beside, *alone)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_flat", [False, True])
def test_a_checkpoint_of_torch_distributed_goes_on(is_flat, tmp_path):
    """With numbers that are None, texts and tuples in groups, and a second moment."""
    options, runs = StateDictOptions(flatten_optimizer_state_dict=is_flat), []
    for lr in (0.125, 0.5):
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)).bfloat16()
        (first, *others) = model.parameters()
        groups = [
            {"params": [first], "use_muon": True, "split_sizes": (2, 4)},
            {"params": others, "ns_coefficients": "quintic", "nesterov": False},
        ]
        runs.append((model, FusedMuon(groups, lr, second_moment="normuon", **MASTER)))
    (model, straight), (other, resumed) = runs
    train(straight, 2)
    resumed.initialize_states()
    packed = {"model": model.state_dict()}
    packed["optimizer"] = get_optimizer_state_dict(model, straight, options=options)
    dcp.save(packed, checkpoint_id=tmp_path)
    found = {"model": other.state_dict()}
    found["optimizer"] = get_optimizer_state_dict(other, resumed, options=options)
    dcp.load(found, checkpoint_id=tmp_path)
    other.load_state_dict(found["model"])
    set_optimizer_state_dict(other, resumed, found["optimizer"], options=options)
    assert_same(snapshot(resumed), snapshot(straight))
    for optimizer in (straight, resumed):
        train(optimizer, 2, 2)
    assert_same(snapshot(resumed), snapshot(straight))
