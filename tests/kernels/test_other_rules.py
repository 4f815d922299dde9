"""Rules beside Adam's two: any number of moments, on kernel, twin and an independent oracle."""

import dataclasses
from pathlib import Path

import pytest
import torch
from mutants import mutant
from step_cases import (
    CURATED,
    DRAWING,
    GROUP,
    OTHER_RULES,
    assert_all_agree,
    assert_same_buffers,
    buffers,
    combinations,
    copied,
    oracle_step,
    reference_step,
    triton_step,
    with_rule,
)
from step_cases import name_of as name_of_formats

from megaopt import kernels
from megaopt.kernels.rules import RULES
from megaopt.kernels.step.draws import Place
from megaopt.kernels.step.table import Geometry

SMALL = Geometry(64, 2)
SOURCES = Path(kernels.__path__[0])
each_rule = pytest.mark.parametrize("rule", OTHER_RULES, ids=lambda rule: rule.name)


def test_there_are_rules_with_no_one_and_three_moments():
    assert {len(rule.moments) for rule in OTHER_RULES} == {0, 1, 3}


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("formats", CURATED, ids=name_of_formats)
@each_rule
def test_twin_is_the_oracle(rule, formats, maximize):
    formats = dataclasses.replace(with_rule(formats, rule), maximize=maximize)
    found = buffers(formats, [1, 700], "cpu")
    expected = copied(found)
    reference_step(found, formats, rule, GROUP)
    oracle_step(expected, formats, rule, GROUP)
    assert_same_buffers(found, expected)


@pytest.mark.parametrize("formats", CURATED[::9], ids=name_of_formats)
@each_rule
def test_kernel_is_the_twin(rule, formats, device):
    formats = dataclasses.replace(with_rule(formats, rule), maximize=formats is CURATED[0])
    found = buffers(formats, [1, 127, 128, 129, 0, 300], device)
    expected = {slot: [t.cpu() for t in each] for slot, each in copied(found).items()}
    triton_step(found, formats, rule, GROUP, SMALL)
    reference_step(expected, formats, rule, GROUP)
    assert_same_buffers(found, expected)


@pytest.mark.slow
@each_rule
def test_every_combination(rule, device):
    """Twin and oracle; of three moments the kernel takes one in seven."""
    seen = set()
    for place, formats in enumerate(combinations()):
        formats = with_rule(formats, rule)
        if name_of_formats(formats) in seen:
            continue
        seen.add(name_of_formats(formats))
        found = buffers(formats, [1, 200], "cpu")
        expected, kernel = copied(found), copied(found)
        reference_step(found, formats, rule, GROUP)
        oracle_step(expected, formats, rule, GROUP)
        assert_same_buffers(found, expected)
        if place % 7 == 0 or len(rule.moments) < 3:
            kernel = {slot: [t.to(device) for t in each] for slot, each in kernel.items()}
            triton_step(kernel, formats, rule, GROUP, SMALL)
            assert_same_buffers(kernel, expected)


@pytest.mark.sample(12)
@pytest.mark.gpu
@pytest.mark.parametrize("formats", CURATED, ids=name_of_formats)
@each_rule
def test_compiled_kernel_is_the_twin(rule, formats, device):
    formats = with_rule(formats, rule)
    found = buffers(formats, [1, 4095, 4096, 4097, 0, 100_000], device)
    expected = {slot: [t.cpu() for t in each] for slot, each in copied(found).items()}
    triton_step(found, formats, rule, GROUP)
    reference_step(expected, formats, rule, GROUP)
    assert_same_buffers(found, expected)


@each_rule
def test_many_steps(rule, device):
    """From the first on, with new gradients; nothing is synchronised in between."""
    formats = with_rule(CURATED[1], rule)
    kernel = buffers(formats, [200], device)
    truth = {slot: [t.cpu() for t in each] for slot, each in copied(kernel).items()}
    for step in range(1, 6):
        grad = torch.randn(200, generator=torch.Generator().manual_seed(step))
        for tensors in (kernel, truth):
            tensors["grad"][0].copy_(grad)
        triton_step(kernel, formats, rule, {**GROUP, "step": step})
        oracle_step(truth, formats, rule, {**GROUP, "step": step})
        assert_same_buffers(kernel, truth)


