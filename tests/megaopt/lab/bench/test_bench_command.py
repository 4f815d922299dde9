"""`megaopt bench` as a command: exit statuses, the gate, and, on a GPU, a whole small run."""

import json
from pathlib import Path

import pytest
import torch

from megaopt.lab.bench import command
from megaopt.lab.bench.command import BenchCase, main, record_of, select
from megaopt.lab.bench.equality import Check, check
from megaopt.lab.bench.modes import MODES
from megaopt.lab.bench.sets import SETS
from megaopt.lab.bench.subjects import PEERS, Subject
from megaopt.lab.source import describe_source
from megaopt.lab.toml_tables import ConfigError

CPU = torch.device("cpu")


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="bench cannot run here: needs a CUDA GPU"):
        main(out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def not_called(*_: object) -> None:
    raise AssertionError("a case whose bits are wrong was built or measured")


def test_case_that_differs_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "check", lambda *_: Check("reference", "step 1, tensor 0"))
    monkeypatch.setattr(Subject, "instance", not_called)
    monkeypatch.setattr(command, "measure", not_called)
    result = command.run(select(("A",), ("bf16",))[0], CPU, None)
    assert "step_ms" not in result
    assert result["problem"] == "differs from reference: step 1, tensor 0"


def test_peer_that_fails_has_its_reason_and_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("needs amp_C")

    monkeypatch.setattr(command, "check", not_called)  # a peer promises nothing
    monkeypatch.setattr(Subject, "instance", failing)
    peer = BenchCase(SETS["C"], PEERS["apex-fp32"])
    result = command.run(peer, CPU, None)
    assert (result.get("step_ms"), result["problem"]) == (None, "RuntimeError: needs amp_C")
    with pytest.raises(AssertionError):  # the check: ours is not run without it
        command.run(BenchCase(SETS["C"], MODES["bf16"]), CPU, None)


@pytest.mark.parametrize(("peers", "count"), [(True, 1 + 3), (False, 1)])
def test_peers_are_measured_unless_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peers: bool, count: int
) -> None:
    seen: list[BenchCase] = []

    def measured(case: BenchCase, *_: object) -> dict[str, object]:
        seen.append(case)
        return record_of(case, None, "not measured")

    monkeypatch.setattr(command.report, "require_gpu", lambda name: None)
    monkeypatch.setattr(command, "Copy", lambda device: None)
    monkeypatch.setattr(command, "run", measured)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Subject, "why_not", lambda _: None)
    monkeypatch.setattr(Subject, "version", lambda _: "1.0")
    assert main(out=tmp_path, sets=("A",), only=("fp32",), peers=peers) == 1
    assert len(seen) == count
    record = json.loads((tmp_path / "record.json").read_text())
    assert [case["case"] for case in record["cases"]] == [case.name for case in seen]
    assert record["source"] == describe_source()
    assert record["libraries"] == ({"apex": "1.0", "torch": "1.0"} if peers else {})
    assert record["skipped"] == {}
    assert record["command"].startswith("megaopt")
    assert (tmp_path / "speed_A.png").exists()


@pytest.mark.long
@pytest.mark.gpu
def test_small_run_on_a_gpu(tmp_path: Path) -> None:
    only = ("bf16", "bf16-remainders", "fp32", "torch-fused-fp32")
    assert main(out=tmp_path, sets=("C", "gpt2"), only=only) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["environment"]["gpu"]
    assert record["libraries"]["torch"] == torch.__version__
    measured = {case["case"]: case for case in record["cases"]}
    assert {f"{name}/{mode}" for name in ("C", "gpt2") for mode in only} <= set(measured)
    for name, case in measured.items():
        if "ours" in case:
            assert case["bytes"] == case["bytes_per_parameter"] * case["elements"]
            assert case["launches"] in (None, 1)  # None where the profiler may not look
        assert case.get("wall_ms", 1) > 0, name
    assert "torch-fused-fp32" in {r["peer"] for r in measured["C/fp32"]["times_faster_than"]}
    for name in ("C", "gpt2"):
        assert (tmp_path / f"speed_{name}.png").stat().st_size > 5000


@pytest.mark.sample(4)
@pytest.mark.gpu
@pytest.mark.parametrize("name", MODES)
def test_every_mode_passes_its_gate_on_unaligned_shards_and_cut_blocks(name: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    # shapes for fp8, and no odd sizes for two codes a byte
    shaped = MODES[name].weight is not None or name == "blocks-4bit"
    tensors = SETS["B" if shaped else "llama70b-64"]
    found = check(MODES[name], tensors.shrunk(2**20), device)
    assert found.difference is None
    assert found.against is not None or MODES[name].contract == "te"
