"""The examples run, and train; each is short."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from modules import loaded

FOLDER = Path(__file__).parents[2] / "examples"


def test_each_is_short():
    pages = set(FOLDER.glob("*_on_a_page.py"))
    scripts = set(FOLDER.glob("*.py")) - pages
    assert len(scripts) == 3
    for paths, most in ((scripts, 79), (pages, 120)):
        for path in sorted(paths):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= most, path


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("lion", "sgd")]


@pytest.mark.parametrize("optimizer", ["adamw", "galore", "8bit", *SLOW])
def test_a_gpt_learns_with_each_optimizer(monkeypatch, optimizer):
    gpt = loaded("examples/train_gpt.py")
    assert optimizer in gpt.NAMES
    monkeypatch.setattr(gpt, "BATCH", 4)
    losses = gpt.main(["--optimizer", optimizer, "--steps", "8"])
    assert min(losses) < losses[0] - 0.2


def test_a_fine_tuning_holds_five_bytes():
    pytest.importorskip("transformers")
    trainer = loaded("examples/finetune_8bit.py").main(["--steps", "3"])
    optimizer = trainer.optimizer.optimizer
    weight = trainer.model.model.layers[0].mlp.up_proj.weight
    held = [weight, *(each for each in optimizer.state[weight].values() if each is not None)]
    assert weight.dtype == torch.bfloat16
    # weight, 24-bit master's rest, codes of both moments; and a scale of each 128 codes
    assert sum(each.nbytes for each in held) == weight.numel() * (2 + 1 + 2) + weight.numel() // 64


def test_a_fine_tuning_without_transformers_says_what_it_needs(monkeypatch, capsys):
    example, find_spec = loaded("examples/finetune_8bit.py"), importlib.util.find_spec
    hide = lambda name, *rest: None if name == "transformers" else find_spec(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hide)
    assert example.main([]) is None
    assert capsys.readouterr().out == "skipped: needs transformers: pip install transformers\n"


@pytest.mark.slow
def test_fsdp2_trains_on_two_ranks():
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*start, str(FOLDER / "train_fsdp2.py"), "--steps", "8"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    words = done.stdout.split()
    assert float(words[5]) < float(words[1]) - 0.5


TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
"""


@pytest.fixture
def same_run(tmp_path):
    """Takes the steps of the workflow that are megaopt's; the last one's status and output."""
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load((FOLDER / "same_run.yml").read_text(encoding="utf-8"))["jobs"].values()
    steps = [step for step in job["steps"] if step.get("run", "").startswith("megaopt ")]
    assert [step["run"].split()[1] for step in steps] == ["record", "record", "diff"]

    def run(base, head):
        for name, lr in (("base", base), ("head", head)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "train.py").write_text(TRAIN.replace("LR", str(lr)))
        for step in steps:
            done = subprocess.run(
                step["run"].replace("megaopt", f"{sys.executable} -m megaopt", 1),
                shell=True,
                cwd=tmp_path / step.get("working-directory", "."),
                env={**os.environ, "TRAIN": f"{sys.executable} train.py"},
                capture_output=True,
                text=True,
            )
        assert (tmp_path / "out" / "diff.html").exists()
        return done.returncode, done.stdout

    return run


@pytest.mark.slow
def test_the_workflow_passes_the_same_run(same_run):
    status, out = same_run(0.1, 0.1)
    assert status == 0
    assert out.startswith("same: 3 steps")


@pytest.mark.slow
def test_the_workflow_names_who_is_to_blame(same_run):
    status, out = same_run(0.1, 0.2)
    assert status == 1
    assert out.splitlines()[-1].startswith("::error title=megaopt diff::differ: step 1: weight of ")
    assert "lr of group 0: 0.1, and 0.2" in out
