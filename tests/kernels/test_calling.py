"""A launch that compiles for long tells of it, once a process."""

import inspect
import logging
import threading

import pytest
import torch

from megaopt.kernels import calling
from megaopt.kernels.calling import call


class Heard(logging.Handler):
    """The lines of the logger, and when there is one."""

    def __init__(self):
        super().__init__()
        self.lines, self.come = [], threading.Event()

    def emit(self, record):
        self.lines.append(record.getMessage())
        self.come.set()


@pytest.fixture
def heard():
    handler, logger = Heard(), logging.getLogger("megaopt")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


class Compiling:
    """A kernel whose first launch compiles until it is told of, and no longer than a minute."""

    pre_run_hooks, params, signature = (), (), inspect.Signature()

    def __init__(self, waits):
        self._waits, self.launches = waits, 0

    def __getitem__(self, programs):
        return self._launch

    def _launch(self, *_, **__):
        self.launches += 1
        if self.launches == 1:
            self._waits()


def test_long_compiling_is_told_once(heard, monkeypatch):
    monkeypatch.setattr(calling, "INTERPRETED", False)
    monkeypatch.setattr(calling, "PATIENCE", 0.01)
    slow = [Compiling(lambda: heard.come.wait(60)) for _ in range(2)]
    for kernel in (slow[0], slow[0]):
        call(kernel, 1, (torch.zeros(1),), {})
    assert slow[0].launches == 2
    (line,) = heard.lines
    assert line.startswith("compiling kernels for the CPU, cached in ")
    assert line.endswith(" for later processes")
    monkeypatch.setattr(slow[1], "_waits", lambda: threading.Event().wait(0.1))
    call(slow[1], 1, (torch.zeros(1),), {})
    assert heard.lines == [line]


def test_quick_compiling_is_not_told(heard, monkeypatch):
    monkeypatch.setattr(calling, "INTERPRETED", False)
    call(Compiling(lambda: None), 1, (torch.zeros(1),), {})
    assert heard.lines == []