MUTANTS = {
    "lion kernel: the direction by beta2": (
        "lion.py",
        (
            "sign(beta1 * exp_avg + one_minus_beta1 * grad)",
            "sign(beta2 * exp_avg + one_minus_beta2 * grad)",
        ),
        "LION",
    ),
    "lion kernel: sign of a zero is 1": (
        "lion.py",
        ("tl.where(value > 0.0", "tl.where(value >= 0.0"),
        "LION",
    ),
    "lion kernel: no decay": (
        "lion.py",
        (" grad) + weight_decay * param\n    param = param - lr", " grad)\n    param = param - lr"),
        "LION",
    ),
    "lion twin: average by beta1": (
        "lion.py",
        ("exp_avg * beta2 + grad * one_minus_beta2", "exp_avg * beta1 + grad * one_minus_beta1"),
        "LION",
    ),
    "sgd kernel: Nesterov is plain momentum": (
        "sgd.py",
        ("update + momentum * momentum_buffer if NESTEROV", "momentum_buffer if NESTEROV"),
        "SGD_RULES",
        2,
    ),
    "sgd kernel: dampening left out": (
        "sgd.py",
        ("momentum * moments[0] + kept * update", "momentum * moments[0] + update"),
        "SGD_RULES",
        1,
    ),
    "sgd twin: decay before the momentum": (
        "sgd.py",
        ("found = grad if decoupled else", "found = grad if not decoupled else"),
        "SGD_RULES",
        4,
    ),
    "both: the first step is dampened": (
        "sgd.py",
        ('1.0 if group["step"] == 1 else', '1.0 if group["step"] == 0 else'),
        "SGD_RULES",
        1,
        1,
    ),
    "amsgrad kernel: the root of the newest": (
        "adam_ieee.py",
        (
            "update = direction(exp_avg, max_exp_avg_sq, scalars)",
            "update = direction(exp_avg, exp_avg_sq, scalars)",
        ),
        "ADAMW_AMSGRAD_IEEE",
    ),
    "amsgrad kernel: NaN forgotten": (
        "adam_ieee.py",
        (
            "(max_exp_avg_sq >= exp_avg_sq) | (max_exp_avg_sq != max_exp_avg_sq)",
            "max_exp_avg_sq >= exp_avg_sq",
        ),
        "ADAMW_AMSGRAD_IEEE",
    ),
    "amsgrad twin: fmax": (
        "adam_ieee.py",
        ("torch.maximum(moments[2], exp_avg_sq)", "torch.fmax(moments[2], exp_avg_sq)"),
        "ADAMW_AMSGRAD_IEEE",
    ),
}


@pytest.mark.parametrize("case", MUTANTS.values(), ids=MUTANTS)
def test_the_check_notices_a_mutant(case, tmp_path, device):
    file, change, name, *more = case
    module = mutant(SOURCES / "rules" / file, change, tmp_path)
    rule = getattr(module, name)
    rule = rule[more[0]] if more else rule
    group = {**GROUP, "step": more[1]} if len(more) > 1 else GROUP
    formats = with_rule(CURATED[0], rule)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        assert_all_agree(formats, rule, group, [1, 1000], device)


def test_a_mutant_is_not_noticed_for_nothing(device):
    for rule in OTHER_RULES:
        assert_all_agree(with_rule(CURATED[0], rule), rule, GROUP, [1, 1000], device)
    assert RULES["lion", "ieee"] in OTHER_RULES


@each_rule
def test_pieces_and_geometry_change_no_bit(rule, device):
    drawing = next(formats for formats in DRAWING if not formats.scaled)
    formats = with_rule(drawing, rule)
    whole = buffers(formats, [300], device)
    pieces = {
        slot: [part.clone() for part in tensors[0].split([1, 128, 171])]
        for slot, tensors in whole.items()
    }
    triton_step(whole, formats, rule, GROUP)
    places = [Place(0, first) for first in (0, 1, 129)]
    triton_step(pieces, formats, rule, GROUP, Geometry(32, 3), places=places)
    assert_same_buffers({slot: [torch.cat(parts)] for slot, parts in pieces.items()}, whole)
