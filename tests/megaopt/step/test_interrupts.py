"""Ctrl-C at any line of a step: it was taken and counted, or neither."""

import functools

import interrupts
import kinds
import pytest
from runs import FP32, MASTER, give_gradients, parameters, params_of, train

from megaopt import FusedAdam, FusedMuon, GaLoreAdamW

BEHIND_A_LAUNCH = ("kernels/calling.py", "kernels/step/preparation.py")
"""Files with a line behind a launch, before anybody knows of it: the interpreter's, and the return
of what counts on a device."""


def of_two_kinds():
    """In two groups, which are stepped by two launches."""
    return [{"params": parameters()}, {"params": parameters(dtype=FP32)}]


def small():
    return parameters([(6, 4), (9,)])


APART = {**MASTER, "step_counts": "parameter"}
ON_DEVICE = {**MASTER, "capturable": True}
CASES = {
    "masters": (FusedAdam, parameters, MASTER, {}),
    "two kinds": (FusedAdam, of_two_kinds, APART, {}),
    "clipped": (FusedAdam, parameters, MASTER, {"clip_norm": 0.5}),
    "capturable": (FusedAdam, of_two_kinds, ON_DEVICE, {}),
    "muon": (FusedMuon, small, {**MASTER, "ns_steps": 1}, {}),
    "galore": (functools.partial(GaLoreAdamW, rank=2, update_proj_gap=2), small, MASTER, {}),
    "fp8": (FusedAdam, lambda: kinds.float8("delayed"), MASTER, {}),
}
KERNELS = ("masters", "two kinds", "clipped", "capturable")
"""Those that kernels step in launches after which nothing comes."""


def torn(name, backend, **which):
    kind, make, options, arguments = CASES[name]

    def made():
        optimizer = kind(make(), lr=0.01, backend=backend, **options)
        train(optimizer, 2)
        return optimizer

    def prepare(optimizer):
        give_gradients(params_of(optimizer), 2)

    def step(optimizer):
        optimizer.step(**arguments)

    count, lines = interrupts.torn_by(made, prepare, step, **which)
    print(f"{name}, {backend}: {count} lines")
    return [line for line in lines if not any(name in line for name in BEHIND_A_LAUNCH)]


@pytest.mark.parametrize(
    ("name", "backend"),
    [("two kinds", "reference"), ("two kinds", "triton")],
)
def test_a_step_is_taken_and_counted_or_neither(name, backend):
    assert torn(name, backend, every=60, last=30) == []


@pytest.mark.slow
@pytest.mark.thirds
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "reference") for name in CASES), *((name, "triton") for name in KERNELS)],
)
def test_at_every_line_it_is_taken_and_counted_or_neither(name, backend):
    assert torn(name, backend) == []
