"""Replays of CUDA graphs are recorded as eager steps are, and nothing waits for the device."""

import pytest
import torch
from runs import MASTER, REMAINDERS, values

from megaopt import FusedAdam, Recorder
from megaopt.recording.files import Recording

pytestmark = pytest.mark.gpu

SHAPES = [(3, 4), (5000,), (300, 128)]
EAGER, STEPS = 2, 6
FUSED = {"weights": torch.float32, "kind": torch.optim.AdamW, "fused": True}
FOREACH = {"weights": torch.float32, "kind": torch.optim.AdamW, "foreach": True}
OURS = {"weights": torch.bfloat16, "kind": FusedAdam}
OPTIMIZERS = {
    "torch fused": FUSED,
    "torch foreach": FOREACH,
    "ours": {**OURS, **MASTER},
    "ours with remainders": {**OURS, **REMAINDERS},
    "ours with moments of its own pass": {**OURS, **MASTER, "exp_avg_dtype": torch.float16},
}


class Model(torch.nn.Module):
    """Gradients are the inputs, whatever the order of a sum."""

    def __init__(self, dtype):
        super().__init__()
        made = (values(shape, 1).to("cuda", dtype) for shape in SHAPES)
        self.weights = torch.nn.ParameterList(made)

    def forward(self, inputs):
        pairs = zip(self.weights, inputs, strict=True)
        return sum((weight * each).float().sum() for weight, each in pairs)


class Loop:
    """Trains on inputs that are put into the same tensors."""

    def __init__(self, weights, kind, **options):
        self.model = Model(weights)
        self.optimizer = kind(self.model.parameters(), lr=0.01, capturable=True, **options)
        self.inputs = [torch.zeros_like(weight) for weight in self.model.weights]
        self.graph = torch.cuda.CUDAGraph()

    def fill(self, number):
        for place, each in enumerate(self.inputs):
            each.copy_(values(tuple(each.shape), 100 * number + place))

    def step(self):
        self.optimizer.zero_grad()
        self.model(self.inputs).backward()
        self.optimizer.step()

    def capture(self):
        self.optimizer.zero_grad()
        with torch.cuda.graph(self.graph):
            self.step()

    def run(self, captures):
        for number in range(STEPS):
            self.fill(number)
            if captures and number == EAGER:
                self.capture()
            (self.graph.replay if captures and number >= EAGER else self.step)()
        return [weight.detach().clone() for weight in self.model.weights]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_replays_are_recorded_as_steps_are(options, every, tmp_path):
    left = []
    for captures in (False, True):
        loop = Loop(**options)
        with Recorder(loop.model, loop.optimizer, tmp_path / str(captures), every=every):
            left.append(loop.run(captures))
    assert all(map(torch.equal, *left))
    eager, replayed = (Recording(tmp_path / str(captures)) for captures in (False, True))
    assert eager.steps == replayed.steps
    for step in eager.steps:
        assert eager.digests(step).items() <= replayed.digests(step).items()
        assert samples(eager, step) == samples(replayed, step)
        one, other = (found.scalars(step)[0][0] for found in (eager, replayed))
        assert [one[key] for key in ("losses", "groups")] == [
            other[key] for key in ("losses", "groups")
        ]


def samples(found, step):
    """All but old values: torch counts what a capture does not write."""
    own = found.ranks[0].samples(step)
    return [(v, held, w.tolist()) for v, held, w in own if not v.quantity.startswith("old")]


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_replay_waits_for_nothing(options, tmp_path):
    loop = Loop(**options)
    with Recorder(loop.model, loop.optimizer, tmp_path / "a"):
        loop.run(captures=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(2**31)
        loop.graph.replay()
        assert not torch.cuda.current_stream().query()
    assert Recording(tmp_path / "a").steps == [*range(1, STEPS + 2)]


def test_a_dropped_graph_is_forgotten(tmp_path):
    loop = Loop(**FUSED)
    with Recorder(loop.model, loop.optimizer, tmp_path / "a"):
        loop.run(captures=True)
        del loop.graph
        loop.step()
    assert Recording(tmp_path / "a").steps == [*range(1, STEPS + 2)]
