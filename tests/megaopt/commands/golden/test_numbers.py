"""The record's inputs: the same everywhere, hard, and exact in the dtype that they are given to."""

import struct

import numpy as np
import pytest
import torch
from bits import assert_same_bits

from megaopt.commands.golden.numbers import coarse, patterns, tensor_of, words

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def splitmix64(state):
    """Steele, Lea and Flood's generator as it is published, on Python's integers."""
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return state, z ^ (z >> 31)


def test_words_are_those_of_splitmix64():
    """Without a seed it starts at 0, whose first numbers are published with the generator."""
    state, expected = 0, []
    for _ in range(1000):
        state, word = splitmix64(state)
        expected.append(word)
    assert expected[:3] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert words(1000).tolist() == expected


@every_dtype
def test_a_dtype_holds_the_numbers_exactly(dtype):
    bits = patterns(words(20_000, 1), dtype)
    exact = torch.from_numpy(bits.astype(np.uint32).view(np.float32))
    assert_same_bits(tensor_of(bits, dtype).float(), exact)


@every_dtype
def test_all_binades_zeros_and_subnormal_numbers_occur(dtype):
    bits = patterns(words(20_000, 1), dtype)
    numbers = [struct.unpack("<f", struct.pack("<I", pattern))[0] for pattern in bits.tolist()]
    assert {(0, sign) for sign in (1.0, -1.0)} <= {(n, float(np.copysign(1, n))) for n in numbers}
    normal = [n for n in numbers if abs(n) >= 2.0**-24]
    for sign in (1, -1):
        binades = {int(np.floor(np.log2(sign * n))) for n in normal if sign * n > 0}
        assert binades == set(range(-24, 4))
    subnormal = torch.finfo(dtype).tiny
    assert sum(0 < abs(n) < subnormal for n in numbers) > 100


def test_coarse_numbers_scale_by_a_power_of_two():
    for dtype in DTYPES:
        values = tensor_of(coarse(patterns(words(5000, 2), dtype)), dtype).float()
        assert values[0] == values.abs().amax() == 448 * 2.0**-5
        assert_same_bits(values.bfloat16().float(), values)
