import pytest

TINY = """
seed = 1
steps = {steps}
batch_size = 2
device = "cpu"
cpu_threads = 1

[model]
layers = 1
heads = 2
width = 16
context = 16
vocabulary_size = 256

[optimizer]
learning_rate = {learning_rate}
warmup_steps = 3
beta2 = 0.95
weight_decay = 0.1
{optimizer}

[[variant]]
name = "unfused"
kind = "unfused"

[[variant]]
name = "ties_away"
kind = "unfused"
rounding = "nearest_away"
"""

FUSED = """
[[variant]]
name = "{name}"
kind = "fused"
baseline = "{baseline}"
"""


@pytest.fixture
def write_run(tmp_path):
    """Writes a very small run: write_run(steps, name=(baseline, {key: value}), ...)."""

    def write(steps=4, optimizer="", learning_rate=3e-3, **variants):
        text = TINY.format(steps=steps, optimizer=optimizer, learning_rate=learning_rate)
        for name, (baseline, options) in variants.items():
            text += FUSED.format(name=name, baseline=baseline)
            for key, value in options.items():
                text += f"{key} = {value!r}\n"
        path = tmp_path / "tiny.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write
