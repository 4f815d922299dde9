"""`megaopt galore test` and `bench`: errors, bounds, what is noticed, messages, floors."""

import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_figures import FIGURES
from galore_cases import Twin
from mutants import mutant
from record_pages import read

from megaopt import kernels
from megaopt.galore import GaLoreAdamW
from megaopt.kernels.galore import rule, wave
from megaopt.kernels.galore.rule import LEFT, RIGHT
from megaopt.lab.bench.instance import bytes_per_step
from megaopt.lab.bench.subjects import SHARED
from megaopt.lab.galore import bench
from megaopt.lab.galore.bench import BETAS, EPS, floor_bytes, is_there, reference
from megaopt.lab.galore.check import (
    GROUP,
    KERNELS,
    WEIGHTS,
    Setup,
    check_setup,
    compared,
    measure_errors,
    plain_step,
)

CPU = torch.device("cpu")
MATRIX = Path(kernels.__path__[0]) / "galore"
RULE = Path(kernels.__path__[0]) / "rules" / "galore.py"
QUICK = [name for name in KERNELS if name != "compiled"]
"""Compiling takes ten seconds."""
SMALL = ("--M", 40, "--N", 50, "--rank", 12)


def beyond(setup, device):
    return [finding.name for finding in measure_errors(setup, device) if not finding.holds]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("precision", "error"), [("tf32", 1e-3), ("bf16", 8e-3)])
@pytest.mark.parametrize("kernel", QUICK)
def test_precisions_are_within_their_bounds(kernel, precision, error, device):
    findings = measure_errors(setup_of(kernel, precision=precision), device)
    for each in findings:
        assert each.holds
        assert error / 30 * each.norm < each.error < error * each.norm


def test_a_precision_that_is_not_kept_is_noticed(device, monkeypatch):
    """The kernel rounds to bf16, where fp32 was asked for."""
    monkeypatch.setattr(wave.Products, "_product", lower(wave.Products._product))
    wrong = beyond(setup_of("grouped"), device)
    assert wrong == ["exp_avg", "exp_avg_sq", "update"]


def lower(product):
    return lambda *own: dataclasses.replace(product(*own), precision="bf16")


