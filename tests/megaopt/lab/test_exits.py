"""What ends a command becomes one line on stderr and a status, whatever it is."""

import errno
import os
import subprocess
import sys

import pytest

from megaopt.lab import cli, doctor, exits
from megaopt.lab.source import SourceError
from megaopt.lab.toml_tables import ConfigError
from megaopt.saving.checkpoint import CheckpointError

HINT = "(please report it; MEGAOPT_DEBUG=1 shows the traceback)"


@pytest.fixture
def ended_by(monkeypatch, capsys):
    """Runs `megaopt doctor`, which raises that; status and stderr."""
    monkeypatch.delenv("MEGAOPT_DEBUG", raising=False)

    def ended_by(error):
        def raise_it():
            raise error

        monkeypatch.setattr(doctor, "main", raise_it)
        status = cli.main(["doctor"])
        return status, capsys.readouterr().err

    return ended_by


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, SourceError])
def test_an_error_for_users_is_its_message(ended_by, kind):
    assert ended_by(kind("steps must be 1, got 2")) == (2, "megaopt: steps must be 1, got 2\n")


FILE_ERRORS = {
    "full disk": (OSError(errno.ENOSPC, "No space left on device", "a/b"), "a/b: No space left"),
    "no folder": (FileNotFoundError(errno.ENOENT, "No such file", "x"), "x: No such file"),
    "no name": (OSError(errno.EIO, "Input/output error"), "[Errno 5] Input/output error"),
    "words": (OSError("the disk is gone"), "the disk is gone"),
}


@pytest.mark.parametrize(("error", "text"), FILE_ERRORS.values(), ids=FILE_ERRORS)
def test_a_file_error_names_the_file(ended_by, error, text):
    status, err = ended_by(error)
    assert status == 2
    assert err.startswith(f"megaopt: {text}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "error", [KeyError("x"), RuntimeError("wrong\nsecond line"), AssertionError(), ImportError("y")]
)
def test_what_no_input_explains_is_called_an_internal_error(ended_by, error, monkeypatch):
    status, err = ended_by(error)
    first_line = str(error).split("\n")[0]
    name = type(error).__name__
    assert (status, err) == (2, f"megaopt: internal error: {name}: {first_line} {HINT}\n")
    monkeypatch.setenv("MEGAOPT_DEBUG", "1")
    status, err = ended_by(error)
    assert status == 2
    assert err.startswith("megaopt: Traceback (most recent call last)")
    assert "raise_it" in err
    assert f"internal error: {name}" in err


def test_an_interrupt_is_130(ended_by):
    assert ended_by(KeyboardInterrupt()) == (130, "megaopt: interrupted\n")


# --- as a process, since the interpreter has its say at the end


def run(arguments):
    command = ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m megaopt {arguments}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
@pytest.mark.parametrize("command", ["--version", pytest.param("doctor", marks=pytest.mark.slow)])
def test_output_that_cannot_be_written_is_told(command):
    told = "megaopt: [Errno 28] No space left on device\n"
    assert run(f"{command} > /dev/full") == (2, told)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_a_reader_that_has_gone_is_no_error_to_tell():
    # `true` reads nothing: its end of the pipe is closed before the first line comes
    assert run("doctor | true") == (2, "")


def test_an_interrupt_within_an_exec_has_our_status(tmp_path):
    (tmp_path / "interrupted.py").write_text(
        "from megaopt.lab import exits\n\n\n"
        "def interrupted():\n    exec('raise KeyboardInterrupt')\n\n\n"
        "raise SystemExit(exits.run(interrupted))\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (exits.INTERRUPTED, "megaopt: interrupted\n")
