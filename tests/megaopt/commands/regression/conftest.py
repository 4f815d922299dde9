import pytest
from tiny_runs import UNFUSED, fused, tiny_run, variant

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
