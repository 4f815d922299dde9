"""`megaopt ranks bench`: the whole path on a CPU over gloo, the model of growth, messages."""

import json
import math
import time
from dataclasses import replace

import pytest
import torch

from megaopt.lab.bench.sets import TensorSet
from megaopt.lab.bench.workers import Failed, Team
from megaopt.lab.muon import bench as muon
from megaopt.lab.ranks import bench
from megaopt.lab.ranks.measure import Size, llama_of
from megaopt.lab.ranks.subjects import (
    ENTRIES,
    RANK,
    SETS,
    Speeds,
    StepWork,
    most_of,
    predicted_ms,
    speeds_of,
    work_of,
)

TINY = {
    "L": TensorSet.of_shapes("L", "two weights", [(40, 24), (7, 40)]),
    "G": TensorSet.of_shapes("G", "a weight", [(8, 24)]),
    "E": TensorSet.of_shapes("E", "four experts", [(4, 16, 8)]),
}
SIZE = Size(layers=1, width=48, vocabulary=64, tokens=8)
BENCH = ("ranks", "bench", "--repetitions=2")


@pytest.fixture
def on_cpu(monkeypatch):
    """Two processes over gloo in the place of cards, and tiny sets."""
    monkeypatch.setattr(bench, "hardware", lambda: ("cpu", 2))
    monkeypatch.setattr(bench, "SETS", TINY)
    usual = bench.question_of
    tiny = lambda *words: replace(usual(*words), size=SIZE, speed_bytes=2**16)  # noqa: E731
    monkeypatch.setattr(bench, "question_of", tiny)


def record_in(folder):
    return json.loads((folder / "out" / "ranks" / "record.json").read_text())


# --- the whole path


def test_the_whole_path_on_a_cpu(megaopt, tmp_path, on_cpu):
    only = ("muon-fp16", "galore", "adam", "torch")
    status, out, err = megaopt(*BENCH, "--sets", "L", "E", "llama", "--only", *only)
    assert (status, err) == (0, "")
    record = record_in(tmp_path)
    assert record["cards"] == 2
    assert record["command"].startswith("megaopt")
    cases = {case["case"]: case for case in record["cases"]}
    wanted = ["L/muon-fp16", "L/galore", "L/adam", "L/torch", "E/muon-fp16"]
    assert [*cases] == [*wanted, "llama/adam", "llama/torch"]
    for case in cases.values():
        assert (case["problem"], case["differ"]) == (None, [])
        assert case["step_ms"] == case["several"]["step_ms"] > 0
        assert case["one"]["iteration_ms"] >= case["one"]["step_ms"] >= case["one"]["host_ms"] > 0
        assert (case["one"]["row_ms"] is None) == (case["set"] == "llama")
    assert [row["case"] for row in record["growth"]] == wanted
    for row in record["growth"]:
        assert row["error"] == row["model_ms"] / row["measured_ms"] - 1
        assert row["model_ms_4"] >= row["model_ms_8"] > 0
    assert out.count("0 bits differ") == len(wanted)
    assert "8 by the model" in out
    assert (tmp_path / "out" / "ranks" / "ranks.png").stat().st_size > 10_000
    first, second = (part.splitlines() for part in bench.page(record).split("\n\n"))
    assert (len(first), len(second)) == (2 + len(cases), 2 + len(wanted))
    assert first[2].startswith("| L/muon-fp16 | FusedMuon, fp16 | ")


def test_muon_has_a_llamas_matrices_and_adamw_the_rest():
    pytest.importorskip("transformers")
    _, optimizer = llama_of("muon", SIZE, torch.device("cpu"), None)
    muons, others = optimizer.param_groups
    assert (len(muons["params"]), others["use_muon"]) == (7, False)
    assert {param.shape for param in others["params"]} == {(64, 48), (48,)}


# --- what is said of failures


