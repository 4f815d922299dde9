"""Step counts of parameters of their own, and which parameters get a state."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bits import assert_same_bits
from handling import both_backends, refused
from runs import assert_same, assert_same_run, params_of, snapshot
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megaopt import FusedAdam, FusedLion, FusedSGD, release_gradients

LRS = (1e-2, 3e-3)
HAS_GRADIENT = ("110", "110", "010", "111", "001", "111", "101")
"""For each step which of three parameters have a gradient."""


def parameter(seed, dtype=torch.float32, shape=(37,)):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))


def gradient(param, seed, step):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randn(param.shape, generator=generator).to(param.dtype)


def give(params, step, pattern):
    for seed, (param, has) in enumerate(zip(params, pattern, strict=True)):
        param.grad = gradient(param, seed, step) if has == "1" else None


def three(dtype=torch.float32):
    return [parameter(seed, dtype) for seed in range(3)]


def stepped(optimizer, *patterns):
    """With such gradients in each step."""
    for step, pattern in enumerate(patterns):
        give(params_of(optimizer), step, pattern)
        optimizer.step()
    return optimizer


def together(kind, params, **options):
    """Two groups: the first has two of the parameters."""
    numbered = {"param_numbers": [0, 1]}, {"param_numbers": [2]}
    groups = [
        {"params": own, "lr": lr, **(number if "seed" in options else {})}
        for own, lr, number in zip((params[:2], params[2:]), LRS, numbered, strict=True)
    ]
    return kind(groups, **options)


def alone(kind, params, **options):
    """An optimizer for each parameter, which is stepped only where it has a gradient."""
    lrs = (LRS[0], LRS[0], LRS[1])
    return [
        kind([{"params": [p], "lr": lr, **({"param_numbers": [i]} if "seed" in options else {})}],
             **options)
        for i, (p, lr) in enumerate(zip(params, lrs, strict=True))
    ]  # fmt: skip


def counts(optimizer):
    return [int(optimizer.state[p].get("step", 0)) for p in params_of(optimizer)]


CASES = {
    "adamw": (FusedAdam, torch.float32, {"weight_decay": 0.1}),
    "adam": (FusedAdam, torch.float32, {"adam_w_mode": False, "amsgrad": True}),
    "masters": (FusedAdam, torch.bfloat16, {"dtype": torch.float32}),
    "remainders": (
        FusedAdam, torch.bfloat16, {"dtype": torch.float32, "store_param_remainders": True},
    ),
    "scaled": (FusedAdam, torch.float32, {"exp_avg_dtype": torch.float16}),
    "drawn": (FusedAdam, torch.bfloat16, {"weight_rounding": "stochastic", "seed": 5}),
    "lion": (FusedLion, torch.bfloat16, {"weight_rounding": "stochastic", "seed": 5}),
    "sgd": (FusedSGD, torch.float32, {"momentum": 0.9, "dampening": 0.5}),
}  # fmt: skip


@both_backends
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(4)
@pytest.mark.thirds
def test_a_parameter_is_stepped_as_by_an_optimizer_of_its_own(case, capturable, backend):
    kind, dtype, options = CASES[case]
    if dtype == torch.bfloat16 and "dtype" not in options:
        options = {**options, "master_weights": False}
    options = {**options, "capturable": capturable, "backend": backend, "step_counts": "parameter"}
    params, expected = three(dtype), three(dtype)
    optimizer, others = together(kind, params, **options), alone(kind, expected, **options)
    own = [0, 0, 0]
    for step, pattern in enumerate(HAS_GRADIENT):
        give(params, step, pattern)
        give(expected, step, pattern)
        optimizer.step()
        for place, (each, has) in enumerate(zip(others, pattern, strict=True)):
            if has == "1":
                each.step()
                own[place] += 1
        assert counts(optimizer) == own
        assert [int(group["step"]) for group in optimizer.param_groups] == [step + 1] * 2
        for param, other, each in zip(params, expected, others, strict=True):
            assert_same_bits(param.detach(), other.detach())
            for name, value in each.state[other].items():
                if isinstance(value, torch.Tensor):
                    assert_same_bits(optimizer.state[param][name], value)


def test_counts_of_the_group_are_the_default_of_contract_ieee():
    found, expected = (
        stepped(together(FusedAdam, three(), **options), *HAS_GRADIENT)
        for options in ({}, {"step_counts": "group"})
    )
    assert "step" not in found.state[params_of(found)[0]]
    assert_same_run(found, expected)


@pytest.mark.parametrize("late", [10, 200])
def test_a_layer_unfrozen_late_has_a_first_update_of_lr(late):
    """Adam's first update is lr times the gradient's sign."""
    first, second = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = FusedAdam([first, second], lr=1.0, eps=0.0, step_counts="parameter")
    for _ in range(late):
        first.grad = torch.ones(4)
        optimizer.step()
    second.grad = torch.full((4,), 0.5)
    optimizer.step()
    assert_same_bits(second.detach(), torch.full((4,), -1.0))


@pytest.mark.parametrize(
    ("late", "number", "update"), [(51, 1, 0.71), (200, 1, 1.35), (4000, 1, 3.13), (4000, 12, 6.51)]
)
def test_with_counts_of_the_group_late_updates_are_what_the_page_says(late, number, update):
    """docs/how-to/torch.md; in units of lr."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = FusedAdam([weight], lr=1.0, eps=0.0)
    optimizer.param_groups[0]["step"] = late
    for _ in range(number):
        before = float(weight.detach())
        weight.grad = torch.ones(1)
        optimizer.step()
    assert round(before - float(weight.detach()), 2) == update


