"""The texts of very small regression runs: a GPT of one layer, on a CPU."""

import json

TEXT = """
seed = 1
steps = {steps}
batch_size = {batch_size}
device = "{device}"
cpu_threads = 1
{run}
[model]
layers = 1
heads = 2
width = 16
context = 16
vocabulary_size = 256

[optimizer]
learning_rate = {learning_rate}
{optimizer}
"""


def tiny_run(
    steps=4, *, batch_size=2, device="cpu", run="", learning_rate=3e-3, optimizer="", megatron=None
):
    """A run without variants; `run`, `optimizer` and `megatron` are more lines of these tables."""
    text = TEXT.format(
        steps=steps,
        batch_size=batch_size,
        device=device,
        run=run,
        learning_rate=learning_rate,
        optimizer=optimizer,
    )
    return text if megatron is None else f"{text}\n[megatron]\n{megatron}\n"


def variant(name, kind, **keys):
    """One variant's table."""
    keys = {"name": name, "kind": kind, **keys}
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in keys.items()]
    return "".join(["\n[[variant]]\n", *lines])


UNFUSED = variant("unfused", "unfused")


def fused(name="fused", baseline="unfused", backend="reference", **keys):
    """One of ours, beside the baseline above."""
    return variant(name, "fused", baseline=baseline, backend=backend, **keys)
