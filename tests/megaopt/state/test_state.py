"""State in the dtype asked for, its values in fp32 and back, NaN and infinity."""

import math

import pytest
import torch
from bits import assert_same_bits, bits
from handling import both_backends, refused, train_all
from runs import (
    BF16,
    FORMATS,
    FP8,
    FP16,
    FP16_MASTER,
    FP32,
    MASTER,
    REMAINDERS,
    SCALED,
    assert_same,
    snapshot,
    train,
    values,
)

from megaopt import FusedAdam

MOMENTS = (FP32, BF16, FP16, FP8)
NAMES = ["exp_avg", "exp_avg_sq", "master_param"]
NAN, INF = math.nan, math.inf

all_formats = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)


def one(options, numel=6, dtype=BF16, **more):
    param = torch.nn.Parameter(values((numel,), 0, dtype))
    return FusedAdam([param], **options, **more), param


# --- dtypes


@both_backends
@pytest.mark.parametrize("weight", [FP32, BF16, FP16], ids=str)
def test_fp32_states_are_not_rounded_through_the_weights_dtype(backend, weight):
    """They hold numbers that bf16 and fp16 cannot, and those of an fp32 run, over many steps."""
    found, param = one(MASTER, dtype=weight, backend=backend)
    exact = torch.nn.Parameter(param.detach().float())
    expected = FusedAdam([exact], backend="reference")
    for step in range(5):
        grad = values((6,), step + 1, BF16)
        param.grad, exact.grad = grad.to(weight), grad.float()
        found.step()
        expected.step()
    state = found.state[param]
    for name in ("exp_avg", "exp_avg_sq"):
        assert_same_bits(state[name], expected.state[exact][name], name)
        for coarser in (BF16, FP16):
            assert not torch.equal(state[name].to(coarser).float(), state[name])
    if weight == FP32:
        assert state["master_param"] is None
    else:
        assert_same_bits(state["master_param"], exact.detach(), "master")
        assert not torch.equal(state["master_param"], param.float())
    assert_same_bits(param.detach(), exact.detach().to(weight), "weight")


@both_backends
@pytest.mark.parametrize(
    ("weight", "first", "second"),
    [
        *((BF16, first, second) for first in MOMENTS for second in MOMENTS),
        (FP32, BF16, FP16),
        (FP32, FP32, BF16),
        (FP16, FP16, BF16),
    ],
    ids=str,
)
@pytest.mark.sample(2)
@pytest.mark.thirds
def test_the_moments_dtypes_are_chosen_independently(backend, weight, first, second):
    optimizer, param = one(
        FP16_MASTER, dtype=weight, backend=backend, exp_avg_dtype=first, exp_avg_sq_dtype=second
    )
    train(optimizer, 2)
    state = optimizer.state[param]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (first, second)
    scales = {"exp_avg_scale": first, "exp_avg_sq_scale": second}
    expected = {name for name, dtype in scales.items() if dtype in SCALED}
    if weight != FP32:
        expected.add("master_param_scale")
        assert state["master_param"].dtype == FP16
    assert {name for name in state if name.endswith("_scale")} == expected
    # a moment in fp32 is that of a run that keeps both in fp32: the other's format is not mixed in
    plain, same = one(MASTER, dtype=weight)
    train(plain, 2)
    for name, dtype in zip(NAMES, (first, second), strict=False):
        if dtype == FP32:
            assert_same_bits(state[name], plain.state[same][name], name)
        else:
            assert not torch.equal(
                optimizer.get_unscaled_state(param, name), plain.state[same][name]
            )


def test_a_scale_puts_the_largest_magnitude_at_half_of_fp16s_range_or_the_largest_fp8_code():
    for name, largest in (("fp16_moments", 32752.0), ("fp8_moments", 448.0)):
        optimizer, param = one(FORMATS[name])
        param.grad = torch.tensor([1e-30, 4.0, -8.0, 0.5, 0.0, 1.0], dtype=BF16)
        optimizer.step()
        state = optimizer.state[param]
        assert state["exp_avg"][2] == -largest
        assert state["exp_avg_sq"][2] == largest
        assert state["exp_avg_scale"].shape == (1,)
    assert state["exp_avg"].float().tolist() == [0.0, 224.0, -448.0, 28.0, 0.0, 56.0]
    assert state["exp_avg_sq"].float().tolist() == [0.0, 112.0, 448.0, 1.75, 0.0, 7.0]


