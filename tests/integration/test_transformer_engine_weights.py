"""TransformerEngine's fp8 tensors as weights: the step of a Float8Weight, where it keeps things."""

import types

import pytest
import torch
from bits import assert_same_bits
from transformer_engine_fakes import PAD, NVFP4Tensor, fake

from megaopt import FusedAdam
from megaopt.float8 import Float8Recipe, Float8Weight
from megaopt.float8.shard import Float8Shard
from megaopt.integration import transformer_engine_weights  # noqa: F401 the adapter
from megaopt.kernels.float8 import dequantize_reference, quantize_reference

SHAPES = [(130, 160), (32, 64), (3, 32)]
RECIPES = {
    "delayed": Float8Recipe("delayed"),
    "current": Float8Recipe("current"),
    "current, powers of two": Float8Recipe("current", power_of_two_scales=True),
    "blocks": Float8Recipe("block_128x128"),
    "blocks, any scale": Float8Recipe("block_128x128", power_of_two_scales=False),
    "mxfp8": Float8Recipe("mxfp8"),
}
OPTIONS = {"lr": 3e-2, "weight_decay": 0.1}
STEPS = 2


def weights_of(recipe):
    torch.manual_seed(0)
    return [
        torch.nn.Parameter(Float8Weight.from_values(torch.randn(shape).bfloat16(), recipe))
        for shape in SHAPES
    ]


def give(params, step):
    generator = torch.Generator().manual_seed(step)
    for param, shape in zip(params, SHAPES, strict=True):
        param.grad = torch.randn(shape, generator=generator).bfloat16().view(param.shape)


def codes_of(tensor):
    return tensor._data if hasattr(tensor, "_data") else tensor._rowwise_data


def scale_inv_of(tensor, like):
    found = tensor._scale_inv if hasattr(tensor, "_scale_inv") else tensor._rowwise_scale_inv
    if found.dim() == 2:
        rest = found.clone()
        rest[: like.shape[0], : like.shape[1]] = PAD
        assert bool((rest == PAD).all()), "padding was written"
        found = found[: like.shape[0], : like.shape[1]]
    return found


def pair(recipe, backend, **options):
    """Optimizers of Float8Weights and of TransformerEngine's tensors of the same codes."""
    own = weights_of(recipe)
    theirs = [fake(weight) for weight in own]
    for weight, tensor in zip(own, theirs, strict=True):
        if recipe.scaling == "delayed":  # so that both read the same scale
            weight.scale_inv.copy_(tensor._scale_inv)
            weight.latest_amax.zero_()
        weight.drop_high_precision_initial_value()
        # masters from fp32 values in both: TransformerEngine's dequantize does not round
        start = weight.dequantize()
        tensor.get_high_precision_init_val = lambda start=start: start
        tensor.clear_high_precision_init_val = lambda tensor=tensor: vars(tensor).pop(
            "get_high_precision_init_val", None
        )
    return (
        FusedAdam(own, backend=backend, **OPTIONS, **options),
        FusedAdam(theirs, backend=backend, **OPTIONS, **options),
        own,
        theirs,
    )


@pytest.mark.parametrize(
    ("backend", "direct"), [("reference", None), ("triton", None), ("reference", True)]
)
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.sample(2)
def test_the_step_is_that_of_a_weight_of_ours(name, backend, direct):
    assert_steps_are_ours(name, backend, dtype=torch.float32, direct_cast=direct)


@pytest.mark.parametrize("name", ["blocks", "mxfp8"])
def test_padded_scales_that_are_stored_apart(name):
    """The kernels find blocks' scales in a pass of its own beside moments with a scale."""
    scaled = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
    assert_steps_are_ours(name, "triton", dtype=torch.float32, **scaled)


def assert_steps_are_ours(name, backend, **options):
    ours, other, own, theirs = pair(RECIPES[name], backend, **options)
    for step in range(STEPS):
        scales = [weight.scale.clone() if weight.scale is not None else None for weight in own]
        for optimizer, params in ((ours, own), (other, theirs)):
            give(params, step)
            optimizer.step()
        for index, (weight, tensor) in enumerate(zip(own, theirs, strict=True)):
            assert_same_bits(codes_of(tensor), weight.data8.view(torch.uint8), f"codes {index}")
            assert_same_bits(scale_inv_of(tensor, weight.scale_inv), weight.scale_inv)
            for kept in ("master_param", "exp_avg", "exp_avg_sq"):
                assert_same_bits(other.state[tensor][kept], ours.state[weight][kept])
            if weight.scale is None:
                continue
            # TransformerEngine moves its scales itself, as ours have moved
            amax = weight.amax_history[-1:]
            assert_same_bits(tensor._quantizer.amax, amax, f"amax {index}")
            assert_same_bits(tensor._quantizer.scale, scales[index].view(()), f"scale {index}")
            tensor._quantizer.scale.copy_(weight.scale.view(()))
            tensor._quantizer.amax.zero_()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_columnwise_data_are_blocks_along_columns(backend):
    recipe = RECIPES["mxfp8"]
    _, other, _, theirs = pair(recipe, backend, dtype=torch.float32)
    give(theirs, 0)
    other.step()
    for tensor in theirs:
        values = other.state[tensor]["master_param"].bfloat16()
        made = quantize_reference(values.t(), recipe)
        assert_same_bits(tensor._columnwise_data, made.codes.t().view(torch.uint8).contiguous())
        rows, columns = made.scale_inv.t().shape
        stored = tensor._columnwise_scale_inv
        assert_same_bits(stored[:rows, :columns], made.scale_inv.t())
        rest = stored.clone()
        rest[:rows, :columns] = PAD
        assert bool((rest == PAD).all()), "padding was written"


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_skipped_step_writes_nothing(backend):
    _, other, _, theirs = pair(RECIPES["mxfp8"], backend, dtype=torch.float32, nonfinite="skip")
    give(theirs, 0)
    theirs[1].grad[0, 0] = float("inf")
    before = [(t._rowwise_data.clone(), t._columnwise_data.clone()) for t in theirs]
    other.step()
    for tensor, (rows, columns) in zip(theirs, before, strict=True):
        assert_same_bits(tensor._rowwise_data, rows)
        assert_same_bits(tensor._columnwise_data, columns)


