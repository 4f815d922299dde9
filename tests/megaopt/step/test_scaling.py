"""A GradScaler where the step unscales, overflows, and the policies for what is not finite."""

import copy
import gc
import math
import weakref

import pytest
import torch
from bits import assert_same_bits
from handling import both_backends, both_modes
from runs import (
    BF16,
    FP32,
    MASTER,
    assert_same,
    assert_same_run,
    parameters,
    params_of,
    snapshot,
    values,
)

from megaopt import FusedAdam

SHAPES = [(3, 4), (), (0,), (5,), (40,)]


def made(options=MASTER, dtype=BF16, **others):
    """Two groups and, with an fp32 bias among the weights, two batches."""
    params = parameters(SHAPES, dtype)
    params[3] = torch.nn.Parameter(params[3].detach().float())
    groups = [{"params": params[:2], "lr": 0.02}, {"params": params[2:], "weight_decay": 0.1}]
    optimizer = FusedAdam(groups, **{**others, **options})
    optimizer.step_unscales = True
    return optimizer


def pair(backend, *arguments, nonfinite="propagate", **options):
    """On a backend and under a policy, and the plain one to compare with."""
    found = made(*arguments, backend=backend, nonfinite=nonfinite, **options)
    return found, made(*arguments, backend="reference", **options)


def give(optimizer, step, scale=1.0, bad=None, attribute="grad"):
    """The step's gradients, scaled; `bad` is put into the fp32 bias's, the smaller batch's."""
    for index, param in enumerate(params_of(optimizer)):
        grad = values(param.shape, 1000 * step + index).to(param.dtype) * scale
        if bad is not None and index == 3:
            grad[2] = bad
        setattr(param, attribute, grad)


def scaler_of(init_scale=2.0**10):
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)
    scaler.scale(torch.ones(()))  # which makes its tensors
    return scaler


def scaled_step(scaler, optimizer, step, bad=None, **arguments):
    give(optimizer, step, scaler.get_scale(), bad)
    scaler.step(optimizer, **arguments)
    scaler.update()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def plain_step(optimizer, step, **arguments):
    give(optimizer, step)
    optimizer.step(**arguments)


@both_backends
@both_modes
def test_an_overflow_at_the_very_first_step(backend, capturable):
    found, expected = pair(backend, capturable=capturable)
    weights, scaler = copy.deepcopy(snapshot(found)["weights"]), scaler_of()
    scaled_step(scaler, found, 0, math.inf)
    assert_same(snapshot(found)["weights"], weights)
    assert [int(group["step"]) for group in found.param_groups] == [0, 0]
    for step in range(2):
        scaled_step(scaler, found, step)
        plain_step(expected, step)
    assert_same_run(found, expected)


@both_backends
@both_modes
def test_unscaling_first_and_clipping_by_torch(backend, capturable):
    """grad_scale is None then, and what torch wrote into the gradients is what counts."""
    found, expected = pair(backend, {}, FP32, capturable=capturable)
    scaler = scaler_of()
    for step, bad in ((0, None), (1, math.inf), (2, None)):
        give(found, step, scaler.get_scale(), bad)
        scaler.unscale_(found)
        torch.nn.utils.clip_grad_norm_(params_of(found), 0.5)
        if bad is None:
            for ours, theirs in zip(params_of(found), params_of(expected), strict=True):
                theirs.grad = ours.grad.clone()
            expected.step()
        scaler.step(found)
        scaler.update()
    assert_same_run(found, expected)
    assert scaler.get_scale() == 2.0**9


@both_backends
def test_a_step_that_found_inf_leaves_out_measures_nothing(backend):
    found, scaler = made(backend=backend), scaler_of()
    scaled_step(scaler, found, 0, math.inf, clip_norm=0.5)
    with pytest.raises(RuntimeError, match=r"no step has measured the norm yet: .* found_inf"):
        _ = found.grad_norm
    scaled_step(scaler, found, 0, clip_norm=0.5)
    kept = found.grad_norm.clone()
    assert 0 < kept < math.inf
    scaled_step(scaler, found, 1, math.inf, clip_norm=0.5)
    assert_same_bits(found.grad_norm, kept)


@both_backends
def test_with_capturable_a_step_that_found_inf_leaves_out_is_measured(backend):
    found = made(capturable=True, backend=backend)
    scaled_step(scaler_of(), found, 0, math.inf, clip_norm=0.5)
    assert found.grad_norm == math.inf


@both_backends
def test_a_scale_that_is_no_power_of_two(backend):
    """Unscaling is one product with the correctly rounded reciprocal."""
    found, expected = pair(backend, {}, FP32)
    scale = torch.tensor(3.0)
    inverse = torch.tensor(1 / 3)  # rounded to fp64, then to fp32: as once
    for step in range(3):
        give(found, step, 3.0)
        give(expected, step, 3.0)
        for param in params_of(expected):
            param.grad *= inverse
        found.grad_scale, found.found_inf = scale, torch.zeros(())
        found.step()
        expected.step()
    assert_same_run(found, expected)


@both_backends
@both_modes
def test_a_scaler_for_several_optimizers(backend, capturable):
    """Each one's overflow is its own; the scale backs off for both."""
    pair = [made(capturable=capturable, backend=backend) for _ in range(2)]
    expected = made(capturable=capturable, backend="reference")
    scaler = scaler_of()
    give(pair[0], 0, 1024.0, math.inf)
    give(pair[1], 0, 1024.0)
    untouched = snapshot(pair[0])
    for optimizer in pair:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    plain_step(expected, 0)
    assert_same_run(pair[1], expected)
    assert_same(snapshot(pair[0])["weights"], untouched["weights"])


