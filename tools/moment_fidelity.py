"""How near the moments of an optimizer stay to fp64's: our formats, and other libraries' 8 bits.

    python tools/moment_fidelity.py run OUT.json PICTURE.png [--steps 5000] [--rows 64]
    python tools/moment_fidelity.py draw OUT.json PICTURE.png

Every optimizer steps one parameter with the same gradients; its moments, read by its library's own
functions, are compared with averages in fp64 of these gradients, which nothing brings back
together. Other libraries are measured on a GPU, where they are installed; on a CPU ours alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from followed_moments import (
    COLUMNS,
    HALVED,
    MOMENT_SCENARIOS,
    SMALLER,
    Follower,
    Gradients,
    follow,
    reading,
    spread,
)

from megaopt import FusedAdam
from megaopt.commands.bench.peers import PEERS
from megaopt.commands.environment import describe
from megaopt.source import describe_source

SIZES = (1e-12, 1e-5, 1e4)
BETAS2 = (0.95, 0.99, 0.999, 0.9999)
BETAS1 = (0.9, 0.95, 0.99)
EPS = 1e-8
READINGS = {
    "stationary": "stationary",
    "spike": "after a spike",
    "drop, 2.5": "2.5 time constants after a drop",
    "half: gone, 2.5": "2.5 time constants after going to 0",
    "half: the others": "beside those gone to 0",
    "1,000x smaller": "1,000 times below the block's largest",
}
"""Of exp_avg_sq, and how the picture calls them."""


# --- what is followed


def _moments(exp_avg: Any, exp_avg_sq: Any) -> dict[str, Any]:
    return {"exp_avg_dtype": exp_avg, "exp_avg_sq_dtype": exp_avg_sq, "seed": 5}


OURS = {
    "fp32": _moments(torch.float32, torch.float32),
    "bf16, nearest": _moments(torch.bfloat16, torch.bfloat16),
    "bf16, stochastic": _moments("bfloat16_stochastic", "bfloat16_stochastic"),
    "blocks, nearest": _moments("block_e4m3_nearest", "block_e5m3_nearest"),
    "blocks, stochastic": _moments("block_e4m3", "block_e5m3"),
    "4 bits": _moments("block32_e3m0", "block32_e4m0"),
}


def _ours(optimizer: Any, param: Any, name: str) -> Any:
    return optimizer.get_unscaled_state(param, name)


def _torchao(optimizer: Any, param: Any, name: str) -> Any:
    return optimizer.state[param][name].dequantize()


def _flashoptim(optimizer: Any, param: Any, name: str) -> Any:
    return optimizer.state[param][name].materialize()


def _bitsandbytes(optimizer: Any, param: Any, name: str) -> Any:
    from bitsandbytes.functional import dequantize_blockwise

    own, place = optimizer.state[param], "1" if name == "exp_avg" else "2"
    scales = {"absmax": own["absmax" + place], "code": own["qmap" + place]}
    return dequantize_blockwise(own["state" + place], **scales, blocksize=256)


READERS = {
    "torchao-8bit": _torchao,
    "torchao-fp8": _torchao,
    "torchao-4bit": _torchao,
    "bitsandbytes-8bit": _bitsandbytes,
    "flashoptim-8bit": _flashoptim,
}
"""By the name of a peer, as `megaopt bench` knows it."""


def kinds(device: str) -> tuple[dict[str, tuple[Any, Any, dict[str, Any]]], dict[str, str]]:
    """Class, reader and options of all that can be followed here; versions of the libraries."""
    found: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        name: (FusedAdam, _ours, options) for name, options in OURS.items()
    }
    versions = {}
    for name, read in READERS.items():
        peer = PEERS[name]
        reason = "needs a GPU" if device == "cpu" else peer.why_not()
        if reason is not None:
            print(f"{name}: {reason}", flush=True)
            continue
        # weights are fp32 here, beside which flashoptim's cannot have more bits
        options = {"master_weight_bits": None} if peer.package == "flashoptim" else {}
        found[name] = (getattr(importlib.import_module(peer.module), peer.kind), read, options)
        versions[peer.package] = peer.version()
    return found, versions


# --- the record


def _number(value: Any) -> float | None:
    return float(f"{float(value):.4g}") if abs(float(value)) < float("inf") else None


def _spread(ratio: torch.Tensor) -> dict[str, float | None]:
    """NaN counts as infinity; what is not finite is null."""
    ratio = ratio.nan_to_num(torch.inf, torch.inf, -torch.inf)
    names = ("low", "median", "high")
    return {
        "mean": _number(ratio.mean()),
        **{name: _number(each) for name, each in zip(names, spread(ratio), strict=True)},
    }


def _rows_of_a_run(name: str, beta2: float, found: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Of exp_avg_sq at all readings and sizes; of the updates at the middle size."""
    own = {"kind": name, "beta2": beta2}
    rows = [
        {**own, "what": what, "size": size, **_spread(ratio.sqrt()), "mean": _number(ratio.mean())}
        for what in READINGS
        for size, ratio in zip(SIZES, reading(what, found, MOMENT_SCENARIOS), strict=True)
    ]
    first, smaller = (MOMENT_SCENARIOS.index(each) for each in ("stationary", "1,000x smaller"))
    error = (found["errors"][first, 1].sum() / found["exact"][first, 1].sum()).sqrt()
    rms = (found["squares"] / found["exact"]).sqrt()[smaller, 1, SMALLER]
    rows.append({**own, "what": "update", "size": SIZES[1], "error": _number(error)})
    rows.append({**own, "what": "update 1,000x smaller", "size": SIZES[1], **_spread(rms)})
    return rows


