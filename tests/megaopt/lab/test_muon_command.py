"""`megaopt muon test` and `bench`: errors, what is noticed, floors, processes, messages."""

import itertools
import json
import math
import time
from dataclasses import replace

import pytest
import torch
from bench_figures import FIGURES
from interpreted import interpreted
from torch.nn import Parameter

from megaopt.kernels.muon import newton_schulz, orthogonal
from megaopt.kernels.muon.newton_schulz import MatrixScales, Workspace, iterated
from megaopt.kernels.muon.orthogonal import Orthogonal, coefficients_of
from megaopt.lab.bench.instance import bytes_per_step
from megaopt.lab.bench.measure import with_rates
from megaopt.lab.bench.sets import TensorSet
from megaopt.lab.bench.subjects import SHARED
from megaopt.lab.muon import bench, check
from megaopt.lab.muon.bench import SETS, SUBJECTS, Failed, Team, floor_bytes, operations
from megaopt.lab.muon.check import CaseErrors, OrthogonalCase, chance, in_fp64

CPU = torch.device("cpu")
TEST = ("muon", "test", "--shapes", 24, 80, "--matrices", 14)
SIMPLE = coefficients_of("simple", 5)


# --- test


def test_what_it_prints(megaopt):
    status, out, err = megaopt(*TEST, "--no-launches", "--spectra=random")
    assert (status, err) == (0, "")
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    found = {tuple(line[2:4]): line for line in lines if line[:1] == ["24 x 80"]}
    assert [*found] == [("standard", "bf16"), ("standard", "fp16"), ("gram", "fp16")]
    for form, (*_, error, torchs, part, bound, above, bits, verdict) in found.items():
        assert (bits, verdict, above.split()[1:]) == ("", "within", ["of", "14"])
        assert 5e-4 < float(error) < 2 * float(bound.split()[1]) * float(torchs) < 4e-2
        # both errors are printed in three digits, so each is off by half a percent at most
        assert float(part) == pytest.approx(float(error) / float(torchs), rel=0.01)
        assert bound == f"<= {1 / 8 if form == ('standard', 'fp16') else 1:g}"


@interpreted
def test_launches_are_compared_with_the_twin(megaopt, monkeypatch):
    status, out, err = megaopt(*TEST, "--precisions=fp16", "--spectra=random")
    assert (status, err, out.count("the same")) == (0, "", 2)
    begun = newton_schulz.begun

    def other(direction, how):
        first, scales = begun(direction, how)
        first[0, 0] = first[0, 0].nextafter(torch.zeros_like(first[0, 0]))
        return first, scales

    monkeypatch.setattr(newton_schulz, "begun", other)
    status, out, _ = megaopt(*TEST, "--precisions=fp16", "--spectra=random")
    assert (status, out.count("OTHERS"), out.count("BEYOND")) == (1, 2, 2)
    assert "above torch's part, or of other bits: 2" in out


def test_a_precision_that_is_not_kept_is_noticed(megaopt, monkeypatch):
    """The iteration begins from numbers of bf16, where fp16 was asked for."""
    begun = newton_schulz.begun
    changed = lambda direction, how: begun(direction.bfloat16().float(), how)  # noqa: E731
    monkeypatch.setattr(newton_schulz, "begun", changed)
    status, out, _ = megaopt(*TEST, "--no-launches", "--methods=standard")
    assert status == 1
    assert [line.split("│")[4].strip() for line in out.splitlines() if "BEYOND" in line] == [
        "fp16"
    ] * 2


def test_a_broken_ratio_is_noticed(megaopt, monkeypatch):
    monkeypatch.setitem(orthogonal.RATIOS, "original", lambda rows, columns: 1.0)
    monkeypatch.setattr(check, "RATIOS", {"original": lambda rows, columns: math.sqrt(2)})
    arguments = ("--shapes", 40, 20, "--no-launches", "--methods=standard", "--spectra=random")
    assert megaopt("muon", "test", *arguments)[0] == 1


def test_nan_and_other_bits_are_beyond_every_bound():
    case = OrthogonalCase(4, 8, "random", "standard", "bf16")
    for error, above, bits, holds in (
        (1e-3, 0, None, True), (1e-3, 0, True, True), (1e-3, 0, False, False),
        (math.nan, 1, None, False), (1.2e-2, 13, True, True), (1.2e-2, 14, True, False),
    ):  # fmt: skip
        assert CaseErrors(case, error, 1e-2, 14, above, bits).holds == holds


