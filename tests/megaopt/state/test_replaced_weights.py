"""Another tensor in a weight's place, or another parameter's state: torch counts neither."""

import copy
import pickle
import warnings

import handling
import kinds
import pytest
import torch
from bits import assert_same_bits
from handling import both_backends, train_all
from runs import (
    BF16,
    FP16,
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

from megaopt import FusedAdam, GaLoreAdamW, get_fp32_model_state_dict, release_gradients
from megaopt.float8 import RECIPES, Float8Weight

SHAPES = [(3, 40), (), (0,), (50,)]


def optimizer_of(**options):
    params = parameters(SHAPES)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 3e-2}]
    return FusedAdam(groups, lr=1e-2, **MASTER, **options)


def replace(param, new=None):
    """The same values in other memory, or new ones."""
    kept = param.data  # or the new tensor might lie at the same address
    param.data = kept.clone() if new is None else new
    return kept


def half_of(param, value):
    new = param.detach().clone()
    new[: len(new) // 2] = value
    return new


def refused():
    return pytest.raises(RuntimeError, match=r"parameter 1 of group 1 must not be written")


def noticed():
    return pytest.warns(UserWarning, match=r"parameter 1 of group 1 was written outside")


# --- what is noticed


@both_backends
def test_writes_after_a_replacement_are_noticed_too(backend):
    optimizer = optimizer_of(backend=backend, on_external_write="error")
    train(optimizer, 1)
    param = params_of(optimizer)[3]
    kept = replace(param)
    train(optimizer, 1, first=1)
    with torch.no_grad():
        param.fill_(0.75)
    with refused():
        train(optimizer, 1, first=2)
    assert len(kept) == 50


@both_backends
def test_what_a_step_did_not_write_is_noticed_when_one_does(backend):
    """The batches are made anew, as other parameters have gradients."""
    optimizer = optimizer_of(backend=backend, makes_states="stepped")
    train(optimizer, 1)
    param = params_of(optimizer)[3]
    give_gradients(params_of(optimizer), 1)
    param.grad = None
    kept = replace(param, half_of(param, 0.75))
    optimizer.step()
    before = optimizer.state[param]["master_param"].clone()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    with noticed():
        train(optimizer, 1, first=2)
    after = optimizer.state[param]["master_param"]
    assert_same_bits(after[:25], torch.full((25,), 0.75))
    assert_same_bits(after[25:], before[25:])
    assert len(kept) == 50


# --- between steps


def test_another_dtype_goes_on_from_its_masters():
    optimizer, expected = (optimizer_of() for _ in range(2))
    train_all((optimizer, expected), 2)
    for param in params_of(optimizer):
        param.data = param.data.to(FP16)
    give_gradients(params_of(expected), 2)
    for param, twin in zip(params_of(optimizer), params_of(expected), strict=True):
        param.grad = twin.grad.to(FP16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    expected.step()
    for param, twin in zip(params_of(optimizer), params_of(expected), strict=True):
        masters = (optimizer.state[param], expected.state[twin])
        assert_same_bits(*(state["master_param"] for state in masters))


# --- other kinds of weights


@both_backends
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.sample(2)
@pytest.mark.thirds
def test_fp8_weights(backend, recipe):
    def run(on_external_write):
        weight = Float8Weight.from_values(values((64, 64), 3, BF16), RECIPES[recipe])
        param = torch.nn.Parameter(weight)
        options = {**MASTER, "backend": backend, "on_external_write": on_external_write}
        return FusedAdam([param], lr=1e-2, **options)

    found, expected, strict = run("refresh"), run("refresh"), run("error")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            train_all((found, expected, strict), 1, first=step)
            for each in (found, strict):
                (param,) = params_of(each)
                param.data = copy.deepcopy(param.data)
    assert_same_bits(*(e.state[params_of(e)[0]]["master_param"] for e in (found, expected)))
    new = Float8Weight.from_values(values((64, 64), 9, BF16), RECIPES[recipe])
    for each in (found, strict):
        params_of(each)[0].data = copy.deepcopy(new)
    with torch.no_grad():
        params_of(expected)[0].copy_(new)
    for each in (found, expected):
        with pytest.warns(UserWarning, match="written outside"):
            train(each, 1, first=3)
    with pytest.raises(RuntimeError, match="must not be written"):
        train(strict, 1, first=3)
    one, other = (params_of(each)[0] for each in (found, expected))
    assert_same_bits(found.state[one]["master_param"], expected.state[other]["master_param"])
    assert_same(one.tensors(), other.tensors())


def test_projected_matrices():
    param = torch.nn.Parameter(values((24, 10), 5, BF16))
    options = {"rank": 3, "dtype": FP32, "backend": "reference", "on_external_write": "error"}
    optimizer = GaLoreAdamW([param], lr=1e-2, **options)
    train(optimizer, 1)
    kept = replace(param)
    train(optimizer, 1, first=1)
    replace(param, torch.zeros_like(kept))
    with pytest.raises(RuntimeError, match="must not be written"):
        train(optimizer, 1, first=2)


# --- writes that no step has taken over yet: copies, files and fp32 weights have them


PENDING = {
    "fp32": {"dtype": torch.float32},
    "kahan": {"master_weights": True, "master_weight_dtype": "kahan_stochastic"},
}


def made(weight, options):
    return FusedAdam([weight], lr=0.1, backend="reference", **options)


def resumed(weight, optimizer, options, model_first):
    other = torch.nn.Parameter(torch.zeros_like(weight))
    again, saved = made(other, options), copy.deepcopy(optimizer.state_dict())
    if not model_first:
        again.load_state_dict(saved)
    with torch.no_grad():
        other.copy_(weight)
    if model_first:
        again.load_state_dict(saved)
    return other, again


WAYS = {
    "saved, model first": lambda *run: resumed(*run, model_first=True),
    "saved, optimizer first": lambda *run: resumed(*run, model_first=False),
    "deepcopy": lambda *run: copy.deepcopy(run[:2]),
    "pickle": lambda *run: pickle.loads(pickle.dumps(run[:2])),
}


@pytest.mark.filterwarnings("ignore:.*was written outside the optimizer")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("options", PENDING.values(), ids=PENDING)
@pytest.mark.parametrize("replaced", [False, True])
def test_a_write_before_a_copy_counts_after_it(replaced, options, way):
    weight = torch.nn.Parameter(torch.randn(300).bfloat16())
    optimizer = made(weight, options)
    grads = [torch.randn(300).bfloat16() for _ in range(3)]
    weight.grad = grads[0]
    optimizer.step()
    new = weight.detach().clamp(-0.5, 0.5)
    new[7] = 5.0
    if replaced:
        weight.data = new
    else:
        with torch.no_grad():
            weight.copy_(new)
    found = []
    for own, its in (way(weight, optimizer, options), (weight, optimizer)):
        for grad in grads[1:]:
            own.grad = grad.clone()
            its.step()
        found.append((own.detach(), its.get_unscaled_state(own, "master_param")))
    (one, its_master), (other, master) = found
    assert_same_bits(one, other)
    assert_same_bits(its_master, master)
    assert float(one[7]) > 4


@pytest.mark.filterwarnings("ignore:.*was written outside the optimizer")
def test_fp32_weights_have_writes_of_weights_that_had_no_gradient():
    model = torch.nn.Linear(4, 4).bfloat16()
    optimizer = FusedAdam(model.parameters(), lr=0.1, dtype=torch.float32, backend="reference")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    model.bias.grad = None
    optimizer.step()
    with torch.no_grad():
        model.bias.fill_(3.0)
    found = get_fp32_model_state_dict(model, optimizer)["bias"]
    assert found.tolist() == [3.0] * 4


# --- states that come to a parameter from another one

HANDED = ("fp32_masters", "fp16_masters", "remainders", "kahan", "lion", "momentum", "muon",
          "24 bits, drawn", "fp8 delayed, masters", "fp8 delayed, remainder8")  # fmt: skip


def hand_over(optimizer, place, new):
    """A new parameter in the place of one, whose state it gets."""
    (group,) = optimizer.param_groups
    old = group["params"][place]
    group["params"][place] = param = torch.nn.Parameter(new)
    optimizer.state[param] = optimizer.state.pop(old)
    return param


def pruned(param):
    """The values of a weight with zeros in the first row."""
    new = param.dequantize() if isinstance(param, Float8Weight) else param.detach().clone()
    new[0] = 0
    return Float8Weight.from_values(new, param.recipe) if isinstance(param, Float8Weight) else new


def of_kind(kind, **more):
    return kinds.made(kind, backend="reference", **more)


@pytest.mark.filterwarnings("ignore:.*was written outside the optimizer")
@pytest.mark.parametrize("kind", HANDED)
def test_new_parameters_are_compared_with_the_masters_that_they_get(kind):
    """As a write in place is; nothing is pruned here that comes back."""
    found, expected = of_kind(kind), of_kind(kind)
    train_all((found, expected), 2)
    new = pruned(params_of(expected)[0])
    hand_over(found, 0, copy.deepcopy(new))
    with torch.no_grad():
        params_of(expected)[0].copy_(new)
    train_all((found, expected), 2, first=2)
    assert_same(kinds.on_the_host(snapshot(found)), kinds.on_the_host(snapshot(expected)))


@pytest.mark.parametrize("kind", ["fp32_masters", "fp16_masters", "kahan", "lion", "muon"])
def test_new_parameters_are_refused_where_writes_are(kind):
    optimizer = of_kind(kind, on_external_write="error")
    train(optimizer, 2)
    param = hand_over(optimizer, 0, pruned(params_of(optimizer)[0]))
    give_gradients(params_of(optimizer), 2)
    for _ in range(2):
        with handling.refused(optimizer, "must not be written between steps", RuntimeError):
            optimizer.step()
    optimizer.refresh_masters([param])
    optimizer.step()


@pytest.mark.parametrize("kind", HANDED)
def test_new_parameters_of_the_same_values_move_no_bit(kind):
    found, expected = of_kind(kind, on_external_write="error"), of_kind(kind)
    train_all((found, expected), 2)
    hand_over(found, 0, copy.deepcopy(params_of(found)[0].data))
    train_all((found, expected), 2, first=2)
    assert_same(kinds.on_the_host(snapshot(found)), kinds.on_the_host(snapshot(expected)))


def test_rows_that_are_appended_stay_where_they_were_put():
    """With zeros in every state tensor, as libraries that grow a model append them."""
    optimizer = of_kind("fp32_masters", lr=0.0)
    train(optimizer, 2)
    old = params_of(optimizer)[0]
    param = hand_over(optimizer, 0, torch.cat([old.data, torch.ones(2, 4, dtype=BF16)]))
    own = optimizer.state[param]
    for name, tensor in own.items():
        own[name] = torch.cat([tensor, tensor.new_zeros(2, 4)])
    with pytest.warns(UserWarning, match="parameter 0 of group 0 was written outside"):
        train(optimizer, 1, first=2)
    assert_same_bits(param[3:].detach(), torch.ones(2, 4, dtype=BF16))


def test_states_of_two_parameters_that_change_places():
    optimizer = FusedAdam(parameters([(8,), (8,)]), lr=0.0, backend="reference", **MASTER)
    train(optimizer, 1)
    one, other = params_of(optimizer)
    before, state = [one.detach().clone(), other.detach().clone()], optimizer.state
    state[one], state[other] = state[other], state[one]
    with pytest.warns(UserWarning, match="was written outside"):
        train(optimizer, 1, first=1)
    assert_same([one.detach(), other.detach()], before)


def test_a_new_optimizer_with_the_states_of_an_old_one():
    old = of_kind("fp32_masters")
    train(old, 2)
    params = [torch.nn.Parameter(pruned(p) if p.dim() > 1 else p.data) for p in params_of(old)]
    new = kinds.made("fp32_masters", params, backend="reference", on_external_write="error")
    for own, its in zip(params, params_of(old), strict=True):
        new.state[own] = old.state[its]
    give_gradients(params, 2)
    with handling.refused(new, "must not be written between steps", RuntimeError):
        new.step()


def test_a_parameter_that_has_no_gradient_when_it_comes():
    optimizer = of_kind("fp32_masters", makes_states="stepped", lr=0.0)
    train(optimizer, 2)
    param = hand_over(optimizer, 0, pruned(params_of(optimizer)[0]))
    give_gradients(params_of(optimizer), 2)
    param.grad = None
    optimizer.step()
    with pytest.warns(UserWarning, match="was written outside"):
        train(optimizer, 1, first=3)
    assert not param[0].any()


@pytest.mark.filterwarnings("ignore:.*was written outside the optimizer")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_new_parameter_before_a_copy_counts_after_it(way):
    weight = torch.nn.Parameter(torch.randn(300).bfloat16())
    optimizer = made(weight, PENDING["fp32"])
    weight.grad = torch.randn(300).bfloat16()
    optimizer.step()
    new = weight.detach().clone()
    new[7] = 5.0
    weight = hand_over(optimizer, 0, new)
    own, its = way(weight, optimizer, PENDING["fp32"])
    own.grad = torch.randn(300).bfloat16()
    its.step()
    assert float(own[7].detach()) > 4


@pytest.mark.filterwarnings("ignore:.*was written outside the optimizer")
def test_a_released_gradient_of_a_new_parameter():
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(4).bfloat16())], lr=1e-3, **MASTER)
    train(optimizer, 1)
    param = hand_over(optimizer, 0, torch.zeros(4).bfloat16())
    release = release_gradients([param], optimizer)
    param.sum().backward()
    optimizer.step()
    release.remove()
    assert float(param.detach().abs().max()) < 0.01


