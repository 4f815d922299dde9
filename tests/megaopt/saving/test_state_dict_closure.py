"""What an optimizer saves it loads: whatever its users put there, and whenever they save."""

import copy
import pickle
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bits import assert_same_bits
from handling import refused, train_all
from kinds import KINDS, kept_as, made, with_weights_of
from runs import (
    BF16,
    FP32,
    MASTER,
    REMAINDERS,
    assert_same,
    assert_same_run,
    give_gradients,
    parameters,
    params_of,
    snapshot,
    through_a_file,
    train,
    values,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megaopt import FusedAdam, FusedLion, FusedMuon, FusedSGD, GaLoreAdamW, release_gradients
from megaopt.integration import bitsandbytes, flashoptim, torchao

each_kind = pytest.mark.parametrize("kind", KINDS)
OPTIMIZERS = {
    **{kind.__name__: kind for kind in (FusedAdam, FusedLion, FusedMuon, FusedSGD, GaLoreAdamW)},
    "bitsandbytes": bitsandbytes.Lion8bit,
    "flashoptim": flashoptim.FlashAdamW,
    "torchao": torchao.AdamW4bit,
}


def saved_by(optimizer):
    """Its state dict through a file, without entries of states that have nothing.

    Someone made them by looking, or a step of SGD, which keeps nothing but that there is no master.
    """
    saved = through_a_file(optimizer.state_dict())
    states = {key: own for key, own in saved["state"].items() if own}
    made = {
        key: names
        for key, names in saved["not_made"].items()
        if key in states or names != ["master_param"]
    }
    return {**saved, "state": states, "not_made": made}


def assert_closed(optimizer, fresh):
    """A load of its own state dict is no change; a fresh one goes on as it does."""
    weights, saved = snapshot(optimizer)["weights"], saved_by(optimizer)
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert_same(snapshot(optimizer)["weights"], weights)
    assert_same(saved_by(optimizer), saved)
    fresh.load_state_dict(copy.deepcopy(saved))
    assert_same(saved_by(fresh), saved)
    train_all((optimizer, fresh), 2, first=7)
    assert_same_run(fresh, optimizer)


# --- what users keep in states


def of_users(param, number):
    """As Lookahead, averages of weights, and feedback of errors keep it, and what is no tensor."""
    return {
        "slow_buffer": param.detach().float().clone(),
        "ema": values((2, 3), number),
        "error_scale": torch.tensor([number], dtype=torch.int64),
        "cached": {"nested": [torch.ones(2), (1, "text", None)], "empty": {}},
        "nothing": None,
        "counter": number,
    }


@pytest.mark.parametrize("steps", [0, 2])
def test_what_users_keep_in_a_state_is_saved_and_loaded(steps):
    for make in OPTIMIZERS.values():
        check_users_keys(make, steps)


def check_users_keys(make, steps):
    optimizer, fresh, plain = (make(parameters(), lr=0.01) for _ in range(3))
    for each in (optimizer, fresh, plain):
        each.master_weights = True
    train_all((optimizer, plain), steps)
    for number, param in enumerate(params_of(optimizer)):
        optimizer.state[param].update(of_users(param, number))
    for param, other in zip(params_of(optimizer), params_of(fresh), strict=True):
        other.data = param.detach().clone()
    expected = copy.deepcopy([of_users(p, i) for i, p in enumerate(params_of(optimizer))])
    assert_closed(optimizer, fresh)
    train(plain, 2, first=7)
    assert_same(snapshot(optimizer)["weights"], snapshot(plain)["weights"])
    for param, own in zip(params_of(fresh), expected, strict=True):
        assert_same({name: fresh.state[param][name] for name in own}, own)


def test_tensors_of_users_keep_their_dtypes_and_are_no_alias():
    optimizer = FusedAdam(parameters(), **MASTER)
    param = params_of(optimizer)[0]
    optimizer.state[param]["ema"] = torch.full((3, 4), 0.1, dtype=torch.float64)
    saved = optimizer.state_dict()
    assert saved["state"][0]["ema"] is optimizer.state[param]["ema"]
    optimizer.load_state_dict(saved)
    saved["state"][0]["ema"].zero_()
    assert_same_bits(optimizer.state[param]["ema"], torch.full((3, 4), 0.1, dtype=torch.float64))


def test_one_tensor_of_users_may_be_in_all_states():
    """The step writes its own alone: only these need memory of their own."""
    optimizer, shared = FusedAdam(parameters(), **MASTER), torch.ones(3)
    for param in params_of(optimizer):
        optimizer.state[param].update(shared=shared, weight=param.data)
    train(optimizer, 1)
    assert all(optimizer.state[param]["shared"] is shared for param in params_of(optimizer))
    release_gradients(params_of(optimizer), optimizer).remove()


@pytest.mark.parametrize("make", [FusedAdam, GaLoreAdamW])
def test_what_wrappers_keep_in_state_under_a_text_is_saved_and_loaded(make):
    optimizer, other = make(parameters()), make(parameters())
    train(optimizer, 1)
    optimizer.state["lookahead"] = {"k": 5, "slow": [torch.ones(2)]}
    optimizer.state["alpha"] = 0.5
    train(optimizer, 1, first=1)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    for each in (other, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert_same(each.state["lookahead"], {"k": 5, "slow": [torch.ones(2)]})
        assert each.state["alpha"] == 0.5


def test_what_users_keep_in_a_state_of_torchs_is_kept_and_named():
    theirs = torch.optim.AdamW(parameters(dtype=FP32))
    train(theirs, 1)
    for number, param in enumerate(params_of(theirs)):
        theirs.state[param]["ema"] = values((2,), number)
    ours = FusedAdam(parameters(dtype=FP32))
    with pytest.warns(
        UserWarning, match="parameter 3 of group 0: 'ema' .* no step reads it"
    ) as said:
        ours.load_state_dict(theirs.state_dict())
    assert len(said) == 1
    for number, param in enumerate(params_of(ours)):
        assert_same_bits(ours.state[param]["ema"], values((2,), number))


def test_names_of_this_package_that_a_state_cannot_have_are_refused_at_the_save():
    for name in ("momentum_buffer", "exp_avg_scale", "projection", "step"):
        optimizer = FusedAdam(parameters(), **MASTER)
        train(optimizer, 1)
        optimizer.state[params_of(optimizer)[1]][name] = torch.ones(1)
        with pytest.raises(
            ValueError, match=rf"parameter 1 of group 0: its state .*, got {name}, "
        ):
            optimizer.state_dict()


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "nested"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_users_keep_goes_through_torchs_checkpoints(flat, tmp_path):
    """torch reads what the optimizer has: it is to have the key."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    runs = []
    for seed in range(2):
        model = torch.nn.Linear(3, 4).bfloat16()
        optimizer = FusedAdam(model.parameters(), **MASTER)
        train(optimizer, 2, first=seed)
        for param in params_of(optimizer):
            optimizer.state[param]["ema"] = param.detach().float() + seed
        runs.append((model, optimizer))
    (_, source), (_, target) = runs
    dcp.save(get_optimizer_state_dict(*runs[0], options=options), checkpoint_id=tmp_path)
    found = get_optimizer_state_dict(*runs[1], options=options)
    dcp.load(found, checkpoint_id=tmp_path)
    set_optimizer_state_dict(*runs[1], found, options=options)
    assert_same(snapshot(target)["states"], snapshot(source)["states"])


# --- between a change and the next step


def asked_late(optimizer):
    optimizer.master_weights = True


def given_up(optimizer):
    optimizer.master_weights = False


def in_another_dtype(dtype):
    def change(optimizer):
        for param in params_of(optimizer):
            param.data = param.data.to(dtype)

    return change


def without_its_state(optimizer):
    del optimizer.state[params_of(optimizer)[1]]


def with_a_new_group(optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 4).bfloat16())]})


def with_an_empty_group(optimizer):
    optimizer.add_param_group({"params": []})


def with_a_new_parameter(optimizer):
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(3, 4).bfloat16()))


def with_other_numbers(optimizer):
    optimizer.param_groups[0].update(lr=torch.tensor(0.5), weight_decay=0.0, mine={"a": [1]})


def written(optimizer):
    with torch.no_grad():
        params_of(optimizer)[0].add_(1.0)


NO_MASTER, SCALED = {"master_weights": False}, {"master_weights": True}
SCALED |= {"master_weight_dtype": torch.float16}
CHANGES = {
    "masters asked for late": (NO_MASTER, BF16, asked_late),
    "masters given up": (SCALED, BF16, given_up),
    "float()": (MASTER, BF16, in_another_dtype(FP32)),
    "float() of remainders": (REMAINDERS, BF16, in_another_dtype(FP32)),
    "float() of fp16 masters": (SCALED, BF16, in_another_dtype(FP32)),
    "float() of 24 bits": (kept_as("remainder8"), BF16, in_another_dtype(FP32)),
    "float() of kahan": (kept_as("kahan"), BF16, in_another_dtype(FP32)),
    "bfloat16()": (MASTER, FP32, in_another_dtype(BF16)),
    "half()": (MASTER, BF16, in_another_dtype(torch.float16)),
    "state deleted": (MASTER, BF16, without_its_state),
    "group added": (MASTER, BF16, with_a_new_group),
    "empty group": (MASTER, BF16, with_an_empty_group),
    "parameter added": (MASTER, BF16, with_a_new_parameter),
    "numbers": (MASTER, BF16, with_other_numbers),
    "written": (MASTER, BF16, written),
}


@pytest.mark.parametrize("step_counts", ["group", "parameter"])
@pytest.mark.filterwarnings("ignore:.*was written outside")
def test_a_save_between_a_change_and_the_next_step(step_counts):
    for options, dtype, change in CHANGES.values():
        check_change(options, dtype, change, step_counts)


def check_change(options, dtype, change, step_counts):
    optimizer = FusedAdam(parameters(dtype=dtype), step_counts=step_counts, **options)
    train(optimizer, 2)
    change(optimizer)
    groups = [
        {"params": [torch.nn.Parameter(p.detach().to(dtype, copy=True)) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    fresh = FusedAdam(groups, step_counts=step_counts, **options)
    if change in (asked_late, given_up):
        change(fresh)
    for param, other in zip(params_of(optimizer), params_of(fresh), strict=True):
        other.data = param.detach().clone()
    straight = copy.deepcopy(optimizer)
    assert_closed(optimizer, fresh)
    train(straight, 2, first=7)
    assert_same(snapshot(fresh)["weights"], snapshot(straight)["weights"])


@pytest.mark.parametrize("place", range(3))
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_empty_group_goes_through_torchs_checkpoints(place, tmp_path):
    """torch has nothing of it. Flattened its own code finds no parameter, of any optimizer."""
    runs = []
    for seed in range(2):
        model = torch.nn.ModuleList(torch.nn.Linear(3, 4) for _ in range(2))
        groups = [{"params": [*own.parameters()], "lr": 0.5 + i} for i, own in enumerate(model)]
        groups.insert(place, {"params": [], "lr": 7.0 + seed})
        optimizer = FusedAdam(groups)
        train(optimizer, 2, first=seed)
        runs.append((model, optimizer))
    target = runs[1][1]
    dcp.save(get_optimizer_state_dict(*runs[0]), checkpoint_id=tmp_path)
    found = get_optimizer_state_dict(*runs[1])
    dcp.load(found, checkpoint_id=tmp_path)
    set_optimizer_state_dict(*runs[1], found)
    assert_same(snapshot(target)["states"], snapshot(runs[0][1])["states"])
    assert [group["lr"] for group in target.param_groups if not group["params"]] in ([7.0], [8.0])
    train(target, 1)


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "nested"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_masters_that_were_asked_for_late_go_through_torchs_checkpoints(flat, tmp_path):
    options, runs = StateDictOptions(flatten_optimizer_state_dict=flat), []
    for seed in range(2):
        model = torch.nn.Linear(3, 4).bfloat16()
        optimizer = FusedAdam(model.parameters(), master_weights=False)
        train(optimizer, 2, first=seed)
        optimizer.master_weights = True
        runs.append((model, optimizer))
    dcp.save(get_optimizer_state_dict(*runs[0], options=options), checkpoint_id=tmp_path)
    found = get_optimizer_state_dict(*runs[1], options=options)
    dcp.load(found, checkpoint_id=tmp_path)
    set_optimizer_state_dict(*runs[1], found, options=options)
    states = snapshot(runs[1][1])["states"]
    assert_same(states, snapshot(runs[0][1])["states"])
    for own, param in zip(states, runs[0][0].parameters(), strict=True):
        assert_same_bits(own["master_param"], param.detach().float())


def test_a_weight_that_became_fp32_is_named_before_torchs_checkpoint():
    """Its master would be in the checkpoint, and no fresh optimizer would ask for it."""
    model = torch.nn.Linear(3, 4).bfloat16()
    optimizer = FusedAdam(model.parameters(), **MASTER)
    train(optimizer, 1)
    optimizer.zero_grad()
    model.float()
    with pytest.raises(ValueError, match=r"parameter 0 .* became fp32 .* initialize_states\(\)"):
        get_optimizer_state_dict(model, optimizer)
    optimizer.initialize_states()
    assert "master_param" not in get_optimizer_state_dict(model, optimizer)["state"]["weight"]


@pytest.mark.parametrize(
    ("optimizer", "key", "value"),
    [
        (lambda p: FusedMuon(p), "use_muon", False),
        (lambda p: GaLoreAdamW(p, rank=2), "rank", 4),
        (lambda p: GaLoreAdamW(p, rank=2), "rank", None),
    ],
    ids=["use_muon", "another rank", "no rank"],
)
def test_a_group_that_asks_for_another_rule_is_refused_at_the_save(optimizer, key, value):
    """As by the next step: its states are of the rule before."""
    optimizer = optimizer(parameters([(16, 16)], FP32))
    train(optimizer, 1)
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=r"parameter 0 of group 0: (its )?state .*must"):
        optimizer.state_dict()


# --- parameters and names that left a group


def test_the_state_of_a_parameter_that_left_its_group_is_left_out():
    """Frozen so, training goes on; torch's state_dict raises a KeyError of a number."""
    params = parameters()
    optimizer = FusedAdam(params, **MASTER)
    train(optimizer, 2)
    optimizer.param_groups[0]["params"].remove(params[0])
    train(optimizer, 1, first=2)
    with pytest.warns(UserWarning, match=r"in no group any more, the first of shape \(3, 4\)"):
        saved = optimizer.state_dict()
    assert_same(optimizer.state_dict(), saved)  # which says no more
    fresh = FusedAdam([torch.nn.Parameter(p.detach().clone()) for p in params[1:]], **MASTER)
    fresh.load_state_dict(through_a_file(saved))
    assert params[0] in optimizer.state
    train_all((optimizer, fresh), 2, first=3)
    assert_same(snapshot(fresh)["weights"], snapshot(optimizer)["weights"])
    optimizer.param_groups[0]["params"].insert(0, params[0])
    assert {*optimizer.state_dict()["state"]} == {0, 1, 2, 3}


def test_names_that_do_not_fit_their_group_are_left_out():
    params = parameters()
    optimizer = FusedAdam([(f"w{i}", param) for i, param in enumerate(params)], **MASTER)
    del optimizer.param_groups[0]["params"][0]
    train(optimizer, 1)
    with pytest.warns(
        UserWarning, match="group 0: param_names must be a list of 3 names, got .*w0"
    ):
        saved = optimizer.state_dict()
    assert "param_names" not in saved["param_groups"][0]
    fresh = FusedAdam([(f"w{i}", param) for i, param in enumerate(parameters()[1:], 1)], **MASTER)
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["param_names"] == ["w1", "w2", "w3"]


def test_numbers_that_do_not_fit_their_group_are_refused_by_save_and_step():
    """They say which random bits a parameter draws: none can be left out."""
    params = parameters()
    groups = [{"params": params, "param_numbers": [4, 5, 6, 7]}]
    optimizer = FusedAdam(groups, weight_rounding="stochastic", seed=3)
    train(optimizer, 1)
    del optimizer.param_groups[0]["params"][0]
    message = "group 0: param_numbers must be a list of 3 whole numbers .*, got "
    with refused(optimizer, message):
        train(optimizer, 1)
    with pytest.raises(ValueError, match=message), pytest.warns(UserWarning, match="no group any"):
        optimizer.state_dict()


# --- at random


def changed(optimizer, generator):
    """One of the things that users do between steps."""
    params = params_of(optimizer)
    param = generator.choice(params)
    kind = generator.choice(["step", "part", "looked", "users", "text", "lr", "delete", "write"])
    if kind in ("step", "part"):
        give_gradients(params, generator.randrange(9))
        if kind == "part":
            param.grad = None
        optimizer.step()
    elif kind == "looked":
        optimizer.state[param]
    elif kind == "users":
        optimizer.state[param].update(of_users(param, generator.randrange(9)))
    elif kind == "text":
        optimizer.state["wrapper"] = {"steps": generator.randrange(9)}
    elif kind == "lr":
        optimizer.param_groups[0].update(lr=generator.random(), layer=[generator.random()])
    elif kind == "delete":
        optimizer.state.pop(param, None)
    elif not hasattr(param, "tensors"):
        with torch.no_grad():
            param.mul_(0.5)


@each_kind
@pytest.mark.filterwarnings("ignore:.*was written outside")
@pytest.mark.filterwarnings("ignore:.*have no master any more")
def test_a_load_takes_what_was_saved_whenever_that_was(kind):
    """Of every kind, between any of the things that users do."""
    for seed in range(3):
        generator = random.Random(f"{kind} {seed}")
        optimizer = made(kind)
        for _ in range(generator.randrange(1, 6)):
            changed(optimizer, generator)
        fresh = with_weights_of(optimizer, kind)
        assert_closed(optimizer, fresh)
