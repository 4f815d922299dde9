"""The end of a command: its exit status, and what it says of the error that ended it.

The commands turn errors into words and a status here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping

from megaopt.recording.printable import short

DONE = 0
"""Done; nothing differs."""
DIFFERENT = 1
"""A difference, or a check that failed."""
REFUSED = 2
"""Bad input, what cannot be done here, or a file that cannot be written."""
STOP = 128
"""REFUSED, to `git bisect run`: it ends the bisect, where another status would be a commit's."""
INTERRUPTED = 130
"""Ctrl-C."""
DEBUG = "MEGAOPT_DEBUG"
"""The environment variable that asks for the traceback of whatever ends a command."""

USERS_ERRORS = {
    "megaopt.lab.source": "SourceError",
    "megaopt.lab.toml_tables": "ConfigError",
    "megaopt.recording.checks": "RecordingError",
    "megaopt.saving.checkpoint": "CheckpointError",
}
"""The error of each module whose message is for users."""
REPOSITORY = "https://github.com/megaopt/megaopt"
"""The source of releases until an index of packages has them; pyproject.toml names it too."""
MEMORY_ERRORS = {"torch": "OutOfMemoryError"}


def run(command: Callable[[], int]) -> int:
    """Call a command; whatever it raises becomes a message on stderr and an exit status."""
    try:
        status = command()
        print(end="", flush=True)
        return status
    except KeyboardInterrupt:
        _say("interrupted")
        # Where one left an exec of a string (dataclasses make their methods so), Python notes it as
        # unhandled, and ends by a signal in the place of our status; the next exec drops the note.
        exec("")
        return INTERRUPTED
    except SystemExit as leaving:
        # the parser's way to end: 0 after --help, 2 after an argument that it refuses
        return leaving.code if isinstance(leaving.code, int) else REFUSED
    except BrokenPipeError:
        # whoever read the output has gone, and has no use for a message
        _drop_output()
        return REFUSED
    except Exception as error:
        first_line = str(error).split("\n")[0]
        # torch has a class for its allocator on the GPU; on the CPU it raises a RuntimeError
        is_memory = isinstance(error, MemoryError) or _has_a_class_of(error, MEMORY_ERRORS)
        is_memory |= isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
        if _has_a_class_of(error, USERS_ERRORS):
            text = str(error)
        elif isinstance(error, OSError):
            text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        elif is_memory:
            text = f"not enough memory: {first_line or type(error).__name__}"
        else:  # that no input explains: a fault of megaopt's, which is called one
            text = f"internal error: {type(error).__name__}: {first_line} "
            text += f"(please report it; {DEBUG}=1 shows the traceback)"
        _say("".join(traceback.format_exception(error)) + text if wants_traceback() else text)
        try:
            print(end="", flush=True)
        except OSError:  # what is left cannot be written
            _drop_output()
        return REFUSED


def how_to_install(extra: str) -> str:
    """The command that installs one of megaopt's extras."""
    return f"pip install 'megaopt[{extra}] @ git+{REPOSITORY}'"


def wants_traceback() -> bool:
    """Returns whether the environment asks for tracebacks."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


def _has_a_class_of(error: Exception, names: Mapping[str, str]) -> bool:
    # a module that was not imported has raised nothing, and may be what cannot be imported
    loaded = {module: sys.modules[module] for module in names if module in sys.modules}
    return isinstance(error, tuple(getattr(m, names[name]) for name, m in loaded.items()))


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # of a closed stderr
        print("megaopt: " + "\n".join(map(short, text.split("\n"))), file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Leave what is still to be written to nobody: Python would try again at exit, and complain."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
