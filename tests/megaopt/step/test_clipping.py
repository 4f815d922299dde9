"""clip_norm and clip_coefficient: the norm's definition, the coefficient's, then a plain step."""

import copy
import itertools
import math
import re

import pytest
import torch
from bits import assert_same_bits
from handling import both_backends, both_modes, refused
from norm_oracle import oracle_counts, oracle_norm
from runs import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    MASTER,
    REMAINDERS,
    assert_same,
    assert_same_run,
    give_gradients,
    parameters,
    params_of,
    snapshot,
    values,
)

from megaopt import FusedAdam


def norm_of(tensors):
    """The norm of all elements of the tensors, fp32, NaN and infinity included."""
    values = torch.cat([tensor.detach().flatten().float().cpu() for tensor in tensors])
    if bool(values.isnan().any()):
        return torch.tensor(math.nan)
    if bool(values.isinf().any()):
        return torch.tensor(math.inf)
    return oracle_norm(oracle_counts(values))


SHAPES = [(3, 4), (), (0,), (5,), (300,)]
SETTINGS = {"lr": 0.02, "weight_decay": 0.1}
every_format = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)


def made(options=MASTER, params=None, **others):
    """An optimizer of decoupled gradients, which may be fp32 beside any weight."""
    params = parameters(SHAPES) if params is None else params
    return FusedAdam(params, use_decoupled_grad=True, **{**SETTINGS, **others, **options})


def grads_of(step, dtype=FP32, shapes=SHAPES, factor=1.0):
    return [
        (values(shape, 1000 * step + index) * factor).to(dtype)
        for index, shape in enumerate(shapes)
    ]


def give(optimizer, grads):
    for param, grad in zip(params_of(optimizer), grads, strict=True):
        param.decoupled_grad = grad


def coefficient_of(norm, clip_norm):
    """In the order of docs/numbers.md, by torch's fp32 operations on one number."""
    found = torch.tensor(clip_norm) / (norm + torch.tensor(1e-6))
    return torch.tensor(1.0) if bool(found > 1) else found


def clipped_by_hand(grads, clip_norm):
    """fp32 gradients, each product rounded once."""
    coefficient = coefficient_of(norm_of(grads), clip_norm)
    return [grad.float() * coefficient for grad in grads]


def assert_clips(options, clip_norm, grads, **others):
    """Fails unless two clipped steps are plain steps with gradients multiplied by hand."""
    found, expected = made(options, **others), made(options, backend="reference")
    for _ in range(2):
        before = copy.deepcopy(grads)
        give(found, grads)
        give(expected, clipped_by_hand(grads, clip_norm))
        found.step(clip_norm=clip_norm)
        expected.step()
        assert_same_bits(found.grad_norm.cpu(), norm_of(grads), "grad_norm")
        assert_same(grads, before, "the gradients themselves")
    for part in ("weights", "states"):
        assert_same(snapshot(found)[part], snapshot(expected)[part], part)
    assert [int(group["step"]) for group in found.param_groups] == [2]


@both_modes
@both_backends
@every_format
@pytest.mark.sample(3)
@pytest.mark.thirds
def test_a_clipped_step_is_a_plain_one_with_clipped_gradients(options, backend, capturable):
    assert_clips(options, 0.3, grads_of(1), backend=backend, capturable=capturable)


@pytest.mark.sample(5)
@both_backends
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", ["no_masters", "remainders", "fp8_moments"])
def test_gradients_of_16_bits(name, dtype, backend):
    assert_clips(FORMATS[name], 0.3, grads_of(1, dtype), backend=backend)


@pytest.mark.sample(5)
@both_backends
@both_modes
@pytest.mark.parametrize("name", ["fp32_masters", "fp16_master_bf16_fp16"])
def test_gradients_that_are_not_contiguous(name, backend, capturable):
    wide = [values((2 * max(len(g.flatten()), 1),), i)[::2] for i, g in enumerate(grads_of(1))]
    grads = [w[: g.numel()].view(g.shape) for w, g in zip(wide, grads_of(1), strict=True)]
    assert not all(grad.is_contiguous() for grad in grads)
    assert_clips(FORMATS[name], 0.3, grads, backend=backend, capturable=capturable)


HARD = {
    "tiny": (1e-40, 1.0),
    "tiny, and clipped": (1e-30, 1e-33),
    "subnormal result": (1e-5, 1e-38),
    "large": (1e30, 1.0),
    "the norm alone overflows": (1e38, 1.0),
    "zero": (0.0, 1.0),
}


@both_backends
@pytest.mark.parametrize(("factor", "clip_norm"), HARD.values(), ids=HARD)
def test_norms_of_all_sizes(factor, clip_norm, backend):
    assert_clips(MASTER, clip_norm, grads_of(1, factor=factor), backend=backend)


