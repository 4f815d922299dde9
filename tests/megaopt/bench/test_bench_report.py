"""The bench's table, record and picture, from given figures."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console
from torch.autograd import DeviceType

from megaopt.bench.cases import MODES, SETS, Case
from megaopt.bench.measure import Figures, count_device_work
from megaopt.bench.report import Result, draw, record_of, table_of, write_record

FIGURES = Figures(
    tensors=1,
    elements=1000,
    bytes=28_000,
    step_ms=2.0,
    step_ms_quartiles=(1.9, 2.1),
    copy_bytes=56_000,
    copy_ms=3.0,
    copy_ms_quartiles=(2.9, 3.1),
    wall_ms=2.25,
    wall_moved_ms=2.5,
    kernels={"step_kernel": 1},
    transfers={"Memcpy HtoD": 2},
    scratch_bytes=2**20,
)
RESULTS = [
    Result(Case(SETS["A"], MODES["bf16"]), FIGURES),
    Result(Case(SETS["A"], MODES["fp32"]), None, "step 1, tensor 0, weight[3]: ..."),
    Result(Case(SETS["C"], MODES["bf16"]), replace(FIGURES, kernels={})),
]
HERE = {"gpu": "a card", "cuda_driver": None}


def test_percent_and_bandwidth() -> None:
    assert FIGURES.percent_of_copy == pytest.approx(75.0, rel=1e-12)  # 14 against 18.67 bytes/us
    assert FIGURES.copy_bandwidth == pytest.approx(56_000 / 3e-3, rel=1e-12)
    assert FIGURES.launches == 1
    assert replace(FIGURES, kernels={"a": 2, "b": 3}).launches == 5
    assert replace(FIGURES, kernels={}).launches is None


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


def test_record_holds_every_figure(tmp_path: Path) -> None:
    write_record(tmp_path / "record.json", record_of(RESULTS, HERE, "megaopt bench"))
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["environment"] == HERE
    assert record["command"] == "megaopt bench"
    assert set(record["sets"]) == {"A", "C"}
    good, bad, unknown = record["cases"]
    assert good["case"] == "A/bf16"
    assert good["equal_to_reference"] is True
    for name in ("step_ms", "copy_ms", "wall_ms", "wall_moved_ms", "bytes", "scratch_bytes"):
        assert good[name] == getattr(FIGURES, name)
    assert good["kernels"] == {"step_kernel": 1}
    assert good["percent_of_copy"] == FIGURES.percent_of_copy
    assert unknown["launches"] is None
    assert bad["equal_to_reference"] is False
    assert bad["problem"].startswith("step 1")
    assert not {"step_ms", "percent_of_copy"} & bad.keys()


def test_table_has_figures_and_no_speed_for_a_failed_case() -> None:
    text = io.StringIO()
    Console(width=120, file=text).print(table_of(RESULTS))
    rows = {
        line.split()[1]: line
        for line in text.getvalue().splitlines()
        if "bf16" in line or "fp32" in line
    }
    for figure in ("28", "2.000", "75.0%", "2.250", "2.500", "1.0"):
        assert figure in rows["A/bf16"]
    assert "no speed" in rows["A/fp32"]
    assert "%" not in rows["A/fp32"]
    assert "unknown" in rows["C/bf16"]


def blue_pixels(path: Path) -> int:
    image = matplotlib.image.imread(path)[..., :3]
    bar_colour = np.array([0x3B, 0x6E, 0xA5]) / 255
    return int((np.abs(image - bar_colour).max(axis=-1) < 0.01).sum())


def test_picture_has_bars_in_proportion(tmp_path: Path) -> None:
    fast = [Result(RESULTS[0].case, replace(FIGURES, step_ms=1.5))]  # 100%
    slow = [Result(RESULTS[0].case, replace(FIGURES, step_ms=3.0))]  # 50%
    draw(tmp_path / "fast.png", fast, "a card")
    draw(tmp_path / "slow.png", slow, "a card")
    assert blue_pixels(tmp_path / "slow.png") > 1000
    ratio = blue_pixels(tmp_path / "fast.png") / blue_pixels(tmp_path / "slow.png")
    assert ratio == pytest.approx(2, abs=0.15)  # text and the line at 100% cover some pixels


def test_picture_of_a_failed_case_has_no_bar(tmp_path: Path) -> None:
    draw(tmp_path / "none.png", [RESULTS[1]], None)
    assert blue_pixels(tmp_path / "none.png") < 100
