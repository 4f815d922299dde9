"""A checkpoint is whole or refused: exact bits, truncation, damage, failed saves."""

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megaopt import checkpoint

INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# the patterns where a careless cast would show: signed zero, subnormals, infinities, NaN with
# payloads (quiet and signalling), ordinary values
PATTERNS_16 = [0x0000, 0x8000, 0x0001, 0x7C00, 0xFC00, 0x7F80, 0x7FC1, 0x7F81, 0xFFFF, 0x3C01]
PATTERNS_32 = [0, 1 << 31, 1, 0x7F800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x3F800001]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(INTEGER_OF[tensor.element_size()])


def of_patterns(patterns: list[int], dtype: torch.dtype) -> Tensor:
    width = 8 * dtype.itemsize
    signed = [p - (1 << width) if p >= 1 << (width - 1) else p for p in patterns]
    return torch.tensor(signed, dtype=INTEGER_OF[dtype.itemsize]).view(dtype)


def example() -> dict:
    return {
        "step": 7,
        "name": "run",
        "groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1]}],
        "state": {
            "bf16": of_patterns(PATTERNS_16, torch.bfloat16),
            "fp16": of_patterns(PATTERNS_16, torch.float16),
            "fp8": of_patterns([0x00, 0x80, 0x01, 0x7E, 0xFE, 0x7F, 0xFF], torch.float8_e4m3fn),
            "int16": of_patterns(PATTERNS_16, torch.int16),
            "fp32": of_patterns(PATTERNS_32, torch.float32),
            "none": None,
        },
    }


def assert_same(found: object, expected: object) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(bits(found), bits(expected))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def test_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a.pt", example())
    assert_same(checkpoint.load(tmp_path / "a.pt"), example())
    assert os.listdir(tmp_path) == ["a.pt"]


def test_comparison_of_this_file_sees_one_bit() -> None:
    other = example()
    bits(other["state"]["fp32"])[4] ^= 1  # a NaN's payload
    with pytest.raises(AssertionError):
        assert_same(other, example())


def test_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    checkpoint.save(path, example())
    whole = path.read_bytes()
    lengths = {*range(0, len(whole), 7), *range(len(whole) - 200, len(whole))}
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        with pytest.raises(checkpoint.CheckpointError, match=r"a\.pt"):
            checkpoint.load(path)


def test_flipped_bit_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    checkpoint.save(path, example())
    whole = path.read_bytes()
    refused = 0
    for position in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            found = checkpoint.load(path)
        except checkpoint.CheckpointError:
            refused += 1
        else:  # padding, or a zip field that nobody reads
            assert_same(found, example())
    assert refused > 50


def test_flipped_bit_inside_a_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    checkpoint.save(path, {"weight": torch.full((64,), 1.25)})
    whole = path.read_bytes()
    pattern = torch.full((64,), 1.25).numpy().tobytes()
    damaged = bytearray(whole)
    damaged[whole.index(pattern) + 17] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(checkpoint.CheckpointError, match=r"a\.pt.*data/0 is damaged.*CRC"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"PK", b"not a checkpoint", b"\x80\x02}q\x00.", os.urandom(4096)],
    ids=["empty", "two bytes", "text", "pickle", "random"],
)
def test_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.bin"
    path.write_bytes(content)
    with pytest.raises(checkpoint.CheckpointError, match=r"other\.bin cannot be read"):
        checkpoint.load(path)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match=r"gone\.pt: no such file"):
        checkpoint.load(tmp_path / "gone.pt")
    with pytest.raises(checkpoint.CheckpointError, match="not a file"):
        checkpoint.load(tmp_path)


def test_file_of_something_else_than_a_dict_is_refused(tmp_path: Path) -> None:
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(checkpoint.CheckpointError, match="holds a list, expected a dict"):
        checkpoint.load(tmp_path / "list.pt")


class Foreign:
    """Pickles well, but `weights_only` refuses to read it."""


class Unpicklable:
    def __reduce__(self) -> str:
        raise RuntimeError("cannot be serialised")


def full_disk(payload: object, file: object) -> None:
    file.write(b"half a checkpoint")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("exists", [True, False], ids=["over an older file", "new file"])
@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ({"x": Unpicklable()}, RuntimeError),
        ({"x": Foreign()}, checkpoint.CheckpointError),
        (None, OSError),
    ],
    ids=["fails while serialising", "could not be loaded", "disk full"],
)
def test_failed_save_leaves_the_older_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: dict | None,
    error: type[Exception],
    exists: bool,
) -> None:
    path = tmp_path / "a.pt"
    if exists:
        checkpoint.save(path, example())
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    if broken is None:
        monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(error):
        checkpoint.save(path, broken or example())
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_save_replaces_an_older_file_and_follows_a_link(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a.pt", {"step": 1})
    (tmp_path / "latest.pt").symlink_to(tmp_path / "a.pt")
    checkpoint.save(tmp_path / "latest.pt", {"step": 2})
    assert (tmp_path / "latest.pt").is_symlink()
    assert checkpoint.load(tmp_path / "a.pt") == {"step": 2}


def test_save_refuses_what_is_not_a_dict(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="payload must be a dict, got list"):
        checkpoint.save(tmp_path / "a.pt", [1, 2])
    assert not os.listdir(tmp_path)
