"""What a step keeps from the one before is looked at again: nothing that was changed is stale."""

import copy

import pytest
import torch
import torch.distributed as dist
from one_rank import group_of_one
from runs import BF16, FP32, MASTER, assert_same, give_gradients, params_of, snapshot, values
from torch.distributed.tensor import distribute_tensor

from megaopt import FusedAdam, FusedSGD

pytestmark = pytest.mark.filterwarnings("ignore:.*was written outside:UserWarning")
both_backends = pytest.mark.parametrize("backend", ["reference", "triton"])
CONTROLS = ("clip_coefficient", "grad_scale", "found_inf")


def of_two_dtypes(backend):
    params = [torch.nn.Parameter(values((6,), i, dtype)) for i, dtype in enumerate((FP32, BF16))]
    return FusedSGD(params, lr=0.1, backend=backend, master_weights=False)


@pytest.mark.usefixtures("looks")
def test_what_moved_beside_a_pending_negation_is_seen():
    """The first look at the second batch fails, after the first batch's addresses were noted."""
    found, expected = of_two_dtypes("triton"), of_two_dtypes("reference")
    for number in range(3):
        for optimizer in (found, expected):
            params = params_of(optimizer)
            give_gradients(params, number)
            old = params[0].data
            before = old.clone()
            if number == 2:
                params[0].data = torch.ones(6)
                params[1].grad = torch._neg_view(params[1].grad.clone())
            optimizer.step()
            if number == 2:
                assert_same(old, before, "where the weight lay")
    assert_same(snapshot(found), snapshot(expected))


def three_groups(backend="reference", **options):
    params = [torch.nn.Parameter(values((7,), number)) for number in range(3)]
    return FusedAdam([{"params": [param]} for param in params], lr=0.1, backend=backend, **options)


LAID_OUT = {
    "expanded": lambda: torch.tensor(0.5).expand(3),
    "strided": lambda: torch.tensor([1.0, 9.0, 0.0, 9.0, 2.0])[::2],
    "negated": lambda: torch._neg_view(torch.tensor([-0.5, -1.0, -2.0])),
    "zeros that have no memory": lambda: torch._efficientzerotensor(3),
    "one, negated": lambda: torch._neg_view(torch.tensor(-0.5)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("kind", LAID_OUT)
@both_backends
def test_numbers_of_groups_lie_in_any_way(name, kind, backend):
    found, expected = three_groups(backend), three_groups("reference")
    numbers = LAID_OUT[kind](), torch.tensor((LAID_OUT[kind]() + 0).tolist())
    for optimizer, number in zip((found, expected), numbers, strict=True):
        give_gradients(params_of(optimizer), 0)
        if name != "clip_coefficient":
            setattr(optimizer, name, number)
        optimizer.step(clip_coefficient=number if name == "clip_coefficient" else None)
    assert_same(snapshot(found), snapshot(expected))


def refused(optimizer, message, **arguments):
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.step(**arguments)
    assert_same(snapshot(optimizer), before)


def test_a_group_that_is_skipped_is_not_measured_with_the_others():
    optimizer = three_groups()
    give_gradients(params_of(optimizer), 0)
    optimizer.found_inf = torch.tensor([1.0, 0.0, 0.0])
    refused(optimizer, "found_inf must be one number in a step that measures", clip_norm=1.0)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_dtensor_is_no_number(name, tmp_path):
    with group_of_one("gloo", tmp_path):
        mesh = dist.init_device_mesh("cpu", (1,))
        optimizer, given = three_groups(), distribute_tensor(torch.ones(()), mesh)
        give_gradients(params_of(optimizer), 0)
        if name != "clip_coefficient":
            setattr(optimizer, name, given)
        arguments = {name: given} if name == "clip_coefficient" else {}
        refused(optimizer, f"{name} must be .*plain tensor", **arguments)


def in_a_new_one(optimizer):
    """An optimizer of the same weights that loads the state dict; groups as they were made."""
    other = two_written()
    with torch.no_grad():
        for own, param in zip(params_of(other), params_of(optimizer), strict=True):
            own.copy_(param)
    other.load_state_dict(optimizer.state_dict())
    return other


def two_written():
    params = [torch.nn.Parameter(values((4,), number, BF16)) for number in range(2)]
    return FusedAdam([{"params": [param]} for param in params], lr=0.01, **MASTER)


@pytest.mark.parametrize("go_on", [copy.deepcopy, in_a_new_one])
def test_what_was_written_is_known_when_groups_change_places(go_on):
    optimizer = two_written()
    give_gradients(params_of(optimizer), 0)
    optimizer.step()
    with torch.no_grad():
        params_of(optimizer)[0].fill_(0.5)
    optimizer.param_groups.reverse()
    other = go_on(optimizer)
    for each in (optimizer, other):
        give_gradients(params_of(each), 1)
        each.step()
    assert_same(snapshot(other)["weights"], snapshot(optimizer)["weights"])


@both_backends
def test_a_count_that_is_replaced_counts(backend):
    """As where a run resumes from what the state says."""
    found = three_groups(backend, step_counts="parameter")
    for number in range(3):
        give_gradients(params_of(found), number)
        found.step()
    state = found.state[params_of(found)[0]]
    state["step"] = torch.zeros_like(state["step"])
    expected = three_groups("reference", step_counts="parameter")
    with torch.no_grad():
        for own, param in zip(params_of(expected), params_of(found), strict=True):
            own.copy_(param)
    expected.load_state_dict(found.state_dict())
    for number in range(3, 5):
        for optimizer in (found, expected):
            give_gradients(params_of(optimizer), number)
            optimizer.step()
    assert int(found.state[params_of(found)[0]]["step"]) == 2
    assert_same(snapshot(found)["weights"], snapshot(expected)["weights"])


def test_two_groups_share_no_step_tensor():
    optimizer = three_groups(capturable=True)
    group, param = optimizer.param_groups[0], torch.nn.Parameter(torch.ones(3))
    optimizer.param_groups.append({**group, "params": [param]})
    give_gradients(params_of(optimizer), 0)
    refused(optimizer, "group 3: step must be another tensor than group 0's")


def test_a_load_within_inference_mode_makes_states_that_are_written_later():
    optimizer, other, plain = three_groups(), three_groups(), three_groups()
    give_gradients(params_of(optimizer), 0)
    optimizer.step()
    with torch.inference_mode():
        other.load_state_dict(optimizer.state_dict())
    plain.load_state_dict(optimizer.state_dict())
    for each in (other, plain):
        give_gradients(params_of(each), 1)
        each.step()
    assert_same(snapshot(other), snapshot(plain))
