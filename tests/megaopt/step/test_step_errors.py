"""Bad gradients and states are refused by the step, by name, and nothing has changed."""

import warnings

import pytest
import torch
import torch.distributed as dist
from handling import both_backends, refused, train_all
from one_rank import group_of_one
from runs import BF16, FP16, MASTER, assert_same, give_gradients, parameters, snapshot, train
from torch.distributed.tensor import Shard, distribute_tensor

from megaopt import FusedAdam, FusedMuon, GaLoreAdamW

SHAPES = [(3, 4), (5,)]

# --- gradients


def nested():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*of nested tensors is in prototype", UserWarning)
        return torch.nested.nested_tensor([torch.ones(5, dtype=BF16)])


GRADS = {
    "sparse": (
        lambda p: torch.ones(p.shape, dtype=BF16).to_sparse(),
        r"layout must be torch.strided, got torch.sparse_coo",
    ),
    "complex": (lambda p: torch.ones(p.shape, dtype=torch.complex64), r"dtype .*torch.complex64"),
    "fp64": (
        lambda p: torch.ones(p.shape, dtype=torch.float64),
        r"dtype must be one of .*float32.*, got torch.float64",
    ),
    "integers": (lambda p: torch.ones(p.shape, dtype=torch.int64), r"dtype .*, got torch.int64"),
    "longer": (lambda p: torch.ones(6, dtype=BF16), r"shape .*\(5,\), got \(6,\)"),
    "shorter": (lambda p: torch.ones(4, dtype=BF16), r"shape .*\(5,\), got \(4,\)"),
    "one_for_all": (lambda p: torch.ones(1, dtype=BF16), r"shape .*\(5,\), got \(1,\)"),
    "two_dimensional": (lambda p: torch.ones(1, 5, dtype=BF16), r"shape .*\(5,\), got \(1, 5\)"),
    "meta": (lambda p: torch.ones(5, device="meta"), r"device .*the parameter's, cpu, got meta"),
    "nested": (lambda p: nested(), r"layout must be torch.strided, got nested"),
}


@both_backends
@pytest.mark.parametrize("steps", [0, 2], ids=["at_the_first_step", "later"])
@pytest.mark.parametrize(("bad", "message"), GRADS.values(), ids=GRADS)
@pytest.mark.sample(2)
@pytest.mark.thirds
def test_gradients_that_cannot_be_read_are_refused(backend, steps, bad, message):
    """Twice: a refusal must not make the next step trust the tensor; then a good step goes on."""
    params, same = parameters(SHAPES), parameters(SHAPES)
    found = FusedAdam(params, backend=backend, use_decoupled_grad=True, **MASTER)
    expected = FusedAdam(same, backend="reference", use_decoupled_grad=True, **MASTER)

    def give(own, step):
        for param in own:
            param.decoupled_grad = torch.full(param.shape, 0.5 + step, dtype=BF16)

    for step in range(steps):
        give(params, step)
        give(same, step)
        found.step()
        expected.step()
    give(params, steps)
    params[1].decoupled_grad = bad(params[1])
    for _ in range(2):
        with refused(found, "parameter 1 of group 0: the gradient's " + message):
            found.step()
    give(params, steps)
    give(same, steps)
    found.step()
    expected.step()
    assert_same(snapshot(found), snapshot(expected))


def test_a_sparse_gradient_of_an_embedding_is_refused():
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = FusedAdam([("table", embedding.weight)])
    embedding(torch.tensor([1, 2])).sum().backward()
    with refused(optimizer, r"parameter 'table': the gradient's layout must .* torch.sparse_coo"):
        optimizer.step()


@both_backends
def test_a_sparse_gradient_of_a_transposed_weight_is_refused(backend):
    param = torch.nn.Parameter(torch.ones(3, 4).t())
    optimizer = FusedAdam([param], backend=backend)
    train(optimizer, 1)
    param.grad = torch.ones(4, 3).to_sparse()
    with refused(optimizer, r"the gradient's layout must be .*, got torch.sparse_coo"):
        optimizer.step()


# --- states that someone replaced

