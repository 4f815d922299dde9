"""Whole tensors in fp8: the twin against numpy and ml_dtypes, all four recipes."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
from bits import assert_same_bits
from encoding_cases import every_pattern_of_16_bits
from float8_oracle import BLOCKS, MAX, amax_of, e8m0_of, scale_of
from oracle import F32, divide, float8_codes, multiply

from megaopt.kernels.float8 import (
    RECIPES,
    Float8Recipe,
    dequantize_reference,
    quantize_reference,
)
from megaopt.kernels.optional_triton import jit, tl

CODES = ml_dtypes.float8_e4m3fn


def oracle_rounded(values, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype).astype(F32)


def oracle_quantize(values, scaling, *, dtype=None, scale=None, epsilon=0.0, power_of_two=False):
    """Codes (uint8), scales, their inverses, amaxes; values are rounded to `dtype` first."""
    values = values if dtype is None else oracle_rounded(values, dtype)
    rows, columns = values.shape
    tall, wide = BLOCKS.get(scaling, (max(rows, 1), max(columns, 1)))
    grid = (-(-rows // tall), -(-columns // wide)) if scaling in BLOCKS else (1, 1)
    codes = np.zeros(values.shape, np.uint8)
    scales, amaxes = np.zeros(grid, F32), np.zeros(grid, F32)
    inverses = np.zeros(grid, np.uint8 if scaling == "mxfp8" else F32)
    for i, j in np.ndindex(*grid):
        place = np.s_[i * tall : (i + 1) * tall, j * wide : (j + 1) * wide]
        amaxes[i, j] = amax_of(values[place])
        if scaling == "mxfp8":
            inverses[i, j] = e8m0_of(amaxes[i, j], MAX)
            scales[i, j] = F32(2.0 ** (127 - int(inverses[i, j])))
        else:
            found = scale_of(amaxes[i, j], MAX, epsilon, power_of_two)
            scales[i, j] = found if scale is None else scale
            inverses[i, j] = divide(F32(1), scales[i, j])
        codes[place] = float8_codes(multiply(values[place], scales[i, j]), CODES)
    if scaling not in BLOCKS:
        scales, inverses, amaxes = (array.reshape(1) for array in (scales, inverses, amaxes))
    return codes, scales, inverses, amaxes


def oracle_dequantize(codes, inverses, scaling):
    """fp32, not yet rounded to the weight's dtype; NaNs are one."""
    values = codes.view(CODES).astype(F32)
    if scaling == "mxfp8":
        inverses = (2.0 ** (inverses.astype(np.float64) - 127)).astype(F32)
    out = np.zeros(codes.shape, F32)
    tall, wide = BLOCKS.get(scaling, codes.shape)
    for i, j in np.ndindex(*codes.shape):
        inverse = inverses[i // tall, j // wide] if scaling in BLOCKS else inverses[0]
        out[i, j] = multiply(values[i, j], inverse)
    return out


SHAPES = [(1, 1), (127, 33), (128, 128), (129, 257), (3, 300), (0, 5), (5, 0)]
NUMPY = {
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float16: np.float16,
    torch.float32: np.float32,
}
LARGEST = torch.finfo(torch.float32).max
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def hard(shape):
    """Values whose blocks have amaxes of every size, and in places what no scale fits."""
    rows, columns = shape
    generator = np.random.default_rng(rows * 1000 + columns)
    values = generator.standard_normal(shape, dtype=np.float32)
    row = np.exp2(generator.integers(-40, 40, (rows, 1))).astype(np.float32)
    values = torch.from_numpy(values * row)
    if rows > 4 and columns > 4:
        values[0] = 0.0
        values[1, 0], values[2, 1], values[2, 2] = torch.nan, torch.inf, -torch.inf
        values[3] = 2.0**-149
        values[4, :2] = torch.tensor([LARGEST, -0.0])
    return values


def assert_quantizes(values, recipe, dtype, scale=None, quantize=quantize_reference):
    found = quantize(values, recipe, dtype, None if scale is None else torch.tensor([scale]))
    expected = oracle_quantize(
        values.numpy(),
        recipe.scaling,
        dtype=None if recipe.direct else NUMPY[dtype],
        scale=scale,
        epsilon=recipe.amax_epsilon,
        power_of_two=recipe.power_of_two_scales,
    )
    names = ("codes", "scale", "scale_inv", "amax")
    for name, tensor, array in zip(names, found, expected, strict=True):
        tensor = tensor.view(torch.uint8) if name == "codes" else tensor
        assert_same_bits(tensor, torch.from_numpy(array), name)
    return found


def scale_for(recipe, scale=0.75):
    return scale if recipe.scaling == "delayed" else None


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_recipe
def test_quantize_is_the_oracle(recipe, shape):
    values = hard(shape)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for direct in (False, True):
            changed = dataclasses.replace(recipe, direct=direct)
            assert_quantizes(values, changed, dtype, scale_for(recipe))


@pytest.mark.parametrize("scaling", ["current", "block_128x128"])
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("epsilon", [0.0, 2.0**-20, 2.0**-140])
def test_options_of_scales(scaling, power_of_two, epsilon):
    recipe = Float8Recipe(scaling, power_of_two_scales=power_of_two, amax_epsilon=epsilon)
    assert_quantizes(hard((130, 300)), recipe, torch.bfloat16)


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf, -torch.inf, 2.0**-149, LARGEST])
@every_recipe
def test_tensors_of_one_value(recipe, value):
    """amax 0, none, infinite, one that has no finite scale, and the largest."""
    for dtype in (torch.bfloat16, torch.float32):
        found = assert_quantizes(
            torch.full((40, 40), value), recipe, dtype, scale_for(recipe, LARGEST)
        )
        back = dequantize_reference(found.codes, found.scale_inv, recipe, torch.float32)
        if value == 0.0:
            assert int(back.count_nonzero()) == 0
        assert bool(back.isnan().all()) == (value != value)


