"""Measures GaLoreAdamW on the matrices of Llama-7B on a GPU of 140 GB, and writes a record.

python tools/galore_whole.py RECORD

224 matrices with bf16 weights and gradients, fp32 masters and moments: steps of FusedAdam, and of
GaLoreAdamW at rank 128 by precision; those without a refresh, and over a gap of 200 steps, in which
each matrix is refreshed once: their mean, and the longest.
"""

import gc
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from digest_times import STEPS, gpu_ms, summary

from megaopt import FusedAdam, GaLoreAdamW
from megaopt.commands.environment import describe
from megaopt.commands.source import describe_source

LAYERS = 32
SHAPES = ((4096, 4096),) * 4 + ((11008, 4096),) * 2 + ((4096, 11008),)
GAP = 200
NO_REFRESH = 10**6
MASTERS = {"dtype": torch.float32}


def params() -> list[torch.nn.Parameter]:
    """Random matrices with random gradients."""
    new = {"device": "cuda", "dtype": torch.bfloat16}
    found = [torch.nn.Parameter(torch.randn(shape, **new)) for shape in SHAPES * LAYERS]
    for param in found:
        param.grad = torch.randn_like(param)
    return found


def steps(optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    """Milliseconds of so many steps, after the first ones, which compile and make states."""
    for _ in range(3):
        optimizer.step()
    return [each for _ in range(count // STEPS) for each in gpu_ms(optimizer.step)]


def galore(own: list[torch.nn.Parameter], precision: str, gap: int, count: int) -> list[float]:
    """Milliseconds of steps of a GaLoreAdamW, which is gone then.

    Without refreshes all projections are made in the first step, which is not timed.
    """
    options: dict[str, Any] = {"rank": 128, "scale": 0.25, "precision": precision, **MASTERS}
    options |= {"update_proj_gap": gap, "stagger": gap != NO_REFRESH}
    found = steps(GaLoreAdamW(own, lr=1e-2, **options), count)
    free()
    return found


def free() -> None:
    """Gives the memory of optimizers back, whose parts know each other."""
    gc.collect()
    torch.cuda.empty_cache()


def main(out: Path) -> None:
    """Measures, and writes the record."""
    record: dict[str, Any] = {"source": describe_source(), "environment": describe()}
    record["command"] = "python tools/galore_whole.py"
    own = params()
    adam = record["fused_adam"] = summary(steps(FusedAdam(own, lr=1e-4, **MASTERS), STEPS))
    free()
    for precision in ("bf16", "tf32"):
        plain = summary(galore(own, precision, NO_REFRESH, 2 * STEPS))
        refreshed = galore(own, precision, GAP, GAP)  # of 22 steps 20 are timed
        mean = statistics.mean(refreshed)
        record[precision] = {
            "step": plain,
            "of_fused_adam": plain["ms"] / adam["ms"],
            "with_refreshes": {"mean_ms": mean, "longest_ms": max(refreshed)},
            "refreshes_of_step": mean / plain["ms"] - 1,
        }
        print(precision, record[precision], flush=True)
    out.write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
