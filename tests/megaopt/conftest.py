import pytest

from megaopt import galore
from megaopt.kernels.chunks import table
from megaopt.kernels.step import prepare
from megaopt.step import batch, stepper
from megaopt.step.ranks import ties


@pytest.fixture
def capturing(monkeypatch):
    """Calling it makes every device one on which a graph is being captured, or none."""

    def begin(on=True):
        for module in (batch, stepper, ties, galore, table, prepare):
            monkeypatch.setattr(module, "is_capturing", lambda device: on)

    return begin
