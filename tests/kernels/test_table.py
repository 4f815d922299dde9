"""Tables on the device."""

import gc
import random
from types import SimpleNamespace

import numpy
import pytest
import torch

from megaopt.kernels.chunks import table as tables
from megaopt.kernels.chunks.table import PinnedMemory, Upload


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


class LaggingDevice:
    """Copies when it is told to, however late: what a queue of work on a GPU does to them."""

    def __init__(self):
        self.queue, self.pieces = [], 0

    def new_piece(self, like):
        self.pieces += 1
        return PinnedMemory(torch.empty_like(like.tensor), Event(self))

    def work(self, count):
        for _ in range(count):
            self.queue.pop(0)()


class Event:
    def __init__(self, device):
        self.device, self.passed = device, True

    def record(self):
        self.passed = False
        self.device.queue.append(lambda: setattr(self, "passed", True))

    def query(self):
        return self.passed


class Target:
    """A tensor on that device; `seen` has what kernels between the copies read."""

    def __init__(self, device, shape):
        self.device, self.tensor, self.seen = device, torch.zeros(shape), []

    def __getitem__(self, rows):
        return Part(self, rows)

    def copy_(self, source, non_blocking):
        self[:].copy_(source, non_blocking)

    def __getattr__(self, name):
        return getattr(self.tensor, name)

    def launch(self):
        self.device.queue.append(lambda: self.seen.append(self.tensor.clone()))


class Part:
    def __init__(self, target, rows):
        self.target, self.rows = target, rows

    def copy_(self, source, non_blocking):
        own = self.target.tensor[self.rows]
        self.target.device.queue.append(lambda: own.copy_(source))


@pytest.mark.parametrize("seed", range(5))
def test_a_device_that_lags_reads_what_was_written_for_each_step(seed):
    chance, device = random.Random(seed), LaggingDevice()
    target = Target(device, (4, 3))
    upload = Upload(target, device.new_piece)
    array, wanted, ahead = numpy.zeros((4, 3), dtype=numpy.float32), [], 0
    for step in range(200):
        first = chance.randrange(4)
        last = chance.choice([None, *range(first + 1, 5)])
        array[first:last] = step + 1
        upload.write(array, first, last)
        wanted.append(torch.from_numpy(array.copy()))
        target.launch()
        array[first:last] += 0.5  # it may change as soon as `write` returns
        array[first:last] -= 0.5
        ahead = max(ahead, len(device.queue) // 3)
        device.work(chance.randrange(min(len(device.queue), 7) + 1))
    device.work(len(device.queue))
    assert all(map(torch.equal, target.seen, wanted))
    assert len(target.seen) == 200
    assert device.pieces <= ahead + 1


def test_a_copy_that_fails_is_made_whole_at_the_next_step(monkeypatch):
    table = tables.DeviceTable(torch.device("cpu"))
    table.update(numpy.zeros((3, 2), dtype=numpy.int64))
    write = Upload.write

    def half(self, array, first=0, last=None):
        write(self, array, first, first + 1)
        raise torch.OutOfMemoryError("no memory today")

    monkeypatch.setattr(Upload, "write", half)
    with pytest.raises(torch.OutOfMemoryError):
        table.update(numpy.ones((3, 2), dtype=numpy.int64))
    monkeypatch.setattr(Upload, "write", write)
    back = numpy.zeros((3, 2), dtype=numpy.int64)
    assert torch.equal(table.update(back), torch.from_numpy(back))


def test_only_what_changed_is_written(monkeypatch):
    written = []
    write = Upload.write
    noted = lambda self, array, *rows: written.append(rows) or write(self, array, *rows)  # noqa: E731
    monkeypatch.setattr(Upload, "write", noted)
    table, array = tables.DeviceTable(torch.device("cpu")), numpy.zeros((9, 100), dtype=numpy.int64)
    table.update(array)
    for rows in ([0], [3, 5], [8], []):
        array[rows, 7] += 1
        assert torch.equal(table.update(array), torch.from_numpy(array))
    assert written == [(0, None), (0, 1), (3, 6), (8, 9)]


def test_zeros_of_another_sign_are_uploaded():
    table = tables.DeviceTable(torch.device("cpu"))
    table.update(numpy.array([[0.0, 1.0]], dtype=numpy.float32))
    assert bool(table.update(numpy.array([[-0.0, 1.0]], dtype=numpy.float32))[0, 0].signbit())


def test_what_a_graph_captured_is_never_written_again(monkeypatch):
    """Nor where it was there before the capture, and the capture uploaded nothing."""
    capturing = [False]
    monkeypatch.setattr(tables, "is_capturing", lambda device: capturing[0])
    table, first = tables.DeviceTable(torch.device("cpu")), numpy.arange(3)
    eager = table.update(first)
    capturing[0] = True
    assert table.update(first) is eager
    capturing[0] = False
    for change in range(1, 4):
        assert torch.equal(table.update(first + change), torch.from_numpy(first + change))
    assert torch.equal(eager, torch.from_numpy(first))


def test_each_stream_has_a_copy_of_its_own(monkeypatch):
    """The allocator gives memory back to the stream that it was allocated on."""
    stream = [1]
    monkeypatch.setattr(tables, "stream_of", lambda device: stream[0])
    table, first = tables.DeviceTable(torch.device("cpu")), numpy.arange(3)
    one = table.update(first)
    stream[0] = 2
    two = table.kept()
    assert two is not one
    assert torch.equal(two, torch.from_numpy(first))
    assert table.update(first + 1) is two
    assert torch.equal(one, torch.from_numpy(first))


def test_a_copy_made_within_inference_mode_is_written_outside():
    table, first = tables.DeviceTable(torch.device("cpu")), numpy.arange(3)
    with torch.inference_mode():
        table.update(first)
    assert torch.equal(table.update(first + 1), torch.from_numpy(first + 1))


@pytest.mark.gpu
def test_steps_that_the_host_is_ahead_of_read_their_own_numbers():
    device = torch.device("cuda")
    table, seen = tables.DeviceTable(device), []
    torch.cuda._sleep(200_000_000)  # so that all is queued before the first copy
    for step in range(64):
        seen.append(table.update(numpy.full((3, 5), step, dtype=numpy.int64)).clone())
    for step, tensor in enumerate(seen):
        assert torch.equal(tensor, torch.full((3, 5), step, device=device))


def test_an_upload_that_is_dropped_after_a_fault_says_nothing(monkeypatch):
    """torch raises the fault again, whatever it is asked: what pytest makes of that is an error."""

    def faulty():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", faulty)
    upload = Upload(SimpleNamespace(is_cuda=True))
    del upload
    gc.collect()


@pytest.mark.usefixtures("looks")
def test_addresses_are_those_of_the_tensors():
    whole = torch.zeros(4, 6, dtype=torch.bfloat16)
    parts = [whole, whole[1:, 2:], whole.view(-1)[5:], torch.zeros(0), torch.nn.Parameter(whole)]
    found = tables.addresses_of({"grad": parts, "weight": []})
    assert found["grad"].dtype == found["weight"].dtype == numpy.int64
    assert found["grad"].tolist() == [each.data_ptr() for each in parts]
    assert found["weight"].tolist() == []
    with pytest.raises(RuntimeError):
        tables.addresses_of({"grad": [torch.zeros(2).to_sparse()]})
