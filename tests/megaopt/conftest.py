import gc
import os

import pytest
import torch

from megaopt import galore
from megaopt.kernels.step import preparation, table
from megaopt.state import native
from megaopt.step import capture, stepper

# two threads that share small products wait for each other: a step of GaLoreAdamW took 40 times as
# much of the processor. Ranks have one too; test_switches.py compares one with two.
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def young_heap():
    """For modules that collect garbage: only what they have made, as all there is takes a while."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["python", "native"])
def looks(request, monkeypatch):
    """Tensors and their counters are looked at by the Python twin, and by the extension."""
    if request.param == "python":
        monkeypatch.setenv(native.SWITCH, "0")
    elif native.build()[0] is None:
        pytest.skip(f"the extension cannot be built here: {native.build()[1]}")


@pytest.fixture
def capturing(monkeypatch):
    """Calling it makes every device one on which a graph is being captured, or none."""
    monkeypatch.setattr(stepper, "can_capture", lambda device: True)

    def begin(on=True):
        for module in (capture, galore, table, preparation):
            monkeypatch.setattr(module, "is_capturing", lambda device: on)

    return begin
