"""`megaopt bench` as a command: exit statuses, the gate, and, on a GPU, a whole small run."""

import json
from pathlib import Path

import pytest
import torch

from megaopt.bench import command, main
from megaopt.bench.cases import select
from megaopt.kernels.backends import BACKENDS


def test_without_a_gpu_it_says_so_and_returns_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(tmp_path / "out", (), ()) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_gpu_without_kernels_returns_2_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(type(BACKENDS["triton"]), "why_not", lambda *_: "no [kernels] here")
    assert main(tmp_path / "out", (), ()) == 2
    assert "bench: no [kernels] here" in capsys.readouterr().err


def test_unknown_names_return_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tmp_path, ("Z",), ()) == 2
    assert "sets=['Z']" in capsys.readouterr().err
    assert main(tmp_path, (), ("Z",)) == 2
    assert "only=['Z']" in capsys.readouterr().err


def test_case_that_differs_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_called(*_: object) -> None:
        raise AssertionError("a case whose bits are wrong was built or measured")

    monkeypatch.setattr(command, "first_difference", lambda *_: "step 1, tensor 0")
    monkeypatch.setattr(command, "build", not_called)
    monkeypatch.setattr(command, "measure", not_called)
    result = command.run(select(("A",), ("bf16",))[0], torch.device("cpu"), None)
    assert result.figures is None
    assert "differs from the reference: step 1, tensor 0" in result.problem


@pytest.mark.gpu
def test_difference_reaches_the_exit_status_and_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "first_difference", lambda *_: "step 1, tensor 0")
    assert main(tmp_path, ("C",), ("bf16",)) == 1
    (case,) = json.loads((tmp_path / "record.json").read_text())["cases"]
    assert case["equal_to_reference"] is False
    assert "percent_of_copy" not in case


@pytest.mark.gpu
def test_small_run_on_a_gpu(tmp_path: Path) -> None:
    assert main(tmp_path, ("C",), ("bf16", "bf16-remainders")) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["environment"]["gpu"]
    assert [case["case"] for case in record["cases"]] == ["C/bf16", "C/bf16-remainders"]
    for case in record["cases"]:
        assert case["tensors"] == 4000
        assert case["bytes"] == case["bytes_per_parameter"] * 4_096_000
        assert case["launches"] in (None, 1)  # None where the profiler may not look
        assert case["wall_ms"] > 0
    assert (tmp_path / "speed.png").stat().st_size > 5000
