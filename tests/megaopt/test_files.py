"""Files are replaced whole, with the mode that they had, and nothing is left behind."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
import time

import pytest
from checkpoints import full_disk

from megaopt.commands.files import replacing, write_json

WRITER = """
import sys
from megaopt.commands.files import replacing

with replacing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.readline()
    file.write(b" and half")
"""


@pytest.fixture
def writer(tmp_path):
    """Begins to write a file in a process of its own."""
    started = []

    def start(name):
        command = [sys.executable, "-c", WRITER, str(tmp_path / name)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "writing\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def write(path, content=b"new"):
    with replacing(path) as file:
        file.write(content)


def temporaries(folder):
    return [name for name in os.listdir(folder) if name.endswith(".tmp")]


def test_a_live_process_keeps_its_temporary_file_and_a_killed_one_does_not(tmp_path, writer):
    live, killed = writer("live"), writer("killed")
    killed.kill()
    killed.wait()
    assert len(temporaries(tmp_path)) == 2
    write(tmp_path / "own")
    assert len(temporaries(tmp_path)) == 1
    live.communicate("go on\n")
    assert live.returncode == 0
    assert {*os.listdir(tmp_path)} == {"live", "own"}
    assert (tmp_path / "live").read_bytes() == b"half and half"


def test_blocks_within_one_process_leave_each_other_alone(tmp_path):
    with replacing(tmp_path / "a") as first, replacing(tmp_path / "b") as second:
        write(tmp_path / "a", b"third")
        first.write(b"first")
        second.write(b"second")
        assert (tmp_path / "a").read_bytes() == b"third"
    assert (tmp_path / "a").read_bytes() == b"first"
    assert (tmp_path / "b").read_bytes() == b"second"
    assert not temporaries(tmp_path)


def test_a_file_stays_locked_until_it_has_its_name(tmp_path, monkeypatch):
    rename = type(tmp_path).replace

    def late(path, target):
        if target.name == "a":
            write(tmp_path / "b")  # and removes what is not locked
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "replace", late)
    write(tmp_path / "a")
    assert {*os.listdir(tmp_path)} == {"a", "b"}


def test_a_file_that_was_removed_before_it_was_locked_is_made_anew(tmp_path, monkeypatch):
    lock, removed = fcntl.flock, []

    def late(descriptor, operation):
        if not removed:  # as another process would, which takes it for left behind
            removed.extend(temporaries(tmp_path))
            (tmp_path / removed[0]).unlink()
        return lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    write(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert len(removed) == 1


def test_where_files_cannot_be_locked_they_are_written_and_stay(tmp_path, monkeypatch, writer):
    killed = writer("killed")
    killed.kill()
    killed.wait()

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    write(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert len(temporaries(tmp_path)) == 1


def test_a_disk_that_fails_at_the_end_leaves_the_older_file(tmp_path, monkeypatch):
    write(tmp_path / "a", b"old")

    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*a'"):
        write(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize(("hours", "stays"), [(23, True), (25, False)])
def test_files_of_other_hosts_stay_for_a_day(tmp_path, monkeypatch, hours, stays):
    """Their locks may not be seen here."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("platform.node", lambda: "another")
        with replacing(tmp_path / "a") as file:
            theirs = file.name
            os.link(theirs, tmp_path / "kept")
    os.rename(tmp_path / "kept", theirs)
    written = time.time() - hours * 3600
    os.utime(theirs, (written, written))
    write(tmp_path / "b")
    assert os.path.exists(theirs) is stays


def test_other_files_stay(tmp_path):
    others = {".tmp", "a.tmp", ".megaopt-a", "megaopt-1.tmp", ".a.tmp"}
    for name in others:
        (tmp_path / name).write_bytes(b"")
    write(tmp_path / "a")
    assert {*os.listdir(tmp_path)} == others | {"a"}


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755, 0o666])
def test_the_mode_of_an_older_file_is_kept_and_never_wider(tmp_path, mode):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(mode)
    with replacing(path) as file:
        file.write(b"new")
        assert stat.S_IMODE(os.stat(file.name).st_mode) & ~mode & 0o077 == 0
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write(tmp_path / "a")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs to be root")
def test_owner_and_group_of_an_older_file_are_kept(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    os.chown(path, 12345, 54321)
    path.chmod(0o2640)
    write(path)
    status = path.stat()
    assert (status.st_uid, status.st_gid) == (12345, 54321)
    assert stat.S_IMODE(status.st_mode) == 0o2640


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, ".pt" * 85])
def test_the_longest_names_are_written(tmp_path, name):
    for content in (b"first", b"second"):
        write(tmp_path / name, content)
        assert (tmp_path / name).read_bytes() == content
    assert os.listdir(tmp_path) == [name]


REFUSED = {
    "too long": ("x" * 256, errno.ENAMETOOLONG),
    "no folder": ("none/a", errno.ENOENT),
    "a folder": ("folder", errno.EISDIR),
    "a device": ("/dev/full", errno.EINVAL),
    "a loop of links": ("loop", errno.ELOOP),
    "in a file": ("file/a", errno.ENOTDIR),
}


@pytest.mark.parametrize(("name", "number"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_written_is_an_oserror_before_anything_is_written(tmp_path, name, number):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "loop").symlink_to("loop")
    before = {*os.listdir(tmp_path)}
    with pytest.raises(OSError, match=r".") as raised, replacing(tmp_path / name):
        pytest.fail("the block was entered")
    assert raised.value.errno == number
    assert raised.value.filename == os.path.realpath(tmp_path / name)
    assert {*os.listdir(tmp_path)} == before
    assert (tmp_path / "file").read_bytes() == b"old"


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
