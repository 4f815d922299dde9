"""One GPT trained on real text with many kinds of optimizers: what rounding costs in the loss.

What tools that train it share (tools/train_muon.py); constants that one of them
sets are for its own runs. The text is the source of Python's
standard library: comments, docstrings and code, some 10 MB. The last twentieth of it is held out.
The model has 29 million parameters, bf16 matrices, fp32 norms, unless a tool says another.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megaopt.commands.config import ModelConfig
from megaopt.commands.environment import describe
from megaopt.commands.source import describe_source, portable
from megaopt.commands.training.model import GPT, build_model
from megaopt.optimizer import FusedOptimizer

MODEL = ModelConfig(layers=9, heads=8, width=512, context=512, vocabulary_size=256)
BATCH, STEPS, WARMUP, PEAK, LAST = 16, 1500, 100, 1e-3, 1e-5
HELD_OUT_BATCHES = 64
ALL_FP32 = False
"""All weights and gradients are fp32, and the passes go through autocast to bf16."""
BAND = "fp32"
"""The kind whose seeds' losses are a band in the picture; the first where there is none."""
MEANS_OF = 50
"""So many steps' training losses are one number of a record."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Kind = Callable[[list[dict[str, Any]], int], Any]
"""Makes an optimizer of groups and a seed. Its method `prepare`, where it has one, changes the
model before that."""


def text() -> torch.Tensor:
    """All modules of the standard library, in order of their names; uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    files = [path for path in files if "dist-packages" not in path.parts]
    content = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(DEVICE)


def learning_rate(step: int) -> float:
    """Linear to PEAK, then a cosine to LAST."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return LAST + (PEAK - LAST) * 0.5 * (1 + math.cos(math.pi * done))


def batch(tokens: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 (BATCH, context)."""
    last = tokens.numel() - MODEL.context - 1
    starts = torch.randint(last, (BATCH, 1), generator=generator).to(DEVICE)
    own = tokens[starts + torch.arange(MODEL.context + 1, device=DEVICE)].long()
    return own[:, :-1], own[:, 1:]


