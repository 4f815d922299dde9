import pytest

from megaopt import galore
from megaopt.kernels import native
from megaopt.kernels.chunks import table
from megaopt.kernels.step import preparation
from megaopt.step import stepper


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
        for module in (stepper, galore, table, preparation):
            monkeypatch.setattr(module, "is_capturing", lambda device: on)

    return begin
