"""What a step refuses before it writes anything; gradients that are not what their memory says."""

import contextlib
import copy
import importlib

import pytest
import torch
from handling import both_backends, refused, train_all
from runs import (
    BF16,
    FP32,
    MASTER,
    assert_same,
    assert_same_run,
    give_gradients,
    parameters,
    params_of,
    train,
    values,
)
from torch.testing._internal.two_tensor import TwoTensor

from megaopt import FusedAdam, GaLoreAdamW
from megaopt.float8 import RECIPES, Float8Weight
from megaopt.integration import torchao

SHAPES = [(3, 4), (5,), (6,)]


def optimizer_of(backend="reference", **options):
    optimizer = FusedAdam(parameters(SHAPES), backend=backend, **{**MASTER, **options})
    train(optimizer, 2)
    give_gradients(optimizer.param_groups[0]["params"], 2)
    return optimizer


def assert_refused(optimizer, message):
    with refused(optimizer, message):
        optimizer.step()


def inference(tensor):
    with torch.inference_mode():
        return tensor.detach().clone()


# --- memory that a step cannot write


UNWRITABLE = {
    **{
        f"{name} made in inference mode": (name, inference, "must be .*inference_mode")
        for name in ("exp_avg", "exp_avg_sq", "master_param")
    },
    **{
        f"{name} expanded": (
            name,
            lambda own: torch.ones(1).expand(3, 4),
            "must have memory of its own for each element, got strides",
        )
        for name in ("exp_avg", "master_param")
    },
    "strides that overlap without a zero": (
        "exp_avg",
        lambda own: torch.zeros(6).as_strided((3, 4), (1, 1)),
        "must have memory of its own for each element, got strides",
    ),
}


@pytest.mark.sample(2)
@both_backends
@pytest.mark.parametrize(("name", "change", "message"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_state_that_cannot_be_written(backend, name, change, message):
    optimizer = optimizer_of(backend)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state[name] = change(state[name])
    optimizer.param_groups[0]["params"][1].grad = None  # so that the state is looked at anew
    assert_refused(optimizer, f"parameter 0 of group 0: state '{name}' {message}")


@both_backends
def test_a_parameter_made_in_inference_mode(backend):
    good = parameters([(3,)])[0]
    with torch.inference_mode():
        bad = torch.nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = FusedAdam([good, bad], backend=backend, **MASTER)
    good.grad = torch.ones_like(good)
    with torch.inference_mode():
        bad.grad = torch.ones(3, dtype=BF16)
    assert_refused(optimizer, "parameter 1 of group 0: weight must be .*inference_mode")


@both_backends
def test_a_step_within_inference_mode_makes_state_that_may_be_written_later(backend):
    optimizer, plain = (FusedAdam(parameters(SHAPES), backend=backend, **MASTER) for _ in range(2))
    give_gradients(optimizer.param_groups[0]["params"], 0)
    with torch.inference_mode():
        optimizer.step()
    train(plain, 1)
    train_all((optimizer, plain), 1, first=1)
    assert_same_run(optimizer, plain)


# what a step, a constructor, a new group and a load make for later steps to write

KEPT = {
    "capturable": (FusedAdam, {"capturable": True}, {}),
    "capturable, counts apart": (FusedAdam, {"capturable": True, "step_counts": "parameter"}, {}),
    "clipped": (FusedAdam, {}, {"clip_norm": 0.5}),
    "nonfinite": (FusedAdam, {"nonfinite": "skip"}, {}),
    "capturable, clipped": (FusedAdam, {"capturable": True}, {"clip_norm": 0.5}),
    "galore": (GaLoreAdamW, {"rank": 2, "update_proj_gap": 1, "capturable": True}, {}),
    "torchao": (torchao.AdamW8bit, {}, {}),
}
WITHIN = ("construct", "add", "initialize", "load", "step", "later step")


def run_within(which, kind, options, arguments):
    """A run of which one part is within inference mode; None for no part."""

    def part(name):
        return torch.inference_mode() if name == which else contextlib.nullcontext()

    first, *others = parameters(SHAPES)
    with part("construct"):
        optimizer = kind([first], lr=0.02, weight_decay=0.1, **options)
    with part("load"):
        optimizer.load_state_dict(kind([first], lr=0.02, **options).state_dict())
    with part("add"):
        optimizer.add_param_group({"params": others})
    with part("initialize"):
        optimizer.initialize_states()
    for step in range(4):
        give_gradients(params_of(optimizer), step)
        with part("step" if step == 0 else "later step" if step == 2 else ""):
            optimizer.step(**arguments)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(0.01)  # as a schedule does
    return optimizer


@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("triton", marks=pytest.mark.sample(3))]
)
@pytest.mark.parametrize(("kind", "options", "arguments"), KEPT.values(), ids=KEPT)
def test_what_is_made_within_inference_mode_may_be_written_later(kind, options, arguments, backend):
    if kind is not torchao.AdamW8bit:  # which has no such argument
        options = {**options, "backend": backend}
    expected = run_within(None, kind, options, arguments)
    # what the others make is the same beside the kernels, which the interpreter takes long for
    for which in WITHIN if backend == "reference" else ("step", "later step"):
        assert_same_run(run_within(which, kind, options, arguments), expected)