@pytest.fixture
def answers(monkeypatch, on_cpu):
    """What fake teams answer, by ranks and subject: figures, or a failure; how often they began."""
    table, begun = {}, []

    class Fake:
        def __init__(self, works):
            self.ranks = len(works)
            begun.append(self.ranks)

        def ask(self, question, seconds):
            if not question.subject and (self.ranks, "") in table:
                raise Failed(table[self.ranks, ""])
            if not question.subject:
                return [{"memory": 1e12, "link": 1e11 if self.ranks > 1 else None}] * self.ranks
            figures = dict.fromkeys(("step_ms", "iteration_ms", "row_ms"), 8.0 / self.ranks)
            figures |= {"memory_bytes": 3e6, "kernels": 7, "nccl": 2}
            figures |= {"digests": ["x"] * len(question.shapes)}
            figures |= table.get((self.ranks, question.subject), {})
            if "error" in figures:
                raise Failed(figures["error"])
            return [figures | {"host_ms": 0.1 * (rank + 1)} for rank in range(self.ranks)]

        def end(self):
            pass

    monkeypatch.setattr(bench, "Team", Fake)
    return table, begun


def test_a_failure_is_told_and_its_processes_are_begun_anew(megaopt, tmp_path, answers):
    table, begun = answers
    table[2, "muon"] = {"error": "an illegal memory access"}
    status, out, _ = megaopt(*BENCH, "--sets=L", "--only", "muon", "adam")
    assert (status, begun) == (1, [1, 2, 2])
    assert "L/muon: no speed: an illegal memory access" in out
    muons, adam = record_in(tmp_path)["cases"]
    assert (muons["one"]["step_ms"], muons["problem"]) == (8.0, "an illegal memory access")
    assert (adam["step_ms"], adam["several"]["host_ms"], adam["problem"]) == (4.0, 0.2, None)
    row = next(line for line in out.splitlines() if line.startswith("│ L/adam"))
    cells = [cell.strip() for cell in row.split("│")[3:-1]]
    same = ["", "3, 3", "7, 7", "2, 2", "0 bits differ"]
    assert cells == ["8.00", "4.00", "0.50", "8.00, 4.00", "0.10, 0.20", *same]


@pytest.mark.parametrize(
    ("name", "status"), [("muon", 1), ("adam", 1), ("galore", 1), ("torch", 0)]
)
def test_other_bits_are_told_and_fail_where_the_same_are_promised(
    megaopt, tmp_path, answers, name, status
):
    answers[0][2, name] = {"digests": ["x", "y"]}
    done, out, _ = megaopt(*BENCH, "--sets=L", "--only", name)
    assert done == status
    assert "1 of 2 differ" in out
    assert record_in(tmp_path)["cases"][0]["differ"] == [1]


def test_nothing_is_begun_late(megaopt, tmp_path, answers, monkeypatch):
    now = iter(range(0, 1000, 40))
    monkeypatch.setattr(bench.report.time, "monotonic", lambda: next(now))
    arguments = ("--sets=L", "--only", "muon", "adam", "galore", "--seconds=100")
    assert megaopt(*BENCH, *arguments)[0] == 1
    problems = [case["problem"] for case in record_in(tmp_path)["cases"]]
    assert problems == [None, None, "not begun in time"]


