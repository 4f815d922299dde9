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


def test_both_are_measured_for_each_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "STEPS", 2)
    found = measure_host(torch.device("cpu"), (2, 5), backend="reference")
    assert [each.tensors for each in found] == [2, 5]
    assert select((HOST,), ("bf16",)) == []  # it has no cases of its own


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
