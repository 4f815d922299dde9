"""A checkpoint is whole or refused: exact bits, truncation, damage, failed saves."""

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from bits import bits
from checkpoints import example, full_disk
from runs import assert_same

from megaopt.commands import checkpoint


def test_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a.pt", example())
    assert_same(checkpoint.load(tmp_path / "a.pt"), example())
    assert os.listdir(tmp_path) == ["a.pt"]


def test_comparison_of_this_file_sees_one_bit() -> None:
    other = example()
    bits(other["state"]["fp32"])[4] ^= 1  # a NaN's payload
    with pytest.raises(AssertionError):
        assert_same(other, example())


def test_flipped_bit_inside_a_tensor_of_a_file_without_digest_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.full((64,), 1.25)}, path)
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


def content_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in os.listdir(folder)}


over_an_older_file = pytest.mark.parametrize("exists", [True, False], ids=["older file", "new"])


@over_an_older_file
@pytest.mark.parametrize(
    ("broken", "error"),
    [({"x": Unpicklable()}, RuntimeError), ({"x": Foreign()}, checkpoint.CheckpointError)],
    ids=["fails while serialising", "could not be loaded"],
)
def test_failed_save_leaves_the_older_file(
    tmp_path: Path, broken: dict, error: type[Exception], exists: bool
) -> None:
    if exists:
        checkpoint.save(tmp_path / "a.pt", example())
    before = content_of(tmp_path)
    with pytest.raises(error):
        checkpoint.save(tmp_path / "a.pt", broken)
    assert content_of(tmp_path) == before


@over_an_older_file
def test_full_disk_is_an_oserror_and_leaves_the_older_file(tmp_path: Path, exists: bool) -> None:
    payload = {**example(), "large": torch.arange(50_000)}
    checkpoint.save(tmp_path / "a.pt", payload)
    size = (tmp_path / "a.pt").stat().st_size
    if not exists:
        (tmp_path / "a.pt").unlink()
    before = content_of(tmp_path)
    for limit in (0, 1, 100, 5_000, 8_192, 300_000, size - 200, size - 100, size - 1):
        with full_disk(limit), pytest.raises(OSError, match=r"too large: '.*a\.pt'") as raised:
            checkpoint.save(tmp_path / "a.pt", {**payload, "step": 8})
        assert raised.value.errno == errno.EFBIG, limit
        assert content_of(tmp_path) == before, limit
    with full_disk(size):
        checkpoint.save(tmp_path / "a.pt", {**payload, "step": 8})
    assert_same(checkpoint.load(tmp_path / "a.pt"), {**payload, "step": 8})


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


def test_torch_reads_a_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a.pt", example())
    for mmap in (False, True):
        found = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mmap)
        assert_same(found, example())


def test_a_file_of_torch_is_read(tmp_path: Path) -> None:
    torch.save(example(), tmp_path / "a.pt")
    assert_same(checkpoint.load(tmp_path / "a.pt"), example())


def test_the_digest_is_sha256s(tmp_path: Path) -> None:
    """So that a user can check a file without megaopt, and zip's tools take it for an archive."""
    checkpoint.save(tmp_path / "a.pt", example())
    content = (tmp_path / "a.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        said, _, digest = archive.comment.rpartition(b" ")
    assert said == b"megaopt: SHA-256 of all bytes before this comment:"
    archived = content[: -len(said + b" " + digest)]
    assert hashlib.sha256(archived).hexdigest().encode() == digest


@pytest.mark.parametrize("kill", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_killed_saves_leave_a_whole_file_and_the_next_save_tidies_up(
    tmp_path: Path, kill: int
) -> None:
    script = Path(__file__).parents[1] / "support" / "killed_saves.py"
    command = [sys.executable, str(script), str(tmp_path), str(kill)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # otherwise no process was killed while it wrote, and nothing was shown
    assert int(done.stdout) > 0


def test_a_private_file_stays_private_and_the_longest_name_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 252 + ".pt")
    checkpoint.save(path, {"step": 1})
    path.chmod(0o600)
    checkpoint.save(path, {"step": 2})
    assert path.stat().st_mode & 0o777 == 0o600
    assert checkpoint.load(path) == {"step": 2}
    assert os.listdir(tmp_path) == [path.name]
