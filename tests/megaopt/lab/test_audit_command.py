"""`megaopt audit`: what it prints and writes, and its exit status."""

import json

import pytest
import torch
from wrong_steps import AdamW, Model, audited

from megaopt.lab.cli import main


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_a_run_that_obeys(tmp_path, capsys):
    model = Model()
    audited(tmp_path / "run", model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert main(["audit", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == "AdamW obeys its law in 4 steps: 12 updates of tensors\n"


def test_a_run_that_does_not(tmp_path, capsys):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def write(step):
        if step == 3:
            model.parts[1].data.mul_(0.5)

    audited(tmp_path / "run", model, optimizer, between=write)
    out = tmp_path / "report.json"
    assert main(["audit", str(tmp_path / "run"), "--json", str(out)]) == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == (
        "AdamW does not obey its law from step 3 on: outside write (1 tensor: parts.1)"
    )
    assert rest[0].startswith("step 3")
    report = json.loads(out.read_text())
    assert (report["obeys"], report["checked"]) == (False, 12)
    assert report["optimizers"] == ["torch.optim.adamw.AdamW"]
    (finding,) = report["findings"]
    assert finding == {
        "step": 3,
        "name": "parts.1",
        "quantity": "weight",
        "explanation": "outside write",
        "ratio": None,
        "off": None,
    }


def test_a_run_of_an_optimizer_without_a_law(tmp_path, capsys):
    model = Model()
    audited(tmp_path / "run", model, AdamW(model.parameters()))
    assert main(["audit", str(tmp_path / "run")]) == 2
    out = capsys.readouterr().out
    assert out.startswith("AdamW: nothing could be checked in 4 steps")
    assert "wrong_steps.AdamW is not known: 3 tensors: parts.0, parts.1, parts.2" in out


def test_a_folder_without_a_recording(tmp_path, capsys):
    assert main(["audit", str(tmp_path)]) == 2
    assert "recording must be a folder with rank-0" in capsys.readouterr().err