# --- get_unscaled_state, set_scaled_state


@pytest.mark.parametrize("name", NAMES)
@all_formats
def test_a_state_set_from_its_own_value_is_unchanged(options, name):
    optimizer, param = one(options)
    train(optimizer, 3)
    before = snapshot(optimizer)
    value = optimizer.get_unscaled_state(param, name)
    assert value.dtype == FP32
    assert value.shape == param.shape
    optimizer.set_scaled_state(param, name, value.clone())
    after = snapshot(optimizer)
    if options.get(f"{name}_dtype") == FP8:
        scales = [bits(found["states"][0].pop(f"{name}_scale")) for found in (after, before)]
        # it comes from 448 times itself: a product, a quotient and two reciprocals, each off by
        # half of the last place at most, which is 2**-24 of the number or less, and so 4 places
        assert abs(int(scales[0] - scales[1])) <= 4
    assert_same(after, before)


@pytest.mark.parametrize("name", NAMES)
@all_formats
def test_a_state_set_before_the_first_step_is_the_one_set(options, name):
    """Megatron's load: set_scaled_state makes what is missing, initialize_state the rest."""
    optimizer, param = one(options)
    wanted = values((6,), 9).abs().to(BF16).float()
    optimizer.set_scaled_state(param, name, wanted)
    found = optimizer.get_unscaled_state(param, name)
    assert found.dtype == FP32
    other, twin = one(options)
    other.initialize_state(twin)
    other.set_scaled_state(twin, name, wanted)
    assert_same_bits(found, other.get_unscaled_state(twin, name))
    if not SCALED & {*options.values()}:
        assert_same_bits(found, wanted)
    optimizer.initialize_state(param)
    assert_same(snapshot(optimizer), snapshot(other))
    train_all((optimizer, other), 1)
    assert_same(snapshot(optimizer), snapshot(other))


@all_formats
def test_set_scaled_state_writes_into_the_tensors_that_are_there(options):
    optimizer, param = one(options)
    train(optimizer, 1)
    before = dict(optimizer.state[param])
    for name in NAMES:
        optimizer.set_scaled_state(param, name, values((6,), 5).abs())
    assert all(optimizer.state[param][name] is tensor for name, tensor in before.items())


def test_an_fp32_state_is_given_as_it_is_and_others_as_copies():
    optimizer, param = one({**MASTER, "exp_avg_dtype": BF16})
    train(optimizer, 1)
    state = optimizer.state[param]
    assert optimizer.get_unscaled_state(param, "exp_avg_sq") is state["exp_avg_sq"]
    assert optimizer.get_unscaled_state(param, "master_param") is state["master_param"]
    assert_same_bits(optimizer.get_unscaled_state(param, "exp_avg"), state["exp_avg"].float())


def test_a_weight_without_master_is_its_own():
    for dtype in (FP32, BF16, FP16):
        optimizer, param = one({}, dtype=dtype)
        assert_same_bits(
            optimizer.get_unscaled_state(param, "master_param"), param.detach().float()
        )
        optimizer.set_scaled_state(param, "master_param", values((6,), 4))
        assert_same_bits(param.detach(), values((6,), 4, dtype))
        assert optimizer.state[param]["master_param"] is None


def test_a_flag_passed_as_a_state_is_ignored():
    """Megatron-Core 0.16 passes its padding flag through set_scaled_state."""
    optimizer, param = one(MASTER)
    optimizer.set_scaled_state(param, "padding", False)
    assert param not in optimizer.state