def test_chance_is_that_of_coins():
    """Of all rows of five coins, those with so many heads."""
    for above in range(6):
        rows = [sum(coins) >= above for coins in itertools.product((0, 1), repeat=5)]
        assert chance(5, above) == sum(rows) / 32


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)], ids=str)
def test_fp64_is_the_polynomial_of_singular_values(shape):
    """At most 1e-12 off, as fp64 in two ways is."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for a, b, c in SIMPLE:
        values = a * values + b * values**3 + c * values**5
    wanted = max(1, shape[0] / shape[1]) ** 0.5 * left @ values.diag() @ right
    assert (in_fp64(matrix) - wanted).norm() <= 1e-12 * wanted.norm()


REFUSED = {
    "methods": (["--methods=cubic"], "methods must be of standard, gram, got 'cubic'"),
    "precisions": (["--precisions=fp8"], "precisions must be of bf16, fp16, got 'fp8'"),
    "spectra": (["--spectra=flat"], "spectra must be of random, decaying, got 'flat'"),
    "shapes": (["--shapes", 0, 8], "shapes must be whole numbers from 1 to 16384, got (0, 8)"),
    "matrices": (["--matrices=0"], "matrices must be a whole number >= 14, got 0"),
    "seed": (["--seed=-1"], "seed must be a whole number from 0 to 2**63 - 1, got -1"),
    "nothing": (
        ["--methods=gram", "--shapes", 8, 8],
        "methods must be gram alone with fp16 and a matrix at least 3 times as long as wide",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_of_test_is_named(megaopt, arguments, message):
    status, out, err = megaopt("muon", "test", *arguments)
    assert (status, out) == (2, "")
    assert message in err


# --- floors, and what is timed


SMALL = TensorSet.of_shapes("small", "small", [(24, 40), (30, 12)])


@pytest.mark.parametrize("name", ["ours", "ours-fp16", "torch"])
def test_floors_are_those_of_the_optimizers_own_tensors(name):
    made = SUBJECTS[name].instance(SMALL, CPU)
    made.optimizer.step()
    assert floor_bytes(SMALL) == bytes_per_step(made)


class Counted:
    """Operations of the products that an iteration asks for."""

    total = 0

    def symmetric_products(self, left, out, **others):
        (one,) = left
        self.total += one.shape[0] ** 2 * one.shape[1]

    def products(self, left, right, out, **others):
        self.total += 2 * left[0].shape[0] * right[0].numel()


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)], ids=str)
def test_operations_are_those_of_grams_form(shape):
    first, short = torch.empty(shape, device="meta"), min(shape)
    squares = [[first.new_empty(short, short)] for _ in range(4)]
    how, counted = Orthogonal(SIMPLE, precision="fp16", restarts=(2,)), Counted()
    scales = MatrixScales(*[None] * len(MatrixScales._fields))
    iterated(Workspace([first], [first.clone()], squares), scales, how, True, counted)
    assert operations(TensorSet.of_shapes("", "", [shape])) == counted.total


def test_sets_are_those_of_the_models():
    found = {name: (len(own.shapes), round(sum(own.sizes) / 1e6)) for name, own in SETS.items()}
    assert found == {"L": (28, 872), "G": (48, 85), "E": (192, 554)}
    assert round(operations(SETS["L"]) / 1e11) == 402


def test_a_peer_steps_masters():
    """Weights are the masters of the library's own optimizer, rounded; its state is there."""
    made = SUBJECTS["torch"].instance(SMALL, CPU)
    own = [Parameter(each.detach().float()) for each in made.parameters]
    plain = torch.optim.Muon(own, **SHARED)
    for _ in range(2):
        made.draw_gradients()
        for param, gradient in zip(own, made.gradients, strict=True):
            param.grad = gradient.float()
        made.optimizer.step()
        plain.step()
    for param, weight in zip(own, made.parameters, strict=True):
        assert torch.equal(weight, param.bfloat16())
        state = made.optimizer.state[weight]
        assert torch.equal(state["master_param"], param)
        assert torch.equal(state["momentum_buffer"], plain.state[param]["momentum_buffer"])


# --- bench


COPY = {"copy_bytes": 10**9, "copy_ms": 0.5}
TIMES = {"ours": [100.0, 98.0], "torch": [140.0, 150.0], "dion": [200.0, 200.0]}


@pytest.fixture
def asked(monkeypatch):
    """As if there were a GPU, with given times; the questions in order. "dion" hangs on set E."""
    questions, names = [], set()

    class Fake:
        def __init__(self, works):
            (work,) = works
            (self.name,), self.is_over = work.args, False
            self.times = {}
            assert self.name not in names  # one process each
            names.add(self.name)

        def ask(self, question, seconds):
            questions.append((question[0], self.name))
            if (question[0], self.name) == ("E", "dion"):
                self.is_over = True
                raise Failed("no answer within 7 seconds")
            times = self.times.setdefault(question[0], list(TIMES[self.name]))
            more = {"host_ms": 1.5, "speed": 1e15, "version": "1.0"}
            return [with_rates(FIGURES | {"step_ms": times.pop(0)} | COPY) | more]

        def end(self):
            self.is_over = True

    monkeypatch.setattr(bench.report, "require_gpu", lambda name: None)
    monkeypatch.setattr(bench, "Team", Fake)
    there = {**SUBJECTS, "dion": replace(SUBJECTS["torch"], name="dion")}
    there["lacking"] = replace(SUBJECTS["dion"], module="no_such_library.muon")
    monkeypatch.setattr(bench, "SUBJECTS", there)
    return questions