def loss_of(model: GPT, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """In nats a byte."""
    with torch.autocast(DEVICE, torch.bfloat16, enabled=ALL_FP32):
        loss: torch.Tensor = model(inputs, targets)
    return loss


@torch.no_grad()
def held_out_loss(model: GPT, tokens: torch.Tensor) -> float:
    """The mean over batches that are the same for all, in nats a byte."""
    generator = torch.Generator().manual_seed(12345)
    losses = [loss_of(model, *batch(tokens, generator)) for _ in range(HELD_OUT_BATCHES)]
    return float(torch.stack(losses).mean())


def clip(params: list[torch.nn.Parameter], largest: float = 1.0) -> None:
    """Scales all gradients so that their norm, taken in fp32, is at most `largest`."""
    grads = [param.grad for param in params if param.grad is not None]
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
    coefficient = (largest / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(coefficient)


def step(optimizer: Any, lr: float) -> None:
    """One step with clipped gradients: ours clips by itself; torchao's lr is a tensor.

    A group may have lr_factor, by which its lr is another.
    """
    for group in optimizer.param_groups:
        own = lr * group.get("lr_factor", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own
    if isinstance(optimizer, FusedOptimizer):
        optimizer.step(clip_norm=1.0)
    else:
        clip([param for group in optimizer.param_groups for param in group["params"]])
        optimizer.step()
    optimizer.zero_grad()


def train(kind: Kind, seed: int, tokens: torch.Tensor) -> dict[str, Any]:
    """One run: means of the losses, and the held-out loss behind the last step.

    Also what the optimizer's method `report` returns, where it has one.
    """
    cut = tokens.numel() - tokens.numel() // 20
    model = build_model(MODEL, seed, torch.device(DEVICE))
    model = model.float() if ALL_FP32 else model
    if hasattr(kind, "prepare"):
        kind.prepare(model)
    matrices = [param for param in model.parameters() if param.ndim > 1]
    norms = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    torch.manual_seed(seed)  # of those that draw from torch's own generator
    optimizer = kind(groups, seed)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for index in range(STEPS):
        loss = loss_of(model, *batch(tokens[:cut], generator))
        loss.backward()
        step(optimizer, learning_rate(index))
        losses.append(loss.detach())
    means = torch.stack(losses).view(-1, MEANS_OF).mean(1)
    found = {"held_out": held_out_loss(model, tokens[cut:])}
    found |= optimizer.report() if hasattr(optimizer, "report") else {}
    return {**found, "losses": [round(x, 5) for x in means.tolist()]}


def run(out: Path, seed: int, kinds: Mapping[str, Kind], versions: Mapping[str, str]) -> None:
    """Every kind with one seed; the file is written anew behind each."""
    tokens = text()
    record: dict[str, Any] = {
        "command": portable(["python", *sys.argv]),
        "source": describe_source(),
        "environment": describe(),
        "versions": dict(versions),
        "text": {
            "what": "Python's standard library, *.py",
            "bytes": tokens.numel(),
            "sha256": hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest(),
        },
        "model": f"{MODEL}",
        "seeds": {str(seed): {}},
    }
    for name, kind in kinds.items():
        start = time.perf_counter()
        found = record["seeds"][str(seed)][name] = train(kind, seed, tokens)
        seconds = time.perf_counter() - start
        print(f"seed {seed}, {name}: {found['held_out']:.5f} in {seconds:.0f} s", flush=True)
        out.write_text(json.dumps(record), encoding="utf-8")


def join(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of several seeds', of one or more runs each, with the kinds that all seeds have.

    Raises ValueError where source, text, model or versions differ.
    """
    first = records[0]
    for key in ("source", "versions", "text", "model"):
        if any(each[key] != first[key] for each in records):
            raise ValueError(f"{key} must be the same in all records, got others")
    seeds: dict[str, dict[str, Any]] = {}
    for each in records:
        for seed, found in each["seeds"].items():
            seeds.setdefault(seed, {}).update(found)
    runs = list(seeds.values())
    kinds = [name for name in runs[0] if all(name in each for each in runs)]
    joined = {seed: {name: runs[name] for name in kinds} for seed, runs in seeds.items()}
    return {**first, "command": [each["command"] for each in records], "seeds": joined}


def table(record: dict[str, Any]) -> str:
    """The held-out losses as a page shows them: a row a kind, a column a seed."""
    seeds = record["seeds"]
    kinds = list(next(iter(seeds.values())))
    rows = [["optimizer", *(f"seed {seed}" for seed in seeds)], ["---"] * (len(seeds) + 1)]
    rows += [
        [name, *(f"{runs[name]['held_out']:.4f}" for runs in seeds.values())] for name in kinds
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(record: dict[str, Any], picture: Path) -> None:
    """The held-out losses of all kinds, a dot a seed, and fp32's band; the losses beside them."""
    from matplotlib.figure import Figure

    seeds = record["seeds"]
    first, runs = next(iter(seeds.items()))
    figure = Figure(figsize=(11, 4.5), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    name = BAND if BAND in runs else next(iter(runs))
    band = [each[name]["held_out"] for each in seeds.values()]
    left.axvspan(min(band), max(band), color="#3b6ea5", alpha=0.2, label=f"{name}, all seeds")
    for place, kind in enumerate(runs):
        found = [each[kind]["held_out"] for each in seeds.values()]
        left.plot(found, [place] * len(found), "o", color="#3b6ea5", markersize=5)
        losses = runs[kind]["losses"]
        right.plot(
            [MEANS_OF * (i + 0.5) for i in range(len(losses))], losses, label=kind, linewidth=1
        )
    left.set_yticks(range(len(runs)), list(runs))
    left.invert_yaxis()
    left.set_xlabel("held-out loss, nats a byte")
    left.legend(loc="best", fontsize=8)
    right.set_xlabel("step")
    right.set_ylabel(f"training loss, seed {first}, means of {MEANS_OF}")
    right.set_yscale("log")
    right.legend(fontsize=7)
    figure.savefig(picture)


def main(
    about: str,
    kinds: Mapping[str, Kind],
    versions: Callable[[], Mapping[str, str]] = dict,
    models: Mapping[str, ModelConfig] | None = None,
) -> dict[str, Any] | None:
    """Reads the command line, and runs one seed, or joins, draws and prints several.

    models: of which `run` takes one by its name; None: it takes MODEL.

    Returns:
        The joined record, None of a run.
    """
    global MODEL
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    own = commands.add_parser("run", help="train with one seed, on a GPU")
    own.add_argument("out", type=Path)
    own.add_argument("--seed", type=int, default=0)
    own.add_argument("--kinds", nargs="+", choices=[*kinds], default=[*kinds])
    if models is not None:
        own.add_argument("--model", choices=[*models], required=True)
    own = commands.add_parser("join", help="one record, a picture and a table of several seeds")
    own.add_argument("record", type=Path)
    own.add_argument("picture", type=Path)
    own.add_argument("records", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "run":
        MODEL = MODEL if models is None else models[given.model]
        run(given.out, given.seed, {name: kinds[name] for name in given.kinds}, versions())
        return None
    record = join([json.loads(path.read_text(encoding="utf-8")) for path in given.records])
    given.record.write_text(json.dumps(record), encoding="utf-8")
    draw(record, given.picture)
    print(table(record))
    return record
