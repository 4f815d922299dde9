"""The host's share of a step: what is timed, and how it is shown and recorded."""

import json

import pytest
import torch
from rich.console import Console

from megaopt.commands.bench import host
from megaopt.commands.bench.cases import select
from megaopt.commands.bench.host import HostFigures, host_record, host_table, measure_host
from megaopt.commands.bench.report import print_table
from megaopt.commands.bench.sets import HOST

CPU = torch.device("cpu")


def test_a_step_is_timed_behind_a_wait_and_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("wait"))
    monkeypatch.setattr(host, "STEPS", 2)
    clock = iter((0.0, 1.0, 0.0, 3.0))
    monkeypatch.setattr(host.time, "perf_counter", lambda: done.append("clock") or next(clock))
    median = host._median(
        lambda: done.append("step"), lambda: done.append("prepare"), torch.device("cuda")
    )
    assert done == ["prepare", "wait", "clock", "step", "clock"] * 2
    assert median == 2000.0


def test_both_are_measured_for_each_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "STEPS", 2)
    found = measure_host(CPU, (2, 5), backend="reference")
    assert [each.tensors for each in found] == [2, 5]
    assert all(
        min(each.ours_ms, each.torch_ms, each.ours_moved_ms, each.torch_moved_ms) > 0
        for each in found
    )


def test_table_and_record_say_what_was_measured() -> None:
    figures = [
        HostFigures(tensors=4000, ours_ms=0.5, torch_ms=20, ours_moved_ms=2, torch_moved_ms=21)
    ]
    console = Console(width=200, record=True)
    print_table(console, host_table(figures))
    text = console.export_text()
    for cell in ("4,000", "0.500", "20.000", "40.00x", "2.000", "21.000", "10.50x"):
        assert cell in text
    record = json.loads(json.dumps(host_record(figures)))
    assert record["cases"][0]["torch_moved_ms"] == 21
    assert record["elements"] == 1024


def test_the_set_has_no_cases_of_its_own() -> None:
    assert select((HOST,)) == []
    assert select((HOST,), ("bf16",)) == []
    assert {case.tensors.name for case in select((HOST, "C"), ("bf16",))} == {"C"}
