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
from attacks import full_disk
from bits import bits
from runs import assert_same

from megaopt.kernels.files import replacing, write_json
from megaopt.saving import checkpoint

INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# the patterns where a careless cast would show: signed zero, subnormals, infinities, NaN with
# payloads (quiet and signalling), ordinary values
PATTERNS_16 = [0x0000, 0x8000, 0x0001, 0x7C00, 0xFC00, 0x7F80, 0x7FC1, 0x7F81, 0xFFFF, 0x3C01]


PATTERNS_32 = [0, 1 << 31, 1, 0x7F800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x3F800001]


def of_patterns(patterns, dtype):
    width = 8 * dtype.itemsize
    signed = [p - (1 << width) if p >= 1 << (width - 1) else p for p in patterns]
    return torch.tensor(signed, dtype=INTEGER_OF[dtype.itemsize]).view(dtype)


def example():
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


def is_refused(path, content, expected):
    """Whether the content is refused as a checkpoint; fails if it gives anything but `expected`."""
    path.unlink(missing_ok=True)  # some file systems wait for the disk where a file is overwritten
    path.write_bytes(content)
    try:
        found = checkpoint.load(path)
    except checkpoint.CheckpointError:
        return True
    assert_same(found, expected)
    return False


def flipped(content, position, bit):
    damaged = bytearray(content)
    damaged[position] ^= 1 << bit
    return bytes(damaged)


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