@every_recipe
def test_rounding_to_the_dtype_comes_before_the_scale(recipe):
    """bf16 moves the amax, and with it codes; direct does not."""
    values = torch.full((2, 130), 1.0 + 2.0**-8 + 2.0**-20)
    scale = torch.ones(1) if recipe.scaling == "delayed" else None
    found = quantize_reference(values, recipe, torch.bfloat16, scale)
    direct = dataclasses.replace(recipe, direct=True)
    unrounded = quantize_reference(values, direct, torch.bfloat16, scale)
    assert found.amax.flatten()[0] == 1.0 + 2.0**-7
    assert_same_bits(unrounded.amax.flatten()[:1], values[0, :1])


def test_two_roundings_are_not_one():
    """1.0625 is a tie of e4m3fn: bf16 makes one of a number just above it."""
    value = torch.tensor([[1.0625 + 2.0**-12]])
    scale = torch.ones(1)
    codes = [
        quantize_reference(value, Float8Recipe("delayed", direct=direct), torch.bfloat16, scale)
        for direct in (False, True)
    ]
    assert [q.codes.float().item() for q in codes] == [1.0, 1.125]


def test_delayed_scaling_saturates():
    """The scale is of other values: these are too large for it."""
    values = torch.tensor([[500.0, -1e30, torch.inf, 448.0, 447.0]])
    made = quantize_reference(values, RECIPES["delayed"], torch.float32, torch.ones(1))
    assert made.codes.float().tolist() == [[448.0, -448.0, 448.0, 448.0, 448.0]]
    assert made.amax.tolist() == [torch.inf]


def scales_to_try():
    generator = np.random.default_rng(0)
    random = generator.uniform(0.5, 1.0, 20) * np.exp2(generator.integers(-30, 40, 20))
    edges = [1.0, 448.0, 57344.0, 2.0**-126, 2.0**-119, 1e-30, 2.0**20, 1e30, 2.0**127, LARGEST]
    return [float(np.float32(value)) for value in [*edges, *random, 448 / 3, 448 / 7]]


@jit
def encode_scaled_kernel(value_ptr, code_ptr, scale_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr)
    tl.store(code_ptr + offsets, FORMAT.encode(tl.load(value_ptr + offsets) * scale, 1.0))


def test_every_bf16_number_times_many_scales(device):
    values = every_pattern_of_16_bits()[: 2**16].reshape(256, 256)
    recipe = RECIPES["delayed"]
    for index, scale in enumerate(scales_to_try()):
        made = assert_quantizes(values, recipe, torch.bfloat16, scale)
        if index % 4 and device.type != "cuda":
            continue  # the interpreter is slow
        found = torch.zeros(2**16, dtype=torch.int8, device=device)
        with np.errstate(all="ignore"):
            encode_scaled_kernel[(16,)](
                values.flatten().to(device), found, torch.tensor([scale], device=device),
                recipe.format, 4096, enable_fp_fusion=False,
            )  # fmt: skip
        assert_same_bits(found, made.codes.view(torch.int8).flatten(), f"kernel, scale {scale}")


