"""`megaopt verify`: what it says, and that a change of one operation is seen and named."""

from pathlib import Path

import pytest
import torch
from mutants import mutant

from megaopt import kernels
from megaopt.kernels.formats import MOMENTS, WEIGHTS
from megaopt.kernels.rules import RULES
from megaopt.lab.golden import check
from megaopt.lab.golden.cases import (
    ANY_MACHINE,
    CASES,
    NVIDIA_GPU,
    GoldenCase,
    Record,
    packaged,
    parse,
)

FP32 = "ieee/adamw/fp32-weight/no-master/fp32-fp32"
BF16 = "ieee/adamw/bf16-weight/no-master/bf16-bf16"
MASTER = "ieee/adamw/bf16-weight/fp32-master/fp32-fp32"
FLOAT8 = "ieee/adamw/bf16-weight/fp32-master/fp8-fp8/nonfinite"


@pytest.fixture
def verify(megaopt):
    """Checks some cases with the reference."""
    return lambda *names: megaopt("verify", "--backends", "reference", "--only", *names)


def lines(out):
    return [line for line in out.splitlines() if line.startswith("different: ")]


def test_identical_cases_exit_with_0(verify):
    status, out, err = verify(FP32, BF16)
    assert (status, err) == (0, "")
    row = next(line for line in out.splitlines() if "reference on cpu" in line)
    assert [cell.strip() for cell in row.split("│")[4:-1]] == ["2", "2", "0", "0"]
    assert out.splitlines()[-1] == "identical: all that was checked here, bit for bit"


def test_processes_that_share_cases_find_what_one_finds():
    """In the order of the cases; one of another digest differs in either."""
    names, cpu = (FP32, BF16, MASTER), torch.device("cpu")
    digests = packaged().digests[ANY_MACHINE]
    expected = [digests[FP32], {**digests[BF16], "weights": "0" * 16}, digests[MASTER]]
    pairs = zip(names, expected, strict=True)
    jobs = [check.GoldenJob(ANY_MACHINE, name, "reference", cpu, digest) for name, digest in pairs]
    alone, shared = (list(check.outcomes_of(jobs, workers)) for workers in (1, 2))
    assert [one.different for one in alone] == [None, "weights", None]
    assert shared == alone


# --- one operation in one rule or format changed: the case is named, and the quantity

SOURCES = Path(kernels.__file__).parent


def changed(file, change, folder):
    return mutant(SOURCES / file, change, folder)


def test_a_change_of_a_rule_is_named(verify, monkeypatch, tmp_path):
    change = (
        "square_root_reference(exp_avg_sq * correction2) + eps",
        "square_root_reference(exp_avg_sq * correction2 + eps)",
    )
    module = changed("rules/adam_ieee.py", change, tmp_path)
    monkeypatch.setitem(RULES, ("adamw", "ieee"), module.ADAMW_IEEE)
    status, out, _ = verify(FP32, "ieee/adam/fp32-weight/no-master/fp32-fp32")
    assert status == 1
    assert lines(out) == [f"different: {FP32}: weights (reference on cpu)"]


FORMATS = {
    "bf16: ties away, weights": (
        "formats/bfloat16.py",
        (
            "code = value.to(torch.bfloat16).view(torch.int16)",
            "code = ((value.view(torch.int32) + 0x8000) >> 16).to(torch.int16)",
        ),
        (WEIGHTS, "BFLOAT16"),
        (MASTER, "weights"),
    ),
    "scaled fp8: infinities saturate": (
        "formats/float8.py",
        ("torch.where(value.isfinite(), scaled, torch.nan)", "scaled"),
        (MOMENTS, "SCALED_FLOAT8_E4M3"),
        (FLOAT8, "exp_avg, exp_avg_sq, masters, scales, weights"),
    ),
}


@pytest.mark.parametrize(
    ("file", "change", "place", "expected"), FORMATS.values(), ids=FORMATS.keys()
)
def test_a_change_of_a_format_is_named(
    file, change, place, expected, verify, monkeypatch, tmp_path
):
    form = getattr(changed(file, change, tmp_path), place[1])
    monkeypatch.setitem(place[0], form.name, form)
    (name, quantities) = expected
    status, out, _ = verify(name)
    assert status == 1
    assert lines(out) == [f"different: {name}: {quantities} (reference on cpu)"]


def test_a_change_of_a_kernel_is_named(megaopt, monkeypatch, tmp_path, device):
    change = (
        "quotient(exp_avg * correction1, exp_avg_sq",
        "(exp_avg * correction1) * quotient(tl.full((), 1.0, tl.float32), exp_avg_sq",
    )
    module = changed("rules/adam_ieee.py", change, tmp_path)
    monkeypatch.setitem(RULES, ("adamw", "ieee"), module.ADAMW_IEEE)
    status, out, _ = megaopt("verify", "--only", FP32)
    assert status == 1
    assert lines(out) == [f"different: {FP32}: weights (triton on {device.type})"]


# --- a new case, parts that cannot be checked


def test_a_case_without_digests_is_named(verify, monkeypatch):
    old = packaged()
    digests = {**old.digests, ANY_MACHINE: {**old.digests[ANY_MACHINE], FP32: {}}}
    monkeypatch.setattr(check, "packaged", lambda: Record(digests, old.made_on))
    status, out, _ = verify(FP32, BF16)
    assert status == 1
    assert lines(out) == [
        f"different: {FP32}: exp_avg, exp_avg_sq, steps, weights (reference on cpu)"
    ]


