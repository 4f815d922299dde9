import pytest

from megaopt import galore
from megaopt.kernels.chunks import table
from megaopt.kernels.step import prepare
from megaopt.step import stepper
from megaopt.step.ranks import ties


@pytest.fixture
def capturing(monkeypatch):
    """Calling it makes every device one on which a graph is being captured, or none."""
    monkeypatch.setattr(stepper, "can_capture", lambda device: True)

    def begin(on=True):
        for module in (stepper, ties, galore, table, prepare):
            monkeypatch.setattr(module, "is_capturing", lambda device: on)

    return begin