STATES = {
    "another_dtype": ("exp_avg", lambda t: t.to(BF16), r"torch.bfloat16 of shape .*torch.float32"),
    "another_width": ("exp_avg_sq", lambda t: t.double(), r"torch.float64 of shape"),
    "another_size": ("exp_avg", lambda t: t[:3], r"\(3,\).*allowed: .*\(5,\)"),
    "another_shape": ("exp_avg_sq", lambda t: t.clone()[None], r"\(1, 5\).*allowed: .*\(5,\)"),
    "another_view": ("exp_avg_sq", lambda t: t.view(1, 5), r"\(1, 5\).*allowed: .*\(5,\)"),
    "another_device": ("exp_avg", lambda t: t.to("meta"), r"on meta; allowed: .*on cpu"),
    "no_master": ("master_param", lambda t: t.to(BF16), r"torch.bfloat16.*allowed: torch.float32"),
    "a_scale_of_another_dtype": ("exp_avg_scale", lambda t: t.double(), r"torch.float64"),
    "a_number": ("exp_avg", lambda t: 0.5, "Tensor"),
    "a_list": ("exp_avg", lambda t: t.tolist(), "Tensor"),
}


@pytest.mark.usefixtures("looks")
@both_backends
@pytest.mark.parametrize(("name", "change", "message"), STATES.values(), ids=STATES)
def test_states_replaced_by_other_ones_are_refused(backend, name, change, message):
    scaled = {"exp_avg_dtype": FP16} if name == "exp_avg_scale" else {}
    optimizer = FusedAdam(parameters(SHAPES), backend=backend, **MASTER, **scaled)
    train(optimizer, 2)
    param = optimizer.param_groups[0]["params"][1]
    good, before = optimizer.state[param][name], snapshot(optimizer)
    optimizer.state[param][name] = change(good)
    message = f"parameter 1 of group 0: state '{name}' is .*{message}"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            train(optimizer, 1, first=2)
    optimizer.state[param][name] = good
    assert_same(snapshot(optimizer), before)
    train(optimizer, 1, first=2)


def test_a_refused_first_step_makes_no_state():
    """Not of the parameters before the one that is refused either."""
    params = parameters(SHAPES)
    optimizer = FusedAdam(params, **MASTER)
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(5, dtype=BF16)
    with refused(optimizer, "parameter 1 of group 0: state 'exp_avg'"):
        train(optimizer, 1)


# --- closures


@pytest.mark.parametrize("closure", [1.0, "loss", torch.ones(())])
def test_a_closure_that_is_no_function_is_refused(closure):
    """As a loss, or a learning rate, in its place."""
    optimizer = FusedAdam(parameters())
    train(optimizer, 1)
    message = "closure must be None or a function that gives the loss, got "
    with refused(optimizer, message, TypeError):
        optimizer.step(closure)


def test_the_closures_error_changes_nothing():
    optimizer = FusedAdam(parameters(SHAPES))
    give_gradients(optimizer.param_groups[0]["params"], 0)

    def closure():
        raise KeyError("the data ran out")

    with refused(optimizer, "the data ran out", KeyError):
        optimizer.step(closure)


# --- what a GradScaler sets, clip_coefficient, and what is put into a group

NO_SCALE = (
    r"grad_scale must be None or a plain tensor of one number .*, as a GradScaler sets it, got "
)
NO_INF = r"found_inf must be None, 0 or a plain tensor of one number .*, got "
NO_COEFFICIENT = (
    r"clip_coefficient must be one element of torch.float32, .*, in a plain tensor, got "
)
NO_NUMBER = {
    "text": (lambda: "x", "'x'"),
    "number": (lambda: 0.5, "0.5"),
    "True": (lambda: True, "True"),
    "two elements": (lambda: torch.ones(2), r"a torch.float32 tensor of shape \(2,\) on cpu"),
    "no element": (lambda: torch.ones(0), r"a torch.float32 tensor of shape \(0,\) on cpu"),
    "meta": (lambda: torch.ones((), device="meta"), r"a torch.float32 tensor .* on meta"),
    "sparse": (lambda: torch.ones(1).to_sparse(), "tensor"),
    "complex": (lambda: torch.tensor(1j), "tensor"),
    "nested": (nested, "a nested torch.bfloat16 tensor on cpu"),
}


