"""A write to a weight that no step has taken over yet: copies, files and fp32 weights have it."""

import copy
import pickle

import pytest
import torch
from bits import assert_same_bits

from megaopt import FusedAdam, get_fp32_model_state_dict

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


@pytest.mark.parametrize("name", ["kahan", "kahan_stochastic"])
def test_a_write_that_changes_nothing_keeps_compensations(name):
    weight = torch.nn.Parameter(torch.randn(4096).bfloat16())
    options = {"master_weights": True, "master_weight_dtype": name, "backend": "reference"}
    optimizer = FusedAdam([weight], lr=0.01, on_external_write="error", **options)
    for _ in range(3):
        weight.grad = torch.randn(4096).bfloat16()
        optimizer.step()
    kept = optimizer.state[weight]["master_param"].clone()
    with torch.no_grad():
        weight.add_(0)
    optimizer.refresh_masters()
    assert_same_bits(optimizer.state[weight]["master_param"], kept)
    with torch.no_grad():
        weight.copy_(weight.clone())
    weight.grad = torch.randn(4096).bfloat16()
    optimizer.step()  # raises where the write changed something


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
