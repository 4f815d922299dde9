"""A checkpoint is whole or refused: exact bits, damage, failed and killed saves."""

import errno
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bits import bits
from checkpoints import example, flipped, full_disk, is_refused
from runs import assert_same

from megaopt.kernels.files import replacing, write_json
from megaopt.saving import checkpoint


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.pt"


@pytest.fixture
def whole(path):
    """The bytes of a checkpoint."""
    checkpoint.save(path, example())
    return path.read_bytes()


def content_of(folder):
    return {name: (folder / name).read_bytes() for name in os.listdir(folder)}


def test_round_trip_keeps_every_bit_for_torch_too(path, whole):
    assert_same(checkpoint.load(path), example())
    for mmap in (False, True):
        assert_same(torch.load(path, weights_only=True, mmap=mmap), example())
    assert os.listdir(path.parent) == ["a.pt"]
    other = example()
    bits(other["state"]["fp32"])[4] ^= 1  # a NaN's payload
    with pytest.raises(AssertionError):
        assert_same(other, checkpoint.load(path))


def damages(content, tries):
    """One bit, a part cut out, added or overwritten, the end cut off."""
    generator = random.Random(0)
    for _ in range(tries):
        begin, end = sorted(generator.sample(range(len(content) + 1), 2))
        end = min(end, begin + 600)
        junk = generator.randbytes(generator.choice([1, 22, 512]))
        yield from (
            flipped(content, begin % len(content), generator.randrange(8)),
            content[:begin],
            content[:begin] + content[end:],
            content[:begin] + junk + content[begin:],
            content[:begin] + bytes(end - begin) + content[end:],
        )


@pytest.mark.parametrize("tries", [100, pytest.param(5_000, marks=pytest.mark.slow)])
def test_damage_is_refused_wherever_it_lies(path, whole, tries):
    assert not is_refused(path, whole, example())
    for damaged in damages(whole, tries):
        assert is_refused(path, damaged, example()) == (damaged != whole)
    for length in range(len(whole) - 200, len(whole)):
        assert is_refused(path, whole[:length], example()), length


def test_another_files_digest_is_refused(path, whole):
    checkpoint.save(path, {**example(), "step": 8})
    other = path.read_bytes()
    assert len(other) == len(whole)
    assert is_refused(path, whole[:-64] + other[-64:], example())


def test_a_checkpoint_whose_digest_is_the_archives_comment_loads(path, whole):
    """As older versions wrote it: the archive's end counts what is behind it."""
    end = whole.index(checkpoint.MARK)
    archive = whole[: end - 2] + checkpoint.TRAILER_SIZE.to_bytes(2, "little")
    digest = checkpoint.hashlib.sha256(archive).hexdigest().encode()
    assert not is_refused(path, archive + checkpoint.MARK + digest, example())


@pytest.mark.parametrize("content", [b"", b"PK", b"not a checkpoint", os.urandom(4096)])
def test_what_is_no_checkpoint_is_refused_by_its_path(path, content):
    path.write_bytes(content)
    with pytest.raises(checkpoint.CheckpointError, match=r"a\.pt cannot be read: no digest"):
        checkpoint.load(path)
    with pytest.raises(checkpoint.CheckpointError, match=r"gone\.pt cannot be .*No such file"):
        checkpoint.load(path.with_name("gone.pt"))
    torch.save(example(), path)
    with pytest.raises(checkpoint.CheckpointError, match=r"torch\.load reads torch\.save's"):
        checkpoint.load(path)


class Foreign:
    """Pickles well, but `weights_only` refuses to read it."""


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("cannot be serialised")


BROKEN = [
    ({"x": Unpicklable()}, RuntimeError, "cannot be serialised"),
    ({"x": Foreign()}, checkpoint.CheckpointError, "payload cannot be loaded back"),
    ([1, 2], TypeError, "payload must be a dict, got list"),
]


@pytest.mark.parametrize(("broken", "error", "message"), BROKEN)
@pytest.mark.parametrize("exists", [True, False])
def test_failed_save_leaves_the_older_file(path, broken, error, message, exists):
    if exists:
        checkpoint.save(path, example())
    before = content_of(path.parent)
    with pytest.raises(error, match=message):
        checkpoint.save(path, broken)
    assert content_of(path.parent) == before


def test_full_disk_is_an_oserror_and_leaves_the_older_file(path):
    payload = {**example(), "large": torch.arange(50_000)}
    checkpoint.save(path, payload)
    size, before = path.stat().st_size, content_of(path.parent)
    for limit in (0, 100, 8_192, 300_000, size - 1):
        with full_disk(limit), pytest.raises(OSError, match=r"too large: '.*a\.pt'") as raised:
            checkpoint.save(path, {**payload, "step": 8})
        assert raised.value.errno == errno.EFBIG, limit
        assert content_of(path.parent) == before, limit
    with full_disk(size):
        checkpoint.save(path, {**payload, "step": 8})
    assert_same(checkpoint.load(path), {**payload, "step": 8})


@pytest.mark.parametrize("kill", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_killed_saves_leave_the_old_file_or_the_new_one(tmp_path, kill):
    script = Path(__file__).parents[2] / "support" / "killed_saves.py"
    command = [sys.executable, str(script), str(tmp_path), str(kill)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # otherwise no process was killed while it wrote, and nothing was shown
    assert int(done.stdout) > 0


# --- files are replaced whole, with the mode that they had, and nothing is left behind


def write(path, content=b"new"):
    with replacing(path) as file:
        file.write(content)


def test_blocks_within_one_process_leave_each_other_alone(tmp_path):
    with replacing(tmp_path / "a") as first, replacing(tmp_path / "a"):
        write(tmp_path / "a", b"third")
        first.write(b"first")
        assert (tmp_path / "a").read_bytes() == b"third"
    assert (tmp_path / "a").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_a_disk_that_fails_at_the_end_leaves_the_older_file(tmp_path, monkeypatch):
    write(tmp_path / "a", b"old")

    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*a'"):
        write(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, None])
def test_an_older_files_mode_is_kept_before_anything_is_written(tmp_path, mode):
    path, plain = tmp_path / "a", tmp_path / "plain"
    plain.write_bytes(b"")
    if mode is not None:
        write(path)
        path.chmod(mode)
    expected = mode or stat.S_IMODE(plain.stat().st_mode)
    with replacing(path) as file:
        assert stat.S_IMODE(os.stat(file.name).st_mode) == expected
        file.write(b"new")
    assert stat.S_IMODE(path.stat().st_mode) == expected


@pytest.mark.parametrize("name", ["x" * 256, "none/a", "folder", "pipe", "file/a"])
def test_what_cannot_be_written_is_an_oserror_of_the_file_asked_for(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r".") as raised:
        write(tmp_path / name)
    assert raised.value.filename == str(tmp_path / name)
    assert {*os.listdir(tmp_path)} == {"folder", "file", "pipe"}


def test_a_link_stays_one_and_a_broken_one_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("target")
    for content in (b"first", b"second"):
        write(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "target").read_bytes() == content


def test_a_failed_record_leaves_the_older_one(tmp_path):
    path = tmp_path / "record.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(path, {"a": object()})
    with full_disk(10), pytest.raises(OSError, match=r"File too large: '.*record\.json'"):
        write_json(path, {"a": list(range(10_000))})
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert os.listdir(tmp_path) == ["record.json"]
