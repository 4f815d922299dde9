"""What a look at an optimizer's tensors notices, by the extension and its Python twin alike."""

import ctypes
import gc
import sys

import numpy
import pytest
import torch

from megaopt.kernels import native
from megaopt.state.watch import Guards, Watch

pytestmark = pytest.mark.usefixtures("young_heap")
BF16, FP32 = torch.bfloat16, torch.float32
NAMES = ["first", "second", "second_scale"]
SLOTS = ["grad", "weight", *NAMES]
SHAPES = [(4, 4), (3,), (0,), ()]


@pytest.fixture(params=["python", "native"], scope="module")
def module(request):
    if request.param == "python":
        return None
    built, why_not = native.build()
    if built is None:
        pytest.skip(f"the extension cannot be built here: {why_not}")
    return built


class Optimizer:
    """Two groups of parameters, the last without gradient; the others are one batch."""

    def __init__(self, module, decoupled=True, contiguous=True, param_class=torch.nn.Parameter):
        self.params = [param_class(torch.randn(s, dtype=BF16)) for s in [*SHAPES, (2,)]]
        self.decoupled, self.attribute = decoupled, "decoupled_grad" if decoupled else "grad"
        self.param_groups = [{"params": self.params[:2]}, {"params": self.params[2:]}]
        self.state = {}
        for param in self.params[:4]:
            setattr(param, self.attribute, torch.randn_like(param))
            self.state[param] = {
                **{name: torch.randn(param.shape) for name in ("first", "second")},
                "second_scale": torch.ones(1),
                "unused": None,
            }
        self.rows = numpy.full((5, 4), -1, dtype=numpy.int64)
        guards = Guards(
            positions=[0, 1, 2, 3],
            names=NAMES,
            dtypes=[BF16, BF16, FP32, FP32, FP32],
            scales=[None, None, None, None, [torch.Size([1])] * 4],
            shapes=[torch.Size(shape) for shape in SHAPES],
            devices=[torch.device("cpu")] * 5,
            contiguous=contiguous,
            addresses=list(self.rows) if contiguous else [],
        )
        self.watch = Watch(
            params=tuple(self.params),
            sizes=[2, 3],
            states=(*self.state.values(), None),
            keys=tuple(self.state),
            values=tuple(self.state.values()),
            batches=[guards],
            find=lambda: module,
            counted=self.params[:4],
            noted=numpy.array([param._version for param in self.params[:4]], dtype=numpy.int64),
        )

    def look(self):
        return self.watch.look(self.param_groups, self.state, self.decoupled)

    def get(self, slot, index=0):
        param = self.params[index]
        if slot == "grad":
            return getattr(param, self.attribute)
        return param.data if slot == "weight" else self.state[param][slot]

    def put(self, slot, tensor):
        param = self.params[0]
        if slot == "grad":
            setattr(param, self.attribute, tensor)
        elif slot == "weight":
            param.data = tensor
        else:
            self.state[param][slot] = tensor

    def addresses(self):
        """Asked of torch one by one."""
        return [[self.get(slot, index).data_ptr() for index in range(4)] for slot in SLOTS]


def looked(*args, **kwargs):
    optimizer = Optimizer(*args, **kwargs)
    assert optimizer.look() is not None
    assert optimizer.look().moved == [False]
    return optimizer


each_slot = pytest.mark.parametrize("slot", SLOTS)
both_grads = pytest.mark.parametrize("decoupled", [False, True], ids=["grad", "decoupled_grad"])

# --- addresses


@both_grads
@each_slot
def test_moved_tensors_are_noticed_and_their_addresses_noted(module, decoupled, slot):
    optimizer = looked(module, decoupled)
    kept = optimizer.get(slot)
    optimizer.put(slot, kept.clone())
    assert optimizer.look().moved == [True]
    assert optimizer.rows.tolist() == optimizer.addresses()
    assert optimizer.look().moved == [False]


@each_slot
def test_a_weight_that_lies_elsewhere_is_told_from_other_tensors(module, slot):
    optimizer = looked(module)
    assert not optimizer.look().elsewhere
    kept = optimizer.get(slot)
    optimizer.put(slot, kept.clone())
    assert optimizer.look().elsewhere == (slot == "weight")
    assert not optimizer.look().elsewhere


def test_written_weights_are_named_until_they_are_noted(module):
    optimizer = looked(module)
    assert optimizer.look().written == []
    with torch.no_grad():
        optimizer.params[3].zero_()
        optimizer.params[1].zero_()
    for _ in range(2):
        assert optimizer.look().written == [1, 3]
    before = [param._version for param in optimizer.params]
    optimizer.watch.count_up()
    assert optimizer.look().written == []
    counted = [param._version for param in optimizer.params]
    assert [now - was for now, was in zip(counted, before, strict=True)] == [1, 1, 1, 1, 0]


