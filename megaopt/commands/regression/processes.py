"""Processes of a command's own: Ctrl-C goes to the command, which ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Processes", "RankError", "print_into", "printed"]


CAN_BLOCK = hasattr(signal, "pthread_sigmask")  # not on Windows


class RankError(RuntimeError):
    """A process of a variant with ranks failed."""


class Processes:
    """Processes of functions, which do not hear Ctrl-C; leaving the context ends them.

    torch.distributed.elastic.multiprocessing is not used: it takes the command's handler of Ctrl-C
    away for good, and writes errors to stderr itself.

    Args:
        context: of multiprocessing; it says how they are made.
        daemon: whether they have no processes of their own.
    """

    def __init__(self, context: Any, daemon: bool) -> None:
        self._context, self._daemon = context, daemon
        self.all: list[Any] = []

    def __enter__(self) -> Processes:
        return self

    def start(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        """Starts another one, which calls a module's function."""
        process = self._context.Process(
            target=function, args=arguments, name=name, daemon=self._daemon
        )
        self.all.append(process)
        if CAN_BLOCK:
            # else it would be started with the first process, and unblocks Ctrl-C then
            resource_tracker.ensure_running()
        with _deaf():
            process.start()

    def join(self, seconds: float | None = None) -> None:
        """Waits until they have ended by themselves, so long at most."""
        last = None if seconds is None else time.monotonic() + seconds
        for process in self.all:
            process.join(None if last is None else max(0.0, last - time.monotonic()))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for process in (each for each in self.all if each.pid is not None):
            process.kill()
            process.join()
        self.all = []


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


def print_into(path: Path) -> None:
    """From now on this process prints into a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)


def printed(path: Path) -> str:
    """What a process printed into a file so far."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
