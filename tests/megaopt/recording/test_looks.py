"""What a look at a list of tensors notices, by the extension and its Python twin alike."""

from collections import UserDict

import pytest
import torch

from megaopt.kernels import native
from megaopt.recording.looks import Looks, SameStates, same_params

pytestmark = pytest.mark.usefixtures("looks")


def made():
    return [torch.randn(4, 4), None, torch.nn.Parameter(torch.randn(3)), torch.zeros(0)]


def looked(tensors):
    found = Looks(tensors)
    found.look(tensors)
    return found


def addresses(tensors):
    return [0 if each is None else each.data_ptr() for each in tensors]


def test_nothing_happens_where_nothing_is_written():
    tensors = made()
    found = looked(tensors).look(tuple(tensors))
    assert (found.moved, found.written) == ([], [])
    assert found.addresses.tolist() == addresses(tensors)


def test_writes_and_moves_are_told_apart():
    tensors = made()
    looks = looked(tensors)
    tensors[0].add_(1)
    tensors[2].data = tensors[2].data.clone()
    found = looks.look(tensors)
    assert (found.moved, found.written) == ([2], [0])
    assert found.addresses.tolist() == addresses(tensors)
    assert looks.look(tensors)[1:] == ([], [])


OTHERS = {
    "dtype": lambda tensors: tensors.__setitem__(0, tensors[0].double()),
    "size": lambda tensors: tensors.__setitem__(0, torch.randn(17)),
    "device": lambda tensors: tensors.__setitem__(0, tensors[0].to("meta")),
    "layout": lambda tensors: tensors.__setitem__(0, tensors[0].to_sparse()),
    "none more": lambda tensors: tensors.__setitem__(0, None),
    "none less": lambda tensors: tensors.__setitem__(1, torch.zeros(0)),
    "shorter": lambda tensors: tensors.pop(),
    "data": lambda tensors: setattr(tensors[2], "data", tensors[2].data.half()),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_other_kinds_are_noticed(change):
    tensors = made()
    looks = looked(tensors)
    change(tensors)
    assert looks.look(tensors) is None


@pytest.mark.parametrize("other", [lambda t: t.t(), lambda t: torch._neg_view(t)])
def test_there_are_no_addresses_where_memory_is_not_the_bits(other):
    tensors = made()
    looks = looked(tensors)
    tensors[0] = other(tensors[0])
    assert looks.look(tensors).addresses is None


def test_tensors_without_versions_are_never_written():
    with torch.inference_mode():
        tensors = [torch.zeros(3), torch.zeros(2)]
        looks = looked(tensors)
        tensors[0].add_(1)
        assert looks.look(tensors).written == []


def test_what_the_twin_noted_counts_for_the_extension(monkeypatch):
    tensors = made()
    with monkeypatch.context() as off:
        off.setenv(native.SWITCH, "0")
        looks = looked(tensors)
    tensors[0].add_(1)
    assert looks.look(tensors)[1:] == ([], [0])


def test_other_parameters_are_noticed():
    params = tuple(torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    groups = [{"params": [*params[:2]]}, {"params": [params[2]]}]
    assert same_params(groups, params, [2, 1])
    assert not same_params([{"params": [*params]}], params, [2, 1])
    groups[1]["params"] = [torch.nn.Parameter(torch.zeros(2))]
    assert not same_params(groups, params, [2, 1])


CHANGES = {
    "a value": lambda state: state["b"].update(y=torch.zeros(2)),
    "an entry": lambda state: state.update(b=dict(state["b"])),
    "one more entry": lambda state: state.update(c={}),
    "one more value": lambda state: state["b"].update(z=1),
    "one value less": lambda state: state["b"].pop("y"),
    "other keys": lambda state: state.update(a=state.pop("a")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_states_are_noticed(change):
    state = {"a": {}, "b": {"x": torch.zeros(2), "y": torch.zeros(2)}}
    states = SameStates(state)
    assert states.are(state)
    assert states.are(dict(state))
    state["b"]["x"].add_(1)
    assert states.are(state)
    change(state)
    assert not states.are(state)


def test_states_of_other_kinds_cannot_be_told():
    assert not SameStates({"a": [torch.zeros(2)]}).has_dicts
    assert not SameStates(UserDict()).has_dicts
    assert not SameStates({"a": {}}).are(UserDict())
