"""fp8 weights that Muon steps: masters as fp32 weights, codes as an fp8 weight's are made."""

import pytest
import torch
from handling import refused
from interpreted import interpreted
from runs import FP32, assert_same, give_gradients, params_of, train, values

from megaopt import FusedMuon, FusedSGD
from megaopt.float8 import RECIPES, Float8Weight
from megaopt.float8.shard import Float8Shard

SHAPES = [(128, 256), (256, 128), (128, 128)]
KINDS = {
    "plain": {},
    "drawn momentum": {"momentum_buffer_dtype": "bfloat16_stochastic", "maximize": True},
    "normuon": {"second_moment": "normuon", "precision": "fp16", "nesterov": False},
    "blocks": {"momentum_buffer_dtype": "block_e4m3"},
}


def float8(recipe, shapes=SHAPES):
    made = [Float8Weight.from_values(values(s, i), RECIPES[recipe]) for i, s in enumerate(shapes)]
    return [torch.nn.Parameter(each) for each in made]


def codes_of(param):
    return param.data8.view(torch.uint8), param.scale_inv


def cast_by_sgd(recipe, masters, others, optimizer):
    """The codes that FusedSGD makes of these masters, by a step of size 0."""
    for other, master in zip(others, masters, strict=True):
        optimizer.set_scaled_state(other, "master_param", master)
        other.grad = torch.zeros(other.shape)
    optimizer.step()
    return [codes_of(other) for other in others]


def steps_are_those_of_fp32(recipe, options, shapes=SHAPES, steps=3, **own):
    """Also of a clipped step; delayed scales follow the amaxes of all steps."""
    params = float8(recipe, shapes)
    found = FusedMuon(params, 0.02, dtype=FP32, **options, **own)
    plain = [torch.nn.Parameter(values(shape, i)) for i, shape in enumerate(shapes)]
    expected = FusedMuon(plain, 0.02, backend="reference", **options)
    others = float8(recipe, shapes)
    sgd = FusedSGD(others, 0.0, dtype=FP32, backend="reference")
    for step in range(steps):
        for optimizer in (found, expected):
            give_gradients(params_of(optimizer), step)
            optimizer.step(clip_norm=1.0 if step == 1 else None)
        masters = [param.detach() for param in plain]
        assert_same([found.state[param]["master_param"] for param in params], masters)
        for param, other in zip(params, plain, strict=True):
            for name, kept in expected.state[other].items():
                assert_same(found.state[param][name], kept) if kept is not None else None
        assert_same([*map(codes_of, params)], cast_by_sgd(recipe, masters, others, sgd))
    with pytest.raises(AssertionError):
        assert_same([*map(codes_of, params)], [*map(codes_of, float8(recipe, shapes))])


@pytest.mark.sample(3)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_masters_are_stepped_as_fp32_weights(recipe, options):
    steps_are_those_of_fp32(recipe, options)


def test_a_batch_of_matrices_in_one_weight():
    steps_are_those_of_fp32("current", {}, [(2, 32, 64)])


@interpreted
@pytest.mark.parametrize(
    ("recipe", "capturable"),
    [
        pytest.param(recipe, own, marks=[pytest.mark.slow] * ((place + own) % 2))
        for place, recipe in enumerate(RECIPES)
        for own in (False, True)
    ],
)
def test_launches_take_the_same_steps(recipe, capturable):
    own = {"backend": "triton", "capturable": capturable}
    steps_are_those_of_fp32(recipe, {}, [(128, 128)], 2, **own)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_that_is_left_out_leaves_codes_and_scales(bad):
    (param,) = params = float8("delayed", [(32, 64)])
    optimizer = FusedMuon(params, dtype=FP32, nonfinite="skip")
    train(optimizer, 2)
    before = [each.clone() for each in (*codes_of(param), param.scale, param.amax_history)]
    param.grad = torch.full(param.shape, bad)
    optimizer.step()
    assert_same([*codes_of(param), param.scale, param.amax_history], before)


def test_parts_of_fp8_weights_are_refused():
    part = Float8Shard(float8("current", [(32, 64)])[0], 0, 512)
    with pytest.raises(ValueError, match="False beside its parameter 0, a flat part of a matrix"):
        FusedMuon([part], dtype=FP32)


@pytest.mark.parametrize(
    "options",
    [{}, {"master_weights": True, "master_weight_dtype": torch.float16},
     {"master_weights": True, "master_weight_dtype": "remainder8"}],
    ids=["none", "fp16", "remainder8"],
)  # fmt: skip
def test_fp8_weights_without_fp32_masters_are_refused(options):
    reason = "master_weight_dtype must be torch.float32, of whole masters, for parameter 0 of group"
    with pytest.raises(ValueError, match=reason):
        FusedMuon(float8("current", [(32, 64)]), **options)
    optimizer = FusedMuon([torch.nn.Parameter(values((4, 6), 1))], **options)
    with refused(optimizer, reason):
        optimizer.add_param_group({"params": float8("current", [(32, 64)])})
