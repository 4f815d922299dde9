"""The bench's table and record, from given figures, and the host's share of a step."""

import io
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_figures import FIGURES
from rich.console import Console
from torch.autograd import DeviceType

from megaopt.kernels.files import write_json
from megaopt.lab.bench import command
from megaopt.lab.bench.command import (
    NAMED,
    TIMED,
    BenchCase,
    add_ratios,
    host_table,
    measure_host,
    record_of,
    select,
)
from megaopt.lab.bench.equality import Check
from megaopt.lab.bench.measure import Record, count_device_work, time_steps, with_rates
from megaopt.lab.bench.modes import MODES
from megaopt.lab.bench.report import table_of
from megaopt.lab.bench.sets import HOST, SETS
from megaopt.lab.bench.subjects import PEERS
from megaopt.lab.console import print_table

A_BF16 = BenchCase(SETS["A"], MODES["bf16"])
A_TE = BenchCase(SETS["A"], PEERS["transformerengine-bf16"])
A_FP32 = BenchCase(SETS["A"], MODES["fp32"])
C_BF16 = BenchCase(SETS["C"], MODES["bf16"])
SLOW = with_rates(
    FIGURES | {"step_ms": 3.0, "wall_ms": 9.0, "wall_moved_ms": 20.0, "bytes": 26_500}
)
CASES = [
    record_of(A_BF16, FIGURES, None, Check("reference")),
    record_of(A_TE, SLOW),
    record_of(A_FP32, None, "differs from ...", Check("torch-fused-fp32", "step 1, tensor 0")),
    record_of(C_BF16, with_rates(FIGURES | {"kernels": {}}), None, Check(None)),
]
add_ratios(CASES)


def test_percent_and_bandwidth() -> None:
    assert FIGURES["percent_of_copy"] == 75.0  # 14 against 18.67 bytes/us
    assert FIGURES["copy_bandwidth"] == 56_000 / 3e-3
    assert FIGURES["launches"] == 1
    assert with_rates(FIGURES | {"kernels": {"a": 2, "b": 3}})["launches"] == 5
    assert with_rates(FIGURES | {"kernels": {}})["launches"] is None


def test_a_step_is_timed_behind_what_goes_before_it() -> None:
    calls: list[str] = []
    names = ("prepare", "queue", "before")
    others = {name: partial(calls.append, name) for name in names}
    times = time_steps(partial(calls.append, "step"), 2, torch.device("cpu"), **others)
    assert calls == [*names, "step"] * 2
    assert [len(values) for values in times] == [2] * 4
    assert all(host <= wall for host, wall in zip(times.host, times.wall, strict=True))


def test_only_work_on_the_device_is_counted() -> None:
    def event(name: str, device: DeviceType = DeviceType.CUDA, note: bool = False) -> Any:
        return SimpleNamespace(name=name, device_type=device, is_user_annotation=note)

    events = [
        event("step_kernel"),
        event("step_kernel"),
        event("fill"),
        event("Memcpy HtoD (Pinned -> Device)"),
        event("Memset (Device)"),
        event("Optimizer.step#FusedAdam.step", note=True),
        event("cudaLaunchKernel", DeviceType.CPU),
    ]
    kernels, transfers = count_device_work(events)
    assert kernels == {"step_kernel": 2, "fill": 1}
    assert transfers == {"Memcpy HtoD (Pinned -> Device)": 1, "Memset (Device)": 1}


def test_ratios_are_to_the_peers_of_the_same_set() -> None:
    ours, peer, without_speed, alone = CASES
    ratio = {"peer": "transformerengine-bf16", "step": 1.5, "wall": 4.0, "wall_moved": 8.0}
    assert ours["times_faster_than"] == [ratio]
    assert not any("times_faster_than" in case for case in (peer, without_speed))
    assert alone["times_faster_than"] == []  # the peer was not measured on set C


def test_record_holds_every_figure(tmp_path: Path) -> None:
    write_json(tmp_path / "record.json", {"cases": CASES})
    good, peer, bad, unknown = json.loads((tmp_path / "record.json").read_text())["cases"]
    assert (good["case"], good["ours"], good["contract"]) == ("A/bf16", "bf16", "ieee")
    assert (good["checked_against"], good["equal"]) == ("reference", True)
    for name in ("step_ms", "copy_ms", "wall_ms", "wall_moved_ms", "bytes", "scratch_bytes"):
        assert good[name] == FIGURES[name]
    assert good["kernels"] == {"step_kernel": 1}
    assert good["percent_of_copy"] == FIGURES["percent_of_copy"]
    assert peer["peer"] == "transformerengine-bf16"
    assert peer["bytes_per_parameter"] == 26.5  # as counted, not as declared
    assert not {"equal", "contract", "times_faster_than"} & peer.keys()
    assert (unknown["checked_against"], unknown["equal"]) == (None, None)
    assert unknown["launches"] is None
    assert (bad["checked_against"], bad["equal"]) == ("torch-fused-fp32", False)
    assert bad["problem"].startswith("differs")
    assert not {"step_ms", "percent_of_copy", "times_faster_than"} & bad.keys()


def printed(cases: list[Record], width: int) -> list[str]:
    text = io.StringIO()
    print_table(Console(width=width, file=text), table_of("", cases, NAMED, TIMED))
    return text.getvalue().splitlines()


def row(lines: list[str], case: str) -> list[str]:
    (line,) = [line for line in lines if line.startswith(f"│ {case} ")]
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_table_has_figures_and_no_speed_for_a_failed_case() -> None:
    lines = printed(CASES, 300)
    figures = ["28", "14", "2.000", "75.0%", "2.250", "2.500", "1", "1.0"]
    against = "transformerengine-bf16 1.50x / 4.00x / 8.00x"
    assert row(lines, "A/bf16") == ["A/bf16", "✓ reference", *figures, against]
    peer = row(lines, "A/transformerengine-bf16")
    assert peer[1:5] == ["", "26.5", "14", "3.000"]
    assert row(lines, "A/fp32")[1:] == ["differ", "28", "", "no speed", *[""] * 6]
    assert row(lines, "C/bf16")[1] == "unchecked"
    assert row(lines, "C/bf16")[8] == "unknown"


def test_narrow_terminal_cuts_nothing_off() -> None:
    long = {**CASES[0], "case": "llama70b-64/bf16-remainders-moments"}
    assert printed([*CASES, long], 80) == printed([*CASES, long], 300)


def test_both_are_measured_for_each_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "HOST_STEPS", 2)
    found = measure_host(torch.device("cpu"), (2, 5), backend="reference")
    assert [each["tensors"] for each in found["cases"]] == [2, 5]
    assert (found["elements"], found["repetitions"]) == (1024, 2)
    names = {"tensors", "ours_ms", "torch_ms", "ours_moved_ms", "torch_moved_ms"}
    assert all(each.keys() == names and min(each.values()) > 0 for each in found["cases"])
    assert json.loads(json.dumps(found)) == found
    assert select((HOST,), ("bf16",)) == []  # it has no cases of its own


def test_the_hosts_table_says_what_was_measured() -> None:
    times = {"ours_ms": 0.5, "torch_ms": 20, "ours_moved_ms": 2, "torch_moved_ms": 21}
    figures = [{"tensors": 4000, **times}]
    console = Console(width=200, record=True)
    print_table(console, host_table(figures))
    text = console.export_text()
    for cell in ("4,000", "0.500", "20.000", "40.00x", "2.000", "21.000", "10.50x"):
        assert cell in text