@both_backends
@both_modes
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_overflows_in_decoupled_gradients_are_found(backend, capturable, bad):
    """A GradScaler looks at p.grad alone, which is finite here."""
    found, expected = pair(backend, capturable=capturable, use_decoupled_grad=True)
    scaler = scaler_of()
    for step, value in ((0, None), (1, bad), (1, None)):
        give(found, 99, 1.0)
        give(found, step, 1024.0, value, attribute="decoupled_grad")
        before = snapshot(found)
        scaler.step(found)
        scaler.update(2.0**10)
        if value is not None:
            assert_same(snapshot(found), before)
            continue
        give(expected, step, attribute="decoupled_grad")
        expected.step()
    assert_same_run(found, expected)


# --- nonfinite

PLACES = {"the first batch": (0, (1, 2)), "a scalar": (1, ()), "the other batch": (3, (4,))}


def put(optimizer, place, bad):
    index, where = place
    params_of(optimizer)[index].grad[where] = bad


@both_backends
@both_modes
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.sample(4)
@pytest.mark.thirds
def test_skip_leaves_the_step_out(place, bad, capturable, backend):
    found, expected = pair(backend, nonfinite="skip", capturable=capturable)
    plain_step(found, 0)
    plain_step(expected, 0)
    before = snapshot(found)
    give(found, 1)
    put(found, place, bad)
    closure_loss = torch.tensor(1.5)
    assert found.step(lambda: closure_loss) is closure_loss
    assert_same(snapshot(found), before)
    assert not found.grad_norm.isfinite()
    plain_step(found, 1)
    plain_step(expected, 1)
    assert_same_run(found, expected)


@both_backends
@pytest.mark.parametrize("steps", [0, 2], ids=["at_the_first_step", "later"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.sample(4)
@pytest.mark.thirds
def test_error_raises_before_anything_changed(place, bad, steps, backend):
    found, expected = pair(backend, nonfinite="error")
    for step in range(steps):
        plain_step(found, step)
        plain_step(expected, step)
    before = snapshot(found)
    give(found, steps)
    put(found, place, bad)
    with pytest.raises(FloatingPointError, match="gradients must be finite with nonfinite='error'"):
        found.step()
    if steps:
        assert_same(snapshot(found), before)
    assert_same(snapshot(found)["weights"], before["weights"])
    assert_same(snapshot(found)["groups"], before["groups"])
    plain_step(found, steps)
    plain_step(expected, steps)
    assert_same_run(found, expected)


@both_backends
@both_modes
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_propagate_goes_through_the_arithmetic(bad, capturable, backend):
    found = made({}, FP32, nonfinite="propagate", capturable=capturable, backend=backend)
    give(found, 0)
    put(found, PLACES["the first batch"], bad)
    found.step()
    weight = params_of(found)[0]
    assert weight.isnan().nonzero().tolist() == [[1, 2]]
    assert [int(group["step"]) for group in found.param_groups] == [1, 1]


@both_backends
@pytest.mark.parametrize("policy", ["skip", "error"])
def test_large_but_finite_gradients_are_stepped(policy, backend):
    """Their norm is too large for fp32, which is no infinity among them."""
    found, expected = made({}, FP32, nonfinite=policy, backend=backend), made({}, FP32)
    for optimizer in (found, expected):
        give(optimizer, 0, 1e38)
        optimizer.step()
    assert_same_run(found, expected)
    assert found.grad_norm == math.inf


@both_backends
@pytest.mark.parametrize(
    ("policy", "capturable"), [("skip", False), ("skip", True), ("error", False)]
)
def test_policies_beside_a_scaler(backend, policy, capturable):
    """The scaler's overflow comes first: it skips, whatever the policy."""
    found, expected = pair(backend, nonfinite=policy, capturable=capturable)
    scaler = scaler_of()
    for step, bad in ((0, None), (1, math.inf), (1, None)):
        scaled_step(scaler, found, step, bad)
        if bad is None:
            plain_step(expected, step)
    assert_same_run(found, expected)
    assert scaler.get_scale() == 2.0**9


@both_backends
def test_error_beside_a_scaler_raises_for_decoupled_gradients(backend):
    """The scaler has not seen them and would not lower its scale."""
    optimizer = made(nonfinite="error", backend=backend, use_decoupled_grad=True)
    scaler = scaler_of()
    give(optimizer, 0, 1024.0)
    give(optimizer, 0, 1024.0, math.inf, attribute="decoupled_grad")
    with pytest.raises(FloatingPointError, match="nonfinite='error'"):
        scaler.step(optimizer)


@both_backends
@both_modes
def test_a_skipped_step_of_tensors_that_are_not_contiguous(backend, capturable):
    def build(name, **options):
        weight = torch.nn.Parameter(values((4, 3), 1).t())
        return FusedAdam([weight], capturable=capturable, backend=name, **options)

    found, expected = build(backend, nonfinite="skip"), build("reference")
    for step in range(2):
        grad = values((4, 3), 10 + step).t()
        for bad in (True, False):
            (weight,) = params_of(found)
            weight.grad = grad.clone(memory_format=torch.preserve_format)
            if bad:
                weight.grad[1, 1] = math.nan
            found.step()
        params_of(expected)[0].grad = grad
        expected.step()
    assert_same_run(found, expected)


@both_modes
def test_a_skipped_step_holds_no_gradient_back(capturable):
    """Tensors that are not contiguous are stepped as copies, beside which the gradient lies."""
    weight = torch.nn.Parameter(values((4, 3), 1).t())
    optimizer = FusedAdam(
        [weight], capturable=capturable, backend="triton", nonfinite="skip", **MASTER
    )
    weight.grad = torch.full((3, 4), math.nan)
    optimizer.step()
    gone = weakref.ref(weight.grad)
    weight.grad = None
    gc.collect()
    assert gone() is None
