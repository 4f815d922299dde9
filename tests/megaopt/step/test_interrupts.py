"""Ctrl-C at any line of a step: it was taken and counted, or neither."""

import functools
import linecache
import sys
from pathlib import Path

import kinds
import pytest
from runs import FP32, MASTER, assert_same, everything, give_gradients, parameters, params_of, train

import megaopt
from megaopt import FusedAdam, FusedMuon, GaLoreAdamW

# Ctrl-C at each line of a step.

ROOTS = [Path(megaopt.__file__).parent.resolve()]
ROOTS += [Path(sys.modules["megaopt.kernels"].__path__[0]).resolve()]


class InterruptedAt:
    """Raises KeyboardInterrupt at the line of this number that runs within it, as Ctrl-C may.

    number: among the lines of the package; -1: counts them. Lines that a kernel's interpreter runs
    are passed over: a card's launch is one call. So are ends of `with` blocks, where a tracer may
    raise and a signal does not: Python looks for signals behind calls and jumps, within the block.
    """

    def __init__(self, number=-1):
        self.number, self.count, self.where = number, 0, ""
        self._files, self._begun = {}, set()

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _is_ours(self, name):
        if name not in self._files:
            path = Path(name).resolve() if Path(name).exists() else Path(name)
            self._files[name] = any(root in path.parents for root in ROOTS)
        return self._files[name]

    def _trace(self, frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and not (self._is_ours(name) and not is_within_launch(frame)):
            return None
        if event == "line" and not self._ends_block(frame):
            self.count += 1
            if self.count - 1 == self.number:
                sys.settrace(None)
                self.where = f"{name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace

    def _ends_block(self, frame):
        """Whether the line is that of a `with` whose block has begun in this frame."""
        code, line = frame.f_code, frame.f_lineno
        if not linecache.getline(code.co_filename, line).lstrip().startswith("with "):
            return False
        is_again = (frame, line) in self._begun
        self._begun.add((frame, line))
        return is_again


def is_within_launch(frame):
    """Whether Triton's interpreter is among the callers."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("triton."):
            return True
        frame = frame.f_back
    return False


def torn_by(make, prepare, step, every=1, last=0):
    """How many lines a step has, and those at which an interrupt tore it apart.

    Behind such a line things are neither as before the step nor as after it.

    make: an optimizer that has taken steps, the same each time. prepare: gives it gradients. step:
    steps it. every: each such line is tried, and each of the `last` ones.
    """
    for _ in range(2):  # the first fills caches, which takes lines of its own
        optimizer = make()
        prepare(optimizer)
        before = everything(optimizer)
        with InterruptedAt() as lines:
            step(optimizer)
    after, torn, count = everything(optimizer), [], lines.count
    for number in sorted({*range(0, count, every), *range(max(count - last, 0), count)}):
        optimizer = make()
        prepare(optimizer)
        interrupted = InterruptedAt(number)
        try:
            with interrupted:
                step(optimizer)
        except KeyboardInterrupt:
            now = everything(optimizer)
        assert interrupted.where
        if not (is_same(now, before) or is_same(now, after)):
            torn.append(interrupted.where)
    return count, torn


def is_same(one, other):
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True


BEHIND_A_LAUNCH = ("kernels/calling.py", "kernels/step/prepare.py")
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

    count, lines = torn_by(made, prepare, step, **which)
    print(f"{name}, {backend}: {count} lines")
    return [line for line in lines if not any(name in line for name in BEHIND_A_LAUNCH)]


@pytest.mark.parametrize(
    ("name", "backend"),
    [("two kinds", "reference"), ("two kinds", "triton")],
)
def test_a_step_is_taken_and_counted_or_neither(name, backend):
    assert torn(name, backend, every=60, last=30) == []


BACKENDS = [*((name, "reference") for name in CASES), *((name, "triton") for name in KERNELS)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_at_every_seventh_line_it_is_taken_and_counted_or_neither(name, backend):
    assert torn(name, backend, every=7, last=60) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_at_every_line_it_is_taken_and_counted_or_neither(name, backend):
    assert torn(name, backend) == []
