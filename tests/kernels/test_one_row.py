"""Rules of one optimizer that share a row of scalars, each with its own part of it."""

import dataclasses

import pytest
import torch
from bits import assert_same_bits
from step_cases import (
    CURATED,
    GROUP,
    assert_same_buffers,
    buffers,
    copied,
    name_of,
    reference_step,
    triton_step,
)

from megaopt.kernels.rules import EMA, RULES
from megaopt.kernels.rules.base import in_one_row
from megaopt.kernels.step.preparation import Request
from megaopt.kernels.step.prepare import TritonPreparation

MASTERS = next(f for f in CURATED if name_of(f) == "bfloat16-bfloat16-float32-float32-float32")
NUMBERS = {**GROUP, "ema_decay": 0.75}
ADAMW, NESTEROV = RULES["adamw", "ieee"], RULES["sgd_nesterov", "ieee"]
BEHIND = dataclasses.replace(NESTEROV, hyper_length=len(NESTEROV.hyper(NUMBERS)))


@pytest.mark.parametrize("step", [reference_step, triton_step])
@pytest.mark.parametrize("place", [0, 1])
def test_each_rule_steps_as_alone(step, place, device):
    """AdamW, whose part of the row is the first, and Nesterov's momentum behind it."""
    alone, shared = (ADAMW, BEHIND)[place], in_one_row(ADAMW, BEHIND)[place]
    own = {"moments": MASTERS.moments[: len(alone.moments)], "moment_names": alone.moments}
    formats = dataclasses.replace(MASTERS, **own)
    found = buffers(formats, [1, 1000], device)
    expected = copied(found)
    step(found, formats, shared, NUMBERS)
    step(expected, formats, alone, NUMBERS)
    assert_same_buffers(found, expected)


def test_the_row_is_one_for_all():
    rules = in_one_row(ADAMW, EMA)
    rows = [rule.scalars(NUMBERS) for rule in rules]
    assert rows == [(*ADAMW.scalars(NUMBERS), *EMA.scalars(NUMBERS))] * 2
    assert {rule.row_length for rule in rules} == {len(rows[0])}


def test_the_row_is_the_same_on_the_device(device):
    """With lr and step there: each part of the row finds its own numbers of the group."""
    (rule, _), step = in_one_row(ADAMW, EMA), 7
    on_device = {
        **NUMBERS,
        "lr": torch.tensor(NUMBERS["lr"], device=device),
        "step": torch.tensor([step - 1], dtype=torch.int32, device=device),
    }
    found, _ = TritonPreparation(rule, device).make([on_device], 1, Request(), [])
    expected = rule.scalars({**NUMBERS, "lr": float(on_device["lr"]), "step": step})
    assert_same_bits(found.cpu(), torch.tensor([expected]), "row")