@both_backends
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("value", "shown"), NO_NUMBER.values(), ids=NO_NUMBER)
@pytest.mark.sample(2)
@pytest.mark.thirds
def test_numbers_of_the_device_that_are_none_are_refused(value, shown, steps, backend):
    optimizer = FusedAdam(parameters(SHAPES), backend=backend, **MASTER)
    train(optimizer, steps)
    give_gradients(optimizer.param_groups[0]["params"], steps)
    for name, message in {"grad_scale": NO_SCALE, "found_inf": NO_INF}.items():
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
        setattr(optimizer, name, value())
        with refused(optimizer, f"^{message}{shown}"):
            optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
    with refused(optimizer, f"^{NO_COEFFICIENT}{shown}"):
        optimizer.step(clip_coefficient=value())
    train(optimizer, 1, first=steps)


@pytest.mark.parametrize(
    "found_inf", [None, 0, torch.tensor(0), torch.zeros(1), torch.tensor([False])]
)
def test_what_a_scaler_may_set_is_taken(found_inf):
    found, expected = (FusedAdam(parameters(SHAPES), **MASTER) for _ in range(2))
    found.grad_scale, found.found_inf = torch.ones(()), found_inf
    train_all((found, expected), 2)
    assert_same(snapshot(found), snapshot(expected))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"dtype": None}], ids=str)
@pytest.mark.parametrize("junk", ["x", None, 3, [torch.ones(2)]], ids=str)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.sample(4)
@pytest.mark.thirds
def test_what_is_no_tensor_among_the_parameters_is_refused(place, junk, options, steps):
    """Put into a group behind torch's back, in a parameter's place or behind them."""
    optimizer = FusedAdam(parameters(SHAPES), **{**MASTER, **options})
    train(optimizer, steps)
    own = optimizer.param_groups[0]["params"]
    give_gradients(own, steps)
    before, kept = snapshot(optimizer), list(own)
    own[place : place + 1] = [junk]
    message = f"^parameter {place} of group 0 must be a tensor, got"
    for name in ("step", "state_dict", "initialize_states", "refresh_masters"):
        with pytest.raises(ValueError, match=message):
            getattr(optimizer, name)()
    own[:] = kept
    assert_same(snapshot(optimizer), before)
    train(optimizer, 1, first=steps)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("make", [FusedAdam, GaLoreAdamW, FusedMuon])
@pytest.mark.parametrize("junk", [5, None, torch.ones(2, 2), "xy", {1: 2}], ids=str)
@pytest.mark.sample(3)
def test_what_is_no_list_of_parameters_is_refused(junk, make, steps):
    optimizer = make(parameters(SHAPES), dtype=torch.float32)
    train(optimizer, steps)
    before, group = snapshot(optimizer), optimizer.param_groups[0]
    kept = group["params"]
    give_gradients(kept, steps)
    group["params"] = junk
    for name in ("step", "state_dict", "initialize_states", "refresh_masters"):
        with pytest.raises(ValueError, match=r"^group 0: params must be a list of tensors"):
            getattr(optimizer, name)()
    group["params"] = kept
    assert_same(snapshot(optimizer), before)
    train(optimizer, 1, first=steps)


def test_a_parameter_that_its_groups_names_do_not_reach_has_its_place_for_a_name():
    (named,) = parameters([(3,)])
    optimizer = FusedAdam([("a", named)], **MASTER)
    optimizer.param_groups[0]["params"].append(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^parameter 1 of group 0: dtype must .* torch.int64"):
        optimizer.initialize_states()


def test_a_dtensors_first_step_names_an_lr_that_is_none(tmp_path):
    """Ranks look at it before they check it, as one of 0 may be a checkpoint's question."""
    with group_of_one("gloo", tmp_path):
        whole = distribute_tensor(torch.ones(4, 4), dist.init_device_mesh("cpu", (1,)), [Shard(0)])
        param = torch.nn.Parameter(whole)
        param.grad = whole
        optimizer = FusedAdam([param], lr=0.1)
        optimizer.param_groups[0]["lr"] = [1]
        with pytest.raises(ValueError, match=r"group 0: lr must be a finite number .*, got \[1\]"):
            optimizer.step()
