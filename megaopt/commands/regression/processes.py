"""Processes of a command's own: Ctrl-C goes to the command, which ends them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Child", "start_deaf"]


CAN_BLOCK = hasattr(signal, "pthread_sigmask")  # not on Windows


def start_deaf(process: Any) -> None:
    """Starts a process of multiprocessing, which will not hear Ctrl-C."""
    if CAN_BLOCK:
        # else it would be started with the first process, and unblocks Ctrl-C then
        resource_tracker.ensure_running()
    with _deaf():
        process.start()


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started within do not hear Ctrl-C, which a terminal sends to all.

    Here it is heard when the context is left: blocked, and not ignored, so that none is lost.
    """
    if not CAN_BLOCK:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Child:
    """A command in a process; leaving the context ends it.

    Args:
        command: program and arguments.
        folder: where it runs.
        said: the file that takes what it prints.
    """

    def __init__(self, command: Sequence[str], folder: Path, said: Path) -> None:
        self.command, self.folder, self.said = command, folder, said

    def __enter__(self) -> Child:
        with _deaf(), self.said.open("wb") as said:
            self._process = subprocess.Popen(
                self.command, cwd=self.folder, stdout=said, stderr=subprocess.STDOUT
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> tuple[int, str]:
        """The exit status, and what it printed."""
        status = self._process.wait()
        return status, self.said.read_text(encoding="utf-8", errors="replace")
