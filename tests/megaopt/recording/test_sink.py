"""Steps that wait for a device are written by a thread, in order, and its errors are heard."""

import threading
import types

import pytest
import torch

from megaopt.recording.files import Rank, Writer
from megaopt.recording.sink import Sink, Step

CUDA = {torch.device("cuda", 0)}


@pytest.fixture
def event(monkeypatch):
    """What the device does not get to before it is set."""
    found = threading.Event()
    stream = types.SimpleNamespace(
        record_event=lambda: types.SimpleNamespace(synchronize=lambda: found.wait(30))
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return found


def test_a_step_is_written_when_the_device_is_done(tmp_path, event):
    sink = Sink(Writer(tmp_path, 0, {}))
    loss = torch.zeros(())
    for number in range(1, 5):
        sink.put(Step(number=number, losses=[loss]), CUDA)
    assert not Rank(tmp_path / "rank-0").scalars
    loss.fill_(2.0)
    event.set()
    sink.close()
    found = Rank(tmp_path / "rank-0").scalars
    assert list(found) == [1, 2, 3, 4]
    assert found[1][0]["losses"] == [(2.0).hex()]


def put_many(sink, first):
    for number in range(first, 1000):
        sink.put(Step(number=number), CUDA)


@pytest.mark.parametrize("hears", [put_many, lambda sink, _: sink.close()])
def test_an_error_of_the_thread_is_raised_once(tmp_path, event, hears):
    event.set()
    sink = Sink(Writer(tmp_path, 0, {}))
    sink.put(Step(number=1), CUDA)
    sink.put(Step(number=2, losses=["no number"]), CUDA)
    with pytest.raises(ValueError, match="no number"):
        hears(sink, 3)
    sink.close()
    assert list(Rank(tmp_path / "rank-0").scalars) == [1]
