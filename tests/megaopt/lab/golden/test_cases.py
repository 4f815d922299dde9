"""The record has a case for every row of every table, and beside each format what it goes with."""

import itertools
from dataclasses import replace
from typing import get_args

import pytest
import torch

from megaopt.float8 import RECIPES
from megaopt.kernels.contracts import CONTRACTS
from megaopt.kernels.float8 import ALGORITHMS, FLOAT8
from megaopt.kernels.formats import (
    GRADS,
    MASTERS,
    MOMENTS,
    STOCHASTIC_WEIGHTS,
    WEIGHTS,
    FormatTable,
)
from megaopt.kernels.rules import RULES
from megaopt.lab.golden.cases import ANY_MACHINE, CASES, NVIDIA_GPU, VARIATIONS
from megaopt.options.choices import Nonfinite, Rounding

EVERY = [case for cases in CASES.values() for case in cases]
MASTER_NAMES = {
    "no-master": "none",
    "fp32-master": "float32",
    "fp16-master": "scaled_float16",
    "remainder": "remainder16",
}


def moments(case):
    return case.options["exp_avg_dtype"], case.options["exp_avg_sq_dtype"]


def master(case):
    given = case.options.get("master_weight_dtype")
    return given if isinstance(given, str) else MASTER_NAMES.get(case.parts[3])


# what the tables ask for, and what the cases of any machine have of it
PLAIN = [case for case in CASES[ANY_MACHINE] if case.recipe is None and case.parts[1] == "adamw"]
IN_FP8 = [case for case in CASES[ANY_MACHINE] if case.recipe is not None]
WANTED = {
    "rule and contract": (lambda: RULES, lambda: {(c.parts[1], c.contract) for c in EVERY}),
    "capturable rule": (
        lambda: RULES,
        lambda: {(case.parts[1], case.contract) for case in EVERY if case.has("capturable")},
    ),
    "contract": (lambda: CONTRACTS, lambda: {case.contract for case in EVERY}),
    "gradient and weight": (
        lambda: itertools.product(GRADS.allowed, WEIGHTS.allowed),
        lambda: {(case.grad, case.weight) for case in PLAIN},
    ),
    "master": (
        lambda: [name.replace("kahan_float16", "kahan") for name in MASTERS],
        lambda: {master(case) for case in PLAIN},
    ),
    "moment": (lambda: MOMENTS.allowed, lambda: {each for case in PLAIN for each in moments(case)}),
    "rounding of weights": (
        lambda: itertools.product(get_args(Rounding), STOCHASTIC_WEIGHTS.allowed),
        lambda: {(case.options.get("weight_rounding", "nearest"), case.weight) for case in PLAIN},
    ),
    "scaling and dtype of fp8 weights": (
        lambda: itertools.product(RECIPES, FLOAT8),
        lambda: {(case.recipe.scaling, case.recipe.dtype) for case in IN_FP8},
    ),
    "amaxes of delayed scaling": (
        lambda: ALGORITHMS,
        lambda: {case.recipe.amax_compute_algo for case in IN_FP8},
    ),
    "direct_cast": (
        lambda: itertools.product(RECIPES, (True, None)),
        lambda: {(case.recipe.scaling, case.options.get("direct_cast")) for case in IN_FP8},
    ),
    "nonfinite": (
        # what raises leaves nothing to hash
        lambda: [policy for policy in get_args(Nonfinite) if policy != "error"],
        lambda: {case.options.get("nonfinite", "propagate") for case in EVERY},
    ),
    "variation": (lambda: VARIATIONS, lambda: {name for case in EVERY for name in case.parts[5:]}),
}


def missing(what):
    wanted, found = (each() for each in WANTED[what])
    return [each for each in wanted if each not in found]


@pytest.mark.parametrize("what", WANTED)
def test_every_row_of_every_table_has_a_case(what):
    assert missing(what) == []


@pytest.mark.parametrize(
    ("table", "row", "whats"),
    [
        (RULES, ("adafactor", "ieee"), ["rule and contract", "capturable rule"]),
        (WEIGHTS, torch.float64, ["gradient and weight"]),
        (MOMENTS, torch.int8, ["moment"]),
        (RECIPES, "block_64x64", ["scaling and dtype of fp8 weights", "direct_cast"]),
    ],
    ids=["rule", "weight", "moment", "recipe"],
)
def test_a_new_row_without_a_case_is_noticed(table, row, whats, monkeypatch):
    if isinstance(table, FormatTable):
        form = replace(table[torch.float32], name="new", dtype=row)
        monkeypatch.setitem(table, "new", form)
    else:
        monkeypatch.setitem(table, row, None)
    for what in whats:
        assert any(each == row or row in each for each in missing(what))


def test_a_contract_that_needs_a_gpu_is_in_the_part_of_gpus():
    for part, cases in CASES.items():
        needs = {CONTRACTS[case.contract].needs_gpu is not None for case in cases}
        assert needs == {part == NVIDIA_GPU}
