"""Processes that may fail, hang or be ended without harm to the one that asks them."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from megaopt.lab.regression.processes import apart, deaf

LONGEST = 500
"""Characters of an error that are kept."""


class Failed(RuntimeError):
    """The work raised an error, took too long, or ended its process."""


class Team:
    """Processes that call a function each for every question; none hears Ctrl-C. End it.

    Args:
        works: what answers a question; they and all questions and answers can be pickled.
    """

    def __init__(self, works: Sequence[Callable[[Any], Any]]) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA allows no copies
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        for work in works:
            pipe, child_pipe = context.Pipe()
            process = context.Process(target=_serve, args=(work, child_pipe))
            with apart(), deaf():
                process.start()
            child_pipe.close()
            self._processes.append(process)
            self._pipes.append(pipe)

    def ask(self, question: Any, seconds: float) -> list[Any]:
        """The answers of all, in order; Failed with the first failure, and after so many seconds.

        Whoever has not answered by then may wait for the one that failed, and is ended.
        """
        answers: dict[int, Any] = {}
        last = time.monotonic() + seconds
        try:
            for pipe in self._pipes:
                pipe.send(question)
            while waiting := [pipe for i, pipe in enumerate(self._pipes) if i not in answers]:
                ready = multiprocessing.connection.wait(waiting, max(0, last - time.monotonic()))
                if not ready:
                    raise Failed(f"no answer within {seconds:g} seconds")
                for index in (i for i, pipe in enumerate(self._pipes) if pipe in ready):
                    is_done, answers[index] = self._pipes[index].recv()
                    if not is_done:
                        raise Failed(answers[index])
        except (EOFError, OSError):
            self._kill(self._processes)
            raise Failed("its process ended") from None
        except Failed:
            self._kill([p for i, p in enumerate(self._processes) if i not in answers])
            raise
        return [answers[index] for index in range(len(self._pipes))]

    @property
    def is_over(self) -> bool:
        """Returns whether one of the processes has ended."""
        return not all(process.is_alive() for process in self._processes)

    def end(self) -> None:
        """Ends all processes, and what they have started."""
        self._kill(self._processes)
        for pipe in self._pipes:
            pipe.close()

    def _kill(self, processes: Sequence[Any]) -> None:
        for process in processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError, AttributeError):  # before its _serve
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
        for process in processes:
            process.join()


def _serve(work: Callable[[Any], Any], pipe: Any) -> None:
    """Answers questions: whether the work was done, and its result or error."""
    if hasattr(os, "setsid"):  # not on Windows
        os.setsid()
    with contextlib.suppress(EOFError, OSError):  # nobody asks any more
        while True:
            question = pipe.recv()
            try:
                answer = True, work(question)
            except Exception as error:  # another library fails in its own way
                answer = False, f"{type(error).__name__}: {error}"[:LONGEST]
            pipe.send(answer)
