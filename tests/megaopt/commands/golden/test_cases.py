"""The record has a case for every row of every table, and beside each format what it goes with."""

import itertools
from dataclasses import replace
from typing import get_args

import pytest
import torch

from megaopt.commands.golden.case import VARIATIONS, Case
from megaopt.commands.golden.cases import ANY_MACHINE, CASES, NVIDIA_GPU
from megaopt.commands.golden.record import packaged
from megaopt.float8 import RECIPES
from megaopt.kernels.contracts import CONTRACTS
from megaopt.kernels.float8.recipe import ALGORITHMS, FLOAT8
from megaopt.kernels.formats import (
    GRADS,
    MASTERS,
    MOMENTS,
    STOCHASTIC_WEIGHTS,
    WEIGHTS,
    FormatTable,
)
from megaopt.kernels.rules import RULES
from megaopt.options.choices import Nonfinite, Rounding

EVERY = [case for cases in CASES.values() for case in cases]
MASTER_DTYPES = {
    "no-master": None,
    "fp32-master": torch.float32,
    "fp16-master": torch.float16,
    "remainder": torch.int16,
}


ROUNDED = [f"{each}{how}" for each in ("remainder8", "kahan") for how in ("", "_stochastic")]


def by_dtype(table):
    """The formats that are crossed with all others: those of a dtype of their own.

    The masters that lose bits, and what is rounded stochastically, read and write as these do.
    """
    lossy = {table[name].dtype for name in ROUNDED if name in table}
    return [each for each in table.allowed if not isinstance(each, str) and each not in lossy]


def moments(case):
    return case.options["exp_avg_dtype"], case.options["exp_avg_sq_dtype"]


def master(case):
    return MASTER_DTYPES.get(case.parts[3], case.parts[3])


def rule(case):
    return case.parts[1]


def weights_with_masters():
    """An fp32 weight is its own master, and only bf16 is half of one."""
    for weight, form in itertools.product(WEIGHTS.allowed, by_dtype(MASTERS)):
        own = weight == torch.float32 and form is not None
        if not own and not (form == torch.int16 and weight != torch.bfloat16):
            yield weight, form


# what the tables ask for, and what the cases of any machine have of it
PLAIN = [case for case in CASES[ANY_MACHINE] if case.recipe is None and rule(case) == "adamw"]
IN_FP8 = [case for case in CASES[ANY_MACHINE] if case.recipe is not None]
WANTED = {
    "rule and contract": (lambda: RULES, lambda: {(rule(case), case.contract) for case in EVERY}),
    "capturable rule": (
        lambda: RULES,
        lambda: {(rule(case), case.contract) for case in EVERY if case.has("capturable")},
    ),
    "contract": (lambda: CONTRACTS, lambda: {case.contract for case in EVERY}),
    "gradient and weight": (
        lambda: itertools.product(GRADS.allowed, WEIGHTS.allowed),
        lambda: {(case.grad, case.weight) for case in PLAIN},
    ),
    "weight and master": (
        weights_with_masters,
        lambda: {(case.weight, master(case)) for case in PLAIN},
    ),
    "exp_avg and exp_avg_sq": (
        lambda: itertools.product(by_dtype(MOMENTS), by_dtype(MOMENTS)),
        lambda: {moments(case) for case in PLAIN},
    ),
    "master and exp_avg": (
        lambda: itertools.product(by_dtype(MASTERS), by_dtype(MOMENTS)),
        lambda: {(master(case), moments(case)[0]) for case in PLAIN},
    ),
    "master and exp_avg_sq": (
        lambda: itertools.product(by_dtype(MASTERS), by_dtype(MOMENTS)),
        lambda: {(master(case), moments(case)[1]) for case in PLAIN},
    ),
    "master that loses bits, and its weight": (
        lambda: (
            (form.requires_weight, name.replace("_float16", ""))
            for name, form in MASTERS.items()
            if name.removesuffix("_stochastic").removesuffix("_float16") in ROUNDED
        ),
        lambda: {(case.weight, case.options.get("master_weight_dtype")) for case in PLAIN},
    ),
    "moment by name": (
        lambda: [each for each in MOMENTS.allowed if isinstance(each, str)],
        lambda: {moment for case in PLAIN for moment in moments(case)},
    ),
    "rounding of weights": (
        lambda: itertools.product(get_args(Rounding), STOCHASTIC_WEIGHTS.allowed),
        lambda: {(case.options.get("weight_rounding", "nearest"), case.weight) for case in PLAIN},
    ),
    "scaling and dtype of fp8 weights": (
        lambda: itertools.product(RECIPES, FLOAT8),
        lambda: {(case.recipe.scaling, case.recipe.dtype) for case in IN_FP8},
    ),
    "scaling and master of fp8 weights": (
        lambda: itertools.product(
            RECIPES, [form for form in by_dtype(MASTERS) if form != torch.int16]
        ),
        lambda: {(case.recipe.scaling, master(case)) for case in IN_FP8},
    ),
    "dtype of fp8 weights": (lambda: WEIGHTS.allowed, lambda: {case.weight for case in IN_FP8}),
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
        (RULES, ("muon", "ieee"), ["rule and contract", "capturable rule"]),
        (CONTRACTS, "apex", ["contract"]),
        (GRADS, torch.float64, ["gradient and weight"]),
        (WEIGHTS, torch.float64, ["gradient and weight", "weight and master"]),
        (MASTERS, torch.float64, ["weight and master", "master and exp_avg"]),
        (MOMENTS, torch.int8, ["exp_avg and exp_avg_sq", "master and exp_avg_sq"]),
        (RECIPES, "block_64x64", ["scaling and dtype of fp8 weights", "direct_cast"]),
    ],
    ids=["rule", "contract", "gradient", "weight", "master", "moment", "recipe"],
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


def test_names_are_unique():
    names = [case.name for case in EVERY]
    assert len(names) == len(set(names))


def test_the_record_has_every_case_and_no_other():
    assert packaged().strays() == {}
    assert list(packaged().digests[ANY_MACHINE]) == [case.name for case in CASES[ANY_MACHINE]]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "ieee",
        "ieee/adamw/bf16-weight/fp32-master",
        "ieee/lion/bf16-weight/no-master/fp32-fp32",
        "ieee/adamw/bf16/no-master/fp32-fp32",
        "ieee/adamw/int4-weight/no-master/fp32-fp32",
        "ieee/adamw/bf16-weight/master/fp32-fp32",
        "ieee/adamw/bf16-weight/no-master/fp32",
        "ieee/adamw/bf16-weight/no-master/fp32-fp64",
        "ieee/adamw/bf16-weight/no-master/fp32-fp32/clipp",
    ],
)
def test_another_name_is_refused(name):
    with pytest.raises(ValueError, match=r"name must be contract/rule/.*got"):
        Case(name)
