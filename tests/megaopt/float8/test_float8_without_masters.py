"""fp8 weights without fp32 masters: what is drawn, what lies beside, moments in blocks."""

import itertools

import float8_drawn_oracle as drawn
import numpy as np
import philox_oracle
import pytest
import torch
from bits import assert_same_bits
from float8_oracle import BLOCKS, MAX, amax_of, e8m0_of, scale_of
from oracle import F32, divide, multiply
from runs import train

from megaopt import FusedAdam
from megaopt.float8 import RECIPES, Float8Weight

BF16, FP32 = torch.bfloat16, torch.float32
KEPT = {
    "stochastic": {"weight_rounding": "stochastic"},
    **{
        name: {"master_weights": True, "master_weight_dtype": name}
        for name in ("remainder8", "remainder8_stochastic")
    },
}
BLOCK_MOMENTS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
MOMENTS = {
    "fp32": {},
    "blocks": BLOCK_MOMENTS,
    "fp8": {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float16},
}
SHAPES = [(130, 160), (70, 256), (5, 96)]
HYPER = {"lr": 3e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "seed": 7}


def values(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weights_of(recipe, device="cpu"):
    own = [values(shape, i).to(device) for i, shape in enumerate(SHAPES)]
    return [torch.nn.Parameter(Float8Weight.from_values(value, recipe)) for value in own]


def give(params, step):
    for i, param in enumerate(params):
        param.grad = values(param.shape, 100 + 10 * step + i).to(param.device, param.dtype)


def numpy_of(weight):
    """Copies of the bytes."""
    own = weight.tensors().items()
    return {name: tensor.detach().cpu().view(torch.uint8).numpy().copy() for name, tensor in own}


class Oracle:
    """Weights as numpy has them; the rule and the moments are a plain fp32 optimizer's.

    Each step gives that optimizer what codes and remainders stand for, and makes codes of what it
    gives back: of scales, products, random words and tables, all of them of tests/support alone.
    """

    def __init__(self, weights, kept, moments):
        self.recipe, self.kept = weights[0].recipe, kept
        self.codes = [numpy_of(w)["data8"] for w in weights]
        self.scales = [self._factors(w.scale_inv.cpu().numpy().copy(), w.shape) for w in weights]
        self.inverses = [w.scale_inv.cpu().numpy().copy() for w in weights]
        self.next = [None if w.scale is None else w.scale.item() for w in weights]
        self.rest = [np.zeros(w.shape, np.int8) for w in weights]
        self.values = [w.high_precision_initial_value().float().cpu().numpy() for w in weights]
        self.params = [torch.nn.Parameter(torch.zeros(w.shape)) for w in weights]
        self.optimizer = FusedAdam(self.params, backend="reference", **HYPER, **moments)
        self.steps = 0
        if kept != "stochastic":
            for i in range(len(weights)):
                self._start(i)

    def _factors(self, inverse, shape):
        """scale_inv of each element."""
        tall, wide = BLOCKS.get(self.recipe.scaling, shape)
        if self.recipe.scaling == "mxfp8":
            inverse = (2.0 ** (inverse.astype(np.float64) - 127)).astype(F32)
        grid = inverse.reshape(-(-shape[0] // tall), -(-shape[1] // wide))
        return np.repeat(np.repeat(grid, tall, 0), wide, 1)[: shape[0], : shape[1]]

    def _start(self, i):
        """The first remainder brings the code nearest to the value that the weight was made of."""
        scaled = multiply(self.values[i], divide(F32(1), self.scales[i]))
        code, rest = drawn.encode_pair(scaled, None)
        own, wide = self.codes[i].astype(int), (code & 0x7F).astype(int) * 256 + rest
        wide = np.where((code ^ self.codes[i]) >= 0x80, -wide, wide)
        self.rest[i] = np.clip(wide - (own & 0x7F) * 256, -128, 127).astype(np.int8)

    def step(self):
        for i, param in enumerate(self.params):
            rest = self.rest[i].astype(np.int64)
            read = drawn.decode_pair(self.codes[i], rest).astype(F32)
            param.data.copy_(torch.from_numpy(multiply(read, self.scales[i])))
        give(self.params, self.steps)
        self.optimizer.step()
        self.steps += 1
        for i, param in enumerate(self.params):
            self._store(i, param.detach().numpy())

    def _store(self, i, value):
        recipe, shape = self.recipe, value.shape
        tall, wide = BLOCKS.get(recipe.scaling, shape)
        scales = np.zeros(shape, F32)
        for row in range(0, shape[0], tall):
            for column in range(0, shape[1], wide):
                part = np.s_[row : row + tall, column : column + wide]
                scales[part] = self._scale(i, amax_of(value[part]))
        if recipe.scaling == "mxfp8":
            self.inverses[i] = 127 - np.log2(scales[:, ::wide]).astype(int)
        else:
            self.inverses[i] = divide(F32(1), scales[::tall, ::wide])
        product = multiply(value, scales)
        words = philox_oracle.words((i, 0, 1, 0), value.size, HYPER["seed"], self.steps)
        bits = (np.array(words, np.uint64) & np.uint64(0xFFFF)).astype(np.int64).reshape(shape)
        if self.kept == "stochastic":
            self.codes[i] = drawn.encode(product, bits)
        else:
            bits = bits if self.kept.endswith("stochastic") else None
            self.codes[i], self.rest[i] = drawn.encode_pair(product, bits)
        self.scales[i] = self._factors(
            self.inverses[i] if recipe.scaling == "mxfp8" else self.inverses[i].astype(F32), shape
        )

    def _scale(self, i, amax):
        recipe = self.recipe
        if recipe.scaling == "mxfp8":
            return F32(2.0 ** (127 - e8m0_of(amax, MAX)))
        if recipe.scaling == "delayed":
            return F32(self.next[i])
        return scale_of(amax, MAX, 0.0, recipe.power_of_two_scales)

    def assert_equals(self, weights, optimizer):
        for i, weight in enumerate(weights):
            assert np.array_equal(numpy_of(weight)["data8"], self.codes[i]), f"codes {i}"
            inverse = weight.scale_inv.cpu().numpy().reshape(-1)
            assert np.array_equal(inverse, np.asarray(self.inverses[i]).reshape(-1)), f"scale {i}"
            state, theirs = optimizer.state[weight], self.optimizer.state[self.params[i]]
            for name, tensor in theirs.items():
                if name != "master_param":
                    assert_same_bits(state[name].cpu(), tensor, f"{name} of {i}")
            if self.kept == "stochastic":
                assert state["master_param"] is None
            else:
                found = state["master_param"].cpu().numpy()
                assert np.array_equal(found, self.rest[i]), f"remainders {i}"
            if weight.scale is not None:
                self.next[i] = weight.scale.item()  # test_float8_scale.py has its oracle


ON_TRITON = {
    ("delayed", "stochastic", "fp32"), ("current", "remainder8", "blocks"),
    ("block_128x128", "remainder8_stochastic", "fp8"), ("mxfp8", "stochastic", "blocks"),
}  # fmt: skip
"""On the interpreter, which takes seconds; the others are slow there."""


def every_case():
    for backend in ("reference", "triton"):
        for case in itertools.product(RECIPES, KEPT, MOMENTS):
            marks = pytest.mark.sample(3) if backend == "reference" else pytest.mark.slow
            marks = () if backend == "triton" and case in ON_TRITON else marks
            yield pytest.param(*case, backend, marks=marks)


@pytest.mark.parametrize(("name", "kept", "moments", "backend"), [*every_case()])
@pytest.mark.thirds
@pytest.mark.sample(2)
def test_steps_are_the_oracles(name, kept, moments, backend, device):
    if backend == "reference":
        device = "cpu"
    weights = weights_of(RECIPES[name], device)
    oracle = Oracle(weights, kept, MOMENTS[moments])
    own = {**HYPER, **KEPT[kept], **MOMENTS[moments]}
    optimizer = FusedAdam(weights, backend=backend, **own)
    for step in range(3 if backend == "reference" else 2):
        before = [numpy_of(weight)["data8"] for weight in weights]
        give(weights, step)
        optimizer.step()
        oracle.step()
        oracle.assert_equals(weights, optimizer)
        for old, weight in zip(before, weights, strict=True):
            assert not np.array_equal(old, numpy_of(weight)["data8"])


QUICK_DECAYS = [("delayed", "stochastic"), ("current", "remainder8_stochastic")]
DECAYS = [
    pytest.param(name, kept, marks=[pytest.mark.slow] * ((name, kept) not in QUICK_DECAYS))
    for name, kept in itertools.product(RECIPES, ("stochastic", "remainder8_stochastic"))
]


@pytest.mark.parametrize(("name", "kept"), DECAYS)
def test_a_small_decay_moves_weights_at_its_exact_rate(name, kept):
    """36 steps without a gradient: 1 - (1 - rate)**36 of the weights, 0.99 to 1.01 times.

    The rate is below half of a code's last place, 2**-5 of the value at least, or of a pair's,
    2**-13. A drawn code is off by at most a step of 2**-3 of the value, in one of its two
    directions. What has been drawn adds up: of n elements, each of which moves by d in the mean,
    the deviation of the mean move is at most sqrt(n * 2**-3 * d) / (n * d), here
    sqrt(2**-3 / (2**18 * 0.056)), or 0.29%: the bounds are three and a half of these. Of pairs,
    whose step is 2**-11, it is sqrt(2**-11 / (2**18 * 0.0036)), or 0.07%.
    """
    value = torch.rand(512, 512, generator=torch.Generator().manual_seed(3)) + 0.5
    weight = torch.nn.Parameter(Float8Weight.from_values(value.bfloat16(), name))
    lr = 1e-2 if kept == "remainder8_stochastic" else 4e-2
    optimizer = FusedAdam([weight], lr=lr, weight_decay=lr, seed=11, **KEPT[kept])
    weight.grad = torch.zeros_like(value, dtype=BF16)
    optimizer.initialize_states()
    start = optimizer.get_unscaled_state(weight, "master_param").double().sum()
    for _ in range(36):
        optimizer.step()
    end = optimizer.get_unscaled_state(weight, "master_param").double().sum()
    assert 0.99 < (start - end) / (start * (1 - (1 - lr * lr) ** 36)) < 1.01


@pytest.mark.parametrize("kept", ["remainder8", "remainder8_stochastic"])
def test_a_weight_that_was_written_is_what_it_says(kept):
    """A 0 written beside a negative remainder is 0: no NaN, nothing of the old value."""
    weights = weights_of(RECIPES["block_128x128"])
    optimizer = FusedAdam(weights, lr=0.0, **KEPT[kept])
    train(optimizer, 2)
    for weight in weights:
        assert (optimizer.state[weight]["master_param"] < 0).any()
        weight.data8.zero_()
        found = optimizer.get_unscaled_state(weight, "master_param")
        rest = optimizer.state[weight]["master_param"]
        assert_same_bits((found == 0), rest <= 0)
        assert (found.abs() <= weight.scale_inv.max() * 2.0**-10).all()
    train(optimizer, 1, first=2)
    assert all(weight.dequantize().isfinite().all() for weight in weights)


def test_values_that_are_set_are_read_again():
    """To 11 bits of mantissa beside e4m3 codes: off by at most half of the last, 2**-12."""
    weights = weights_of(RECIPES["mxfp8"])
    optimizer = FusedAdam(weights, **HYPER, **KEPT["remainder8"])
    train(optimizer, 1)
    for i, weight in enumerate(weights):
        value = torch.rand(weight.shape, generator=torch.Generator().manual_seed(i)) + 4.0
        optimizer.set_scaled_state(weight, "master_param", value)
        found = optimizer.get_unscaled_state(weight, "master_param")
        assert ((found - value).abs() <= value.abs() * 2.0**-12).all()


@pytest.mark.parametrize("name", ["current", "block_128x128", "mxfp8"])
def test_a_value_that_is_read_and_set_again_keeps_every_bit(name):
    """Ties between two codes too; a delayed scale has moved on since the codes were made."""
    weights = weights_of(RECIPES[name])
    optimizer = FusedAdam(weights, **KEPT["remainder8"], **HYPER)
    train(optimizer, 4)
    ties = 0
    for weight in weights:
        before = numpy_of(weight), optimizer.state[weight]["master_param"].clone()
        ties += int((before[1] == -128).sum())
        value = optimizer.get_unscaled_state(weight, "master_param")
        optimizer.set_scaled_state(weight, "master_param", value)
        assert_same_bits(optimizer.state[weight]["master_param"], before[1], "remainder")
        for tensor, own in numpy_of(weight).items():
            assert np.array_equal(own, before[0][tensor]), tensor
    assert ties > 20
