"""write_unscaled_grads: unscaled gradients take the place of the scaled ones, and nothing else."""

import math

import pytest
import torch
from bits import assert_same_bits
from handling import both_backends, both_modes, refused
from runs import BF16, FORMATS, FP16, FP32, MASTER, assert_same_run, parameters, params_of, values

from megaopt import FusedAdam
from megaopt.float8 import RECIPES, Float8Weight

SHAPES = [(3, 4), (), (0,), (5,), (40,)]
WRITES = {"write_unscaled_grads": True}
NAN = {FP32: (torch.int32, 0x7FC00000), BF16: (torch.int16, 0x7FC0), FP16: (torch.int16, 0x7E00)}


def unscaled(grad, scale):
    """By fp64: the reciprocal and the product of two fp32 numbers, each rounded to fp32 once."""
    inverse = (1 / torch.tensor(scale, dtype=torch.float64)).float()
    found = (grad.double() * inverse.double()).float().to(grad.dtype)
    integer, pattern = NAN[grad.dtype]
    return torch.where(found.isnan(), pattern, found.view(integer)).view(grad.dtype)


def give(optimizer, step, scale, dtype=None, attribute="grad"):
    """Scaled gradients; copies of them are returned."""
    given = []
    for index, param in enumerate(params_of(optimizer)):
        grad = values(param.shape, 1000 * step + index) * scale
        setattr(param, attribute, grad.to(dtype or param.dtype))
        given.append(getattr(param, attribute).clone())
    return given


def scaled(optimizer, scale, **arguments):
    """A step as a GradScaler asks for it."""
    optimizer.grad_scale = torch.tensor(scale)
    optimizer.step(**arguments)
    optimizer.grad_scale = None


def assert_grads(optimizer, expected, attribute="grad"):
    for index, (param, grad) in enumerate(zip(params_of(optimizer), expected, strict=True)):
        assert_same_bits(getattr(param, attribute), grad, f"gradient {index}")


@both_backends
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.sample(2)
@pytest.mark.thirds
def test_gradients_are_unscaled_and_the_step_is_what_it_was(options, backend):
    """Also where a tensor is worked through twice, for its scales."""
    made = {"backend": backend, **options}
    found = FusedAdam(parameters(SHAPES), **made, **WRITES)
    expected = FusedAdam(parameters(SHAPES), **made)
    for step in range(2):
        given = give(found, step, 3.0)
        give(expected, step, 3.0)
        scaled(found, 3.0)
        scaled(expected, 3.0)
        assert_grads(found, [unscaled(grad, 3.0) for grad in given])
        assert_grads(expected, given)
        assert_same_run(found, expected)


@both_backends
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("scale", [3.0, 2.0**-20, 2.0**16])
def test_each_dtype_is_rounded_once_and_nan_is_canonical(scale, dtype, backend):
    special = [math.inf, -math.inf, math.nan, -0.0, 1e-41, 3e38, 1e-7, 65504.0, -1.0, 1 / 3]
    (param,) = parameters([(len(special),)], FP32)
    optimizer = FusedAdam([param], use_decoupled_grad=True, backend=backend, **WRITES)
    param.decoupled_grad = torch.tensor(special).to(dtype)
    expected = unscaled(param.decoupled_grad, scale)
    scaled(optimizer, scale)
    assert_grads(optimizer, [expected], "decoupled_grad")


@both_backends
@both_modes
def test_a_grad_scaler_that_steps_has_unscaled_gradients_behind_it(capturable, backend):
    """At an overflow those that it gave."""
    optimizer = FusedAdam(parameters(SHAPES), capturable=capturable, backend=backend, **WRITES)
    optimizer.step_unscales = True
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    for overflow in (True, False):
        give(optimizer, 0, 1024.0)
        params_of(optimizer)[3].grad[2] = math.inf if overflow else 1.0
        given = [param.grad.clone() for param in params_of(optimizer)]
        scaler.step(optimizer)
        scaler.update(1024.0)
        assert_grads(optimizer, given if overflow else [unscaled(g, 1024.0) for g in given])


@both_backends
@both_modes
def test_without_a_scale_gradients_stay(capturable, backend):
    """Clipping alone does not write, nor does it show in what unscaling writes."""
    optimizer = FusedAdam(parameters(SHAPES), capturable=capturable, backend=backend, **WRITES)
    given = give(optimizer, 0, 1.0)
    optimizer.step(clip_norm=0.01)
    assert_grads(optimizer, given)
    given = give(optimizer, 1, 3.0)
    scaled(optimizer, 3.0, clip_norm=0.01)
    assert_grads(optimizer, [unscaled(grad, 3.0) for grad in given])


@both_backends
@pytest.mark.parametrize("options", [MASTER, FORMATS["fp16_moments"]], ids=["fp32", "scaled"])
def test_gradients_that_are_not_contiguous(options, backend):
    optimizer = FusedAdam(parameters([(6, 5), (4, 7)]), backend=backend, **options, **WRITES)
    for step in range(2):
        given = give(optimizer, step, 3.0)
        for param in params_of(optimizer):
            param.grad = param.grad.t().contiguous().t()
        assert not params_of(optimizer)[0].grad.is_contiguous()
        scaled(optimizer, 3.0)
        assert_grads(optimizer, [unscaled(grad, 3.0) for grad in given])


@both_backends
@pytest.mark.parametrize("recipe", ["delayed", "current", "block_128x128", "mxfp8"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_fp8_weights(recipe, transposed, backend):
    weight = Float8Weight.from_values(values((130, 40), 0, BF16), RECIPES[recipe])
    optimizer = FusedAdam([torch.nn.Parameter(weight)], backend=backend, **MASTER, **WRITES)
    (given,) = give(optimizer, 0, 3.0)
    (param,) = params_of(optimizer)
    if transposed:
        param.grad = param.grad.t().contiguous().t()
    scaled(optimizer, 3.0)
    assert_grads(optimizer, [unscaled(given, 3.0)])


def shared(grads):
    grads[1] = grads[0]


def expanded(grads):
    grads[1] = torch.ones(1, dtype=BF16).expand(4)


def inference(grads):
    with torch.inference_mode():
        grads[1] = torch.ones(4, dtype=BF16)


REFUSED = {
    "shared": (shared, r"memory of its own, got that of parameter 0 of group 0's"),
    "expanded": (expanded, r"memory of its own for each element, got strides \(0,\) of shape"),
    "inference": (inference, r"be no inference tensor, got one"),
}


@both_backends
@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_gradients_that_cannot_be_written_are_refused(change, message, backend):
    """Before anything is changed; without a scale they are read as ever."""
    optimizer = FusedAdam(parameters([(4,), (4,)]), backend=backend, **WRITES)
    give(optimizer, 0, 1.0)
    optimizer.step()
    params = params_of(optimizer)
    grads = [values((4,), 5, BF16), None]
    change(grads)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    given = [grad.clone() for grad in grads]
    with refused(optimizer, f"parameter 1 of group 0: .*gradient must {message}|{message}"):
        scaled(optimizer, 3.0)
    optimizer.grad_scale = None
    assert_grads(optimizer, given)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2
