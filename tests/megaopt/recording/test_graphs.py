"""Replays of a graph are recorded as steps: on a CPU, with a stand-in for torch's CUDAGraph."""

import pytest
import torch
from recorded import network, state_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaopt import Recorder
from megaopt.recording import recorder as recording
from megaopt.recording import table
from megaopt.recording.files import Recording

# A stand-in for torch.cuda.CUDAGraph on a CPU, for loops whose steps are operations of torch.


class Noting(TorchDispatchMode):
    """Runs operations, and notes them with what they were given and what they gave."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, found))
        return found


class HostGraph:
    """Repeats the operations of a capture in the capture's memory.

    CUDA's capture runs nothing: `kept` gives the tensors that have their values again behind it.
    """

    kept = staticmethod(list)
    capturing = None
    """The graph that is being captured."""

    def capture_begin(self):
        self.before = [(tensor, tensor.detach().clone()) for tensor in self.kept()]
        HostGraph.capturing, self.mode = self, Noting()
        self.mode.__enter__()

    def capture_end(self):
        self.mode.__exit__(None, None, None)
        HostGraph.capturing = None
        for tensor, value in self.before:
            tensor.data.copy_(value)  # which torch counts as no write

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, found in self.mode.calls:
            again = function(*args, **kwargs)
            for was, now in zip(tree_leaves(found), tree_leaves(again), strict=True):
                if isinstance(was, torch.Tensor) and was.data_ptr() != now.data_ptr():
                    was.copy_(now)


EAGER, STEPS = 2, 5


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda.graphs, "CUDAGraph", HostGraph)
    for module in (recording, table):
        monkeypatch.setattr(module, "is_capturing", lambda _: HostGraph.capturing is not None)


class Loop:
    """Trains on batches that are put into one tensor; the first steps run, the others replay."""

    def __init__(self, captures):
        self.model = network()
        self.model[1].eval()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.batch, self.captures = torch.zeros(5, 8), captures
        self.graph = HostGraph()
        self.graph.kept = lambda: [
            *self.model.parameters(),
            *(state["momentum_buffer"] for state in self.optimizer.state.values()),
        ]

    def step(self):
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()

    def capture(self):
        self.graph.capture_begin()
        self.step()
        self.graph.capture_end()

    def run(self, between=None):
        generator = torch.Generator().manual_seed(1)
        for number in range(STEPS):
            self.batch.copy_(torch.randn(5, 8, generator=generator))
            if self.captures and number == EAGER:
                self.capture()
            replays = self.captures and number >= EAGER
            (self.graph.replay if replays else self.step)()
            if between is not None:
                between(number + 1)
        return state_of(self.model, self.optimizer)


def run(out, captures, between=None, **options):
    loop = Loop(captures)
    with Recorder(loop.model, loop.optimizer, out, **options):
        return loop.run(between and (lambda number: between(loop, number)))


def numbers(found, step):
    line = found.scalars(step)[0][0]
    return {key: line[key] for key in ("losses", "grad_norm", "groups", "skipped")}


@pytest.mark.parametrize("every", [1, 2])
def test_replays_are_recorded_as_steps_are(tmp_path, every):
    left = [run(tmp_path / str(c), c, every=every, keep=[STEPS]) for c in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))
    eager, replayed = (Recording(tmp_path / str(c)) for c in (False, True))
    assert eager.steps == replayed.steps
    for step in eager.steps:
        assert eager.digests(step).items() <= replayed.digests(step).items()
        assert numbers(eager, step) == numbers(replayed, step)
        for one, other in zip(samples(eager, step), samples(replayed, step), strict=True):
            assert one == other


def samples(found, step):
    """All but old values: torch counts what a capture does not write."""
    own = found.ranks[0].samples(step)
    return [(v, held, w.tolist()) for v, held, w in own if not v.quantity.startswith("old")]


def test_a_write_between_replays_is_seen(tmp_path):
    def write(loop, number):
        if number == STEPS - 1:
            with torch.no_grad():
                loop.model[4].bias.add_(1)

    run(tmp_path / "a", True, write)
    found = Recording(tmp_path / "a")
    old = [{key for key in found.digests(s) if key[1].startswith("old")} for s in (4, 5)]
    assert old == [set(), {("4.bias", "old weight")}]
    weight = found.digests(4)["4.bias", "weight"]
    assert weight != found.digests(5)["4.bias", "old weight"]


def test_a_write_before_a_capture_is_seen(tmp_path):
    def write(loop, number):
        if number == EAGER:
            with torch.no_grad():
                loop.model[4].bias.add_(1)

    run(tmp_path / "a", True, write)
    found = Recording(tmp_path / "a")
    weight = found.digests(EAGER)["4.bias", "weight"]
    assert weight != found.digests(EAGER + 1)["4.bias", "old weight"]


def test_a_replay_behind_a_step_that_an_error_ended(tmp_path):
    def fail(loop, number):
        if number == STEPS - 1:
            group = loop.optimizer.param_groups[0]
            rate, group["lr"] = group["lr"], "none"
            with pytest.raises(TypeError):
                loop.step()
            group["lr"] = rate

    run(tmp_path / "a", True, fail)
    recording = Recording(tmp_path / "a")
    assert recording.steps == [*range(1, STEPS + 1)]
    values = [value for value, _ in recording.ranks[0].rows(STEPS)]
    assert len(values) == len(set(values))
    assert len(recording.scalars(STEPS)[0][0]["losses"]) == 2  # of both backwards


def test_steps_between_replays_do_not_disturb_them(tmp_path):
    def step(loop, number):
        if number == 4:
            loop.step()

    run(tmp_path / "a", False, step), run(tmp_path / "b", True, step)
    eager, replayed = Recording(tmp_path / "a"), Recording(tmp_path / "b")
    assert eager.steps == replayed.steps == [1, 2, 3, 4, 5, 6]
    for number in eager.steps:
        assert eager.digests(number).items() <= replayed.digests(number).items()
        assert numbers(eager, number) == numbers(replayed, number)


def test_a_graph_of_two_steps_leaves_two(tmp_path):
    for captures in (False, True):
        loop = Loop(captures)
        loop.step = lambda once=loop.step: (once(), once())
        with Recorder(loop.model, loop.optimizer, tmp_path / str(captures)):
            loop.run()
    eager, replayed = (Recording(tmp_path / str(captures)) for captures in (False, True))
    assert eager.steps == replayed.steps == [*range(1, 2 * STEPS + 1)]
    for step in eager.steps:
        assert eager.digests(step).items() <= replayed.digests(step).items()
        assert numbers(eager, step) == numbers(replayed, step)


def test_a_graph_of_forward_and_backward_leaves_losses(tmp_path):
    found = []
    for captures in (False, True):
        loop = Loop(captures)
        with Recorder(loop.model, loop.optimizer, tmp_path / str(captures)):
            loop.step, whole = lambda own=loop: own.model(own.batch).sum().backward(), loop.step
            for _ in range(2):
                whole()
            if captures:
                loop.capture()
            for _ in range(3):
                loop.optimizer.zero_grad(set_to_none=False)
                (loop.graph.replay if captures else loop.step)()
                loop.optimizer.step()
        recording = Recording(tmp_path / str(captures))
        found.append([recording.scalars(step)[0][0]["losses"] for step in recording.steps])
    assert found[0] == found[1]


def test_a_capture_without_a_step_before_is_left_alone(tmp_path):
    loop = Loop(True)
    loop.step()
    with Recorder(loop.model, loop.optimizer, tmp_path / "a"):
        with pytest.warns(UserWarning, match="a recorded step like it has to come before"):
            loop.capture()
        loop.graph.replay()
        loop.step()
    assert Recording(tmp_path / "a").steps == [1]


def test_a_capture_that_has_begun_before_is_left_alone(tmp_path):
    loop = Loop(True)
    loop.step()
    loop.graph.capture_begin()
    with Recorder(loop.model, loop.optimizer, tmp_path / "a"):
        with pytest.warns(UserWarning, match="was not there when the capture began"):
            loop.step()
        loop.graph.capture_end()
        loop.graph.replay()
    assert Recording(tmp_path / "a").steps == []


def test_closed_recorders_hear_nothing(tmp_path):
    loop, names = Loop(True), ("capture_begin", "capture_end", "replay")
    before = [vars(HostGraph)[name] for name in names]
    with Recorder(loop.model, loop.optimizer, tmp_path / "a"):
        assert [vars(HostGraph)[name] for name in names] != before
    assert [vars(HostGraph)[name] for name in names] == before
