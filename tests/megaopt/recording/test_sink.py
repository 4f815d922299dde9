"""Steps that wait for a device are written by a thread, in order, and its errors are heard."""

import signal
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


def put_all(sink, devices):
    sink.put(Step(number=2, losses=["no number"]), devices)
    for number in range(3, 1000):
        sink.put(Step(number=number), devices)
    sink.close()


@pytest.mark.parametrize("devices", [CUDA, set()], ids=["thread", "at once"])
def test_what_cannot_be_written_is_told_once_and_raises_nothing(tmp_path, event, devices):
    event.set()
    sink = Sink(Writer(tmp_path, 0, {}))
    sink.put(Step(number=1), devices)
    with pytest.warns(RuntimeWarning) as told:
        put_all(sink, devices)
    (warning,) = told
    assert str(warning.message).startswith(f"nothing more is recorded in '{tmp_path}/rank-0': ")
    assert "no number" in str(warning.message)
    assert list(Rank(tmp_path / "rank-0").scalars) == [1]


def test_an_interrupt_within_a_step_is_raised_and_nothing_follows_the_torn_step(
    tmp_path, hears_interrupts
):
    sink = Sink(Writer(tmp_path, 0, {}))
    sink.put(Step(number=1), set())
    torn = Step(number=2)
    torn.write = lambda _: signal.raise_signal(signal.SIGINT)
    with pytest.warns(RuntimeWarning, match="KeyboardInterrupt"), pytest.raises(KeyboardInterrupt):
        sink.put(torn, set())
    sink.put(Step(number=3), set())
    sink.close()
    assert list(Rank(tmp_path / "rank-0").scalars) == [1]