def test_counts_are_torchs():
    """torch.optim.AdamW on a CPU, step for step, and its state dict with unequal counts."""
    params, expected = three(), three()
    optimizer = together(FusedAdam, params, step_counts="parameter", weight_decay=0.01)
    torchs = together(torch.optim.AdamW, expected)
    for step, pattern in enumerate(HAS_GRADIENT[:4]):
        for own, each in ((params, optimizer), (expected, torchs)):
            give(own, step, pattern)
            each.step()
        for param, other in zip(params, expected, strict=True):
            theirs = torchs.state.get(other, {}).get("step", 0)
            assert int(optimizer.state.get(param, {}).get("step", 0)) == int(theirs)
    saved = optimizer.to_torch_state_dict()
    assert [float(own["step"]) for own in saved["state"].values()] == [3.0, 4.0, 1.0]
    torchs.load_state_dict(saved)
    fresh = together(FusedAdam, three(), step_counts="parameter")
    fresh.load_state_dict(torchs.state_dict())
    assert counts(fresh) == counts(optimizer)
    refusing = together(FusedAdam, three())
    with pytest.raises(ValueError, match=r"step counts \[3, 4\].*step_counts='parameter'"):
        refusing.load_state_dict(torchs.state_dict())


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_unequal_counts_go_through_torch_distributed_checkpoint(tmp_path, flat, capturable):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    models = [torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)) for _ in range(2)]
    source, target = (
        FusedAdam(m.parameters(), step_counts="parameter", capturable=capturable) for m in models
    )
    stepped(source, "1100", "1111", "0111").zero_grad()
    saved = {"optimizer": get_optimizer_state_dict(models[0], source, options=options)}
    dcp.save(saved, checkpoint_id=tmp_path / "checkpoint")
    found = {"optimizer": get_optimizer_state_dict(models[1], target, options=options)}
    dcp.load(found, checkpoint_id=tmp_path / "checkpoint")
    set_optimizer_state_dict(models[1], target, found["optimizer"], options=options)
    assert counts(target) == counts(source) == [2, 3, 2, 2]
    assert int(target.param_groups[0]["step"]) == 3


def test_counts_in_a_state_dict_share_no_memory():
    """torch.distributed.checkpoint loads into a state dict's tensors, one after the other."""
    optimizer = stepped(together(FusedAdam, three(), step_counts="parameter"), "111")
    saved = optimizer.state_dict()
    for key, own in saved["state"].items():
        own["step"].fill_(10 + key)
    assert counts(optimizer) == [1, 1, 1]
    optimizer.load_state_dict(saved)
    assert counts(optimizer) == [10, 11, 12]


STEPLESS = {
    "of this version": lambda saved: saved,
    "of an older version": lambda saved: [
        group.pop("state_formats") for group in saved["param_groups"]
    ],
}


@pytest.mark.parametrize("change", STEPLESS.values(), ids=STEPLESS)
@pytest.mark.parametrize("step_counts", ["group", "parameter"])
def test_a_state_without_its_count_is_refused(change, step_counts):
    """It had been given its group's."""
    source, target = (
        stepped(together(FusedAdam, three(), step_counts=own), "111")
        for own in ("parameter", step_counts)
    )
    saved = copy.deepcopy(source.state_dict())
    change(saved)
    del saved["state"][1]["step"]
    with refused(target, "parameter 1 of group 0: the state dict has no 'step'"):
        target.load_state_dict(saved)