@pytest.mark.sample(3)
@both_backends
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["fp32_masters", "fp16_master_bf16_fp16"])
def test_infinities_and_nans_propagate(name, bad, backend):
    """inf * 0 is NaN, and a NaN norm makes every gradient NaN, as with torch's function."""
    grads = grads_of(1)
    grads[3][2] = bad
    found, expected = made(FORMATS[name], backend=backend), made(FORMATS[name], backend="reference")
    give(found, grads)
    coefficient = torch.tensor(math.nan if math.isnan(bad) else 0.0)
    give(expected, [grad * coefficient for grad in grads])
    found.step(clip_norm=1.0)
    expected.step()
    assert_same_run(found, expected)
    norm = found.grad_norm
    assert norm.isnan() if math.isnan(bad) else norm == math.inf


@both_backends
def test_the_coefficient_is_of_all_batches_groups_and_dtypes_together(backend):
    """Weights and gradients of all dtypes: many launches, one norm."""
    dtypes = [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32), (FP32, BF16)]

    def build(name):
        params = [torch.nn.Parameter(values((7,), i).to(d)) for i, (d, _) in enumerate(dtypes)]
        groups = [{"params": params[:2], "lr": 0.5}, {"params": params[2:]}, {"params": []}]
        return made(MASTER, groups, backend=name)

    found, expected = build(backend), build("reference")
    for step in range(2):
        grads = [values((7,), 10 * step + i).to(g) for i, (_, g) in enumerate(dtypes)]
        give(found, grads)
        give(expected, clipped_by_hand(grads, 0.25))
        found.step(clip_norm=0.25)
        expected.step()
        assert_same_bits(found.grad_norm, norm_of(grads))
    assert_same_run(found, expected)


@pytest.mark.sample(5)
@both_backends
@pytest.mark.parametrize(
    "options", [{}, MASTER, REMAINDERS, FORMATS["bf16_moments"]], ids=["no", "fp32", "16", "bf16"]
)
@pytest.mark.parametrize("cut", [[300], [1, 299], [128, 129, 43], [299, 0, 1]], ids=str)
@pytest.mark.thirds
def test_the_cutting_of_parameters_shows_in_no_bit(cut, options, backend):
    """One tensor, its pieces, in reversed order and in a group each."""
    weight, grads = values((300,), 5).to(BF16), [values((300,), step) for step in range(2)]
    whole = made(options, [torch.nn.Parameter(weight.clone())], backend="reference")
    pieces = [torch.nn.Parameter(piece.clone()) for piece in weight.split(cut)]
    found = made(options, [{"params": [piece]} for piece in reversed(pieces)], backend=backend)
    for grad in grads:
        give(whole, [grad])
        give(found, [piece.clone() for piece in reversed(grad.split(cut))])
        whole.step(clip_norm=0.5)
        found.step(clip_norm=0.5)
        assert_same_bits(found.grad_norm, whole.grad_norm)
    assert_same_bits(torch.cat([p.detach() for p in pieces]), params_of(whole)[0].detach())


@both_backends
def test_clipping_agrees_with_torchs_function_on_an_exact_norm(backend):
    """3, 4 and the norm 5 leave torch's own sum nothing to round."""
    found, expected = (
        FusedAdam([torch.nn.Parameter(torch.ones(2))], backend=each)
        for each in (backend, "reference")
    )
    for optimizer in (found, expected):
        params_of(optimizer)[0].grad = torch.tensor([3.0, 4.0])
    found.step(clip_norm=0.7)
    torch.nn.utils.clip_grad_norm_(params_of(expected), 0.7)
    expected.step()
    assert_same_run(found, expected)
    assert_same_bits(params_of(found)[0].grad, torch.tensor([3.0, 4.0]))


@pytest.mark.sample(5)
@both_backends
@both_modes
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_coefficient_of_the_users(backend, capturable, shape):
    found = made(backend=backend, capturable=capturable)
    expected = made(backend="reference", capturable=capturable)
    for step in range(3):
        coefficient = torch.tensor(0.3 / (step + 1))
        give(found, grads_of(step))
        give(expected, [grad * coefficient for grad in grads_of(step)])
        found.step(clip_coefficient=coefficient.reshape(shape))
        expected.step()
    assert_same_run(found, expected)


def test_grad_norm_is_not_known_before_a_step_measured_it():
    optimizer = made()
    message = r"no step has measured the norm yet: a step with clip_norm, .* or 'error', does"
    with pytest.raises(RuntimeError, match=message):
        _ = optimizer.grad_norm
    give(optimizer, grads_of(1))
    optimizer.step()
    with pytest.raises(RuntimeError, match=message):
        _ = optimizer.grad_norm
    optimizer.step(clip_norm=1.0)
    kept = optimizer.grad_norm.clone()
    optimizer.step()
    assert_same_bits(optimizer.grad_norm, kept)


