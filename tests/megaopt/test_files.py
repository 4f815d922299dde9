"""Files are replaced whole, with the mode that they had, and nothing is left behind."""

import errno
import os
import stat

import pytest
from checkpoints import full_disk

from megaopt.saving.files import replacing, write_json


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
