"""Tables on the device."""

import numpy
import torch

from megaopt.kernels.step import table as tables


def test_a_table_that_waits_for_a_replay_is_not_read_before(monkeypatch):
    """What a capture uploads is there after a replay: steps outside have a copy of their own."""
    capturing = [False]
    monkeypatch.setattr(tables, "is_capturing", lambda device: capturing[0])
    table = tables.DeviceTable(torch.device("cpu"))
    first, second = numpy.arange(3), numpy.arange(3, 6)
    before = table.update(first)
    assert table.update(first) is before

    capturing[0] = True
    captured = table.update(second)
    assert table.kept() is captured
    captured.zero_()  # not filled yet
    capturing[0] = False

    eager = table.kept()
    assert eager is not captured
    assert torch.equal(eager, torch.from_numpy(second))
    assert table.kept() is eager
    assert table.update(second) is eager
    assert torch.equal(captured, torch.zeros(3, dtype=captured.dtype))
