"""The recipes of docs/adding.md: a rule and a format from a file outside the package."""

import importlib.util

import pytest
import torch
from handling import copy_weights, train_all
from runs import BF16, FP32, assert_same, parameters, snapshot, through_a_file, train

from megaopt.kernels.formats import MOMENTS
from megaopt.kernels.rules import RULES

SOURCE = '''
"""Descent with momentum, whose moment is kept in signed bytes: sixteenths, from -8 to 8."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from megaopt.options.checks import DECAY, NOT_NEGATIVE
from megaopt.kernels.formats import MOMENTS, Format
from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.rules import RULES, Moment, Rule
from megaopt.kernels.rules.base import round_row
from megaopt.kernels.rules.loading import number
from megaopt.optimizer import FusedOptimizer
from megaopt.options.options import Numbers, Options


# --- the rule

def hyper(group):
    return (float(group["decay"]),)


def scalars(group):
    return round_row((*hyper(group), float(group["lr"])))


@helper
def prepare(hyper_ptr, lr, step):
    return number(hyper_ptr, 0).to(tl.float32), lr


@helper
def update(param, moments, grad, scalars):
    decay, lr = scalars
    velocity = decay * moments[0] + grad
    return param - lr * velocity, (velocity,)


def update_reference(param, moments, grad, scalars):
    decay, lr = scalars
    velocity = moments[0] * decay + grad
    return param - velocity * lr, (velocity,)


TOY = Rule(
    "toy", "ieee", (Moment("velocity"),), scalars, 2, hyper, prepare, update, update_reference
)
RULES["toy", "ieee"] = TOY


# --- the format

@helper
def decode(code, scale):
    return code.to(tl.float32) * 0.0625


@helper
def encode(value, inverse):
    clamped = tl.minimum(tl.maximum(tl.where(value == value, value, 0.0), -7.9375), 7.9375)
    return (clamped * 16.0).to(tl.int32).to(tl.int8)  # towards zero


def decode_reference(code, scale=None):
    return code.float() * 0.0625


def encode_reference(value, inverse=None):
    clamped = torch.where(value.isnan(), 0.0, value).clamp(-7.9375, 7.9375)
    return (clamped * 16.0).to(torch.int32).to(torch.int8)


@helper
def decode_coarse(code, scale):
    return code.to(tl.float32) * 0.125


@helper
def encode_coarse(value, inverse):
    return encode(value * 0.5, inverse)


def decode_coarse_reference(code, scale=None):
    return code.float() * 0.125


def encode_coarse_reference(value, inverse=None):
    return encode_reference(value * 0.5)


SIXTEENTHS = Format(
    "sixteenths", torch.int8, tl.int8, decode, encode, decode_reference, encode_reference
)
EIGHTHS = Format(
    "eighths", torch.int8, tl.int8,
    decode_coarse, encode_coarse, decode_coarse_reference, encode_coarse_reference,
)
MOMENTS.add(SIXTEENTHS)
MOMENTS.add(EIGHTHS)  # found by its name alone: torch.int8 finds the first


# --- the optimizer

@dataclass(frozen=True, kw_only=True)
class ToyOptions(Options):
    NUMBERS: ClassVar[Numbers] = Numbers({"lr": NOT_NEGATIVE, "decay": DECAY})
    velocity_dtype: torch.dtype | str = torch.float32


class Toy(FusedOptimizer):
    def __init__(self, params, lr=0.1, decay=0.5, master_weights=None, **options):
        super().__init__(params, {"lr": lr, "decay": decay}, ToyOptions(**options), master_weights)

    @property
    def rule(self):
        return RULES["toy", "ieee"]
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr("megaopt.kernels.rules.RULES", RULES)
    for table in (RULES, MOMENTS):  # what it registers goes with the test
        for key in table:
            monkeypatch.setitem(table, key, table[key])
    path = tmp_path / "toy.py"
    path.write_text(SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("toy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.Toy
    RULES.pop(("toy", "ieee"))
    del MOMENTS["sixteenths"], MOMENTS["eighths"]


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": FP32, "velocity_dtype": torch.int8}, {"velocity_dtype": "eighths"}],
    ids=str,
)
def test_kernel_and_twin_take_the_same_steps(toy, options, capturable):
    kernel, twin = (
        toy(parameters(dtype=BF16), backend=backend, capturable=capturable, **options)
        for backend in ("triton", "reference")
    )
    start = snapshot(kernel)["weights"]
    train_all((kernel, twin), 3)
    assert_same(snapshot(kernel), snapshot(twin))
    with pytest.raises(AssertionError):
        assert_same(snapshot(kernel)["weights"], start)


def test_two_formats_of_one_dtype_are_two(toy):
    runs = [toy(parameters(), dtype=FP32, velocity_dtype=key) for key in (torch.int8, "eighths")]
    train_all(runs, 3)
    with pytest.raises(AssertionError):
        assert_same(*(snapshot(optimizer)["weights"] for optimizer in runs))


def test_it_resumes_and_refuses_as_every_optimizer(toy):
    options = {"dtype": FP32, "velocity_dtype": torch.int8}
    straight, before, after = (toy(parameters(), **options) for _ in range(3))
    train(straight, 4)
    train(before, 2)
    copy_weights(before, after)
    after.load_state_dict(through_a_file(before.state_dict()))
    train(after, 2, first=2)
    assert_same(snapshot(after), snapshot(straight))
    with pytest.raises(ValueError, match=r"group 0: decay must be a number >= 0 and < 1, got 1\.5"):
        toy(parameters(), decay=1.5)
    with pytest.raises(ValueError, match=r"velocity_dtype must be one of .*torch.int8"):
        toy(parameters(), velocity_dtype=torch.int32)