def setup_of(kernel="hybrid", weights="float32", proj_type="std", **more):
    own = {"rows": 40, "columns": 50, "rank": 40 * 50 // 90, **more}
    return Setup(kernel=kernel, weights=weights, proj_type=proj_type, **own)


@pytest.mark.sample(2)
@pytest.mark.parametrize("proj_type", ["right", "left"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kernel", QUICK)
def test_every_kernel_is_within_its_bounds(kernel, weights, proj_type, device):
    findings = measure_errors(setup_of(kernel, weights, proj_type), device)
    updates = ["update"] if weights == "float32" else [f"update of the {w}" for w in PARTS]
    assert [each.name for each in findings] == ["exp_avg", "exp_avg_sq", *updates]
    for each in findings:
        assert each.holds
        assert 0 < each.error < each.bound < (1e-2 if "weight" in each.name else 2e-6) * each.norm


PARTS = ("master", "weight")


@pytest.mark.parametrize(("rows", "columns"), [(2, 3), (17, 5)])
@pytest.mark.parametrize("kernel", QUICK)
def test_a_matrix_of_few_numbers_is_within_its_bounds(kernel, rows, columns, device):
    for seed in range(2):
        assert not beyond(
            Setup(kernel=kernel, rows=rows, columns=columns, rank=1, seed=seed), device
        )


@pytest.mark.parametrize("side", [RIGHT, LEFT])
def test_the_plain_step_is_the_twin_in_fp64(side):
    """At most 1e-14 of the largest number off, as operations in two orders are."""
    generator = torch.Generator().manual_seed(0)
    grad, weight = torch.randn(2, 12, 20, generator=generator, dtype=torch.float64)
    twin = Twin(weight, side, 3, {**GROUP, "bias_correction": True})
    small = (12, 3) if side == RIGHT else (3, 20)
    before = {"param": weight, "exp_avg": torch.zeros(small), "exp_avg_sq": torch.zeros(small)}
    for step in (1, 2):
        twin.step(grad * step)
        before["grad"] = grad * step
        before = plain_step(before, twin.projection, side, GROUP, step)
        pairs = zip(("param", "exp_avg", "exp_avg_sq"), (twin.weight, *twin.moments), strict=True)
        for name, expected in pairs:
            assert (before[name] - expected).abs().max() <= 1e-14 * expected.abs().max()


# In a file of the kernels, what the command has to notice, and where.
KERNEL_MUTANTS = {
    "the last of the rank dropped": (
        "rows, inner, RANK, RANK, ", "rows, inner, RANK - 1, RANK, ",
    ),
    "a product in 16 bits": (
        "right, total, PRECISION)\n    return total",
        "right, total, PRECISION)\n    return total.to(tl.float16).to(tl.float32)",
    ),
    "the last column dropped": (
        "RANK, column, columns, ", "RANK, column, columns - 1, ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", KERNEL_MUTANTS.values(), ids=KERNEL_MUTANTS)
def test_a_broken_kernel_is_noticed(change, tmp_path, device, monkeypatch):
    monkeypatch.setattr(wave, "kernel", mutant(MATRIX / "kernel.py", change, tmp_path))
    assert beyond(setup_of(rank=20), device) == ["update"]


RULE_MUTANTS = {
    "no scale": ("lr * float(group[\"scale\"])", "lr"),
    "no bias correction": ("if group[\"bias_correction\"]:", "if False:"),
    "no decay": ("lr * float(group[\"weight_decay\"]))", "0.0)"),
}  # fmt: skip


@pytest.mark.parametrize("change", RULE_MUTANTS.values(), ids=RULE_MUTANTS)
def test_a_broken_row_of_numbers_is_noticed(change, tmp_path, device, monkeypatch):
    rule = mutant(RULE, change, tmp_path).GALORE_ADAMW
    monkeypatch.setattr(GaLoreAdamW, "rule", property(lambda self: rule))
    assert beyond(setup_of(), device) == ["update"]


def test_a_broken_twin_is_noticed(megaopt, monkeypatch):
    """The kernel "torch" is not compared with itself."""
    projected = rule.projected
    changed = lambda grad, *rest: projected(grad.bfloat16().float(), *rest)  # noqa: E731
    monkeypatch.setattr(rule, "projected", changed)
    status, out, err = megaopt("galore", "test", "--kernel=torch", *SMALL)
    assert (status, err) == (1, "")
    assert out.count("BEYOND") == 3
    assert out.splitlines()[-1] == "beyond their bounds: exp_avg, exp_avg_sq, update"


def test_nan_is_beyond_every_bound():
    tensors = {name: torch.ones(2, 2) for name in ("exp_avg", "exp_avg_sq", "param", "weight")}
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    broken = {**tensors, "exp_avg": torch.full((2, 2), math.nan)}
    found = compared(tensors, broken, wide, tensors, 1.0)
    assert [each.holds for each in found] == [False, True, True]


def test_what_it_prints(megaopt):
    status, out, err = megaopt("galore", "test", "--weights=bfloat16", "--seed=3", *SMALL)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    first = "kernel hybrid, precision ieee, 40 x 50, rank 12 on the left, bfloat16 weights"
    assert lines[0].startswith(f"{first}, fp32 masters, seed 3, on ")
    assert lines[-1] == "all errors within their bounds"
    for name in ("exp_avg", "exp_avg_sq", "update of the master", "update of the weight"):
        (line,) = [line for line in lines if line.startswith(f"│ {name} ")]
        *numbers, verdict = [cell.strip() for cell in line.split("│")][2:-1]
        error, torchs, bound, part = map(float, numbers)
        assert error < bound
        assert bound >= 1.49 * torchs  # both are printed in three digits
        assert 0 < part < 1
        assert verdict == "within"


def test_tf32_is_a_precision(megaopt):
    """Also as galore's pull request spells it."""
    arguments = ("galore", "test", "--kernel=torch", *SMALL)
    expected, plain = megaopt(*arguments, "--precision=tf32"), megaopt(*arguments)
    assert megaopt(*arguments, "--allow_tf32") == expected != plain
    assert megaopt(*arguments, "--no-allow_tf32") == plain


REFUSED = {
    "kernel": (
        ["--kernel=tritn"],
        "kernel must be one of torch, compiled, hybrid, grouped, fused",
    ),
    "precision": (["--precision=fp16"], "precision must be one of ieee, tf32, bf16, got 'fp16'"),
    "tf32": (["--tf32", "--precision=bf16"], "precision must be 'tf32' beside --tf32, got 'bf16'"),
    "M": (["--M=0"], "M must be a whole number from 1 to 1048576, got 0"),
    "rank": (
        ["--M=64", "--N=32", "--rank=40"],
        "rank must be a whole number from 1 to 21 (for M=64 and N=32: rank * (M + N) must be below "
        "M * N), got 40",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_named(megaopt, arguments, message):
    status, out, err = megaopt("galore", "test", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("moments", WEIGHTS)
@pytest.mark.parametrize("grad", [None, *WEIGHTS])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_floors_are_those_of_the_optimizers_own_tensors(weights, grad, moments):
    own = {"weights": weights, "grad": grad, "moments": moments}
    setup = Setup(kernel="torch", rows=30, columns=10, rank=4, **own)
    made = bench.instance_of(setup, CPU)
    made.optimizer.step()
    (weight,) = made.parameters
    state = made.optimizer.state[weight]
    master = state["master_param"]
    assert (made.gradients[0].dtype, state["exp_avg"].dtype) == (
        WEIGHTS[grad or weights], WEIGHTS[moments],
    )  # fmt: skip
    moved = made.gradients[0].nbytes + weight.nbytes + state["projection"].nbytes
    moved += 2 * (state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes)
    moved += weight.nbytes if master is None else 2 * master.nbytes
    assert floor_bytes(setup) == moved == bytes_per_step(made)


def stepped(instance, copy, most):
    """Figures that nobody measured."""
    instance.optimizer.step()
    return FIGURES


@pytest.fixture
def bench_on_cpu(monkeypatch):
    """As if there were a GPU, with given figures in the place of measured ones."""
    monkeypatch.setattr(bench.report, "require_gpu", lambda name: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench, "check_setup", lambda setup, device: check_setup(setup, CPU))
    monkeypatch.setattr(bench, "Copy", lambda device: None)
    monkeypatch.setattr(bench, "product_speed", lambda device, precision: 1e9)
    monkeypatch.setattr(bench, "measure", stepped)
    run = bench.run
    monkeypatch.setattr(bench, "run", lambda setup, device, *own: run(setup, CPU, *own))


@pytest.mark.parametrize("proj_type", ["right", "left"])
def test_the_reference_that_is_compiled_is_the_plain_step(proj_type):
    """Of products with one term that is not 0, and of positive numbers, without cancellation.

    A moment has 5 roundings in each of the two, a direction 4 more, param 4: each of at most 2**-24
    of numbers that are no larger than param and step together.
    """
    setup = Setup(kernel="compiled", rows=8, columns=8, rank=2, proj_type=proj_type)
    size, right = setup.low_rank.projection_shape((8, 8)), proj_type == "right"
    projection = torch.zeros(size)
    line = projection if right else projection.mT
    line[0, 3], line[1, 5] = 1.0, 0.5
    generator = torch.Generator().manual_seed(0)
    grad, param = torch.rand(2, 8, 8, generator=generator) + 0.5
    moments = torch.rand(2, *setup.low_rank.low_shape((8, 8)), generator=generator) + 0.5
    before = {"grad": grad, "param": param, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    group = {"lr": SHARED["lr"], "betas": BETAS, "eps": EPS, "weight_decay": 0.0, "scale": 1.0}
    # so late that nothing is corrected
    expected = plain_step(before, projection, setup.low_rank.side, group, 10**6)
    own = {name: tensor.clone() for name, tensor in before.items()}
    weight = torch.empty(8, 8, dtype=torch.bfloat16)
    reference(grad, projection, own["exp_avg"], own["exp_avg_sq"], own["param"], weight, right)
    size = expected["param"].abs() + expected["step"].abs()
    for name in ("exp_avg", "exp_avg_sq", "param"):
        unit = size if name == "param" else expected[name]
        assert bool(((own[name] - expected[name]).abs() <= 26 * 2.0**-24 * unit).all()), name
    assert torch.equal(weight, own["param"].bfloat16())
    assert not torch.equal(own["param"], param)


def test_peers_have_the_cases_that_there_are(monkeypatch):
    own = {"rows": 30, "columns": 10, "rank": 4}
    found = [
        (weights, precision)
        for weights in WEIGHTS
        for precision in ("ieee", "tf32", "bf16")
        if is_there(Setup(kernel="galore_torch", weights=weights, precision=precision, **own))
    ]
    assert found == [("float32", "ieee"), ("float32", "tf32"), ("bfloat16", "bf16")]
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "galore_torch", raising=False)
    with pytest.raises(ValueError, match=r"galore_torch: it needs .*galore_torch"):
        bench.check_case(Setup(kernel="galore_torch", **own), CPU)


def test_matched_cases_are_those_of_the_pull_request_and_each_once():
    given = {"N": [(30, 10)], "weights": WEIGHTS, "grads": [None], "moments": ["float32"]}
    given |= {"precisions": ["ieee", "bf16"], "matrices": [1], "ranks": [4], "kernels": ["torch"]}
    found = [(each.weights, each.precision) for each in bench.select(given, CPU, matched=True)]
    assert found == [("float32", "ieee"), ("bfloat16", "bf16")]
    assert len(bench.select(given, CPU)) == 4


BENCH = ("galore", "bench", "--M", 30, "--N", 10, 40, "--ranks", 2, 4, "--kernels", "torch",
         "--precisions", "ieee")  # fmt: skip


def test_a_case_beyond_its_bounds_has_no_speed(megaopt, tmp_path, bench_on_cpu, monkeypatch):
    projected_back = rule.projected_back
    changed = lambda *own: projected_back(*own).half().float()  # noqa: E731
    monkeypatch.setattr(rule, "projected_back", changed)
    status, out, _ = megaopt(*BENCH, "--weights", "float32")
    assert status == 1
    assert out.count("no speed: errors beyond their bounds: update") == 4
    cases = json.loads((tmp_path / "out" / "galore" / "record.json").read_text())["cases"]
    assert all("step_ms" not in case for case in cases)


def test_cases_that_no_time_is_left_for_have_no_speed(megaopt, bench_on_cpu, monkeypatch):
    clock = itertools.count(step=2)  # of the bench alone
    monkeypatch.setattr(bench.report, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    status, out, _ = megaopt(*BENCH, "--weights", "float32", "--seconds", 5)
    assert status == 1
    assert out.count("no speed: not begun within 5 seconds") == 2


def test_lines_go_from_rank_to_rank_whatever_their_order_was():
    record = read("h200-galore-peers.json")
    assert [case["rank"] for case in record["cases"][::3][:3]] == [128, 64, 256]
    lines = [line for axes in bench.draw(record).axes for line in axes.get_lines()]
    assert {tuple(line.get_xdata()) for line in lines} == {(32, 64, 128, 256, 512)}


# inductor's, of torch's own modules and of an empty graph that it captures, in torch 2.11
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.long
@pytest.mark.gpu
def test_a_small_bench_on_a_gpu(megaopt, tmp_path):
    arguments = ("--M", 512, "--N", 512, 700, "--ranks", 128, "--precisions", "ieee", "bf16",
                 "--weights", "bfloat16")  # fmt: skip
    status, out, err = megaopt("galore", "bench", *arguments, "--out", "here")
    assert status == 0, out + err  # torch's compiler tells on stderr what it tries
    record = json.loads((tmp_path / "here" / "record.json").read_text())
    assert len(record["cases"]) == 2 * 2 * len(KERNELS)
    assert all(case["step_ms"] > 0 and case["floor_ms"] > 0 for case in record["cases"])