def test_what_is_not_installed_is_skipped(megaopt, tmp_path, answers, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    lacking = replace(ENTRIES["dion"], subject=replace(ENTRIES["dion"].subject, module="no_such"))
    monkeypatch.setitem(bench.ENTRIES, "dion", lacking)
    status, out, _ = megaopt(*BENCH, "--sets", "L", "llama", "--only", "dion", "adam")
    assert status == 0
    assert "skipped: dion: no_such is not installed" in out
    assert "skipped: llama: transformers is not installed" in out
    assert [case["case"] for case in record_in(tmp_path)["cases"]] == ["L/adam"]


def test_cards_that_cannot_meet_are_told(megaopt, answers):
    answers[0][2, ""] = "no NCCL"
    status, _, err = megaopt(*BENCH)
    assert (status, err) == (2, "megaopt: ranks bench cannot run here: no NCCL\n")


def test_one_card_is_told(megaopt, monkeypatch):
    monkeypatch.setattr(bench.report, "require_gpu", lambda name: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    status, out, err = megaopt("ranks", "bench")
    assert (status, out) == (2, "")
    assert err == "megaopt: ranks bench cannot run here: needs two CUDA GPUs or more, has 1\n"


REFUSED = {
    "sets": (["--sets=A"], "sets must be of L, G, E, llama, got 'A'"),
    "only": (["--only=lion"], "only must be of muon, muon-fp16, galore, adam, torch, dion"),
    "repetitions": (["--repetitions=0"], "repetitions must be a whole number >= 1, got 0"),
    "patience": (["--patience=0"], "patience must be a whole number >= 1, got 0"),
    "seconds": (["--seconds=-1"], "seconds must be a whole number >= 0, got -1"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_named(megaopt, arguments, message):
    status, out, err = megaopt("ranks", "bench", *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_where_one_process_fails_all_end():
    team = Team([time.sleep, math.exp])
    try:
        with pytest.raises(Failed, match="OverflowError"):
            team.ask(1000, 100)
        assert team.is_over
    finally:
        team.end()


# --- the model


def test_the_most_loaded_card():
    assert most_of([], 3) == 0
    assert most_of([3, 1, 1, 1], 1) == 6
    assert most_of([1, 3, 1, 1], 2) == 3
    assert most_of([2.0] * 5, 4) == 4
    assert most_of([7, 1], 8) == 7


def test_a_card_sends_of_its_part_what_others_own():
    work = StepWork(moved=0, exchanged=1200)
    speeds = Speeds(memory=1.0, link=1e3, operations=0.0, host_ms=0.0)
    assert [predicted_ms(work, speeds, cards) for cards in (1, 2, 4)] == [0, 300, 225]


def test_speeds_are_those_of_the_step_on_one_card():
    """The model says one card's time again, and of more cards the sum of its three parts."""
    work = StepWork(moved=4e9, owned=(1e12, 1e12, 2e12), shared=2e12, exchanged=8e8)
    speeds = speeds_of(work, 10.0, 0.5, memory=1e12, link=1e11)
    assert speeds.operations == pytest.approx(6e12 / 6e-3)
    assert predicted_ms(work, speeds, 1) == pytest.approx(10.0)
    # 3e12 operations, 2e9 bytes, 2e8 bytes sent
    assert predicted_ms(work, speeds, 2) == pytest.approx(3.0 + 2.0 + 2.0)
    # the largest matrix and a quarter of what is shared; 1e9 bytes; 1.5e8 bytes sent
    assert predicted_ms(work, speeds, 4) == pytest.approx(2.5 + 1.0 + 1.5)


def test_without_operations_the_step_has_its_own_speed_and_the_host_is_a_bound():
    speeds = speeds_of(StepWork(moved=4e9), 8.0, 3.0, memory=1e12, link=1e11)
    assert (speeds.memory, speeds.operations) == (5e11, 0)
    assert [predicted_ms(StepWork(moved=4e9), speeds, cards) for cards in (1, 2, 4)] == [8, 4, 3]


def test_a_step_faster_than_its_bytes_still_has_a_speed():
    work = StepWork(moved=4e9, owned=(1e12,))
    assert speeds_of(work, 1.0, 0.1, memory=1e12, link=1.0).operations == pytest.approx(1e16)


def test_work_is_that_of_the_sets():
    shapes = {name: tensors.shapes for name, tensors in SETS.items()}
    for name in SETS:
        work = work_of("muon", shapes[name])
        assert sum(work.owned) == muon.operations(muon.SETS[name])
        assert work.moved == muon.floor_bytes(muon.SETS[name])
    assert shapes["E"] == ((64, 1408, 2048), (64, 1408, 2048), (64, 2048, 1408))
    assert work_of("muon", shapes["E"]).exchanged == 0
    elements = sum(SETS["L"].sizes)
    assert work_of("muon-fp16", shapes["L"]).exchanged == 4 * elements
    assert work_of("adam", shapes["L"]) == StepWork(moved=28 * elements)
    galore = work_of("galore", [(40, 24), (24, 40)])
    assert (galore.owned, galore.shared) == ((4.0 * RANK * 960,), 4.0 * RANK * 960)
    assert galore.exchanged == 6 * 960 + 8 * RANK * 40