@pytest.mark.sample(6)
@both_backends
@pytest.mark.parametrize("recipe", RECIPES)
def test_so_may_what_fp8_weights_need(recipe, backend):
    runs = []
    for first in (torch.inference_mode, contextlib.nullcontext):
        weight = torch.nn.Parameter(Float8Weight.from_values(values((40, 128), 3, BF16), recipe))
        optimizer = FusedAdam([weight], lr=0.1, dtype=FP32, backend=backend)
        for step, within in enumerate((first, contextlib.nullcontext)):
            weight.grad = values((40, 128), 10 + step, BF16)
            with within():
                optimizer.step()
        runs.append([weight.dequantize(), optimizer.state[weight]["master_param"]])
    assert_same(*runs)


@both_backends
def test_a_step_count_made_in_inference_mode_is_refused_where_it_is_put_into_a_group(backend):
    optimizer = optimizer_of(backend, capturable=True)
    optimizer.param_groups[0]["step"] = inference(optimizer.param_groups[0]["step"])
    assert_refused(optimizer, "group 0: step must be a tensor that may be written, .*inference")


# --- memory that is written twice


def shared_weights():
    memory = values((9,), 0, BF16)
    return [torch.nn.Parameter(memory[:5]), torch.nn.Parameter(memory[4:])]


def interleaved(gap):
    """Two columns of one matrix; with a gap of 1 they share elements."""
    memory = values((6, 4), 0, BF16)
    return [torch.nn.Parameter(memory[:, :2]), torch.nn.Parameter(memory[:, gap : gap + 2])]


@both_backends
@pytest.mark.parametrize(
    "params", [shared_weights, lambda: interleaved(1)], ids=["rows", "columns"]
)
def test_parameters_that_share_elements(backend, params):
    optimizer = FusedAdam(params(), backend=backend, **MASTER)
    give_gradients(optimizer.param_groups[0]["params"], 0)
    assert_refused(optimizer, r"must have memory of its own, got memory shared with parameter")


@both_backends
def test_parameters_that_share_a_storage_and_no_element(backend):
    memory = values((10,), 1, BF16)
    params = [*interleaved(2), torch.nn.Parameter(memory[:5]), torch.nn.Parameter(memory[5:])]
    alone = [torch.nn.Parameter(param.detach().clone().contiguous()) for param in params]
    found, expected = (FusedAdam(own, backend=backend, **MASTER) for own in (params, alone))
    train_all((found, expected), 2)
    assert_same(params, alone)


@both_backends
def test_one_tensor_as_two_states(backend):
    optimizer = optimizer_of(backend)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["exp_avg_sq"] = state["exp_avg"]
    optimizer.param_groups[0]["params"][1].grad = None
    assert_refused(optimizer, "'exp_avg_sq' must have memory of its own, got memory shared")


# --- gradients that are not what their memory says


def negated(tensor):
    """The same numbers; the memory has the other sign."""
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


@both_backends
@pytest.mark.parametrize("decoupled", [False, True], ids=["grad", "decoupled_grad"])
def test_a_pending_negation_counts(backend, decoupled):
    found, expected = (
        FusedAdam(parameters(SHAPES, FP32), backend=backend, use_decoupled_grad=decoupled)
        for _ in range(2)
    )
    for step in range(3):
        for optimizer in (found, expected):
            for index, param in enumerate(optimizer.param_groups[0]["params"]):
                grad = values(param.shape, 10 * step + index)
                assert negated(grad).is_neg()
                own = negated(grad) if optimizer is found and index != step else grad
                setattr(param, "decoupled_grad" if decoupled else "grad", own)
            optimizer.step()
    assert_same_run(found, expected)


@both_backends
def test_a_weight_with_a_pending_negation_is_refused(backend):
    param = torch.nn.Parameter(negated(values((3,), 0)))
    optimizer = FusedAdam([param], backend=backend)
    param.grad = values((3,), 1)
    assert_refused(optimizer, "weight must be a tensor of its own values, .*resolve_neg")


@both_backends
def test_a_wrapper_is_refused_by_name(backend):
    optimizer = optimizer_of(backend)
    param = optimizer.param_groups[0]["params"][1]
    param.grad = TwoTensor(param.grad.clone(), param.grad.clone())
    assert_refused(optimizer, "parameter 1 of group 0: a gradient must be a plain .* got TwoTensor")


@both_backends
@pytest.mark.parametrize("decoupled", [False, True], ids=["grad", "decoupled_grad"])
def test_a_gradient_that_a_collective_still_writes_is_waited_for(backend, decoupled):
    collectives = importlib.import_module("torch.distributed._functional_collectives")
    name = "decoupled_grad" if decoupled else "grad"
    found, expected = (
        FusedAdam(parameters(SHAPES), backend=backend, use_decoupled_grad=decoupled, **MASTER)
        for _ in range(2)
    )
    for step in range(2):
        for optimizer in (found, expected):
            params = optimizer.param_groups[0]["params"]
            give_gradients(params, step)
            for param in params:
                grad, param.grad = param.grad, None
                own = collectives.AsyncCollectiveTensor(grad) if optimizer is found else grad
                setattr(param, name, own)
            optimizer.step()
        assert type(getattr(found.param_groups[0]["params"][0], name)) is torch.Tensor
    assert_same_run(found, expected)


def test_a_deep_copy_of_a_step_that_was_refused_steps_on():
    """The refusal left nothing behind that a later step would stumble over."""
    optimizer = optimizer_of()
    param = optimizer.param_groups[0]["params"][1]
    kept, param.grad = param.grad, TwoTensor(param.grad.clone(), param.grad.clone())
    with pytest.raises(ValueError, match="TwoTensor"):
        optimizer.step()
    param.grad = kept
    expected = optimizer_of()
    copied = copy.deepcopy(optimizer)
    for own in (optimizer, expected):
        own.step()
    assert_same_run(optimizer, expected)
    assert copied.param_groups[0]["step"] == 2
