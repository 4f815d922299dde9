"""What `megaopt verify` steps by default: few cases, with each row of the tables."""

import pytest
import torch

from megaopt.lab.golden import check
from megaopt.lab.golden.cases import ANY_MACHINE, CASES, GoldenCase, covering, packaged

ROWS = {
    "rules": lambda case: {(case.parts[1], case.contract)},
    "weights": lambda case: {case.weight},
    "recipes": lambda case: {case.recipe},
    "gradients": lambda case: {case.grad},
    "masters": lambda case: {case.parts[3]},
    "moments": lambda case: {
        (name, case.options[name]) for name in case.options if name.startswith(("exp_", "moment"))
    },
    "scalings": lambda case: {case.recipe.scaling} if case.recipe else set(),
    "nonfinite": lambda case: {case.options.get("nonfinite")},
    "rounding": lambda case: {case.options.get("weight_rounding")},
    "direct_cast": lambda case: {case.options.get("direct_cast")},
    "options": lambda case: set(case.parts[5:]),
}
"""What a case has of each table, by what its name means to the optimizer."""


def rows(cases, what):
    return set().union(*(ROWS[what](case) for case in cases))


def tasks(gpu, backends=()):
    """What is stepped by default, on a machine with a GPU or without."""
    found = check.plan(packaged(), CASES, backends)
    check.take_few(found)
    assert {task.device.type for task in found} == ({"cpu", "cuda"} if gpu else {"cpu"})
    return [task for task in found if task.reason is None]


@pytest.fixture
def gpu(monkeypatch):
    """One of compute capability 9.0, which a plan asks about and no more."""

    def reason(backend, contract, device):
        interpreted = backend == "triton" and device.type == "cpu"
        return "not interpreted" if interpreted else None

    made_on = packaged().made_on
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check, "why_not", reason)
    monkeypatch.setattr(check.source, "describe", lambda: made_on)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("what", ROWS)
def test_without_a_gpu_each_row_is_stepped_by_plain_torch(what, no_gpu):
    (task,) = (task for task in tasks(gpu=False) if task.backend == "reference")
    assert rows(task.chosen, what) == rows(task.cases, what)


@pytest.mark.parametrize("what", ROWS)
def test_on_a_gpu_each_row_of_each_contract_is_stepped_by_its_kernels(what, gpu):
    kernels = [task for task in tasks(gpu=True) if task.where == "triton on cuda"]
    assert {task.contract for task in kernels} == {"ieee", "te", "torch"}
    for task in kernels:
        assert rows(task.chosen, what) == rows(task.cases, what)


def test_every_backend_that_works_steps_every_optimizer(gpu):
    for task in tasks(gpu=True):
        stepped, recorded = ({c.kind.optimizer for c in of} for of in (task.chosen, task.cases))
        assert stepped == recorded


def test_they_are_few(gpu):
    assert sum(len(task.chosen) for task in tasks(gpu=True)) <= 90


def test_they_are_few_without_a_gpu(no_gpu):
    assert sum(len(task.chosen) for task in tasks(gpu=False)) <= 60


def test_a_backend_that_is_asked_for_alone_covers_what_it_can(gpu):
    by_place = {task.where: task for task in tasks(True, ["reference"]) if task.contract == "ieee"}
    task = by_place["reference on cpu"]
    for what in ROWS:
        assert rows(task.chosen, what) == rows(task.cases, what)
    assert len(by_place["reference on cuda"].chosen) < 10


def test_the_choice_is_the_same_again():
    cases = [case for of in CASES.values() for case in of]
    assert covering(cases, lambda c: c.features) == covering(cases, lambda c: c.features)


def test_a_case_is_chosen_for_what_no_other_has():
    common, rare = (
        GoldenCase(f"ieee/lion/fp32-weight/no-master/{grad}") for grad in ("fp32", "bf16")
    )
    assert covering([common, rare, common], lambda c: c.features) == [common, rare]


@pytest.mark.parametrize(
    ("options", "identical"), [([], 2), (["--all"], 3), (["--only", "ieee/*"], 3)]
)
def test_the_command_says_how_many_it_stepped(megaopt, monkeypatch, no_gpu, options, identical):
    lion = "ieee/lion/fp32-weight/no-master/fp32"
    cases = [GoldenCase(lion), GoldenCase(f"{lion}/nonfinite"), GoldenCase(f"{lion}/maximize")]
    monkeypatch.setitem(CASES, ANY_MACHINE, cases)
    status, out, _ = megaopt("verify", "--backends", "reference", *options)
    assert status == 0
    row = next(line for line in out.splitlines() if "reference on cpu" in line)
    assert [cell.strip() for cell in row.split("│")[4:-1]] == [
        "3",
        str(identical),
        "0",
        str(3 - identical),
    ]
    told = f"stepped {identical} of the 3 cases that can be checked here"
    assert (told in out) == ("--all steps all" in out) == (identical < 3)


def test_a_report_lists_what_was_stepped_alone(megaopt, monkeypatch, tmp_path, no_gpu):
    lion = "ieee/lion/fp32-weight/no-master/fp32"
    monkeypatch.setitem(CASES, ANY_MACHINE, [GoldenCase(f"{lion}/maximize"), GoldenCase(lion)])
    assert megaopt("verify", "--backends", "reference", "--share", "report.md")[0] == 0
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert f"{lion}/maximize" in lines
    assert lion not in lines