@pytest.mark.parametrize("options", [MASTER, REMAINDERS], ids=["fp32", "remainders"])
def test_set_scaled_state_writes_the_external_master(options):
    optimizer, param = one(options)
    dtype = torch.int16 if "store_param_remainders" in options else FP32
    optimizer.master_weights = [torch.zeros(6, dtype=dtype)]
    optimizer.set_scaled_state(param, "master_param", values((6,), 4))
    assert optimizer.state[param]["master_param"] is optimizer.master_weights[0]
    assert_same_bits(optimizer.get_unscaled_state(param, "master_param"), values((6,), 4))


@pytest.mark.parametrize(
    ("options", "name", "shape"),
    [
        pytest.param(MASTER, "master_param", (1,), id="one_for_all"),
        pytest.param({}, "master_param", (1,), id="one_for_all_of_a_weight"),
        pytest.param({}, "master_param", (2, 6), id="more_than_the_weight"),
        pytest.param(FP16_MASTER, "master_param", (5,), id="scaled"),
        pytest.param(REMAINDERS, "master_param", (5,), id="remainders"),
        pytest.param(MASTER, "exp_avg_sq", (5,), id="a_moment"),
    ],
)
def test_a_state_of_another_size_is_refused(options, name, shape):
    optimizer, param = one(options)
    train(optimizer, 1)
    with refused(optimizer, rf"{name} must be .*\(6,\), got"):
        optimizer.set_scaled_state(param, name, torch.ones(shape))


@pytest.mark.parametrize(
    ("method", "value"),
    [("get_unscaled_state", ()), ("set_scaled_state", (torch.ones(6),))],
    ids=["get", "set"],
)
def test_an_unknown_state_is_refused(method, value):
    optimizer, param = one(MASTER)
    with pytest.raises(ValueError, match=r"state_name must be one of exp_avg, exp_.*, got 'exp'"):
        getattr(optimizer, method)(param, "exp", *value)
    assert len(optimizer.state) == 0


@pytest.mark.parametrize(
    ("habit", "step"),
    [
        ("all", "any step"),
        ("trainable", "any step, where the parameter requires gradients,"),
        ("stepped", "the first step with a gradient"),
    ],
)
def test_asking_for_state_that_is_not_there_makes_none(habit, step):
    optimizer, param = one({**MASTER, "makes_states": habit})
    message = rf"parameter 0 of group 0: state 'exp_avg' must be there, got none: {step} makes it,"
    with pytest.raises(ValueError, match=message):
        optimizer.get_unscaled_state(param, "exp_avg")
    assert len(optimizer.state) == 0


# --- NaN and infinity


def set_element(optimizer, param, name, value):
    state = optimizer.get_unscaled_state(param, name).clone()
    state[2] = value
    optimizer.set_scaled_state(param, name, state)


@both_backends
@pytest.mark.parametrize(
    ("where", "bad"),
    [("grad", NAN), ("grad", INF), ("master_param", NAN), ("master_param", -INF), ("exp_avg", NAN)],
    ids=lambda value: str(value),
)
@all_formats
@pytest.mark.sample(4)
@pytest.mark.thirds
def test_nan_reaches_the_weight_and_nothing_else(backend, options, where, bad):
    """Its neighbours get what they get without it, also where they share a scale.

    An infinity becomes NaN: inf / inf, or a decay of 0 times inf.
    """
    found, param = one(options, backend=backend)
    clean, twin = one(options, backend="reference")
    for optimizer, own in ((found, param), (clean, twin)):
        train(optimizer, 2)
        for name in NAMES:
            set_element(optimizer, own, name, 2.0**-10)  # too small to be an amax
        own.grad = values((6,), 50, BF16)
        own.grad[2] = 2.0**-10
    if where == "grad":
        param.grad[2] = bad
    else:
        set_element(found, param, where, bad)
    for _ in range(2):
        found.step()
        clean.step()
    others = torch.tensor([0, 1, 3, 4, 5])
    assert param[2].isnan()
    assert twin.isfinite().all()
    assert_same_bits(param.detach()[others], twin.detach()[others], "neighbours")
    for name, expected in clean.state[twin].items():
        if expected is not None:
            chosen = slice(None) if name.endswith("_scale") else others
            assert_same_bits(found.state[param][name][chosen], expected[chosen], name)