@every_recipe
def test_dequantize_is_the_oracle(recipe):
    scale = torch.tensor([0.3]) if recipe.scaling == "delayed" else None
    made = quantize_reference(hard((131, 70)), recipe, torch.bfloat16, scale)
    codes = made.codes.view(torch.uint8).numpy()
    exact = oracle_dequantize(codes, made.scale_inv.numpy(), recipe.scaling)
    for dtype, rounded in NUMPY.items():
        found = dequantize_reference(made.codes, made.scale_inv, recipe, dtype)
        expected = torch.from_numpy(oracle_rounded(exact, rounded))
        nan = expected.isnan()
        assert found.is_contiguous()
        assert_same_bits(found.float().where(~nan, 0.0), expected.where(~nan, 0.0), str(dtype))
        assert torch.equal(found.isnan(), nan)


@every_recipe
def test_dequantized_values_have_the_codes_they_came_from(recipe):
    """With scales that are powers of two, where the products are exact."""
    values = torch.randn(130, 140)
    scale = torch.tensor([2.0**6]) if recipe.scaling == "delayed" else None
    power = None if recipe.scaling in ("delayed", "mxfp8") else True
    recipe = dataclasses.replace(recipe, power_of_two_scales=power)
    made = quantize_reference(values, recipe, torch.float32, scale)
    back = dequantize_reference(made.codes, made.scale_inv, recipe, torch.float32)
    again = quantize_reference(back, recipe, torch.float32, scale)
    assert_same_bits(dequantize_reference(again.codes, again.scale_inv, recipe), back.bfloat16())


def test_blocks_share_nothing():
    """A huge value changes the codes of its own block alone."""
    values = torch.randn(256, 256)
    for recipe in (RECIPES["block_128x128"], RECIPES["mxfp8"]):
        rows, columns = recipe.block
        other = values.clone()
        other[0, 0] = 1e6
        before, after = (quantize_reference(v, recipe) for v in (values, other))
        same = before.codes.view(torch.uint8) == after.codes.view(torch.uint8)
        assert bool(same[rows:].all())
        assert bool(same[:, columns:].all())
        assert not bool(same[:rows, :columns].all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaling": "per_tensor"}, "scaling must be one of delayed, current, .* got 'per_tensor'"),
        ({"dtype": torch.float8_e5m2}, "dtype must be one of .*, got torch.float8_e5m2"),
        ({"margin": 0.5}, "margin must be a whole number, got 0.5"),
        ({"margin": 101}, "margin must be from -100 to 100, got 101"),
        ({"amax_history_len": 0}, "amax_history_len must be at least 1, got 0"),
        ({"amax_compute_algo": "mean"}, "amax_compute_algo must be one of max, .*, got 'mean'"),
        ({"power_of_two_scales": True}, "power_of_two_scales must be left at None .*, got True"),
        ({"amax_epsilon": 1.0}, "amax_epsilon must be left at 0.0 with scaling='delayed', got 1.0"),
        ({"scaling": "current", "margin": 1}, "margin must be left at 0 with .*'current', got 1"),
        ({"scaling": "current", "amax_epsilon": -1.0}, "amax_epsilon must be finite .*, got -1.0"),
        ({"scaling": "current", "amax_epsilon": 0.1}, "amax_epsilon must be a number of fp32, got"),
        ({"scaling": "current", "amax_epsilon": torch.inf}, "amax_epsilon must be .*, got inf"),
        ({"scaling": "mxfp8", "power_of_two_scales": False}, "power_of_two_scales must .* False"),
        ({"scaling": "mxfp8", "amax_epsilon": 1.0}, "amax_epsilon must be left at 0.0 with"),
        ({"direct": 3}, "direct must be one of True, False, got 3"),
    ],
)
def test_recipes_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Float8Recipe(**{"scaling": "delayed", **options})


def test_defaults_are_transformer_engines():
    powers = {name: recipe.power_of_two_scales for name, recipe in RECIPES.items()}
    assert powers == {
        "delayed": False, "current": False, "block_128x128": True, "mxfp8": True,
    }  # fmt: skip
    assert RECIPES["delayed"].amax_history_len == 1024
    assert Float8Recipe("delayed", margin=2).code_max == 112.0


def test_calls_that_are_refused():
    with pytest.raises(ValueError, match=r"scale must be the current one with .*, got None"):
        quantize_reference(torch.ones(2, 2), RECIPES["delayed"])
    with pytest.raises(ValueError, match="scale must be None with scaling='current', got tensor"):
        quantize_reference(torch.ones(2, 2), RECIPES["current"], scale=torch.ones(1))
    with pytest.raises(ValueError, match=r"shape must have two dimensions .*got \(2, 2, 2\)"):
        quantize_reference(torch.ones(2, 2, 2), RECIPES["mxfp8"])