@each_slot
def test_the_place_in_a_storage_is_part_of_the_address(module, slot):
    optimizer = looked(module)
    old = optimizer.get(slot)
    buffer = torch.zeros(old.numel() + 3, dtype=old.dtype)
    optimizer.put(slot, buffer[: old.numel()].view(old.shape))
    optimizer.look()
    optimizer.put(slot, buffer[3:].view(old.shape))
    assert optimizer.look().moved == [True]
    assert optimizer.rows.tolist() == optimizer.addresses()


@each_slot
def test_memory_that_moved_under_a_tensor_is_noticed(module, slot):
    """A storage freed and filled again: tensor and storage stay the same objects."""
    optimizer = looked(module)
    storage = optimizer.get(slot).untyped_storage()
    size, old = storage.nbytes(), storage.data_ptr()
    storage.resize_(0)
    guards = [torch.empty(size, dtype=torch.uint8) for _ in range(64)]  # takes the old place
    storage.resize_(size)
    assert storage.data_ptr() != old
    assert optimizer.look().moved == [True]
    assert optimizer.rows.tolist() == optimizer.addresses()
    assert len(guards) == 64


@each_slot
def test_memory_shared_until_written_becomes_the_tensors_own(module, slot):
    """The step writes to the address, of which torch does not learn."""
    optimizer = looked(module)
    clone = torch._lazy_clone(optimizer.get(slot))
    optimizer.look()
    address = int(optimizer.rows[SLOTS.index(slot)][0])
    before = bytes(clone.numpy(force=True).tobytes() if clone.dtype == FP32 else b"")
    (ctypes.c_uint16).from_address(address).value ^= 0x7FFF
    assert not torch.equal(clone.view(torch.int16), optimizer.get(slot).view(torch.int16))
    assert clone.dtype != FP32 or clone.numpy(force=True).tobytes() == before


def test_tensors_without_a_row_for_them_are_looked_at_too(module):
    optimizer = looked(module, contiguous=False)
    optimizer.put("first", optimizer.get("first").clone().t())
    assert optimizer.look().moved == [False]
    assert (optimizer.rows == -1).all()


# --- what no longer fits

CHANGES = {
    "dtype": lambda t: t.view(torch.float16 if t.dtype == BF16 else torch.int32),
    "size": lambda t: torch.zeros(7, dtype=t.dtype),
    "shape": lambda t: t.view(1, *t.shape),
    "a_dimension_more": lambda t: t.view(*t.shape, 1),
    "as_many_elements": lambda t: t.view(-1, 1) if t.numel() == 1 else t.view(2, 8),
    "device": lambda t: t.to("meta"),
    "layout": lambda t: t.to_sparse(),
    "no_tensor": lambda t: t.tolist(),
    "none": lambda t: None,
}
TORCH_REFUSES = ["device", "layout", "no_tensor", "none"]  # for the data of a parameter


@pytest.mark.sample(3)
@each_slot
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "any"])
def test_another_kind_of_tensor_does_not_fit(module, slot, change, contiguous):
    if slot == "weight" and change in TORCH_REFUSES:
        return
    optimizer = looked(module, contiguous=contiguous)
    kept = optimizer.get(slot)
    optimizer.put(slot, CHANGES[change](kept))
    assert optimizer.look() is None
    optimizer.put(slot, kept)
    assert optimizer.look() is not None


@pytest.mark.parametrize("slot", SLOTS[:-1])
def test_other_strides_at_the_same_address_do_not_fit(module, slot):
    optimizer = looked(module)
    address = optimizer.get(slot).data_ptr()
    optimizer.put(slot, optimizer.get(slot).t())
    assert optimizer.get(slot).data_ptr() == address
    assert optimizer.look() is None


def other_param(optimizer):
    own = optimizer.param_groups[0]["params"]
    twin = torch.nn.Parameter(own[0].data)
    twin.decoupled_grad = own[0].decoupled_grad
    own[0] = twin


def swap_states(optimizer):
    """Keys and states each in their order, but not together."""
    (one, first), (two, second), *rest = optimizer.state.items()
    optimizer.state = {one: second, two: first, **dict(rest)}


def swap_keys(optimizer):
    (one, first), (two, second), *rest = optimizer.state.items()
    optimizer.state = {two: first, one: second, **dict(rest)}


