"""Processes that may fail, hang or be ended without harm to the one that asks them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from typing import Any

from megaopt.commands.regression.group import apart, deaf

LONGEST = 500
"""Characters of an error that are kept."""


class Failed(RuntimeError):
    """The work raised an error, took too long, or ended its process."""


class Worker:
    """A process that calls a function for each question; it does not hear Ctrl-C. End it.

    Args:
        work: what answers a question; it and all questions and answers can be pickled.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA allows no copies
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(work, child_pipe))
        with apart(), deaf():
            self._process.start()
        child_pipe.close()

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer to a question; Failed where there is none, and after so many seconds."""
        try:
            self._pipe.send(question)
            has_answer = self._pipe.poll(seconds)
            is_done, answer = self._pipe.recv() if has_answer else (False, None)
        except (EOFError, OSError):
            self.end()
            raise Failed("its process ended") from None
        if not has_answer:
            self.end()
            raise Failed(f"no answer within {seconds:g} seconds")
        if not is_done:
            raise Failed(answer)
        return answer

    @property
    def is_over(self) -> bool:
        """Returns whether the process has ended."""
        return not self._process.is_alive()

    def kill(self) -> None:
        """Kills the process, and what it has started; `ask` then fails in whichever thread."""
        if self._process.is_alive() and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError, AttributeError):  # before its _serve
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()

    def end(self) -> None:
        """Ends the process, and what it has started."""
        self.kill()
        self._process.join()
        self._pipe.close()


class Team:
    """Workers of one job, asked together: where one fails all end. End it."""

    def __init__(self, works: Sequence[Callable[[Any], Any]]) -> None:
        self._workers = [Worker(work) for work in works]

    def ask(self, question: Any, seconds: float) -> list[Any]:
        """The answers of all, in order; Failed with the first failure."""
        with ThreadPoolExecutor(len(self._workers)) as pool:
            answers = [pool.submit(worker.ask, question, seconds) for worker in self._workers]
            try:
                done, _ = wait(answers, return_when=FIRST_EXCEPTION)
                return [answer.result() for answer in sorted(done, key=answers.index)]
            except BaseException:
                for worker in self._workers:  # which may wait for the one that failed
                    worker.kill()
                raise

    def end(self) -> None:
        """Ends all processes."""
        for worker in self._workers:
            worker.end()


def _serve(work: Callable[[Any], Any], pipe: Connection) -> None:
    if hasattr(os, "setsid"):  # not on Windows
        os.setsid()
    with contextlib.suppress(EOFError, OSError):  # nobody asks any more
        while True:
            pipe.send(_answered(work, pipe.recv()))


def _answered(work: Callable[[Any], Any], question: Any) -> tuple[bool, Any]:
    try:
        return True, work(question)
    except Exception as error:  # another library fails in its own way
        return False, f"{type(error).__name__}: {error}"[:LONGEST]