@pytest.mark.parametrize("name", ["delayed", "current", "blocks"])
def test_copies_of_the_old_codes_are_stale_or_gone(name):
    _, other, _, theirs = pair(RECIPES[name], "reference", dtype=torch.float32)
    give(theirs, 0)
    other.step()
    for tensor in theirs:
        if name == "blocks":
            assert tensor._columnwise_data is None
            assert tensor._columnwise_scale_inv is None
        else:
            assert tensor._transpose_invalid
        assert not hasattr(tensor, "get_high_precision_init_val")


@pytest.mark.parametrize("name", ["delayed", "current", "blocks"])
def test_without_masters_the_numbers_that_the_codes_are_for_are_updated(name):
    """TransformerEngine leaves delayed ones as they are, in silence."""
    recipe = RECIPES[name]
    theirs = [fake(weight) for weight in weights_of(recipe)]
    plain = []
    for tensor, weight in zip(theirs, weights_of(recipe), strict=True):
        like = scale_inv_of(tensor, weight.scale_inv)
        values = dequantize_reference(weight.data8, like, recipe, torch.float32)
        plain.append(torch.nn.Parameter(values))
    other, expected = FusedAdam(theirs, **OPTIONS), FusedAdam(plain, **OPTIONS)
    give(theirs, 0)
    for param, tensor in zip(plain, theirs, strict=True):
        param.grad = tensor.grad.float()
    other.step()
    expected.step()
    for tensor, param in zip(theirs, plain, strict=True):
        scale = tensor._quantizer.scale.view(1) if name == "delayed" else None
        made = quantize_reference(param.detach(), recipe, torch.bfloat16, scale)
        assert_same_bits(codes_of(tensor), made.codes.view(torch.uint8))
        assert_same_bits(scale_inv_of(tensor, made.scale_inv), made.scale_inv)


E5M2 = types.SimpleNamespace(name="kFloat8E5M2")


def _changed(name, value, recipe="blocks"):
    tensor = fake(weights_of(RECIPES[recipe])[0])
    target = (
        tensor._quantizer if name in ("with_amax_reduction", "with_2d_quantization") else tensor
    )
    setattr(target, name, value)
    return tensor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _changed("_rowwise_data", None), "_rowwise_data=None"),
        (lambda: _changed("_is_2D_scaled", False), "blocks 1x128"),
        (lambda: _changed("_fp8_dtype", E5M2), "Float8BlockwiseQTensor .* kFloat8E5M2"),
        (lambda: _changed("_fp8_dtype", E5M2, "delayed"), "Float8Tensor must .* kFloat8E5M2"),
        (lambda: _changed("_with_gemm_swizzled_scales", True, "mxfp8"), "swizzled=True"),
        (lambda: _changed("with_2d_quantization", True, "mxfp8"), "blocks of 32 x 32"),
        (lambda: _changed("with_amax_reduction", True, "current"), "reduction of amaxes"),
        (lambda: _changed("_quantizer", object(), "current"), "quantizer object"),
        (lambda: NVFP4Tensor((4, 4), torch.bfloat16), "tensor subclass NVFP4Tensor"),
    ],
)  # fmt: skip
def test_what_the_step_does_not_write_is_refused(make, message):
    with pytest.raises(ValueError, match=f"parameter 0 of group 0: .*{message}"):
        FusedAdam([make()], dtype=torch.float32)


def test_a_part_beside_columnwise_data_is_refused():
    tensor = fake(weights_of(RECIPES["mxfp8"])[0])
    with pytest.raises(ValueError, match=r"must be whole, got 100 of 20800 elements"):
        FusedAdam([Float8Shard(tensor, 0, 100)], dtype=torch.float32)
    alone = fake(weights_of(RECIPES["mxfp8"])[0], columnwise=False)
    FusedAdam([Float8Shard(alone, 0, alone.numel())], dtype=torch.float32)