EDITS = {
    "another parameter object": other_param,
    "a parameter less": lambda o: o.param_groups[0]["params"].pop(),
    "a parameter more": lambda o: o.param_groups[1]["params"].append(o.params[0]),
    "another order": lambda o: o.param_groups[0]["params"].reverse(),
    "another group": lambda o: o.param_groups[0]["params"].append(
        o.param_groups[1]["params"].pop(0)
    ),
    "a group less": lambda o: o.param_groups.pop(),
    "a group more": lambda o: o.param_groups.append({"params": []}),
    "no gradient": lambda o: setattr(o.params[1], "decoupled_grad", None),
    "no such attribute": lambda o: delattr(o.params[1], "decoupled_grad"),
    "a gradient more": lambda o: setattr(o.params[4], "decoupled_grad", torch.ones(2)),
    "gradients read elsewhere": lambda o: setattr(o, "decoupled", False),
    "another state": lambda o: o.state.update({o.params[0]: dict(o.state[o.params[0]])}),
    "no state": lambda o: o.state.pop(o.params[0]),
    "a stranger's state": lambda o: o.state.update({torch.ones(1): {}}),
    "states swapped": swap_states,
    "keys swapped": swap_keys,
    "an entry less": lambda o: o.state[o.params[1]].pop("second"),
}


FINE = {
    "groups made anew": lambda o: setattr(o, "param_groups", [dict(g) for g in o.param_groups]),
    "params as a tuple": lambda o: o.param_groups[0].update(params=tuple(o.params[:2])),
    "an unused entry": lambda o: o.state[o.params[0]].update(unused=3),
    "names that are other strings": lambda o: rename(o.state[o.params[0]]),
}


def rename(state):
    for name in NAMES:
        value = state.pop(name)
        state["".join(list(name))] = value


@pytest.mark.parametrize("name", [*EDITS, *FINE])
def test_edited_groups_and_states_fit_where_no_tensor_moves(module, name):
    optimizer = looked(module)
    {**EDITS, **FINE}[name](optimizer)
    seen = optimizer.look()
    assert (None if seen is None else seen.moved) == ([False] if name in FINE else None)


# --- gradients


class Own(torch.nn.Parameter):
    """A parameter whose gradients are made when they are asked for."""

    made = None

    @property
    def decoupled_grad(self):
        if hasattr(self, "broken"):
            raise ZeroDivisionError("no gradient today")
        return None if self.made is None else self.made.clone()

    @decoupled_grad.setter
    def decoupled_grad(self, value):
        self.made = value


def test_gradients_made_by_a_property_live_as_long_as_those_of_the_look(module):
    optimizer = Optimizer(module, param_class=Own)
    seen = optimizer.look()
    noted = torch.frombuffer(
        (ctypes.c_char * 32).from_address(int(optimizer.rows[0][0])), dtype=BF16
    )
    strangers = [torch.full((4, 4), 7.0, dtype=BF16) for _ in range(100)]
    assert torch.equal(noted.view(4, 4), optimizer.params[0].made)
    assert torch.equal(seen.grads()[0], optimizer.params[0].made)
    assert len(strangers) == 100


def test_an_error_of_a_property_comes_through(module):
    optimizer = Optimizer(module, param_class=Own)
    assert optimizer.look() is not None
    optimizer.params[1].broken = True
    with pytest.raises(ZeroDivisionError, match="no gradient today"):
        optimizer.look()


@both_grads
def test_gradients_are_those_of_the_parameters(module, decoupled):
    optimizer = looked(module, decoupled)
    grads = optimizer.look().grads()
    assert len(grads) == 5
    assert all(grads[index] is optimizer.get("grad", index) for index in range(4))
    assert grads[4] is None


# --- what a look leaves behind


@pytest.mark.sample(2)
@both_grads
def test_looks_leave_no_references(module, decoupled):
    optimizer = looked(module, decoupled)

    def counts():
        held = [optimizer.get(slot) for slot in ("grad", *NAMES)]
        held += [*optimizer.params, *optimizer.state.values(), optimizer.state, *NAMES, None]
        return [sys.getrefcount(each) for each in held]

    def repeat():
        for _ in range(1000):
            optimizer.look()
            optimizer.put("first", torch.zeros(3))
            assert optimizer.look() is None
            optimizer.put("first", kept)

    kept = optimizer.get("first")
    repeat()
    gc.collect()
    before, objects = counts(), len(gc.get_objects())
    repeat()
    gc.collect()
    assert abs(len(gc.get_objects()) - objects) < 10
    assert max(abs(now - then) for now, then in zip(counts(), before, strict=True)) < 10


def test_a_watch_that_its_parameters_refer_to_is_collected(module):
    """As a hook on a parameter refers to the optimizer."""
    optimizer = looked(module)
    died = []
    optimizer.params[0].hook = optimizer
    optimizer.state[optimizer.params[0]]["first"].canary = Canary(died)
    del optimizer
    gc.collect()
    assert died == [True]


class Canary:
    def __init__(self, died):
        self.died = died

    def __del__(self):
        self.died.append(True)
