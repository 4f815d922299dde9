import itertools

import pytest
import torch

from megaopt import FusedAdam
from megaopt.commands.bits import as_integers, in_digits
from megaopt.commands.regression.megatron import fingerprint as fingerprints
from megaopt.commands.regression.megatron.fingerprint import odd_numbers
from megaopt.commands.regression.megatron.state import as_master, memory_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
MODULUS = 1 << 64


def fingerprint(shard, start):
    """Beside another shard, which must not matter."""
    other = torch.zeros_like(shard)
    first, second = fingerprints.fingerprint([other, shard], start).tolist()
    assert first == int(fingerprints.fingerprint([other], start))
    return second


def splitmix(place):
    x = (place + 1) * 0x9E3779B97F4A7C15 % MODULUS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ x >> 27) * 0x94D049BB133111EB % MODULUS
    return (x ^ x >> 31) | 1


def drawn(dtype, count=1000):
    bits = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return bits.view(dtype)


@pytest.mark.parametrize("start", [0, 7, 1 << 31, 3 << 40])
def test_the_odd_numbers_are_those_of_splitmix64(start):
    numbers = odd_numbers(start, start + 100, torch.device("cpu")).tolist()
    assert [number % MODULUS for number in numbers] == [splitmix(start + i) for i in range(100)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_that_of_whole_numbers(dtype):
    tensor, size = drawn(dtype), 8 * dtype.itemsize
    total = 0
    if dtype.is_floating_point:  # every NaN counts as torch's
        tensor[tensor.isnan()] = torch.nan
    for place, number in enumerate(as_integers(tensor).tolist()):
        # uint8 has no sign, the others do
        signed = (
            number if dtype == torch.uint8 or number < 1 << (size - 1) else number - (1 << size)
        )
        total += (signed + 1) * splitmix(5 + place)
    assert in_digits(int(fingerprint(tensor, 5)), 64) == f"0x{total % MODULUS:016x}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [(0, 1000), (1, 999), (333, 334), (500, 500)])
def test_shards_add_up_to_the_whole(dtype, cuts, monkeypatch):
    monkeypatch.setattr(fingerprints, "BLOCK", 64)
    tensor = drawn(dtype)
    bounds = [0, *cuts, 1000]
    parts = itertools.pairwise(bounds)
    total = sum(int(fingerprint(tensor[a:b], a)) for a, b in parts)
    assert in_digits(total, 64) == in_digits(int(fingerprint(tensor, 0)), 64)


# --- states


def test_masters_come_back_from_remainders():
    weight = torch.nn.Parameter(torch.randn(4096).bfloat16())
    keys = {"backend": "reference", "master_weights": True, "lr": 1e-2}
    optimizer = FusedAdam([weight], store_param_remainders=True, **keys)
    for _ in range(3):
        weight.grad = torch.randn(4096).bfloat16()
        optimizer.step()
    stored = optimizer.state[weight]["master_param"]
    assert stored.dtype == torch.int16
    assert (stored < 0).any()
    master = optimizer.get_unscaled_state(weight, "master_param")
    assert torch.equal(as_master(weight.detach(), stored), master)


@pytest.mark.parametrize("name", ["_data", "_rowwise_data"])
def test_of_an_fp8_tensor_the_codes_are_compared(name):
    codes = torch.randint(0, 256, (4, 8), dtype=torch.uint8)
    weight = torch.zeros(4, 8)
    setattr(weight, name, codes)
    assert torch.equal(memory_of(weight), codes.view(-1))
