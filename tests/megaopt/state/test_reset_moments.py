"""reset_moments: new moments and counts beside masters; and states that users delete instead."""

import warnings
from collections import defaultdict

import handling
import kinds
import one_rank
import pytest
import torch
from bits import assert_same_bits
from handling import both_modes
from runs import (
    BF16,
    FP32,
    MASTER,
    assert_same,
    copied,
    parameters,
    params_of,
    snapshot,
    train,
    values,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megaopt import FusedAdam, FusedMuon, FusedSGD, GaLoreAdamW

SOME = (
    *("fp32_masters", "fp16_masters", "remainders", "kahan", "counts apart", "amsgrad", "lion"),
    *("momentum", "fp8_moments", "blocks, 24 bits", "4 bits, masters", "muon", "normuon"),
    "fp8 delayed, remainder8",
)


def same(found, expected):
    assert_same(kinds.on_the_host(snapshot(found)), kinds.on_the_host(snapshot(expected)))


def new_beside(optimizer, kind, **more):
    """A new optimizer of the same weights and masters."""
    new = kinds.with_weights_of(optimizer, kind, **more)
    for param, own in zip(params_of(optimizer), params_of(new), strict=True):
        masters = {n: t for n, t in optimizer.state[param].items() if n.startswith("master_param")}
        new.state[own] = copied(masters)
    new.initialize_states()
    return new


@both_modes
@pytest.mark.parametrize("kind", SOME)
def test_training_goes_on_as_that_of_a_new_optimizer_with_the_same_masters(kind, capturable):
    options = {"backend": "reference", "capturable": capturable}
    found = kinds.made(kind, **options)
    train(found, 3)
    found.reset_moments()
    expected = new_beside(found, kind, **options)
    same(found, expected)
    handling.train_all((found, expected), 2)
    same(found, expected)


def test_projections_are_made_anew():
    optimizer = GaLoreAdamW(parameters([(24, 10)]), rank=3, backend="reference", **MASTER)
    train(optimizer, 3)
    (param,) = params_of(optimizer)
    optimizer.reset_moments()
    assert not optimizer.state[param]["projection"].any()
    assert optimizer.param_groups[0]["step"] == 0
    train(optimizer, 1)
    assert optimizer.state[param]["projection"].any()


@both_modes
def test_memory_stays_where_it_is(capturable):
    """CUDA graphs read it; and what others keep in a state is theirs."""
    options = {"capturable": capturable, "step_counts": "parameter", **MASTER}
    optimizer = FusedAdam(parameters(), lr=0.01, backend="reference", **options)
    train(optimizer, 2)
    own = optimizer.state[params_of(optimizer)[0]]
    own["slow"] = torch.ones(3)
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in own.items()}
    step = optimizer.param_groups[0]["step"]
    optimizer.reset_moments()
    assert {name: (tensor, tensor.data_ptr()) for name, tensor in own.items()} == before
    assert bool(own["slow"].all())
    assert not capturable or optimizer.param_groups[0]["step"] is step