def test_another_master_of_the_same_parameter_counts():
    """The user's own: the weight becomes its cast."""
    optimizer = of_kind("fp32_masters", lr=0.0, on_external_write="error")
    train(optimizer, 1)
    param = params_of(optimizer)[0]
    optimizer.state[param]["master_param"] = torch.full(param.shape, 0.75)
    train(optimizer, 1, first=1)
    assert_same_bits(param.detach(), torch.full(param.shape, 0.75, dtype=BF16))


def test_more_rows_at_the_address_of_the_last_weight():
    memory = torch.ones(6, 4, dtype=BF16)
    param = torch.nn.Parameter(memory[:4])
    optimizer = FusedAdam([param], lr=0.0, backend="reference", **MASTER)
    train(optimizer, 1)
    param.data, param.grad = memory, None
    own = optimizer.state[param]
    own.update({name: torch.cat([t, t.new_zeros(2, 4)]) for name, t in own.items()})
    with pytest.warns(UserWarning, match="was written outside"):
        train(optimizer, 1, first=1)
    assert_same_bits(param.detach(), torch.ones(6, 4, dtype=BF16))


def test_a_write_before_masters_are_asked_for_again_counts():
    optimizer = of_kind("fp32_masters", lr=0.0)
    train(optimizer, 1)
    param = params_of(optimizer)[0]
    with torch.no_grad():
        param.fill_(0.75)
    optimizer.master_weights = True
    with pytest.warns(UserWarning, match="was written outside"):
        train(optimizer, 1, first=1)
    assert_same_bits(param.detach(), torch.full(param.shape, 0.75, dtype=BF16))
