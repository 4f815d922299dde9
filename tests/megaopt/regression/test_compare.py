import copy
import hashlib
import math

import pytest
import torch

from megaopt.regression.compare import (
    Difference,
    Mismatch,
    earliest,
    find_mismatch,
    hash_snapshot,
    hexadecimal,
    loss_bits,
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


def test_the_first_of_several_is_named():
    expected, actual = a_snapshot(), a_snapshot()
    flip(actual["norm.weight"]["weight"], 1, 3)
    flip(actual["embedding.weight"]["exp_avg"], 9, 3)
    flip(actual["embedding.weight"]["exp_avg"], 8, 3)
    found = find_mismatch(actual, expected)
    assert (found.tensor, found.index) == ("embedding.weight exp_avg", 8)


def test_equal_snapshots_have_no_mismatch():
    assert find_mismatch(a_snapshot(), a_snapshot()) is None


def test_bits_decide_and_not_values():
    expected, actual = a_snapshot(), a_snapshot()
    for snapshot in (expected, actual):
        snapshot["norm.weight"]["weight"][2] = math.nan
    assert find_mismatch(actual, expected) is None
    expected["norm.weight"]["exp_avg"][4] = 0.0
    actual["norm.weight"]["exp_avg"][4] = -0.0
    found = find_mismatch(actual, expected)
    assert found == Mismatch("norm.weight exp_avg", 4, "0x80000000", "0x00000000")


def test_the_order_of_kinds_carries_no_meaning():
    reordered = {name: dict(reversed(kinds.items())) for name, kinds in a_snapshot().items()}
    assert find_mismatch(reordered, a_snapshot()) is None


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


def test_patterns_are_written_in_full():
    assert hexadecimal(torch.tensor([0.0, -0.0]), 1) == "0x80000000"
    assert hexadecimal(torch.tensor([1.0], dtype=torch.bfloat16), 0) == "0x3f80"
    assert loss_bits(1.0) == "0x3f800000"


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


def test_the_earliest_step_counts_and_then_the_order():
    def at(step, variant):
        return Difference(
            step=step,
            variant=variant,
            baseline="b",
            tensor="loss",
            index=0,
            bits="",
            baseline_bits="",
        )

    assert earliest([None, None]) is None
    assert earliest([at(5, "a"), None, at(3, "b"), at(3, "c")]).variant == "b"