def test_a_first_update_is_one_again():
    """As a late one its bias corrections would be another's: 3.16 times as large."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([weight], lr=0.125, eps=0.0, backend="reference")
    for _ in range(20):
        weight.grad = torch.ones(4)
        optimizer.step()
    optimizer.reset_moments()
    before = weight.detach().clone()
    optimizer.step()
    assert_same_bits(before - weight.detach(), torch.full((4,), 0.125))


def test_shards_are_reset_too(tmp_path):
    found, expected = [], []
    with one_rank.group_of_one("gloo", tmp_path):
        mesh = init_device_mesh("cpu", (1,))
        for sharded, results in ((True, found), (False, expected)):
            for kind, options in ((FusedMuon, MASTER), (GaLoreAdamW, {**MASTER, "rank": 3})):
                params = parameters([(24, 10), (8,)])
                if sharded:
                    own = [distribute_tensor(param.data, mesh, [Shard(0)]) for param in params]
                    params = [torch.nn.Parameter(tensor) for tensor in own]
                optimizer = kind(params, lr=0.01, backend="reference", **options)
                for step in range(4):
                    for index, param in enumerate(params):
                        grad = values(param.shape, 100 * step + index, BF16)
                        is_sharded = isinstance(param, DTensor)
                        param.grad = (
                            distribute_tensor(grad, mesh, [Shard(0)]) if is_sharded else grad
                        )
                    optimizer.step()
                    if step == 1:
                        optimizer.reset_moments()
                results += [param.detach() for param in params]
        found = [tensor.to_local().clone() for tensor in found]
    assert_same(found, expected)


# --- some of the parameters


def test_some_of_a_group_are_refused_as_they_share_its_count():
    optimizer = kinds.made("fp32_masters", backend="reference")
    train(optimizer, 2)
    with handling.refused(
        optimizer, "params must have all parameters of group 0 that have a state"
    ):
        optimizer.reset_moments(params_of(optimizer)[:2])
    with handling.refused(optimizer, "param must be a parameter of this optimizer"):
        optimizer.reset_moments([torch.ones(3)])
    with handling.refused(optimizer, "params must be a list of parameters"):
        optimizer.reset_moments(params_of(optimizer)[0])


def test_a_group_has_its_own_count():
    params = parameters()
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = FusedAdam(groups, backend="reference", **MASTER)
    train(optimizer, 2)
    params[1].requires_grad_(False)
    del optimizer.state[params[1]]  # a frozen one, of no state
    optimizer.reset_moments(params[:1])
    assert [group["step"] for group in optimizer.param_groups] == [0, 2]
    assert not optimizer.state[params[0]]["exp_avg"].any()
    assert optimizer.state[params[3]]["exp_avg"].any()


@both_modes
def test_some_parameters_with_counts_of_their_own(capturable):
    options = {"step_counts": "parameter", "capturable": capturable, **MASTER}
    optimizer = FusedAdam(parameters(), backend="reference", **options)
    train(optimizer, 2)
    optimizer.reset_moments(params_of(optimizer)[:1])
    train(optimizer, 1, first=2)
    counts = [int(optimizer.state[param]["step"]) for param in params_of(optimizer)]
    assert counts == [1, 3, 3, 3]
    assert int(optimizer.param_groups[0]["step"]) == 3


# --- states that users delete


def cleared(optimizer):
    optimizer.state.clear()


def deleted(optimizer):
    for param in params_of(optimizer):
        del optimizer.state[param]


def replaced(optimizer):
    optimizer.state = defaultdict(dict)


WAYS = {"clear": cleared, "del": deleted, "new": replaced}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", ["fp32_masters", "remainders", "kahan", "lion", "muon"])
def test_masters_that_go_with_their_states_are_told_of_once(kind, way):
    optimizer = kinds.made(kind, backend="reference")
    train(optimizer, 2)
    way(optimizer)
    with pytest.warns(UserWarning, match=r"parameter 0 of group 0 .*reset_moments\(\)"):
        train(optimizer, 1, first=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        way(optimizer)
        train(optimizer, 1, first=3)


def test_states_that_are_made_at_once_are_told_of_too():
    optimizer = kinds.made("fp32_masters", backend="reference")
    train(optimizer, 1)
    optimizer.state.clear()
    with pytest.warns(UserWarning, match="no master"):
        optimizer.initialize_states()


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD, FusedMuon])
def test_where_no_master_is_lost_nothing_is_said(kind):
    params = [*parameters([(4, 4)]), *parameters([(4, 4)], FP32)]
    masters = [params[0].detach().float(), None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = kind(params, lr=0.01, backend="reference", master_weights=masters)
        train(optimizer, 1)
        optimizer.state.clear()  # the caller has them
        train(optimizer, 1)
        optimizer = kind(params, lr=0.01, backend="reference", **MASTER)
        train(optimizer, 1)
        optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.ones(4, 4, dtype=BF16))
        train(optimizer, 1)
