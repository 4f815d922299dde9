"""The step of fp8 weights: AdamW on plain numbers, then quantized; nothing else changes a bit."""

import copy
import itertools

import pytest
import torch
from bits import assert_same_bits
from runs import assert_same, copied

from megaopt import FusedAdam
from megaopt.float8 import RECIPES, Float8Recipe, Float8Weight, update_scales
from megaopt.float8.shard import Float8Shard
from megaopt.kernels.float8 import quantize_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
SPECIAL = {
    "direct": Float8Recipe("current", direct=True),
    "most_recent": Float8Recipe("delayed", margin=1, amax_compute_algo="most_recent"),
    "short_history": Float8Recipe("delayed", amax_history_len=2),
    "any_scale": Float8Recipe("block_128x128", power_of_two_scales=False, amax_epsilon=0.5),
}
MASTERS = {"dtype": FP32}
STORED = {
    "fp32_masters": MASTERS,
    "no_masters": {},
    "fp16_masters": {"master_weights": True, "master_weight_dtype": FP16},
    "bf16_moments": {**MASTERS, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "fp8_moments": {**MASTERS, "exp_avg_dtype": E4M3, "exp_avg_sq_dtype": E4M3},
    "fp8_moments_alone": {"exp_avg_dtype": E4M3, "exp_avg_sq_dtype": FP16},
}
SHAPES = [(130, 132), (128, 128), (1, 33), (5, 96)]
HYPER = {"lr": 3e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}

ON_TRITON = pytest.param("triton", marks=pytest.mark.slow)  # the interpreter takes seconds
every_backend = pytest.mark.parametrize("backend", ["reference", ON_TRITON])


def on_both(name, cases, quick):
    """Each case on the reference and on the kernels; there those that are not quick are slow."""
    return pytest.mark.parametrize(
        (name, "backend"),
        [pytest.param(case, "reference", id=f"{key}-reference") for key, case in cases.items()]
        + [
            pytest.param(
                case,
                "triton",
                id=f"{key}-triton",
                marks=[] if key in quick else pytest.mark.slow,
            )
            for key, case in cases.items()
        ],
    )


def values(shape, seed, dtype=BF16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def float8_weights(recipe, dtype=BF16, seed=0, device="cpu"):
    drawn = [values(shape, seed + i, dtype).to(device) for i, shape in enumerate(SHAPES)]
    return [torch.nn.Parameter(Float8Weight.from_values(value, recipe)) for value in drawn]


def grads(step, dtype=BF16):
    return [values(shape, 100 + 10 * step + i, dtype) for i, shape in enumerate(SHAPES)]


def give(params, given):
    for param, grad in zip(params, given, strict=True):
        param.grad = grad.to(param.device, param.dtype)


def parts(weights):
    return copied([weight.tensors() for weight in weights])


class Twin:
    """AdamW on plain parameters, and after each step their values, quantized into fp8 weights.

    The parameters are fp32; bf16 where the masters are to be stored in another format.
    """

    def __init__(self, weights, options, groups=None):
        self.weights = [copy.deepcopy(weight) for weight in weights]
        self.masters = "dtype" in options or "master_weights" in options
        dtype = BF16 if options.get("master_weight_dtype") == FP16 else FP32
        self.params = [
            torch.nn.Parameter(weight.high_precision_initial_value().to(dtype))
            for weight in weights
        ]
        self.optimizer = FusedAdam(self.params, backend="reference", **HYPER, **options)

    def step(self, given, **arguments):
        if not self.masters:
            for param, weight in zip(self.params, self.weights, strict=True):
                param.data.copy_(weight.dequantize())
        give(self.params, given)
        self.optimizer.step(**arguments)
        for param, weight in zip(self.params, self.weights, strict=True):
            weight.quantize_(self.optimizer.get_unscaled_state(param, "master_param"))
            if weight.recipe.scaling == "delayed":
                update_scales(weight)

    def assert_equals(self, optimizer, weights):
        assert_same(parts(weights), parts(self.weights))
        for param, weight in zip(self.params, weights, strict=True):
            theirs, own = self.optimizer.state[param], optimizer.state[weight]
            for name, tensor in theirs.items():
                if name != "master_param" or tensor is not None:
                    assert_same_bits(own[name], tensor, name)
            if self.masters:
                master = self.optimizer.get_unscaled_state(param, "master_param")
                found = optimizer.get_unscaled_state(weight, "master_param")
                assert_same_bits(found, master, "master")


def assert_runs_equal(recipe, options, backend, device, dtype=BF16, **arguments):
    weights = float8_weights(recipe, dtype, device=device)
    twin = Twin(weights, options)
    optimizer = FusedAdam(weights, backend=backend, **HYPER, **options)
    seen = [parts(weights)]
    for step in range(3 if backend == "reference" else 2):  # the interpreter takes seconds
        give(weights, grads(step, dtype))
        optimizer.step(**arguments)
        twin.step(grads(step, dtype), **arguments)
        twin.assert_equals(optimizer, weights)
        seen.append(parts(weights))
    for before, after in itertools.pairwise(seen):
        for old, new in zip(before, after, strict=True):
            assert not torch.equal(old["data8"].view(torch.uint8), new["data8"].view(torch.uint8))


@on_both("recipe", RECIPES, RECIPES)
@pytest.mark.sample(2)
@pytest.mark.thirds
def test_every_recipe(recipe, backend, device):
    assert_runs_equal(recipe, MASTERS, backend, device)


@on_both("recipe", SPECIAL, ["direct", "most_recent", "any_scale"])
def test_recipes_with_options(recipe, backend, device):
    dtype = FP32 if recipe.direct else BF16
    assert_runs_equal(recipe, MASTERS, backend, device, dtype)


@every_backend
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_other_dtypes_of_weights(dtype, backend, device):
    assert_runs_equal(RECIPES["current"], MASTERS, backend, device, dtype)


FORMATS = {
    f"{recipe}-{stored}": (RECIPES[recipe], options)
    for recipe in ("delayed", "block_128x128", "mxfp8")
    for stored, options in STORED.items()
}


QUICK = ["block_128x128-fp16_masters", "block_128x128-fp8_moments_alone", "mxfp8-bf16_moments"]


@on_both("case", FORMATS, QUICK)
@pytest.mark.sample(2)
@pytest.mark.thirds
def test_every_format_of_masters_and_moments(case, backend, device):
    assert_runs_equal(*case, backend, device)


@every_backend
@pytest.mark.parametrize("options", [MASTERS, {}], ids=["fp32_masters", "no_masters"])
def test_clipping_by_norm(options, backend, device):
    assert_runs_equal(RECIPES["mxfp8"], options, backend, device, clip_norm=1.0)


@every_backend
def test_a_master_starts_from_the_values_before_fp8(backend):
    weights = float8_weights(RECIPES["current"])
    initial = [weight.high_precision_initial_value().float() for weight in weights]
    optimizer = FusedAdam(weights, backend=backend, **HYPER, **MASTERS)
    for weight, value in zip(weights, initial, strict=True):
        optimizer.initialize_state(weight)
        assert_same_bits(optimizer.state[weight]["master_param"], value)
        assert not torch.equal(weight.dequantize().float(), value)
    give(weights, grads(0))
    optimizer.step()
    assert all(weight.high_precision_initial_value() is None for weight in weights)


# --- several kinds of weights, refusals


@every_backend
def test_groups_of_every_kind(backend):
    """Groups that mix recipes, dtypes of codes and plain weights: each as if it were alone."""

    def build():
        delayed, scaled, blocks = (
            torch.nn.Parameter(Float8Weight.from_values(values((33, 40), seed), recipe))
            for seed, recipe in enumerate(
                [RECIPES[name] for name in ("delayed", "current", "block_128x128")]
            )
        )
        bf16 = torch.nn.Parameter(values((7, 5), 3))
        fp32 = torch.nn.Parameter(values((9,), 4, FP32))
        return [delayed, bf16, scaled, fp32, blocks]

    def run(params, groups):
        optimizer = FusedAdam(groups, backend=backend, weight_decay=0.1, **MASTERS)
        for step in range(3):
            give(params, [values(p.shape, 10 * step + i) for i, p in enumerate(together)])
            optimizer.step()
        return optimizer

    def found(param, optimizer):
        float8 = isinstance(param, Float8Weight)
        held = param.tensors() if float8 else {"weight": param.detach()}
        return copied([held, dict(optimizer.state[param])])

    together, alone = build(), build()
    groups = [{"params": together[:3], "lr": 1e-2}, {"params": together[3:], "lr": 1e-3}]
    optimizer = run(together, groups)
    for index, param in enumerate(alone):
        single = FusedAdam([param], 1e-2 if index < 3 else 1e-3, weight_decay=0.1, **MASTERS)
        for step in range(3):
            give([param], [values(param.shape, 10 * step + index)])
            single.step()
        assert_same(found(together[index], optimizer), found(param, single))


@every_backend
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_external_masters(dtype, backend):
    """A list of masters, as Megatron gives them, for weights of fp32 too."""
    weights = float8_weights(RECIPES["block_128x128"], dtype)
    masters = [weight.high_precision_initial_value().float().clone() for weight in weights]
    twin = Twin(weights, MASTERS)
    optimizer = FusedAdam(weights, backend=backend, master_weights=masters, **HYPER)
    for step in range(2):
        give(weights, grads(step))
        optimizer.step()
        twin.step([grad.to(dtype) for grad in grads(step)])
        twin.assert_equals(optimizer, weights)
    for weight, master in zip(weights, masters, strict=True):
        assert optimizer.state[weight]["master_param"] is master


@every_backend
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_value_is_set_without_a_master(recipe, backend):
    weights = float8_weights(recipe)
    optimizer = FusedAdam(weights, backend=backend, **HYPER)
    expected = copy.deepcopy(weights[0])
    optimizer.set_scaled_state(weights[0], "master_param", values(SHAPES[0], 9, FP32))
    expected.quantize_(values(SHAPES[0], 9, FP32))
    assert_same(parts(weights[:1]), parts([expected]))
    found = optimizer.get_unscaled_state(weights[0], "master_param")
    assert_same_bits(found, expected.dequantize().float())


def test_a_value_of_a_shard_without_a_master_is_not_set():
    weight = float8_weights(RECIPES["current"])[0]
    before = parts([weight])
    shard = Float8Shard(weight, 3, 100)
    optimizer = FusedAdam([shard], backend="reference", **HYPER)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*master_param.*Float8Shard"):
        optimizer.set_scaled_state(shard, "master_param", torch.zeros(97))
    assert_same(parts([weight]), before)


# --- shards


@pytest.mark.parametrize("start", [0, 1, 129])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_range_outside_the_weight_is_refused(recipe, start):
    weight = float8_weights(recipe)[0]
    for stop in (start - 1, weight.numel() + 1):
        with pytest.raises(ValueError, match=rf"start and stop must .*, got {start} and {stop}"):
            Float8Shard(weight, start, stop)


# --- direct_cast: fp8 weights of fp32 values as they are, whatever their recipe says


SCALINGS = ("delayed", "current", "block_128x128", "mxfp8")


def stepped(recipe, direct_cast):
    torch.manual_seed(0)
    values = torch.randn(130, 260).bfloat16()
    weight = torch.nn.Parameter(Float8Weight.from_values(values, recipe))
    scale = None if weight.scale is None else weight.scale.clone()
    optimizer = FusedAdam([weight], lr=0.1, dtype=torch.float32, direct_cast=direct_cast)
    weight.grad = torch.randn(130, 260).bfloat16()
    optimizer.step()
    return weight, optimizer.state[weight]["master_param"], scale


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_optimizers_word_comes_before_the_recipes(scaling, asked, own):
    weight, master, scale = stepped(Float8Recipe(scaling, direct=own), asked)
    direct = own if asked is None else asked
    made = quantize_reference(master, Float8Recipe(scaling, direct=direct), torch.bfloat16, scale)
    other = quantize_reference(
        master, Float8Recipe(scaling, direct=not direct), torch.bfloat16, scale
    )
    assert_same_bits(weight.data8.view(torch.uint8), made.codes.view(torch.uint8))
    assert_same_bits(weight.scale_inv, made.scale_inv)
    assert not torch.equal(made.codes.view(torch.uint8), other.codes.view(torch.uint8))
