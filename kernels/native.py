"""The extension of native.cpp: loaded where it lies built, else built aside by a child process.

Nobody waits for it: until it is there Python twins serve, and for good where it cannot be
built. `MEGAOPT_NATIVE=0` in the environment leaves it alone: it is neither built nor loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import operator
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

SWITCH = "MEGAOPT_NATIVE"
# On a CPU, where a step itself takes long; beside a GPU it is built for any number of tensors.
# Building takes one core some 30 s, once on a machine. It saves 6 ms a step at 4,000 tensors, on an
# H200's host 0.4 ms of 0.6 at 16.
WORTH_BUILDING = 1000
# A look for the file takes some 10 us: soon at first, as another process may be about to finish it.
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
REASON_LENGTH = 4000

SOURCE = Path(__file__).with_name("native.cpp")
PRODUCT = Path(__file__).with_name("products") / "product.h"
BUILDER = Path(__file__).with_name("native_build.py")


class Extension:
    """One process's view of the extension.

    Args:
        file: where it lies once it is built; its name is the module's.
        source: what it is built from.
    """

    def __init__(self, file: Path, source: Path = SOURCE) -> None:
        self.module: Any = None
        self.reason: str | None = None
        """Why there will be none in this process; None while there may be one."""
        self.file, self.source = file, source
        self._child: _Builder | None = None
        self._output = -1
        self._due, self._wait = 0.0, FIRST_WAIT

    def get(self, is_worth_building: bool) -> Any:
        """The module, None while it is not there; now and then looks whether it is.

        Args:
            is_worth_building: starts the build where nobody has.
        """
        # looks become rarer: the wait doubles
        if self.module is None and self.reason is None and time.monotonic() >= self._due:
            self._due, self._wait = time.monotonic() + self._wait, min(2 * self._wait, LONGEST_WAIT)
            try:
                # the file counts, whoever built it; only then why this child failed
                ended = self._child is not None and self._child.poll() is not None
                output = ""
                if ended:
                    # the last that the compiler said
                    size = os.fstat(self._output).st_size
                    text = os.pread(self._output, REASON_LENGTH, max(0, size - REASON_LENGTH))
                    os.close(self._output)
                    output = text.decode(errors="replace").strip()
                if self.file.exists():
                    spec: Any = importlib.util.spec_from_file_location(self.file.stem, self.file)
                    module = importlib.util.module_from_spec(spec)
                    spec.loader.exec_module(module)
                    self.module = module
                elif ended:
                    self.reason = output or "the compiler's process ended without a word"
                elif self._child is None and is_worth_building:
                    self._start()
            except Exception as error:  # no place to build in, or no process: the twin serves
                self.reason = f"{type(error).__name__}: {error}"
        return self.module

    def wait(self) -> Any:
        """The module, built now where it is not there; None where it cannot be built."""
        while self.get(is_worth_building=True) is None and self.reason is None:
            time.sleep(0.05)
            self._due = 0.0
        return self.module

    def _start(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # one process of all builds; the lock goes on to the child
        lock_file = self.file.with_suffix(".lock")
        lock = _locked(lock_file)
        if lock is None:
            return  # another process builds it
        try:
            # what the compiler says is kept for `reason`
            self._output, path = tempfile.mkstemp()
            os.unlink(path)  # it goes with its descriptors
            # it finds what this process finds, and leaves the GPUs alone; a virtual environment
            # that is not activated has its ninja beside Python
            paths = [path for path in sys.path if path]
            tools = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
            variables = {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.pathsep.join(tools)}
            variables |= {"CUDA_VISIBLE_DEVICES": "", "MAX_JOBS": "1"}
            self._child = _Builder(
                [sys.executable, "-c", _RUN, str(BUILDER), str(self.source), str(self.file)],
                env={**os.environ, **variables},
                cwd=self.file.parent,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],  # it is locked as long as the child lives
                start_new_session=True,  # Ctrl-C is not meant for it
            )
        except BaseException:
            lock_file.unlink(missing_ok=True)
            raise
        finally:
            os.close(lock)
        self._wait = FIRST_WAIT


class _Builder(subprocess.Popen[bytes]):
    def __del__(self, *_: Any) -> None:
        """No warning: it may outlive this process, and then serves the next."""


# not `python FILE`: modules beside the file would be found before others of their name
_RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def _locked(path: Path) -> int | None:
    """A descriptor of the locked file; None where another process holds it."""
    import fcntl  # there is none on Windows

    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # whoever held it may have removed it in between
        if os.path.samestat(os.fstat(lock), os.stat(path)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


# By process: what a fork inherits is its parent's, child process and all.
_extensions: dict[int, Extension] = {}


def extension() -> Extension:
    """This process's, whose file is in torch's cache of extensions.

    There is a file for each source and way to build it, torch, Python and libc.
    """
    native = _extensions.get(os.getpid())
    if native is not None:
        return native
    # all that the binary depends on goes into its name
    about = [torch.__version__, torch.version.git_version, sys.implementation.cache_tag]
    about += [platform.machine(), *platform.libc_ver()]
    # the builder has the compiler's flags
    sources = b"".join(path.read_bytes() for path in (SOURCE, PRODUCT, BUILDER))
    digest = hashlib.sha256(sources + repr(about).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache, "torch_extensions")
    file = Path(root, f"megaopt_native_{digest}.so").absolute()
    return _extensions.setdefault(os.getpid(), Extension(file))


def get(is_worth_building: bool) -> Any:
    """The extension's module where it is there, else None; nobody waits.

    Args:
        is_worth_building: starts the build where nobody has.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    return extension().get(is_worth_building)


def is_worth_building(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether looks at these tensors save the time that it takes to build the extension."""
    on_gpu = any(param.device.type == "cuda" for param in tensors)
    return on_gpu or len(tensors) >= WORTH_BUILDING


def same_objects(first: Collection[object], second: Collection[object]) -> bool:
    """Whether two collections hold the very same objects in one order."""
    return len(first) == len(second) and all(map(operator.is_, first, second))


def build() -> tuple[Any, str | None]:
    """The extension's module, built now where it is not there; or None and why it cannot be."""
    native = extension()
    return native.wait(), native.reason


def status() -> str:
    """Says in words whether steps of this process use the extension; starts nothing."""
    if os.environ.get(SWITCH) == "0":
        return f"off: {SWITCH}=0"
    native = extension()
    if native.get(is_worth_building=False) is not None:
        return f"built: {native.file}"
    if native.reason is not None:
        return f"none: {native.reason}"
    return (
        "not built yet: a first step on a GPU, or of "
        f"{WORTH_BUILDING:,} tensors on a CPU, starts that"
    )
