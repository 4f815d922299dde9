"""Trains one GPT with every kind of master, on real text: what rounding costs in the loss.

    python tools/train_masters.py run OUT.json --seed 0     # on a GPU, one file a seed
    python tools/train_masters.py draw PICTURE.png OUT.json ...

The text is the source of Python's standard library: comments, docstrings and code, some 10 MB. The
last twentieth of it is held out. The model has 29 million parameters, bf16 matrices, fp32 norms.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from megaopt import FusedAdam
from megaopt.commands.config import ModelConfig
from megaopt.commands.environment import describe
from megaopt.commands.training.model import GPT, build_model
from megaopt.source import describe_source

MODEL = ModelConfig(layers=9, heads=8, width=512, context=512, vocabulary_size=256)
BATCH, STEPS, WARMUP, PEAK, LAST = 16, 1500, 100, 1e-3, 1e-5
HELD_OUT_BATCHES = 64
DRAWN = {"exp_avg_dtype": "bfloat16_stochastic", "exp_avg_sq_dtype": "bfloat16_stochastic"}
BF16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}


def _master(name: torch.dtype | str) -> dict[str, Any]:
    return {"master_weights": True, "master_weight_dtype": name}


NONE = {"master_weights": False}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": _master(torch.float32),
    "remainder16": {"master_weights": True, "store_param_remainders": True},
    "remainder8": _master("remainder8"),
    "remainder8_stochastic": _master("remainder8_stochastic"),
    "kahan": _master("kahan"),
    "kahan_stochastic": _master("kahan_stochastic"),
    "none, stochastic": {**NONE, "weight_rounding": "stochastic"},
    "none, stochastic, bf16 moments stochastic": {
        **NONE,
        "weight_rounding": "stochastic",
        **DRAWN,
    },
    "fp32, bf16 moments nearest": {**_master(torch.float32), **BF16},
    "none, nearest": NONE,
}


def text() -> torch.Tensor:
    """All modules of the standard library, in order of their names; uint8 on the GPU."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    files = [path for path in files if "dist-packages" not in path.parts]
    content = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).cuda()


def learning_rate(step: int) -> float:
    """Linear to PEAK, then a cosine to LAST."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return LAST + (PEAK - LAST) * 0.5 * (1 + math.cos(math.pi * done))


def batch(tokens: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 (BATCH, context)."""
    last = tokens.numel() - MODEL.context - 1
    starts = torch.randint(last, (BATCH, 1), generator=generator).cuda()
    own = tokens[starts + torch.arange(MODEL.context + 1, device="cuda")].long()
    return own[:, :-1], own[:, 1:]


@torch.no_grad()
def held_out_loss(model: GPT, tokens: torch.Tensor) -> float:
    """The mean over batches that are the same for all, in nats a byte."""
    generator = torch.Generator().manual_seed(12345)
    losses = [model(*batch(tokens, generator)) for _ in range(HELD_OUT_BATCHES)]
    return float(torch.stack(losses).mean())


def train(kind: str, seed: int, tokens: torch.Tensor) -> dict[str, Any]:
    """One run: the losses of all steps, and the held-out loss behind the last."""
    cut = tokens.numel() - tokens.numel() // 20
    model = build_model(MODEL, seed, torch.device("cuda"))
    matrices = [param for param in model.parameters() if param.ndim > 1]
    norms = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = FusedAdam(groups, betas=(0.9, 0.99), seed=seed, **KINDS[kind])
    generator = torch.Generator().manual_seed(seed)
    losses, start = [], time.perf_counter()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = model(*batch(tokens[:cut], generator))
        loss.backward()
        optimizer.step(clip_norm=1.0)
        optimizer.zero_grad()
        losses.append(loss.detach())
    found = held_out_loss(model, tokens[cut:])
    seconds = time.perf_counter() - start
    print(f"seed {seed}, {kind}: {found:.5f} in {seconds:.0f} s", flush=True)
    return {"held_out": found, "losses": [round(x, 5) for x in torch.stack(losses).tolist()]}


def run(out: Path, seed: int) -> None:
    """Every kind with one seed."""
    tokens = text()
    record = {
        "command": ["python", *sys.argv],
        "source": describe_source(),
        "environment": describe(),
        "text": {
            "what": "Python's standard library, *.py",
            "bytes": tokens.numel(),
            "sha256": hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest(),
        },
        "model": f"{MODEL}",
        "seed": seed,
        "runs": {kind: train(kind, seed, tokens) for kind in KINDS},
    }
    out.write_text(json.dumps(record), encoding="utf-8")


def draw(picture: Path, records: list[Path]) -> None:
    """The held-out losses of all kinds, a dot a seed, and fp32's band; the losses beside them."""
    from matplotlib.figure import Figure

    seeds = [json.loads(path.read_text(encoding="utf-8")) for path in records]
    figure = Figure(figsize=(11, 4.5), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    band = [each["runs"]["fp32"]["held_out"] for each in seeds]
    left.axvspan(min(band), max(band), color="#3b6ea5", alpha=0.2, label="fp32 masters, all seeds")
    for place, kind in enumerate(KINDS):
        found = [each["runs"][kind]["held_out"] for each in seeds]
        left.plot(found, [place] * len(found), "o", color="#3b6ea5", markersize=5)
        own = torch.tensor(seeds[0]["runs"][kind]["losses"])
        smooth = own.view(-1, 50).mean(1)
        right.plot(torch.arange(len(smooth)) * 50 + 25, smooth, label=kind, linewidth=1)
    left.set_yticks(range(len(KINDS)), KINDS)
    left.invert_yaxis()
    left.set_xlabel("held-out loss, nats a byte")
    left.legend(loc="upper right", fontsize=8)
    right.set_xlabel("step")
    right.set_ylabel(f"training loss, seed {seeds[0]['seed']}, means of 50")
    right.set_yscale("log")
    right.legend(fontsize=7)
    figure.savefig(picture)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    own = commands.add_parser("run")
    own.add_argument("out", type=Path)
    own.add_argument("--seed", type=int, default=0)
    own = commands.add_parser("draw")
    own.add_argument("picture", type=Path)
    own.add_argument("records", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "run":
        run(given.out, given.seed)
    else:
        draw(given.picture, given.records)


if __name__ == "__main__":
    main()