BENCH = ("muon", "bench", "--patience=7", "--only")


def test_all_take_turns_and_the_record_has_them(megaopt, tmp_path, asked):
    status, out, err = megaopt(*BENCH, "ours", "torch", "lacking", "--sets", "G", "L")
    assert (status, err) == (0, "")
    turn = ["ours", "torch"] * 2
    assert asked == [*(("G", name) for name in turn), *(("L", name) for name in turn)]
    assert "skipped: lacking: no_such_library is not installed" in out
    record = json.loads((tmp_path / "out" / "muon" / "record.json").read_text())
    assert record["skipped"] == ["lacking"]
    cases = {(case["set"], case["optimizer"]): case for case in record["cases"]}
    own = cases[SETS["L"].description, "torch"]
    assert (own["step_ms"], own["rounds_ms"], own["host_ms"]) == (150.0, [140.0, 150.0], 1.5)
    # the operations at 1e15 a second, and a copy at 2e12 bytes a second
    wanted = 1e3 * (operations(SETS["L"]) / 1e15 + floor_bytes(SETS["L"]) / 2e12)
    assert own["floor_ms"] == wanted
    row = next(line for line in out.splitlines() if line.startswith("│ L   │ torch"))
    assert "1.50x" in row
    assert f"{100 * wanted / 150:.1f}%" in row
    assert (tmp_path / "out" / "muon" / "speed.png").stat().st_size > 10_000


def test_one_that_hangs_is_told_and_asked_no_more(megaopt, tmp_path, asked):
    status, out, _ = megaopt(*BENCH, "ours", "dion", "--sets", "E", "G")
    assert (status, asked.count(("E", "dion")), asked.count(("G", "dion"))) == (0, 1, 0)
    assert "E, dion: no answer within 7 seconds" in out
    cases = json.loads((tmp_path / "out" / "muon" / "record.json").read_text())["cases"]
    found = {(each["set"][0], each["optimizer"]): each["problem"] for each in cases}
    assert found["6", "dion"] == "no answer within 7 seconds"
    assert found["G", "dion"] == "its process ended with set E"
    assert found["G", "ours"] is None


def test_ours_without_a_time_is_a_failure(megaopt, asked, monkeypatch):
    monkeypatch.setitem(bench.SUBJECTS, "dion", SUBJECTS["ours"])
    assert megaopt(*BENCH, "dion", "--sets", "E")[0] == 1


def test_nothing_is_begun_late(megaopt, asked, monkeypatch):
    now = iter(range(0, 1000, 40))
    monkeypatch.setattr(bench.report.time, "monotonic", lambda: next(now))
    status, _, _ = megaopt(*BENCH, "ours", "torch", "--sets", "G", "--seconds=100")
    assert (status, asked) == (0, [("G", "ours"), ("G", "torch")])


BENCH_REFUSED = {
    "sets": (["--sets=A"], "sets must be of L, G, E, got 'A'"),
    "only": (["--only=muon"], "only must be of ours, ours-fp16, torch"),
    "rounds": (["--rounds=0"], "rounds must be a whole number >= 1, got 0"),
}


@pytest.mark.parametrize(("arguments", "message"), BENCH_REFUSED.values(), ids=BENCH_REFUSED)
def test_bad_input_of_bench_is_named(megaopt, arguments, message):
    status, out, err = megaopt("muon", "bench", *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_a_process_answers_fails_and_ends():
    """Each without harm to this one; it is gone afterwards."""
    worker = Team([eval])
    try:
        assert worker.ask("3 * 3.0", 100) == [9.0]
        with pytest.raises(Failed, match="IndexError: list index out of range"):
            worker.ask("[][1]", 100)
        assert (worker.ask("2.0", 100), worker.is_over) == ([2.0], False)
        with pytest.raises(Failed, match="its process ended"):
            worker.ask("__import__('os')._exit(3)", 100)
    finally:
        worker.end()
    assert worker.is_over


def test_a_process_that_hangs_is_ended():
    worker = Team([time.sleep])
    with pytest.raises(Failed, match=r"no answer within 0\.5 seconds"):
        worker.ask(1000, 0.5)
    assert worker.is_over


@pytest.mark.gpu
@pytest.mark.long
def test_a_small_bench_on_a_gpu(megaopt, tmp_path):
    arguments = ("--sets=G", "--only", "ours", "torch", "--rounds=1", "--patience=200")
    status, out, err = megaopt("muon", "bench", *arguments)
    assert (status, err) == (0, ""), out + err
    cases = json.loads((tmp_path / "out" / "muon" / "record.json").read_text())["cases"]
    assert all(case["step_ms"] > case["floor_ms"] > 0 for case in cases)