def test_states_without_counts_take_those_of_their_groups():
    """As step_counts="group" saves them; and back, where counts are equal."""
    source = stepped(together(FusedAdam, three()), *["111"] * 3)
    target = together(FusedAdam, three(), step_counts="parameter")
    target.load_state_dict(source.state_dict())
    assert counts(target) == [3, 3, 3]
    back = together(FusedAdam, three())
    back.load_state_dict(target.state_dict())
    assert_same(back.state_dict(), source.state_dict())


def test_a_state_that_was_put_in_by_hand_counts_from_0():
    """Also after a load, as without one."""
    options = {"step_counts": "parameter", "makes_states": "stepped"}
    source = stepped(together(FusedAdam, three(), **options), "101")
    for name in ("exp_avg", "exp_avg_sq"):
        source.set_scaled_state(params_of(source)[1], name, torch.ones(37))
    target = together(FusedAdam, three(), step_counts="parameter")
    target.load_state_dict(source.state_dict())
    assert counts(target) == [1, 0, 1]


def test_a_state_that_is_taken_away_starts_at_0():
    optimizer = stepped(together(FusedAdam, three(), step_counts="parameter"), *["111"] * 3)
    del optimizer.state[params_of(optimizer)[1]]
    stepped(optimizer, "111")
    assert counts(optimizer) == [4, 1, 4]


def test_a_groups_count_set_by_hand_moves_no_parameters():
    optimizer, other = (together(FusedAdam, three(), step_counts="parameter") for _ in range(2))
    for step in range(3):
        for each in (optimizer, other):
            stepped(each, "111")
        optimizer.param_groups[0]["step"] = 100 * step
    assert counts(optimizer) == [3, 3, 3]
    assert_same(snapshot(optimizer)["weights"], snapshot(other)["weights"])


def test_released_gradients_count_for_their_parameters():
    params, expected = three(), three()
    optimizer = together(FusedAdam, params, step_counts="parameter")
    other = together(FusedAdam, expected, step_counts="parameter")
    for step, pattern in enumerate(HAS_GRADIENT):
        if step == 1:
            release = release_gradients(params, optimizer)
        if step == 6:
            release.remove()
        chosen = [p for p, has in zip(params, pattern, strict=True) if has == "1"]
        grads = [gradient(p, i, step) for i, p in enumerate(params) if pattern[i] == "1"]
        torch.autograd.backward([p * 1 for p in chosen], grads)
        optimizer.step()
        optimizer.zero_grad()
        give(expected, step, pattern)
        other.step()
        assert counts(optimizer) == counts(other)
        assert_same(params, expected)


# --- which parameters get a state


@pytest.mark.parametrize("master_weights", [None, True])
def test_a_step_before_any_backward_pass_makes_the_states(master_weights):
    """What the request's own code expects."""
    model = torch.nn.Linear(4, 3).bfloat16()
    optimizer = FusedAdam(model.parameters(), master_weights=master_weights or False)
    with pytest.warns(UserWarning, match="none of the 2 parameters has a gradient"):
        optimizer.step()
    for p in model.parameters():
        assert_same_bits(optimizer.state[p]["exp_avg"], torch.zeros(p.shape))
        assert_same_bits(optimizer.state[p]["exp_avg_sq"], torch.zeros(p.shape))
        master = optimizer.state[p]["master_param"]
        assert master is None if not master_weights else torch.equal(master, p.detach().float())


@pytest.mark.parametrize(
    ("makes_states", "made"),
    [(None, "110"), ("stepped", "100"), ("trainable", "110"), ("all", "111")],
)
def test_which_parameters_get_a_state(makes_states, made):
    params = three()
    params[2].requires_grad_(False)
    optimizer = stepped(FusedAdam(params, makes_states=makes_states), "100")
    assert [bool(optimizer.state.get(p)) for p in params] == [each == "1" for each in made]


def test_a_weight_written_before_its_first_gradient_sets_the_master():
    first, second = (parameter(seed, torch.bfloat16) for seed in range(2))
    optimizer = stepped(FusedAdam([first, second], dtype=torch.float32), "10")
    with torch.no_grad():
        second.fill_(3.0)
    give([first, second], 1, "11")
    with pytest.warns(UserWarning, match="was written outside"):
        optimizer.step()
    expected = torch.nn.Parameter(torch.full_like(second, 3.0))
    other = FusedAdam([expected], dtype=torch.float32)
    other.param_groups[0]["step"] = 1
    expected.grad = gradient(expected, 1, 1)
    other.step()
    assert_same_bits(second.detach(), expected.detach())
