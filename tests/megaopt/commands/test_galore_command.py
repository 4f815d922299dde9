"""`megaopt galore test` and `bench`: errors, bounds, what is noticed, messages, floors."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from galore_cases import Twin
from mutants import mutant

from megaopt import kernels
from megaopt.commands import cli
from megaopt.commands.bench.instance import bytes_per_step
from megaopt.commands.bench.measure import Figures
from megaopt.commands.galore import bench, cases
from megaopt.commands.galore.cases import Result, floor_bytes, operations
from megaopt.commands.galore.errors import (
    GROUP,
    KERNELS,
    WEIGHTS,
    Setup,
    check_setup,
    compared,
    measure_errors,
)
from megaopt.commands.galore.plain import derived_update_error, plain_step
from megaopt.galore import GaLoreAdamW
from megaopt.kernels.matrix import galore, launch
from megaopt.kernels.matrix.galore import LEFT, RIGHT

CPU = torch.device("cpu")
MATRIX = Path(kernels.__path__[0]) / "matrix"
RULE = Path(kernels.__path__[0]) / "rules" / "galore.py"
QUICK = [name for name in KERNELS if name != "compiled"]
"""Compiling takes ten seconds."""
SMALL = ("--M", 40, "--N", 50, "--rank", 12)


@pytest.fixture
def megaopt(capsys, tmp_path, monkeypatch):
    """Runs the command line in this process: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def beyond(setup, device):
    return [finding.name for finding in measure_errors(setup, device) if not finding.holds]


@pytest.mark.parametrize(("precision", "error"), [("tf32", 1e-3), ("bf16", 8e-3)])
@pytest.mark.parametrize("kernel", QUICK)
def test_precisions_are_within_their_bounds(kernel, precision, error, device):
    findings = measure_errors(setup_of(kernel, precision=precision), device)
    for each in findings:
        assert each.holds
        assert error / 30 * each.norm < each.error < error * each.norm


def test_a_precision_that_is_not_kept_is_noticed(device, monkeypatch):
    """The kernel rounds to bf16, where tf32 was asked for."""
    monkeypatch.setattr(launch.Wave, "_options", lower(launch.Wave._options))
    wrong = beyond(setup_of("grouped", precision="tf32"), device)
    assert wrong == ["exp_avg", "exp_avg_sq", "update"]


def lower(options):
    return lambda self, even: {**options(self, even), "PRECISION": "bf16"}


def test_several_matrices_are_stepped_together(device):
    assert not beyond(setup_of("grouped", matrices=3), device)


