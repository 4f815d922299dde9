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
    scripts = sorted(FOLDER.glob("*.py"))
    assert len(scripts) == 3
    for path in scripts:
        assert len(path.read_text(encoding="utf-8").splitlines()) < 80, path


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
