"""tools/moment_fidelity.py: a small run of ours, and the table of a record."""

import importlib
import math
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
NAMES = ("followed_kinds", "followed_moments", "moment_fidelity")


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    yield importlib.import_module("moment_fidelity")
    for name in NAMES:
        sys.modules.pop(name, None)


def row(kind, what, median, **more):
    spread = {"low": median, "median": median, "high": median, "mean": median}
    return {"kind": kind, "what": what, "size": 1e-5, **spread, **more}


def record_of(tool, *rows):
    """As it says where nothing is lost, but for these rows."""
    ones = [row("k", what, 1.0, beta2=0.9) for what in (*tool.READINGS, tool.RMS)]
    ones += [row("k", f"{tool.RMS}, 1,000x smaller", 1.0, beta2=0.9)]
    ones += [row("k", what, 1.0, beta1=0.9) for what in tool.HALVED]
    return {"results": [*ones, {"kind": "k", "what": "update", "error": 0.0, "beta2": 0.9}, *rows]}


def test_a_table_shows_what_is_farthest_from_exact(tool) -> None:
    record = record_of(
        tool,
        row("k", "stationary", 1.5, beta2=0.99),
        row("k", "stationary", 0.5, beta2=0.999, low=None),
        row("k", "stationary", None, beta2=0.99, size=1e4),
        {"kind": "k", "what": "update", "error": 0.15, "beta2": 0.99},
    )
    heading, _, cells = tool.table(record).splitlines()
    assert cells.startswith("| k | 0.5 (inf to 0.5) | 1 (1 to 1) |")
    assert cells.count("|") == heading.count("|")
    assert "| 15% |" in cells
    assert tool.table(record, tool.SIZES).splitlines()[2].startswith("| k | inf (inf to inf) |")


def test_a_small_run_has_all_of_ours_and_keeps_fp32_exact(tool, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tool, "BETAS2", (0.9,))
    monkeypatch.setattr(tool, "BETAS1", (0.9,))
    monkeypatch.setattr(tool.torch.cuda, "is_available", lambda: False)
    record = tool.run(steps=6, rows=16)
    kinds = {row["kind"] for row in record["results"]}
    assert {"fp32", "blocks, stochastic", "4 bits"} <= kinds
    assert [*record["skipped"].values()] == ["needs a GPU"] * 5
    for each in record["results"]:
        if each["kind"] == "fp32" and "median" in each:
            assert each["median"] == pytest.approx(1, abs=6 * 2**-22)
        if each["kind"] == "blocks, stochastic" and each["what"] == "update":
            assert 1e-3 < each["error"] < 0.15
    tool.draw(record, tmp_path / "picture.png")
    assert tool.table(record).count("\n") == 1 + len(kinds)


def test_too_few_rows_are_refused(tool) -> None:
    for rows in (14, 17):
        with pytest.raises(ValueError, match=f"rows must be even and at least 16, got {rows}"):
            tool.run(1, rows)
    assert tool._worst([1.0, None]) == math.inf
