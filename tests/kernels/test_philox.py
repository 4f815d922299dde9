"""Philox4x32: Random123's known answers, and kernel = twin = an implementation of its own."""

from pathlib import Path

import numpy as np
import philox_oracle
import pytest
import torch
from bits import assert_same_bits
from mutants import mutant

from megaopt.kernels.chunks import draws as module
from megaopt.kernels.chunks.draws import philox_reference
from megaopt.kernels.optional_triton import jit, tl

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
# counter and key, and the answers by rounds, as Random123's kat_vectors has them
KNOWN = {
    "zeros": (
        (0,) * 6,
        {7: "5f6fb709 0d893f64 4f121f81 4f730a48", 10: "6627e8d5 e169c58d bc57ac4c 9b00dbd8"},
    ),
    "ones": (
        (2**32 - 1,) * 6,
        {7: "5207ddc2 45165e59 4d8ee751 8c52f662", 10: "408f276d 41c83b0e a20bc7c6 6d5451fd"},
    ),
    "pi": (
        PI,
        {7: "4dfccaba 190a87f0 c47362ba b6b5242a", 10: "d16cfe09 94fdcceb 5001e420 24126ea1"},
    ),
}


@jit
def philox_kernel(counter_ptr, key_ptr, out_ptr, COUNT: tl.constexpr, PHILOX: tl.constexpr):
    """counter_ptr and out_ptr: four rows of COUNT words; key_ptr: two words."""
    offsets = tl.arange(0, COUNT)
    first = tl.load(counter_ptr + offsets).to(tl.uint32)
    second = tl.load(counter_ptr + COUNT + offsets).to(tl.uint32)
    third = tl.load(counter_ptr + 2 * COUNT + offsets).to(tl.uint32)
    fourth = tl.load(counter_ptr + 3 * COUNT + offsets).to(tl.uint32)
    key_0, key_1 = tl.load(key_ptr).to(tl.uint32), tl.load(key_ptr + 1).to(tl.uint32)
    words = PHILOX(first, second, third, fourth, key_0, key_1)
    tl.store(out_ptr + offsets, words[0].to(tl.int64))
    tl.store(out_ptr + COUNT + offsets, words[1].to(tl.int64))
    tl.store(out_ptr + 2 * COUNT + offsets, words[2].to(tl.int64))
    tl.store(out_ptr + 3 * COUNT + offsets, words[3].to(tl.int64))


def by_kernel(counter, key, device, philox=module.philox):
    """Four words, int64 [4, count]; counter: int64 [4, count]."""
    out = torch.zeros_like(counter, device=device)
    numbers = torch.tensor(key, device=device)
    with np.errstate(all="ignore"):  # products wrap
        philox_kernel[(1,)](counter.to(device), numbers, out, counter.shape[1], philox)
    return out.cpu()


def words_of(found):
    return " ".join(f"{word.item():08x}" for word in found)


@pytest.mark.parametrize("rounds", [7, 10])
@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name, rounds, device, tmp_path):
    numbers, answers = KNOWN[name]
    counter, key = torch.tensor(numbers[:4])[:, None], numbers[4:]
    assert words_of(philox_reference(tuple(counter), key, rounds)) == answers[rounds]
    assert words_of(philox_oracle.philox(counter.numpy(), key, rounds)) == answers[rounds]
    change = ("OWN_ROUNDS = 7", f"OWN_ROUNDS = {rounds}")
    kernel = mutant(Path(module.__file__), change, tmp_path).philox
    assert words_of(by_kernel(counter, key, device, kernel)[:, 0]) == answers[rounds]


@pytest.mark.parametrize("seed", range(20))
def test_any_counter_and_key(seed, device):
    """Random ones, and such with one bit alone, where carries and high halves show."""
    generator = np.random.default_rng(seed)
    counter = generator.integers(0, 2**32, (4, 256))
    counter[:, :128] = 0
    counter[np.repeat(range(4), 32), range(128)] = 2 ** np.tile(np.arange(32), 4)
    key = tuple(map(int, generator.integers(0, 2**32, 2)))
    expected = torch.from_numpy(np.stack(philox_oracle.philox(counter, key)).astype(np.int64))
    given = torch.from_numpy(counter)
    assert_same_bits(torch.stack(philox_reference(tuple(given), key)), expected, "twin")
    assert_same_bits(by_kernel(given, key, device), expected, "kernel")
