"""tools/trained_gpt.py: one small run, and the record, table and picture of several."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from megaopt import FusedAdam
from megaopt.commands.config import ModelConfig

TOOL = Path(__file__).resolve().parents[1] / "tools" / "trained_gpt.py"


@pytest.fixture
def tool(monkeypatch):
    spec = importlib.util.spec_from_file_location("trained_gpt", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.MODEL = ModelConfig(layers=1, heads=1, width=16, context=16, vocabulary_size=256)
    module.STEPS, module.WARMUP, module.BATCH, module.HELD_OUT_BATCHES = 4, 2, 2, 2
    module.MEANS_OF, module.DEVICE = 2, "cpu"
    module.text = lambda: torch.arange(2000).to(torch.uint8)
    return module


def fused(groups, seed):
    return FusedAdam(groups, betas=(0.9, 0.99), master_weights=True, seed=seed)


def test_a_record_has_each_kind_as_soon_as_it_is_trained(tool, tmp_path, capsys) -> None:
    out, seen = tmp_path / "0.json", []

    def late(groups, seed):
        seen.append([*json.loads(out.read_text())["seeds"]["7"]])
        return fused(groups, seed)

    tool.run(out, 7, {"fp32": fused, "late": late}, {"library": "1"})
    record = json.loads(out.read_text())
    runs = record["seeds"]["7"]
    assert (seen, [*runs], record["versions"]) == ([["fp32"]], ["fp32", "late"], {"library": "1"})
    assert runs["fp32"] == runs["late"]
    assert 4 < runs["fp32"]["held_out"] < 6
    assert len(runs["fp32"]["losses"]) == 2
    assert "seed 7, late: " in capsys.readouterr().out


def test_another_optimizer_is_clipped_and_given_its_rates(tool) -> None:
    model = torch.nn.Linear(3, 5, bias=True, dtype=torch.bfloat16)
    params = list(model.parameters())
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    optimizer = torch.optim.SGD(params, lr=torch.tensor(0.0))
    before = [param.detach().clone() for param in params]
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in params))
    tool.step(optimizer, 0.25)
    norm = torch.cat([grad.flatten() for grad in seen]).double().norm()
    assert norm == pytest.approx(1.0, rel=2**-8)  # half of bf16's last place, relatively
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert all(not torch.equal(one, two) for one, two in zip(before, params, strict=True))
    assert [param.grad for param in params] == [None, None]
    for param in params:
        param.grad = torch.full_like(param, 2.0**-10)
    tool.clip(params)
    assert all((param.grad == 2.0**-10).all() for param in params)


def test_a_group_may_have_a_rate_of_its_own(tool) -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": params[:1], "lr_factor": 4.0}, {"params": params[1:]}]
    optimizer = torch.optim.SGD(groups, lr=0.0)
    for param in params:
        param.grad = torch.ones(2)
    tool.step(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.25]


def test_galore_is_trained_in_fp32_beside_adam(tool, tmp_path, monkeypatch) -> None:
    """Of both refreshes, with the energies of our own."""
    monkeypatch.syspath_prepend(TOOL.parent)
    monkeypatch.setitem(sys.modules, "trained_gpt", tool)
    galore = importlib.import_module("train_galore")
    monkeypatch.setattr(galore, "RANK", 4)
    monkeypatch.setattr(galore, "GAP", 3)
    tool.ALL_FP32, tool.BAND = True, "ours"
    kinds = {name: galore.KINDS[name] for name in ("ours, SVD", "ours", "Adam")}
    tool.run(tmp_path / "0.json", 0, kinds, galore.versions())
    record = tool.join([json.loads((tmp_path / "0.json").read_text())])
    tool.draw(record, tmp_path / "picture.png")
    runs = record["seeds"]["0"]
    assert all(4 < own["held_out"] < 6 for own in runs.values())
    energies = runs["ours"]["energies"]
    assert len(energies) == 4  # two of the block's six matrices, in two steps each
    assert all(0.9 < own / best <= 1 + 1e-6 for _, _, own, best in energies)
    assert "4 refreshes: least 0.9" in galore.energies(record)
    for own in record["seeds"].values():
        own.pop("ours")
    assert galore.energies(record) is None
    tool.draw(record, tmp_path / "picture.png")  # the band is another's


def record_of(seed, *kinds, **changes):
    runs = {kind: {"held_out": 1.0 + seed / 10, "losses": [2.0, 1.5]} for kind in kinds}
    rest = {"source": "s", "versions": {}, "text": "t", "model": "m", "command": [f"run {seed}"]}
    return {**rest, "seeds": {f"{seed}": runs}, **changes}


def test_seeds_are_joined_by_the_kinds_that_all_have(tool, tmp_path) -> None:
    records = [record_of(0, "fp32", "other", "lost"), record_of(1, "fp32"), record_of(1, "other")]
    joined = tool.join(records)
    assert {seed: [*runs] for seed, runs in joined["seeds"].items()} == {
        "0": ["fp32", "other"],
        "1": ["fp32", "other"],
    }
    assert joined["command"] == [["run 0"], ["run 1"], ["run 1"]]
    assert tool.table(joined).splitlines()[-1] == "| other | 1.0000 | 1.1000 |"
    tool.draw(joined, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="text must be the same in all records"):
        tool.join([*records, record_of(2, "fp32", text="another")])


def test_the_rate_rises_to_its_peak_and_falls_to_its_last(tool) -> None:
    tool.STEPS, tool.WARMUP = 1500, 100
    rates = [tool.learning_rate(step) for step in (0, 99, 100, 800, 1500)]
    middle = (tool.PEAK + tool.LAST) / 2
    assert rates == pytest.approx([1e-5, tool.PEAK, tool.PEAK, middle, tool.LAST])
