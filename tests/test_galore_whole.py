"""tools/galore_whole.py: all its measurements once, of tiny matrices."""

import importlib
import json
import sys
import types
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[1] / "tools"
RECORD = TOOLS.parent / "docs" / "benchmarks" / "h200-galore-whole.json"


def peer(groups, *, no_deprecation_warning, **options):
    """In the place of galore_torch's AdamW, which need not be there."""
    assert no_deprecation_warning
    assert groups[0]["proj_type"] == "std"
    return torch.optim.AdamW(groups[0]["params"], **options)


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield importlib.import_module("galore_whole")
    for name in ("galore_whole", "device_figures", "galore_torch_peer"):
        sys.modules.pop(name, None)


def renamed(name, tool):
    """What the record of Llama's matrices calls this case."""
    tiny, llama = tool.TINY, tool.LLAMA
    columns = {tiny.width: llama.width, tiny.inner: llama.inner}
    for small, large in columns.items():
        name = name.replace(f"of {tiny.width}x{small} ", f"of {llama.width}x{large} ")
    name = name.replace(f"rank {tiny.rank} ", f"rank {llama.rank} ")
    return name.replace(f"{tiny.many} of {llama.width}", f"{llama.many} of {llama.width}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="takes a CPU: on a GPU sizes are Llama-7B's")
def test_a_run_of_tiny_matrices_has_the_records_cases(tool, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tool, "why_not", lambda: None)
    monkeypatch.setattr(tool, "adamw", lambda: types.SimpleNamespace(AdamW=peer))
    found = tool.run(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == found
    record = json.loads(RECORD.read_text())
    ours = {renamed(name, tool): figures for name, figures in found.items()}
    others = {f"rank {rank} " for rank in tool.LLAMA.ranks if rank != tool.LLAMA.rank}
    assert set(ours) == {name for name in record if not any(each in name for each in others)}
    for name in set(ours) - {"source", "environment", "command"}:
        assert {*ours[name], *(["compiled_ms"] * ("compiled_ms" in record[name]))} == {
            *record[name]
        }
    assert found["state"]["equal"] is True
    assert 0 < found["first step, all bases cold"]["energy"] <= 1
    assert found["fused_adam"]["ms"] > 0


def test_floor_and_state_are_the_records(tool) -> None:
    """Bytes of the 224 matrices, counted without making them."""
    llama, record = tool.LLAMA, json.loads(RECORD.read_text())
    shapes = llama.layer * llama.layers
    params = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    speed = record["copy"]["bytes_per_s"]
    floor = tool.floor_ms(params, speed, True, llama.rank)
    assert floor == pytest.approx(record["llama"]["floor_ms"], rel=1e-12)
    one = [torch.empty(4096, 11008, dtype=torch.bfloat16, device="meta")]
    for name, each in (("galore_torch bf16", one), ("galore_torch fp32 ieee", [one[0].float()])):
        floor = tool.floor_ms(each, speed, False, 128)
        assert floor == pytest.approx(record[name]["floor_ms"], rel=1e-12)
    assert record["state"]["weights"] == 2 * tool.elements(params)


def test_without_galore_torch_the_record_says_so(tool, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tool, "why_not", lambda: "needs galore_torch")
    record = tool.Record(tmp_path / "out.json")
    tool.beside_galore_torch(record, 1.0)
    record.say("last")
    assert json.loads(record.out.read_text())["galore_torch skipped"] == "needs galore_torch"