def part_of_gpus(made_on):
    digests = {ANY_MACHINE: {}, NVIDIA_GPU: {case.name: {} for case in CASES[NVIDIA_GPU]}}
    return check.plan(Record(digests, made_on), {NVIDIA_GPU: CASES[NVIDIA_GPU]})


def test_without_a_gpu_its_part_is_not_checked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for task in part_of_gpus({}):
        assert f"contract '{task.contract}' needs an NVIDIA GPU" in task.reason


def test_nothing_checked_exits_with_2(megaopt):
    status, out, err = megaopt("verify", "--only", "te/*", "--backends", "reference")
    assert status == 2
    assert "not checked here: te, triton on " in out
    assert "its backend was not asked for" in out
    assert err == "megaopt: nothing was checked here\n"


# --- the report to share


def shared(tmp_path):
    """The rows of a report's tables, as lists of cells, and its heading."""
    text = (tmp_path / "report.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return text.splitlines()[0], [row for row in rows if row]


def test_a_report_has_the_machine_and_the_results(megaopt, tmp_path):
    arguments = ("--backends", "reference", "--only", FP32, BF16, "te/*")
    status, out, _ = megaopt("verify", *arguments, "--share", "report.md")
    assert status == 0
    assert out.splitlines()[-1] == "written: report.md"
    heading, rows = shared(tmp_path)
    assert heading == "# megaopt verify: identical"
    assert ["torch", torch.__version__] in rows
    assert {row[0] for row in rows} >= {"gpu", "cuda_driver", "triton", "golden record"}
    (row,) = (row for row in rows if row[1:3] == ["ieee", "reference on cpu"])
    assert row[3:7] == ["2", "2", "0", "0"]
    assert [row[-1] for row in rows if row[1:2] == ["te"]][-1] == "its backend was not asked for"


def test_a_report_has_the_digests_of_a_case_that_differs(megaopt, monkeypatch, tmp_path):
    change = ("exp_avg_sq * correction2) + eps", "exp_avg_sq * correction2 + eps)")
    module = changed("rules/adam_ieee.py", change, tmp_path)
    arguments = ("verify", "--backends", "reference", "--only", FP32, "--share", "report.md")
    assert megaopt(*arguments)[0] == 0
    before = shared(tmp_path)[1]
    monkeypatch.setitem(RULES, ("adamw", "ieee"), module.ADAMW_IEEE)
    assert megaopt(*arguments)[0] == 1
    heading, rows = shared(tmp_path)
    assert heading == "# megaopt verify: 1 differ"
    (row,) = (row for row in rows if row[0] == FP32)
    recorded = packaged().digests[ANY_MACHINE][FP32]
    found = dict(each.split() for each in row[2].split(", "))
    assert {name for name in recorded if recorded[name] != found[name]} == {"weights"}
    digests = [next(row[7] for row in each if row[1:2] == ["ieee"]) for each in (before, rows)]
    assert digests[0] != digests[1]


def test_a_report_has_no_path_of_an_error(megaopt, monkeypatch, tmp_path):
    def broken(*_):
        raise OSError("/home/somebody/.triton/cache: no space left")

    monkeypatch.setattr(check, "run", broken)
    arguments = ("--backends", "reference", "--only", FP32, "--share", "report.md")
    assert megaopt("verify", *arguments)[0] == 1
    assert [row for row in shared(tmp_path)[1] if row[0] == FP32] == [
        [FP32, "reference on cpu", "OSError"]
    ]
    assert "somebody" not in (tmp_path / "report.md").read_text()


# --- arguments, and the file

BAD_INPUT = {
    "no such case": (
        ["--only", "ieee/sgd"],
        f"only must be a pattern of one of the {sum(map(len, CASES.values()))} names of cases, as "
        "'ieee/adamw/bf16*' is, got 'ieee/sgd'",
    ),
    "no such backend": (
        ["--backends", "cuda"],
        "backends must be of triton, reference, got 'cuda'",
    ),
    "a folder for a report": (
        ["--only", FP32, "--backends", "reference", "--share", "."],
        "share must be a file, not a folder, got '.'",
    ),
    "a part of a record": (
        ["--record", "record.json", "--only", FP32],
        "record must stand without only, backends and share: a record is whole",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_exits_with_2_and_is_named(megaopt, tmp_path, arguments, message):
    status, _, err = megaopt("verify", *arguments)
    assert (status, err) == (2, f"megaopt: {message}\n")
    assert not (tmp_path / "record.json").exists()


@pytest.fixture
def two_cases(monkeypatch):
    monkeypatch.setitem(CASES, ANY_MACHINE, [GoldenCase(FP32), GoldenCase(BF16)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_record_is_written_anew(megaopt, tmp_path, two_cases):
    status, out, err = megaopt("verify", "--record", "record.json")
    assert (status, err) == (0, "")
    assert "written: record.json" in out
    assert f"{NVIDIA_GPU}: left as it was, contract 'te' needs an NVIDIA GPU" in out
    written = parse((tmp_path / "record.json").read_text())
    old = packaged()
    assert written.digests[ANY_MACHINE] == {n: old.digests[ANY_MACHINE][n] for n in (FP32, BF16)}
    assert written.digests[NVIDIA_GPU] == old.digests[NVIDIA_GPU]
    assert written.made_on == old.made_on