@both_backends
def test_parameters_without_gradients_have_no_part_in_the_norm(backend):
    optimizer = FusedAdam(parameters(SHAPES), backend=backend)
    params = params_of(optimizer)
    give_gradients(params, 0)
    params[0].grad = None
    optimizer.step(clip_norm=0.1)
    assert_same_bits(optimizer.grad_norm, norm_of([p.grad for p in params[1:]]))
    for param in params:
        param.grad = None
    with pytest.warns(UserWarning, match="none of the . parameters has a gradient"):
        optimizer.step(clip_norm=0.1)
    assert_same_bits(optimizer.grad_norm, torch.tensor(0.0))


NO_NORMS = (0.0, 1e-60, -1.0, math.nan, math.inf, 1e39, "one")
BAD = {
    **{
        f"clip_norm={bad}": (
            {"clip_norm": bad},
            "clip_norm must be a finite number > 0 in .*got " + re.escape(repr(bad)),
        )
        for bad in NO_NORMS
    },
    "a tensor": (
        {"clip_norm": torch.ones(())},
        r"clip_norm must be .*clip_coeff.*, got tensor\(1\.\)",
    ),
    "coefficient: a number": (
        {"clip_coefficient": 0.5},
        r"clip_coefficient must be one element of torch.float32, .*, in a plain tensor, got 0\.5",
    ),
    "coefficient: two": (
        {"clip_coefficient": torch.ones(2)},
        r"clip_coefficient must be one element of torch.float32, .*, got .* of shape \(2,\)",
    ),
    "coefficient: dtype": (
        {"clip_coefficient": torch.ones((), dtype=BF16)},
        r"clip_coefficient must be .*torch.float32, .*got tensor\(1., dtype=torch.bfloat16\)",
    ),
    "both": (
        {"clip_coefficient": torch.ones(()), "clip_norm": 2.0},
        r"clip_norm must be None beside clip_coefficient, got 2\.0",
    ),
}


@both_modes
@pytest.mark.parametrize("steps", [0, 1], ids=["at_the_first_step", "later"])
@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
@pytest.mark.sample(2)
@pytest.mark.thirds
def test_bad_arguments_change_nothing(arguments, message, steps, capturable):
    optimizer = made(capturable=capturable)
    for step in range(steps):
        give(optimizer, grads_of(step))
        optimizer.step()
    give(optimizer, grads_of(7))
    with refused(optimizer, message):
        optimizer.step(**arguments)


def test_a_norm_over_several_devices_is_refused_before_anything_changed():
    elsewhere = torch.nn.Parameter(torch.ones(3, device="meta"))
    optimizer = FusedAdam([*parameters([(3,)]), elsewhere], backend="reference")
    give_gradients(params_of(optimizer)[:1], 0)
    with pytest.raises(ValueError, match=r"one device with clip_norm=1\.0, got .* cpu, meta"):
        optimizer.step(clip_norm=1.0)
    assert len(optimizer.state) == 0
    assert optimizer.param_groups[0]["step"] == 0


def two_passes(grads, scale, coefficient):
    """Gradients as two passes leave them: unscaled, then clipped, each time in their dtype."""
    grads = [grad.clone() for grad in grads]
    for grad in grads:
        grad.mul_(1 / scale).mul_(coefficient)
    return grads


ROUNDED = ["no_masters", "remainders", "fp16_moments", "fp8_moments"]
KINDS = list(itertools.product(ROUNDED, [BF16, FP16, FP32]))


@pytest.mark.sample(4)
@both_backends
@both_modes
@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(*kind, marks=[pytest.mark.slow] * (i % 2)) for i, kind in enumerate(KINDS)],
)
@pytest.mark.thirds
def test_scaled_gradients_rounded_to_their_dtype(name, dtype, backend, capturable):
    """As torch's in-place products leave them, of which a plain step makes the same."""
    scale, coefficient = torch.tensor(3.0), torch.tensor(0.37)
    rounding = {"round_scaled_grads": True, "backend": backend, "capturable": capturable}
    found = made(FORMATS[name], **rounding)
    kept = made(FORMATS[name], backend="reference")
    expected = made(FORMATS[name], backend="reference")
    for step in range(2):
        grads = grads_of(step, dtype)
        for optimizer in (found, kept):
            give(optimizer, grads)
            optimizer.grad_scale, optimizer.found_inf = scale, torch.zeros(())
            optimizer.step(clip_coefficient=coefficient)
        give(expected, two_passes(grads, scale, coefficient))
        expected.step()
    for part in ("weights", "states"):
        assert_same(snapshot(found)[part], snapshot(expected)[part], part)
    moments = [
        torch.cat([own.state[p]["exp_avg"].float().flatten() for p in params_of(own)])
        for own in (kept, expected)
    ]
    seen = not torch.equal(*moments)
    assert seen == (dtype != FP32), "whether the rounding is to be seen here at all"
