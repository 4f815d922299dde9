import pytest
import torch
from tiny_runs import UNFUSED, fused, tiny_run, variant

from megaopt.commands.config import read_config
from megaopt.commands.regression.lockstep import Regression
from megaopt.commands.training.determinism import deterministic
from megaopt.commands.training.text import batches_of, load_corpus

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


@pytest.fixture
def regression_of(tmp_path):
    """The regression of a config's path, not run yet."""

    def regression_of(path, perturb=None):
        config = read_config(path)
        batches, cpu = batches_of(config, load_corpus()), torch.device("cpu")
        own = {"config_path": path, "folder": tmp_path, "perturb": perturb}
        return Regression(config, batches, cpu, **own)

    return regression_of


@pytest.fixture
def run():
    """Runs a regression; its trials by the names of their variants."""

    def run(regression, tell=lambda step: None):
        with deterministic(1):
            regression.run(tell)
        return {trial.variant.name: trial for trial in regression.trials}

    return run
