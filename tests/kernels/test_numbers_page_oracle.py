"""AdamW with 8-bit moments and 24-bit masters, written from docs/numbers.md alone, in numpy.

Nothing of the package is in the oracle: what a reader of the page writes has the optimizer's bits.
"""

import numpy as np
import pytest
import torch

from megaopt import FusedAdam

LR, BETAS, EPS, DECAY, SEED = 0.02, (0.9, 0.99), 1e-6, 0.1, 2**63 + 12345
SHAPES = [(20, 256), (7,), (64, 80), (3, 128)]
"""Whole blocks; too small for blocks; a last block of 99 elements."""
BLOCK = 128
STEPS = 6
F32, F64, U32, U64 = np.float32, np.float64, np.uint32, np.uint64


# --- random bits


def philox_words(count, number, step, seed):
    """The word of each of `count` elements: Philox4x32-7."""
    quads = np.arange(-(-count // 4), dtype=U64)
    mask = U64(0xFFFFFFFF)
    counter = [quads & mask, quads >> U64(32)]
    counter += [np.full_like(quads, number), np.full_like(quads, step)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(7):
        first, second = U64(0xD2511F53) * counter[0], U64(0xCD9E8D57) * counter[2]
        counter = [
            (second >> U64(32)) ^ counter[1] ^ U64(key[0]),
            second & mask,
            (first >> U64(32)) ^ counter[3] ^ U64(key[1]),
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(counter, 1).reshape(-1)[:count].astype(np.int64)


# --- formats


def bits(value):
    """An fp32 number's pattern."""
    return np.ascontiguousarray(value, dtype=F32).view(U32).astype(np.int64)


def number(pattern):
    """The fp32 number of a pattern."""
    return (np.asarray(pattern) & 0xFFFFFFFF).astype(U32).view(F32)


def scales_of(value):
    """The byte of each element's block, of one that is not whole too."""
    magnitude = np.where(np.isfinite(value), np.abs(value), F32(0))
    padded = np.pad(magnitude, (0, -len(value) % BLOCK)).reshape(-1, BLOCK)
    return np.clip((bits(padded.max(1)) - 1) >> 23, 1, 253)


def power(exponent):
    """2**exponent, fp32."""
    return np.ldexp(F32(1), exponent).astype(F32)


def encode_block(value, drawn, shift, largest, signed):
    """Codes and scales of a moment in blocks."""
    scales = scales_of(value)
    each = np.repeat(scales, BLOCK)[: len(value)]
    x = (np.abs(value) * power(127 - each)) * power(-shift)
    code = np.minimum((bits(x) + (drawn << 4) + 8) >> 20, largest)
    if signed:
        return np.where(value < 0, code | 0x80, code), scales
    return np.where(bits(value) == 0, code, np.maximum(code, 1)), scales


def decode_block(code, scales, shift, largest, signed):
    """The numbers of codes."""
    each = np.repeat(scales, BLOCK)[: len(code)]
    magnitude = code & largest
    value = (number(magnitude << 20) * power(shift)) * power(each - 127)
    if signed:
        value = np.where(code & 0x80, -value, value)
    return np.where(magnitude == largest, number(0x7FC00000), value)


E4M3, E5M3 = (113, 127, True), (97, 255, False)


def encode_remainder8(value, drawn):
    """Weight, as a bf16's pattern, and remainder, from -128 to 127."""
    pattern = (bits(value) + (drawn >> 8)) & 0xFFFFFFFF
    pattern = np.where(np.isnan(value), bits(value) & 0xFFFF0000 | 0x400000, pattern)
    remainder = pattern >> 8 & 0xFF
    remainder = np.where(remainder > 127, remainder - 256, remainder)
    return ((pattern >> 16) + (remainder < 0)) & 0xFFFF, remainder


def decode_remainder8(weight, remainder):
    """The master."""
    return number((weight - (remainder < 0)) << 16 | (remainder & 0xFF) << 8)


# --- a step


def chain(beta, step):
    """beta**step."""
    result = 1.0
    for digit in f"{step:b}":
        result *= result
        if digit == "1":
            result *= beta
    return result


def canonical(value):
    """A NaN as 0x7FC00000."""
    return np.where(np.isnan(value), number(0x7FC00000), value)


def adamw(param, exp_avg, exp_avg_sq, grad, step):
    """The numbered operations."""
    beta1, beta2 = BETAS
    corrections = [F32(1 / (1 - chain(beta, step))) for beta in BETAS]
    exp_avg = F32(beta1) * exp_avg + F32(1 - beta1) * grad
    exp_avg_sq = F32(beta2) * exp_avg_sq + F32(1 - beta2) * (grad * grad)
    h = np.sqrt(exp_avg_sq * corrections[1]) + F32(EPS)
    j = (exp_avg * corrections[0]) / h
    param = param - F32(LR) * (j + F32(DECAY) * param)
    return canonical(param), canonical(exp_avg), canonical(exp_avg_sq)


class Oracle:
    """One parameter: flat arrays of codes."""

    def __init__(self, weight, number, row):
        self.weight, self.number = weight, number
        self.remainder = np.zeros(len(weight), np.int64)
        self.in_blocks = len(weight) >= 4096 and row % 128 == 0
        count = -(-len(weight) // BLOCK)
        zeros = np.zeros(len(weight), np.int64)
        self.codes, self.scales = [zeros, zeros], [np.ones(count, np.int64)] * 2
        self.moments = [zeros.astype(F32)] * 2

    def step(self, grad, step):
        word = philox_words(len(grad), self.number, step, SEED)
        upper, lower = word >> 16, word & 0xFFFF
        formats = (E4M3, E5M3)
        if self.in_blocks:
            read = zip(self.codes, self.scales, formats, strict=True)
            self.moments = [decode_block(code, scale, *form) for code, scale, form in read]
        param = decode_remainder8(self.weight, self.remainder)
        param, *self.moments = adamw(param, *self.moments, grad, step)
        self.weight, self.remainder = encode_remainder8(param, lower)
        if self.in_blocks:
            drawn = zip(self.moments, (upper ^ lower, upper), formats, strict=True)
            stored = [encode_block(value, r, *form) for value, r, form in drawn]
            self.codes, self.scales = zip(*stored, strict=True)


# --- the optimizer beside it


def random_numbers(generator, size, spread):
    """Sizes from 2**-spread to 2**spread; zeros of both signs, subnormals, infinities, NaN."""
    value = generator.standard_normal(size) * 2.0 ** generator.uniform(-spread, spread, size)
    special = [0.0, -0.0, 1e-45, -1e-45, 1e-39, 3e38, -3e38, np.inf, -np.inf, np.nan, 1e-30]
    place = generator.choice(size, size // 20, replace=False)
    value[place] = generator.choice(special, len(place))
    return value.astype(F32)


def as_bf16(value):
    """Patterns of bf16: the upper half of what is no NaN by then."""
    return np.where(np.isnan(value), 0x7FC0, bits(value) >> 16)


def bf16_tensor(pattern, shape):
    return torch.from_numpy(pattern.astype(np.int16)).view(torch.bfloat16).reshape(shape)


def patterns(tensor):
    """Codes, or the patterns of numbers; those of 16 and 32 bits with a sign."""
    dtype = {torch.bfloat16: torch.int16, torch.float32: torch.int32}.get(tensor.dtype)
    found = tensor.detach() if dtype is None else tensor.detach().view(dtype)
    return found.reshape(-1).long().numpy()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("spread", [3, 60])
def test_what_the_page_says_has_the_optimizers_bits(backend, spread):
    generator = np.random.default_rng(spread)
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    oracles = [
        Oracle(as_bf16(random_numbers(generator, size, spread)), number, shape[-1])
        for number, (size, shape) in enumerate(zip(sizes, SHAPES, strict=True))
    ]
    weights = [
        torch.nn.Parameter(bf16_tensor(oracle.weight, shape))
        for oracle, shape in zip(oracles, SHAPES, strict=True)
    ]
    optimizer = FusedAdam(
        weights, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, seed=SEED, backend=backend,
        master_weights=True, master_weight_dtype="remainder8_stochastic",
        exp_avg_dtype="block_e4m3", exp_avg_sq_dtype="block_e5m3",
    )  # fmt: skip
    for step in range(1, STEPS + 1):
        for oracle, weight in zip(oracles, weights, strict=True):
            grad = as_bf16(random_numbers(generator, weight.numel(), spread))
            weight.grad = bf16_tensor(grad, weight.shape)
            with np.errstate(all="ignore"):
                oracle.step(number(grad << 16), step)
        optimizer.step()
        for oracle, weight in zip(oracles, weights, strict=True):
            check(oracle, weight, optimizer.state[weight])


def check(oracle, weight, state):
    """Weight, remainder, and each moment's codes and scales, or fp32 patterns."""
    assert (patterns(weight) & 0xFFFF == oracle.weight).all()
    assert (patterns(state["master_param"]) == oracle.remainder).all()
    for index, name in enumerate(("exp_avg", "exp_avg_sq")):
        if oracle.in_blocks:
            assert (patterns(state[name]) == oracle.codes[index]).all()
            assert (patterns(state[f"{name}_scale"]) == oracle.scales[index]).all()
        else:
            assert (patterns(state[name]) & 0xFFFFFFFF == bits(oracle.moments[index])).all()
