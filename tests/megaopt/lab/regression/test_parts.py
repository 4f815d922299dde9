"""What is recorded of tensors: every NaN as the same, parts that add up, states as they count."""

import itertools
import math

import pytest
import torch

from megaopt import FusedAdam
from megaopt.lab.regression.megatron.state import as_master, memory_of
from megaopt.lab.regression.parts import flip_master_bit, open_recording, part, rows_of
from megaopt.recording.files import Recording

CPU = torch.device("cpu")


@pytest.fixture
def digest(tmp_path):
    """The digest of a parameter, from parts of it."""
    numbers = itertools.count()

    def digest(*parts):
        folder = tmp_path / str(next(numbers))
        writer = open_recording(folder, 0, 1, {})
        writer.step(1, 0, {}, rows_of(parts, writer, CPU))
        writer.close()
        (found,) = Recording(folder).digests(1).values()
        assert found.missing == 0
        return found.digest

    return digest


def of(*numbers):
    return part("a", "weight", torch.tensor(numbers))


NAN_PATTERNS = {
    torch.float32: (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF),
    torch.bfloat16: (0x7FC0, 0xFFC0, 0x7F81, 0xFFFF),
    torch.float16: (0x7E00, 0xFE00, 0x7C01, 0xFFFF),
    torch.float8_e4m3fn: (0x7F, 0xFF),
}


@pytest.mark.parametrize("dtype", NAN_PATTERNS, ids=str)
def test_nans_are_compared_by_their_places(digest, dtype):
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[dtype.itemsize]
    of_patterns = lambda *own: part("a", "weight", torch.tensor(own, dtype=unsigned).view(dtype))  # noqa: E731
    found = {digest(of_patterns(0, 0x38, pattern)) for pattern in NAN_PATTERNS[dtype]}
    assert len(found) == 1
    assert {each.nonfinite for each in found} == {1}
    first, *_, last = NAN_PATTERNS[dtype]
    assert digest(of_patterns(last, 0x38, 0)) not in found
    assert digest(of_patterns(last, 0x38, first)) not in found


@pytest.mark.parametrize("other", [0.0, -0.0, 1.0, math.inf, -math.inf])
def test_a_nan_beside_a_number_is_a_difference(digest, other):
    assert digest(of(1.0, math.nan)) != digest(of(1.0, other))
    assert digest(of(1.0, 0.0)) != digest(of(1.0, -0.0))


@pytest.mark.parametrize("cut", [1, 333, 999])
def test_parts_add_up_to_the_whole(digest, cut):
    whole = torch.randn(10, 100)
    whole[3, 33] = math.nan
    flat = whole.view(-1)
    shards = (flat[:cut], 0), (flat[cut:], cut), (flat[:0], 7)
    parts = [part("a", "weight", shard, whole.shape, start) for shard, start in shards]
    assert digest(*parts) == digest(part("a", "weight", whole))


def test_a_bit_of_the_first_master_is_flipped():
    tensors = {
        "weight": torch.ones(3, dtype=torch.bfloat16),
        "master": torch.ones(5),
        "exp_avg": torch.ones(5),
    }
    flip_master_bit(part("a", *each) for each in tensors.items())
    assert tensors["master"].tolist() == [1, 1, 1 + 2**-23, 1, 1]
    assert tensors["exp_avg"].tolist() == [1] * 5
    with pytest.raises(RuntimeError, match="no element of an fp32 master"):
        flip_master_bit([part("a", "weight", tensors["weight"])])


# --- Megatron's states


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
