"""`p.data = new` between steps: another tensor in a weight's place, which torch does not count."""

import copy
import pickle
import warnings

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
    train,
    values,
)

from megaopt import FusedAdam, GaLoreAdamW, get_fp32_model_state_dict
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
