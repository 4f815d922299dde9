import pytest
import torch
from tiny_runs import UNFUSED, fused, tiny_run, variant

from megaopt.lab.config import read_config
from megaopt.lab.regression import processes, regression
from megaopt.lab.regression.processes import Group, RankError
from megaopt.lab.regression.regression import Regression
from megaopt.lab.training.machine import deterministic

BASELINES = UNFUSED + variant("ties_away", "unfused", rounding="nearest_away")
OPTIMIZER = "warmup_steps = 3\nbeta2 = 0.95\nweight_decay = 0.1\n"


@pytest.fixture
def write_run(tmp_path):
    """Writes a very small run: write_run(steps, name=(baseline, {key: value}), ...)."""

    def write(steps=4, optimizer="", learning_rate=3e-3, **variants):
        options = {"learning_rate": learning_rate, "optimizer": OPTIMIZER + optimizer}
        text = tiny_run(steps, **options) + BASELINES
        for name, (baseline, keys) in variants.items():
            text += fused(name, baseline, **keys)
        path = tmp_path / "tiny.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


class Here:
    """A job of one rank in the test's process, where faults can be planted; others as they are."""

    def __init__(self, task):
        self.task, self.job, self.steps = task, task.job, 0

    def start(self):
        pass

    def look(self):
        try:
            with deterministic(1):
                processes.train(self.task)
        except Exception as error:
            raise RankError(str(error)) from error
        self.steps = self.job.steps
        return True

    def end(self):
        pass


@pytest.fixture
def here(monkeypatch):
    """Jobs of one rank run in this process."""
    group = lambda tasks: Here(*tasks) if len(tasks) == 1 else Group(tasks)  # noqa: E731
    monkeypatch.setattr(regression, "Group", group)
    monkeypatch.setattr(regression, "PAUSE", 0)


@pytest.fixture
def regression_of(tmp_path, here):
    """The regression of a config's path, not run yet."""
    return lambda path, perturb=None: Regression(read_config(path), "cpu", tmp_path, perturb)


@pytest.fixture
def run():
    """Runs a regression; what became of its trials, by name."""

    def run(regression):
        made, ended = [], []
        regression.train(lambda outcome: ended.append(outcome.trial.name), made.append)
        assert made == sorted(made)
        assert made[-1] == regression.total_steps
        outcomes = {outcome.trial.name: outcome for outcome in regression.outcomes}
        assert sorted(ended) == sorted(outcomes)
        return outcomes

    return run


@pytest.fixture
def plant(monkeypatch):
    """Plants a fault: fault(training, scalars) is called after one step of one job."""
    built = processes.build

    def plant(name, number, fault):
        def build(task):
            training = built(task)
            step = training.step

            def spoiled(at):
                scalars = step(at)
                if (task.job.name, at) == (name, number):
                    fault(training, scalars)
                return scalars

            training.step = spoiled
            return training

        monkeypatch.setattr(processes, "build", build)

    return plant


@pytest.fixture
def plant_flip(plant):
    """Plants a flipped bit: of an element of a quantity of a parameter, or of a part of it."""

    def plant_flip(name, number, parameter, quantity, index=0):
        def flip(training, scalars):
            for value, tensor in training.parts():
                begin, *_, numel = value.place
                own = (value.name, value.quantity) == (parameter, quantity)
                if own and begin <= index < begin + numel:
                    size = tensor.element_size()
                    tensor.view(-1).view(torch.uint8)[(index - begin) * size] ^= 4

        plant(name, number, flip)

    return plant_flip