def run(steps: int, rows: int) -> dict[str, Any]:
    """All kinds, all betas: the record.

    Raises ValueError where a library would keep fp32 moments, as all do below 4,096 elements, or
    where blocks of 256 would lie in two scenarios.
    """
    if rows < 16 or rows % 2:
        raise ValueError(f"rows must be even and at least 16, got {rows}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    all_kinds, versions = kinds(device)
    results: list[dict[str, Any]] = []

    def one(scenarios: tuple[str, ...], sizes: Any, betas: tuple[float, float], count: int) -> Any:
        gradients = Gradients(scenarios, sizes, rows, count, device)
        rest = {"betas": betas, "eps": EPS, "device": device}
        followers = {
            name: Follower(make, read, gradients.shape, **rest, **options)
            for name, (make, read, options) in all_kinds.items()
        }
        print(f"{scenarios}, betas {betas}", flush=True)
        return follow(gradients, betas, followers, count).items()

    for beta2 in BETAS2:
        for name, found in one(MOMENT_SCENARIOS, SIZES, (0.9, beta2), steps):
            results += _rows_of_a_run(name, beta2, found)
    for beta1 in BETAS1:
        for name, found in one(HALVED, SIZES[1:2], (beta1, 0.999), min(steps, 1500)):
            for what, ratio in zip(HALVED, found["exp_avg"], strict=True):
                results.append({"kind": name, "beta1": beta1, "what": what, **_spread(ratio)})
    return {
        "command": ["python", *sys.argv],
        "source": describe_source(),
        "environment": describe(),
        "versions": versions,
        "steps": steps,
        "coordinates": rows * COLUMNS,
        "eps": EPS,
        "results": results,
    }


def draw(record: dict[str, Any], picture: Path) -> None:
    """Medians and 90% of the coordinates; a colour a beta. What lies outside is at the edge."""
    from matplotlib.figure import Figure

    rows = record["results"]
    names = list(dict.fromkeys(row["kind"] for row in rows))
    figure = Figure(figsize=(17, 8.5), dpi=130, layout="constrained")
    panels = list(figure.subplots(2, 4, sharey=True).flat)
    shown = {**READINGS, "update": "relative error of the update", HALVED[0]: "exp_avg, halved"}
    for panel, (what, title) in zip(panels, shown.items(), strict=True):
        for row in rows:
            if row["what"] != what or row.get("size", SIZES[1]) != SIZES[1]:
                continue
            betas = BETAS1 if "beta1" in row else BETAS2
            place = betas.index(row.get("beta1", row.get("beta2")))
            low, middle, high = (row.get(key) for key in ("low", "median", "high"))
            line = (row["error"],) if what == "update" else (low, middle, high)
            line = [min(max(50 if each is None else each, 0.02), 50) for each in line]
            height, colour = names.index(row["kind"]) + 0.16 * (place - 1.5), f"C{place}"
            panel.plot((line[0], line[-1]), (height, height), color=colour, linewidth=1.5)
            panel.plot(line[len(line) // 2], height, "o", color=colour, markersize=4)
        panel.axvline(0.15 if what == "update" else 1, color="black", linewidth=0.5)
        panel.set_xscale("log")
        panel.set_xlim(0.02, 50)
        panel.set_title(title, fontsize=9)
    for panel in panels[:6]:
        panel.set_xlabel("root of exp_avg_sq / fp64's", fontsize=8)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    for panel, name, betas in ((panels[0], "beta2", BETAS2), (panels[7], "beta1", BETAS1)):
        for place, beta in enumerate(betas):
            panel.plot([], [], "o", color=f"C{place}", label=f"{name} {beta}")
        panel.legend(fontsize=7)
    figure.savefig(picture)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    own = commands.add_parser("run")
    own.add_argument("record", type=Path)
    own.add_argument("picture", type=Path)
    own.add_argument("--steps", type=int, default=5000)
    own.add_argument("--rows", type=int, default=64, help="of 128 coordinates, a scenario and size")
    own = commands.add_parser("draw")
    own.add_argument("record", type=Path)
    own.add_argument("picture", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        given.record.write_text(json.dumps(run(given.steps, given.rows)), encoding="utf-8")
    draw(json.loads(given.record.read_text(encoding="utf-8")), given.picture)


if __name__ == "__main__":
    main()
