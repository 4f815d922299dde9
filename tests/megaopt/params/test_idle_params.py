"""Parameters that nothing can step: codes of a frozen base beside LoRA's, and those on meta."""

import copy
import functools

import handling
import pytest
import torch
from runs import BF16, FP32, MASTER, assert_same, give_gradients, parameters, params_of, snapshot
from torch.testing._internal.two_tensor import TwoTensor

from megaopt import (
    FusedAdam,
    FusedLion,
    FusedMuon,
    FusedSGD,
    GaLoreAdamW,
    get_fp32_model_state_dict,
    set_fp32_model_state_dict,
)

KINDS = {
    "adam": FusedAdam,
    "lion": FusedLion,
    "sgd": functools.partial(FusedSGD, momentum=0.9),
    "muon": FusedMuon,
    "galore": functools.partial(GaLoreAdamW, rank=2),
}
all_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def codes(dtype=torch.int8):
    return torch.nn.Parameter(torch.ones(6, 4).to(dtype), requires_grad=False)


def wrapper():
    return torch.nn.Parameter(TwoTensor(torch.ones(6, 4), torch.ones(6, 4)), requires_grad=False)


FROZEN = {
    **{str(dtype): functools.partial(codes, dtype) for dtype in (
        torch.uint8, torch.int8, torch.bool, torch.float64, torch.complex64)},
    "wrapper": wrapper,
}  # fmt: skip


def stepped(optimizer, steps, first=0):
    trained = [param for param in params_of(optimizer) if param.requires_grad]
    for step in range(first, first + steps):
        give_gradients(trained, step)
        optimizer.step()


def lora():
    return parameters([(6, 4), (5,)])


@all_kinds
@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
def test_frozen_codes_beside_others_change_nothing(kind, frozen):
    own, other = lora(), lora()
    found = kind([own[0], frozen(), own[1]], lr=0.01, backend="reference", **MASTER)
    expected = kind(other, lr=0.01, backend="reference", **MASTER)
    stepped(found, 2)
    stepped(expected, 2)
    for one, theirs in zip(own, other, strict=True):
        assert_same(one.detach(), theirs.detach())
        assert_same(dict(found.state[one]), dict(expected.state[theirs]))
    assert not found.state.get(params_of(found)[1])


@all_kinds
def test_all_that_asks_for_states_passes_them_over(kind):
    model = torch.nn.Module()
    model.base, (model.weight, model.bias) = codes(), lora()
    optimizer = kind(model.parameters(), lr=0.01, backend="reference", **MASTER)
    optimizer.initialize_states()
    stepped(optimizer, 2)
    optimizer.refresh_masters()
    values = get_fp32_model_state_dict(model, optimizer)
    assert values["base"].dtype == torch.int8
    set_fp32_model_state_dict(model, optimizer, values)
    copied = copy.deepcopy(optimizer)
    again = kind([codes(), *lora()], lr=0.01, backend="reference", **MASTER)
    handling.copy_weights(optimizer, again)
    again.load_state_dict(optimizer.state_dict())
    for each in (optimizer, copied, again):
        stepped(each, 1, first=2)
    for each in (copied, again):
        assert_same(snapshot(each)["weights"], snapshot(optimizer)["weights"])
    optimizer.reset_moments()


@pytest.mark.parametrize("with_none", [False, True])
def test_a_list_of_masters_has_none_for_them(with_none):
    own = lora()
    masters = [None, *(param.detach().float() for param in own)]
    params = [codes(), *own]
    optimizer = FusedAdam(params, master_weights=masters if with_none else masters[1:])
    stepped(optimizer, 2)
    assert optimizer.state[own[1]]["master_param"] is masters[2]


def test_states_of_all_are_of_all_that_can_be_stepped():
    params = [codes(), *lora(), torch.nn.Parameter(torch.ones(3), requires_grad=False)]
    optimizer = FusedAdam(params, backend="reference", makes_states="all", **MASTER)
    stepped(optimizer, 1)
    assert [bool(optimizer.state.get(param)) for param in params] == [False, True, True, True]


@all_kinds
def test_those_that_are_to_be_stepped_are_refused(kind):
    dtype = "dtype must be one of torch.float32, torch.bfloat16, torch.float16, got torch.float64"
    param = torch.nn.Parameter(torch.ones(6, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=f"parameter 0 of group 0: {dtype}"):
        kind([param], backend="reference")
    param.requires_grad_(False)
    optimizer = kind([*lora(), param], backend="reference", **MASTER)
    stepped(optimizer, 1)
    param.requires_grad_(True)
    param.grad = torch.ones_like(param)
    with handling.refused(optimizer, f"parameter 2 of group 0: {dtype}"):
        optimizer.step()
    with handling.refused(optimizer, f"parameter 2 of group 0: {dtype}"):
        optimizer.initialize_states()


def test_decoupled_gradients_of_frozen_codes_are_refused():
    optimizer = FusedAdam([codes(), *lora()], backend="reference", use_decoupled_grad=True)
    params_of(optimizer)[0].decoupled_grad = torch.ones(6, 4)
    with handling.refused(optimizer, "parameter 0 of group 0: dtype must be one of"):
        optimizer.step()


# --- on meta


ON_META = "parameter 0 of group 0 must have elements to step, got one on meta: make the optimizer"


@all_kinds
def test_parameters_on_meta_are_taken_and_their_step_is_refused(kind):
    """Where the model has got its memory since, its parameters are others."""
    model = torch.nn.Linear(4, 6, device="meta")
    optimizer = kind(model.parameters(), backend="reference")
    model.to_empty(device="cpu")
    model(torch.ones(2, 4)).sum().backward()
    for _ in range(2):
        with pytest.raises(ValueError, match=ON_META):
            optimizer.step()
    with pytest.raises(ValueError, match=ON_META):
        optimizer.initialize_states()
    for param in params_of(optimizer):
        param.grad = torch.zeros_like(param)
    with pytest.raises(ValueError, match=ON_META):
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 0
    assert not any(optimizer.state.values())


@all_kinds
def test_parameters_that_have_left_meta_are_stepped(kind):
    """torch keeps the very parameters where it is told to."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = torch.nn.Linear(4, 6, device="meta", dtype=BF16)
        optimizer = kind(model.parameters(), lr=0.01, backend="reference", **MASTER)
        model.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    assert [*map(id, params_of(optimizer))] == [*map(id, model.parameters())]
    for param in model.parameters():
        torch.nn.init.ones_(param)
    expected = kind([torch.nn.Parameter(torch.ones_like(p)) for p in model.parameters()], lr=0.01,
                    backend="reference", **MASTER)  # fmt: skip
    for each in (optimizer, expected):
        stepped(each, 2)
    assert_same(snapshot(optimizer)["weights"], snapshot(expected)["weights"])


def test_parts_of_a_model_that_stay_on_meta_leave_the_others():
    """As a rank's of other stages; without gradients."""
    away = torch.nn.Parameter(torch.ones(6, 4, device="meta"))
    optimizer = FusedSGD([away, *parameters([(3,)], FP32)], backend="reference")
    params_of(optimizer)[1].grad = torch.ones(3)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
