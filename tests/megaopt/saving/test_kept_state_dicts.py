"""State dicts that somebody keeps while training goes on: all of it is of now, as torch's is."""

import copy
import gc

import pytest
import torch
import torch.distributed.checkpoint as dcp
from handling import both_backends
from runs import MASTER, assert_same, copied, give_gradients, parameters, params_of, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megaopt import FusedAdam, FusedLion, FusedMuon, FusedSGD, GaLoreAdamW, release_gradients

KINDS = {
    **{kind.__name__: (kind, {}) for kind in (FusedAdam, FusedLion, FusedMuon, GaLoreAdamW)},
    "FusedSGD": (FusedSGD, {"momentum": 0.9}),
    "counts apart": (FusedAdam, {"step_counts": "parameter"}),
    "capturable": (FusedAdam, {"capturable": True}),
}


def made(kind, **more):
    make, options = KINDS[kind]
    first, *others = parameters()
    return make([{"params": [first]}, {"params": others}], **MASTER, **options, **more)


def partly(optimizer, step):
    """A step in which one parameter has no gradient."""
    params = params_of(optimizer)
    give_gradients(params, step)
    params[2].grad = None
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@both_backends
def test_a_state_dict_that_is_kept_is_of_now(kind, backend):
    optimizer = made(kind, backend=backend)
    optimizer.initialize_states()
    kept = [optimizer.state_dict()]
    before = copy.deepcopy(kept[0])
    as_before = copied(before)
    for step in range(3):
        partly(optimizer, step)
        kept.append(optimizer.state_dict())
        train(optimizer, 1, first=10 + step)
    for each in kept:
        assert_same(each, optimizer.state_dict())
    assert_same(before, as_before)


def test_a_kept_state_dict_loads_as_the_state_of_now():
    optimizer, straight = made("counts apart"), made("counts apart")
    for each in (optimizer, straight):
        train(each, 1)
    kept = optimizer.state_dict()
    for each in (optimizer, straight):
        train(each, 4, first=1)
    optimizer.load_state_dict(kept)
    for each in (optimizer, straight):
        train(each, 1, first=5)
    assert_same(optimizer.state_dict(), straight.state_dict())


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "nested"])
@pytest.mark.parametrize("kind", ["FusedAdam", "counts apart"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_dict_for_torchs_checkpoints_that_is_kept_is_of_now(kind, flat):
    """TorchFT keeps one, and sends it to ranks that come later."""
    make, options = KINDS[kind]
    model = torch.nn.Linear(3, 4).bfloat16()
    optimizer = make(model.parameters(), **MASTER, **options)
    flattened = StateDictOptions(flatten_optimizer_state_dict=flat)
    kept = get_optimizer_state_dict(model, optimizer, options=flattened)
    train(optimizer, 5)
    optimizer.zero_grad()
    assert_same(kept, get_optimizer_state_dict(model, optimizer, options=flattened))


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "nested"])
@pytest.mark.parametrize("way", ["older", "capturable", "older, capturable", "tensor lr"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_checkpoints_of_numbers_and_of_tensors_load(way, flat, tmp_path):
    """Older versions saved a number, capturable=True has tensors of shape (1,)."""
    options, runs = StateDictOptions(flatten_optimizer_state_dict=flat), []
    for seed in range(2):
        model = torch.nn.Linear(3, 4).bfloat16()
        lr = torch.tensor(0.25) if way == "tensor lr" else 0.25
        capturable = seed == 1 and "capturable" in way
        optimizer = FusedAdam(model.parameters(), lr=lr, capturable=capturable, **MASTER)
        train(optimizer, 2 + seed, first=seed)
        runs.append((model, optimizer))
    saved = get_optimizer_state_dict(*runs[0], options=options)
    for group in ([saved] if flat else saved["param_groups"]) if "older" in way else ():
        group.update({name: int(group[name]) for name in group if name.split(".")[-1] == "step"})
    dcp.save(saved, checkpoint_id=tmp_path)
    found = get_optimizer_state_dict(*runs[1], options=options)
    dcp.load(found, checkpoint_id=tmp_path)
    set_optimizer_state_dict(*runs[1], found, options=options)
    group = runs[1][1].param_groups[0]
    assert int(group["step"]) == 2
    assert isinstance(group["lr"], torch.Tensor) == (way != "older")
    assert float(group["lr"]) == 0.25


def test_steps_that_are_left_out_and_counts_set_by_hand():
    optimizer = made("FusedAdam", nonfinite="skip")
    kept = optimizer.state_dict()
    train(optimizer, 1)
    params_of(optimizer)[0].grad.fill_(torch.inf)
    optimizer.step()
    assert [int(group["step"]) for group in kept["param_groups"]] == [1, 1]
    optimizer.param_groups[1]["step"] = 100
    train(optimizer, 1)
    assert [int(group["step"]) for group in kept["param_groups"]] == [2, 101]


def test_released_gradients_count_there_too():
    optimizer = made("counts apart")
    optimizer.initialize_states()
    kept = optimizer.state_dict()
    release_gradients(params_of(optimizer), optimizer)
    sum(param.float().sum() for param in params_of(optimizer)[:2]).backward()
    optimizer.step()
    assert [int(own["step"]) for own in kept["state"].values()] == [1, 1, 0, 0]
    assert_same(kept, optimizer.state_dict())


def test_a_load_leaves_state_dicts_of_before_as_they_are():
    """Their moments are those of before, and so are their counts."""
    optimizer, other = made("counts apart"), made("counts apart")
    train(optimizer, 2)
    kept = optimizer.state_dict()
    before = copied(kept)
    optimizer.load_state_dict(other.state_dict())
    train(optimizer, 3, first=2)
    assert_same(kept, before)


def test_counts_live_as_long_as_somebody_has_them():
    optimizer = made("FusedAdam")
    count = optimizer.state_dict()["param_groups"][1]["step"].detach()
    gc.collect()
    train(optimizer, 3)
    assert int(count) == 3


def test_counts_of_parameters_on_the_device_are_copies():
    optimizer = made("counts apart", capturable=True)
    train(optimizer, 1)
    kept = optimizer.state_dict()
    train(optimizer, 1, first=1)
    assert [int(own["step"]) for own in kept["state"].values()] == [1] * 4
    assert [int(group["step"]) for group in kept["param_groups"]] == [2, 2]