def setup_of(kernel="hybrid", weights="float32", proj_type="std", **more):
    own = {"rows": 40, "columns": 50, "rank": 40 * 50 // 90, **more}
    return Setup(kernel=kernel, weights=weights, proj_type=proj_type, **own)


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


@pytest.mark.parametrize(("rows", "columns"), [(2, 3), (3, 17), (17, 5)])
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


def test_what_is_derived_by_hand():
    exact = {"step": torch.tensor([3.0, 4.0]), "param": torch.tensor([0.0, 2.0])}
    # ((7 + 5) * 25 + 2 * 4) / 3
    assert math.isclose(derived_update_error(exact, 7), 2.0**-24 * math.sqrt(308 / 3))


# In a file of the kernels, what the command has to notice, and where.
KERNEL_MUTANTS = {
    "the last of the rank dropped": (
        "right_ptr, inner, RANK, column,", "right_ptr, inner, RANK - 1, column,",
    ),
    "a product in 16 bits": (
        "right, total, PRECISION)\n    return total",
        "right, total, PRECISION)\n    return total.to(tl.float16).to(tl.float32)",
    ),
    "the last column dropped": (
        "inner, RANK, column, columns,", "inner, RANK, column, columns - 1,",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", KERNEL_MUTANTS.values(), ids=KERNEL_MUTANTS)
def test_a_broken_kernel_is_noticed(change, tmp_path, device, monkeypatch):
    monkeypatch.setattr(launch, "kernel", mutant(MATRIX / "kernel.py", change, tmp_path))
    assert beyond(setup_of(rank=20), device) == ["update"]


RULE_MUTANTS = {
    "no scale": ("lr * float(group[\"scale\"])", "lr"),
    "no bias correction": ("if group[\"bias_correction\"]:", "if False:"),
    "no decay": ("lr * float(group[\"weight_decay\"]))", "0.0)"),
}  # fmt: skip


@pytest.mark.parametrize("kernel", QUICK)
@pytest.mark.parametrize("change", RULE_MUTANTS.values(), ids=RULE_MUTANTS)
def test_a_broken_row_of_numbers_is_noticed(change, kernel, tmp_path, device, monkeypatch):
    rule = mutant(RULE, change, tmp_path).GALORE_ADAMW
    monkeypatch.setattr(GaLoreAdamW, "rule", property(lambda self: rule))
    assert beyond(setup_of(kernel), device) == ["update"]


def test_a_broken_twin_is_noticed(megaopt, monkeypatch):
    """The kernel "torch" is not compared with itself."""
    projected = galore.projected
    changed = lambda grad, *rest: projected(grad.bfloat16().float(), *rest)  # noqa: E731
    monkeypatch.setattr(galore, "projected", changed)
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
    arguments = ("galore", "test", "--kernel=torch", *SMALL)
    expected = megaopt(*arguments, "--precision=tf32")
    for name in ("--tf32", "--allow_tf32", "--allow-tf32"):
        assert megaopt(*arguments, name) == expected
    plain = megaopt(*arguments)
    assert plain != expected
    for name in ("--no-allow-tf32", "--no_allow_tf32", "--no-allow_tf32"):
        assert megaopt(*arguments, name) == plain


MODES = [["--mode=test"], ["--mode", "test"]]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_mode_is_the_command(megaopt, mode):
    """As the pull request's script has it, wherever it stands."""
    rest = ("--kernel=torch", *SMALL)
    expected = megaopt("galore", "test", *rest)
    assert expected[0] == 0
    assert megaopt("galore", *mode, *rest) == expected
    assert megaopt("galore", *rest, *mode) == expected


def test_mode_benchmark_is_bench(megaopt, monkeypatch):
    taken = []
    monkeypatch.setattr(bench, "main", lambda *given: taken.append(given) or 0)
    assert megaopt("galore", "--mode=benchmark", "--allow_tf32", "--ranks", 64)[0] == 0
    assert megaopt("galore", "bench", "--precisions", "tf32", "--ranks", 64)[0] == 0
    assert taken[0] == taken[1]


@pytest.mark.parametrize("mode", [["--mode=tset"], ["--mode"]], ids=str)
def test_an_unknown_mode_is_refused(megaopt, mode):
    status, out, err = megaopt("galore", *mode)
    assert (status, out) == (2, "")
    assert "mode must be one of test, benchmark, got " in err


def test_another_command_has_no_mode_and_is_told_whose_it_is(megaopt):
    status, out, err = megaopt("train", "gpt_tiny", "--mode=test")
    assert (status, out) == (2, "")
    assert "--mode is of `megaopt galore` alone" in err


@pytest.mark.parametrize("weights", WEIGHTS)
def test_largest_errors_are_printed_as_the_pull_request_names_them(megaopt, device, weights):
    _, out, _ = megaopt("galore", "test", "--kernel=torch", f"--weights={weights}", *SMALL)
    setup = Setup(kernel="torch", rows=40, columns=50, rank=12, weights=weights)
    findings = measure_errors(setup, device)
    names = ["running mean (exp_avg)", "running variance (exp_avg_sq)"]
    names += ["params"] if weights == "float32" else ["params (master)", "params (weight)"]
    lines = [line for line in out.splitlines() if ": max err " in line]
    for line, name, each in zip(lines, names, findings, strict=True):
        most = float((each.value - each.exact).abs().max())
        assert line == f"{name}: max err {most:.3g}, relative err {most / each.mean:.3g}"
    for each in findings[:2]:
        assert each.mean == float(each.exact.abs().mean())
    # of params, which the second step's update is a part of
    assert findings[2].mean > float(findings[2].exact.abs().mean())


def test_verbose_says_where_the_largest_errors_are(megaopt, device):
    _, plain, _ = megaopt("galore", "test", "--kernel=torch", *SMALL)
    status, out, _ = megaopt("galore", "test", "--kernel=torch", "--verbose", *SMALL)
    assert status == 0
    more = [line for line in out.splitlines() if line not in plain.splitlines()]
    setup = Setup(kernel="torch", rows=40, columns=50, rank=12)
    update = measure_errors(setup, device)[2]
    away = (update.value - update.exact).abs()
    row, column = divmod(int(away.argmax()), 50)
    assert len(more) == 3 * 5
    assert more[10].startswith(f"update[{row}, {column}]: {float(update.value[row, column]):.9g}, ")
    assert more[10].endswith(f"off by {float(away.max()):.3g}")


REFUSED = {
    "kernel": (["--kernel=tritn"], "kernel must be one of torch, compiled, hybrid, grouped, "),
    "weights": (["--weights=fp8"], "weights must be one of float32, bfloat16, got 'fp8'"),
    "precision": (["--precision=fp16"], "precision must be one of ieee, tf32, bf16, got 'fp16'"),
    "tf32": (["--tf32", "--precision=bf16"], "precision must be 'tf32' beside --tf32, got 'bf16'"),
    "proj_type": (["--proj-type=up"], "proj_type must be one of std, reverse_std, right, left, "),
    "M": (["--M=0"], "M must be a whole number from 1 to 1048576, got 0"),
    "N": (["--N=-4"], "N must be a whole number from 1 to 1048576, got -4"),
    "rank 0": (["--rank=0"], "rank must be a whole number from 1 to 2047 (for M=4096 and N=4096"),
    "rank": (
        ["--M=64", "--N=32", "--rank=40"],
        "rank must be a whole number from 1 to 21 (for M=64 and N=32: rank * (M + N) must be below "
        "M * N), got 40",
    ),
    "too small": (["--M=1"], "M and N must be so large that M + N < M * N"),
    "seed": (["--seed=-1"], "seed must be a whole number from 0 to 2**63 - 1, got -1"),
    "no number": (["--rank=x"], "rank"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_named(megaopt, arguments, message):
    status, out, err = megaopt("galore", "test", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_kernel_that_does_not_run_here_is_refused_with_the_reason(megaopt, monkeypatch):
    monkeypatch.setattr(kernels.backends, "MISSING", "Triton is not installed")
    status, _, err = megaopt("galore", "test", *SMALL)
    assert status == 2
    assert "kernel must be torch on " in err
    assert "(Triton is not installed), got 'hybrid'" in err
    assert megaopt("galore", "test", "--kernel=torch", *SMALL)[0] == 0


def test_floors_by_hand():
    wide = Setup(kernel="torch", rows=10, columns=30, rank=4)  # on the left: moments [4, 30]
    assert floor_bytes(wide) == 300 * (4 + 4 + 4) + 2 * 2 * 4 * 120 + 4 * 40
    tall = replace(wide, rows=30, columns=10, weights="bfloat16")  # on the right: [30, 4]
    assert floor_bytes(tall) == 300 * (2 + 2 + 4 + 4) + 2 * 2 * 4 * 120 + 4 * 40
    assert operations(wide) == 2 * 2 * 10 * 30 * 4
    several = replace(wide, matrices=5)
    assert floor_bytes(several) == 5 * floor_bytes(wide)
    assert operations(several) == 5 * operations(wide)
    slow = Result(wide, FIGURES, speed=1e4)  # whose copy takes a microsecond and less
    assert math.isclose(slow.floor_ms, 1e3 * operations(wide) / 1e4)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_floors_are_those_of_the_optimizers_own_tensors(weights):
    setup = Setup(kernel="torch", rows=30, columns=10, rank=4, weights=weights)
    made = bench._instance(setup, CPU)
    made.optimizer.step()
    (weight,) = made.parameters
    state = made.optimizer.state[weight]
    master = state["master_param"]
    moved = weight.grad.nbytes + weight.nbytes + state["projection"].nbytes
    moved += 2 * (state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes)
    moved += weight.nbytes if master is None else 2 * master.nbytes
    assert floor_bytes(setup) == moved == bytes_per_step(made)


def test_a_bench_without_a_gpu_says_so(megaopt, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = megaopt("galore", "bench")
    assert (status, out) == (2, "")
    assert err == (
        "megaopt: galore bench cannot run here: needs a CUDA GPU, torch.cuda.is_available() is "
        "False here\n"
    )
    assert not (tmp_path / "out").exists()


FIGURES = Figures(
    tensors=1, elements=300, bytes=1, held_bytes=1, repetitions=50, step_ms=2.0,
    step_ms_quartiles=(1.9, 2.1), copy_bytes=56_000, copy_ms=3.0, copy_ms_quartiles=(2.9, 3.1),
    wall_ms=2.25, wall_moved_ms=2.5, kernels={"step_kernel": 1, "gemm": 2}, transfers={},
    scratch_bytes=2**20,
)  # fmt: skip


def stepped(instance, copy):
    """Figures that nobody measured, with the bytes of the instance's own tensors."""
    instance.optimizer.step()
    return replace(FIGURES, bytes=bytes_per_step(instance))


@pytest.fixture
def bench_on_cpu(monkeypatch):
    """As if there were a GPU, with given figures in the place of measured ones."""
    monkeypatch.setattr(bench, "why_not", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cases, "check_setup", lambda setup, device: check_setup(setup, CPU))
    monkeypatch.setattr(bench, "Copy", lambda device: None)
    monkeypatch.setattr(bench, "product_speed", lambda device, precision: 1e9)
    monkeypatch.setattr(bench, "measure", stepped)
    run = bench.run
    monkeypatch.setattr(bench, "run", lambda setup, device, copy: run(setup, CPU, copy))


BENCH = ("galore", "bench", "--M", 30, "--N", 10, 40, "--ranks", 2, 4, "--kernels", "torch",
         "--precisions", "ieee")  # fmt: skip


def test_a_bench_prints_draws_and_records(megaopt, tmp_path, bench_on_cpu):
    status, out, err = megaopt(*BENCH, "--out", "here")
    assert (status, err) == (0, "")
    record = json.loads((tmp_path / "here" / "record.json").read_text())
    assert len(record["cases"]) == 2 * 2 * 2
    first = record["cases"][0]
    assert (first["rows"], first["columns"], first["rank"]) == (30, 10, 2)
    assert first["bytes"] == first["floor_bytes"] == 300 * 12 + 16 * 60 + 4 * 20
    assert math.isclose(first["floor_ms"], first["bytes"] / 56_000 * 3.0)
    assert first["step_ms"] == 2.0
    (line, *_) = [line for line in out.splitlines() if line.startswith("│ 30 x 10 │ float32")]
    cells = [cell.strip() for cell in line.split("│")]
    floor = f"{first['floor_ms']:.3f}"
    assert cells[3:10] == ["ieee", "2", "torch", "2.000", floor, "12.4%", "0.0"]
    assert (tmp_path / "here" / "speed.png").stat().st_size > 5000


def test_a_case_beyond_its_bounds_has_no_speed(megaopt, tmp_path, bench_on_cpu, monkeypatch):
    projected_back = galore.projected_back
    changed = lambda *own: projected_back(*own).half().float()  # noqa: E731
    monkeypatch.setattr(galore, "projected_back", changed)
    status, out, _ = megaopt(*BENCH, "--weights", "float32")
    assert status == 1
    assert out.count("no speed: errors beyond their bounds: update") == 4
    cases = json.loads((tmp_path / "out" / "galore" / "record.json").read_text())["cases"]
    assert all("step_ms" not in case for case in cases)


BENCH_REFUSED = {
    "rank": (["--ranks", 4, 9], "rank must be a whole number from 1 to 7 (for M=30 and N=10"),
    "kernel": (["--kernels", "hybrd"], "kernel must be one of torch, compiled, hybrid, grouped, "),
    "none": (["--ranks"], "ranks must have at least one value, got none"),
    "matrices": (["--matrices", 0], "matrices must be a whole number >= 1, got 0"),
}


@pytest.mark.parametrize(("arguments", "message"), BENCH_REFUSED.values(), ids=BENCH_REFUSED)
def test_a_bench_names_bad_input(megaopt, tmp_path, bench_on_cpu, arguments, message):
    status, out, err = megaopt(*BENCH, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert not (tmp_path / "out").exists()


def test_a_case_without_figures_has_no_floor():
    assert Result(setup_of(), None, "out of memory").floor_ms is None


# inductor's, of torch's own modules, in torch 2.11
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.long
@pytest.mark.gpu
def test_a_small_bench_on_a_gpu(megaopt, tmp_path):
    arguments = ("--M", 512, "--N", 512, 700, "--ranks", 128, "--precisions", "ieee", "bf16",
                 "--weights", "bfloat16")  # fmt: skip
    status, out, err = megaopt("galore", "bench", *arguments, "--out", "here")
    assert (status, err) == (0, ""), out + err
    record = json.loads((tmp_path / "here" / "record.json").read_text())
    assert len(record["cases"]) == 2 * 2 * len(KERNELS)
    assert all(case["step_ms"] > 0 and case["floor_ms"] > 0 for case in record["cases"])
