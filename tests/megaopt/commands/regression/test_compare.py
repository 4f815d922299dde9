import copy
import hashlib
import math

import pytest
import torch

from megaopt.commands.bits import hexadecimal, loss_bits
from megaopt.commands.regression.compare import (
    Mismatch,
    find_mismatch,
    hash_snapshot,
)


def a_snapshot():
    generator = torch.Generator().manual_seed(0)
    return {
        "embedding.weight": {
            "weight": torch.randn(5, 7, generator=generator).bfloat16(),
            "master_param": torch.randn(5, 7, generator=generator),
            "exp_avg": torch.randn(5, 7, generator=generator),
        },
        "norm.weight": {
            "weight": torch.randn(7, generator=generator),
            "exp_avg": torch.randn(7, generator=generator),
        },
    }


def flip(tensor, index, bit):
    integers = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).view(-1)
    integers[index] ^= 1 << bit


@pytest.mark.parametrize(
    ("name", "kind", "index"),
    [
        ("embedding.weight", "weight", 0),
        ("embedding.weight", "master_param", 34),
        ("norm.weight", "weight", 3),
        ("norm.weight", "exp_avg", 6),
    ],
)
def test_a_flipped_bit_is_found_where_it_is(name, kind, index):
    expected, actual = a_snapshot(), a_snapshot()
    flip(actual[name][kind], index, 0)
    bits, other = (hexadecimal(s[name][kind], index) for s in (actual, expected))
    assert find_mismatch(actual, expected) == Mismatch(f"{name} {kind}", index, bits, other)
    assert int(bits, 16) ^ int(other, 16) == 1


def test_bits_decide_and_not_values():
    expected, actual = a_snapshot(), a_snapshot()
    for snapshot in (expected, actual):
        snapshot["norm.weight"]["weight"][2] = math.nan
    assert find_mismatch(actual, expected) is None
    expected["norm.weight"]["exp_avg"][4] = 0.0
    actual["norm.weight"]["exp_avg"][4] = -0.0
    found = find_mismatch(actual, expected)
    assert found == Mismatch("norm.weight exp_avg", 4, "0x80000000", "0x00000000")


NAN_PATTERNS = {
    torch.float32: (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF),
    torch.bfloat16: (0x7FC0, 0xFFC0, 0x7F81, 0xFFFF),
    torch.float16: (0x7E00, 0xFE00, 0x7C01, 0xFFFF),
    torch.float8_e4m3fn: (0x7F, 0xFF),
}


def of_patterns(patterns, dtype):
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[dtype.itemsize]
    return torch.tensor(patterns, dtype=unsigned).view(dtype)


@pytest.mark.parametrize("dtype", NAN_PATTERNS, ids=str)
def test_nans_are_compared_by_their_places(dtype):
    patterns = NAN_PATTERNS[dtype]
    tensors = [of_patterns([0, 0x38, pattern], dtype) for pattern in patterns]
    hashes = {str(hash_snapshot({"a": {"weight": each}})) for each in tensors}
    for actual in tensors:
        assert find_mismatch({"a": {"weight": actual}}, {"a": {"weight": tensors[0]}}) is None
    assert len(hashes) == 1
    elsewhere = {"a": {"weight": of_patterns([patterns[-1], 0x38, patterns[0]], dtype)}}
    found = find_mismatch(elsewhere, {"a": {"weight": tensors[0]}})
    assert (found.index, found.bits) == (0, f"0x{patterns[-1]:0{2 * dtype.itemsize}x}")
    assert str(hash_snapshot(elsewhere)) not in hashes


@pytest.mark.parametrize("other", [0.0, -0.0, 1.0, math.inf, -math.inf])
@pytest.mark.parametrize("turned", [False, True])
def test_a_nan_beside_a_number_is_a_difference(other, turned):
    pair = [{"a": {"weight": torch.tensor([1.0, value])}} for value in (math.nan, other)]
    found = find_mismatch(*(reversed(pair) if turned else pair))
    assert (found.tensor, found.index) == ("a weight", 1)
    assert loss_bits(math.nan) != loss_bits(other)


@pytest.mark.parametrize("change", ["missing kind", "missing name", "dtype", "shape"])
def test_snapshots_of_different_tensors_are_not_compared(change):
    actual = a_snapshot()
    weight = actual["norm.weight"]["weight"]
    if change == "missing kind":
        del actual["norm.weight"]["exp_avg"]
    elif change == "missing name":
        del actual["norm.weight"]
    elif change == "dtype":
        actual["norm.weight"]["weight"] = weight.view(torch.int32)
    else:
        actual["norm.weight"]["weight"] = weight[:-1]
    with pytest.raises(RuntimeError, match=r"different tensors.*norm\.weight"):
        find_mismatch(actual, a_snapshot())


def test_the_hash_is_of_the_bytes_in_model_order():
    snapshot = a_snapshot()
    expected = hashlib.sha256()
    for kinds in snapshot.values():
        expected.update(kinds["weight"].view(torch.uint8).numpy().tobytes())
    hashes = hash_snapshot(snapshot)
    assert set(hashes) == {"weight", "master_param", "exp_avg"}
    assert hashes["weight"] == expected.hexdigest()
    changed = copy.deepcopy(snapshot)
    flip(changed["norm.weight"]["exp_avg"], 0, 0)
    assert {k for k, v in hash_snapshot(changed).items() if v != hashes[k]} == {"exp_avg"}
