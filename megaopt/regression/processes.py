"""Processes of a command's own: Ctrl-C goes to the command, which ends them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

__all__ = ["Child", "deaf_to_interrupts"]


@contextlib.contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes that are started within do not hear Ctrl-C, which a terminal sends to all.

    Here it is heard when the context is left: blocked, and not ignored, so that none is lost.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
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
        with deaf_to_interrupts(), self.said.open("wb") as said:
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
