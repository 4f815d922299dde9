"""What a look at tensors notices, by the extension and by its Python twin alike."""

import pytest
import torch

from megaopt.kernels.step import native
from megaopt.kernels.step.watch import CHANGED, MOVED, SAME, Watch, grads_of


@pytest.fixture(params=["python", "native"], scope="module")
def module(request):
    if request.param == "python":
        return None
    built, why_not = native.build()
    if built is None:
        pytest.skip(f"the extension cannot be built here: {why_not}")
    return built


def tensors():
    return [torch.randn(4, 4), torch.randn(3), torch.empty(0), torch.tensor(1.0)]


def looked(module):
    each = tensors()
    watch = Watch(len(each), module)
    assert watch.look(each) == CHANGED
    assert watch.look(each) == SAME
    return watch, each


def test_moved_tensors_are_noticed_and_their_addresses_noted(module):
    watch, each = looked(module)
    kept = each[1]
    each[1] = kept.clone()
    assert watch.look(each) == MOVED
    assert watch.addresses.tolist() == [t.data_ptr() for t in each]
    assert watch.look(each) == SAME


CHANGES = {
    "dtype": lambda t: t.bfloat16(),
    "size": lambda t: torch.randn(5),
    "shape": lambda t: torch.randn(2, 8),
    "contiguity": lambda t: torch.randn(4, 4).t(),
    "device": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_kind_of_tensor_is_a_change(module, change):
    watch, each = looked(module)
    each[0] = change(each[0])
    assert watch.look(each) == CHANGED


SAME_ADDRESS = {
    "dtype": lambda t: t.view(torch.int32),
    "size": lambda t: t.view(-1)[:7],
    "shape": lambda t: t.view(8, 2),
    "contiguity": lambda t: t.t(),
}


@pytest.mark.parametrize("change", SAME_ADDRESS.values(), ids=SAME_ADDRESS)
def test_another_tensor_at_the_same_address_is_noticed(module, change):
    watch, each = looked(module)
    address = each[0].data_ptr()
    each[0] = change(each[0])
    assert each[0].data_ptr() == address
    assert watch.look(each) == CHANGED


def test_grads_are_those_of_the_parameters(module, monkeypatch):
    monkeypatch.setattr(native, "WORTH_BUILDING", 1 if module is not None else 10)
    params = [torch.nn.Parameter(torch.randn(2)) for _ in range(3)]
    params[0].grad = torch.randn(2)
    params[2].grad = torch.randn(2)
    found = grads_of(params)
    assert found[0] is params[0].grad
    assert found[1] is None
    assert found[2] is params[2].grad
