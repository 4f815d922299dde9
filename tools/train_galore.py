"""Trains GPTs by GaLore: galore_torch's AdamW, ours with an SVD and with our refresh, and Adam.

    python tools/train_galore.py run SEED_0.json --seed 0 --model 30M    # on a GPU, one file a seed
    python tools/train_galore.py join RECORD.json PICTURE.png SEED_0.json ...    # of one model

tools/trained_gpt.py says what text this is. All weights are fp32: in bf16 galore_torch's second
moments stop decaying. The blocks' matrices are projected to RANK dimensions, with a learning rate
that times `scale` is Adam's; embeddings and norms have Adam's own. At refreshes of our own kind the
captured energy of every fourth matrix is compared with that of an SVD of the same gradient.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import trained_gpt
from galore_torch_peer import adamw, why_not
from trained_gpt import Kind, main

from megaopt import FusedAdam, GaLoreAdamW
from megaopt.commands.config import ModelConfig

SIZES: dict[str, int] = {"heads": 8, "context": 512, "vocabulary_size": 256}
MODELS = {
    "30M": ModelConfig(layers=9, width=512, **SIZES),
    "60M": ModelConfig(layers=12, width=640, **SIZES),
}
RANK, GAP, SCALE = 128, 200, 0.25
BETAS = (0.9, 0.99)
LOOKED_AT = 4
"""At every so manieth matrix's refreshes."""
EMBEDDINGS = 2
"""The first matrices of a model."""


def projected(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks' matrices in a group of their own, with a rank."""
    matrices, norms = groups
    ranked = {"rank": RANK, "update_proj_gap": GAP, "scale": SCALE, "proj_type": "std"}
    params = matrices["params"]
    own = {**matrices, "params": params[EMBEDDINGS:], **ranked, "lr_factor": 1 / SCALE}
    return [own, {**matrices, "params": params[:EMBEDDINGS]}, norms]


def theirs(groups: list[dict[str, Any]], seed: int) -> Any:
    """galore_torch's."""
    return adamw().AdamW(projected(groups), betas=BETAS, no_deprecation_warning=True)


def ours(options: dict[str, Any], groups: list[dict[str, Any]], seed: int) -> GaLoreAdamW:
    """GaLoreAdamW with these options."""
    kind = GaLoreAdamW if options else Watched
    return kind(projected(groups), betas=BETAS, seed=seed, **options)


def plain(groups: list[dict[str, Any]], seed: int) -> FusedAdam:
    """Adam of all dimensions."""
    return FusedAdam(groups, betas=BETAS, seed=seed)


class Watched(GaLoreAdamW):
    """Keeps what its projections captured when they were made, and what an SVD would have."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._energies: list[list[float]] = []
        self._last: dict[int, torch.Tensor] = {}

    def step(self, *given: Any, **options: Any) -> Any:
        """As GaLoreAdamW's."""
        group = self.param_groups[0]
        loss = super().step(*given, **options)
        for number, param in enumerate(group["params"][::LOOKED_AT]):
            own = self.state[param]["captured_energy"]
            if number not in self._last or not torch.equal(own, self._last[number]):
                self._last[number] = own.clone()
                best = best_energy(param.grad, group["rank"])
                self._energies.append([group["step"], LOOKED_AT * number, float(own), best])
        return loss

    def report(self) -> dict[str, Any]:
        """Of each refresh the step, the matrix, what was captured, and what an SVD captures."""
        return {"energies": self._energies}


def best_energy(grad: torch.Tensor, rank: int) -> float:
    """The share of a gradient's square that its first singular vectors capture."""
    squares = torch.linalg.svdvals(grad.double()).square()
    return float(squares[:rank].sum() / squares.sum())


KINDS: dict[str, Kind] = {
    **({} if why_not() else {"galore_torch": theirs}),
    "ours, SVD": partial(ours, {"refresh": "svd", "stagger": False}),
    "ours": partial(ours, {}),
    "Adam": plain,
}


def versions() -> dict[str, str]:
    """Of the library beside ours."""
    return {} if why_not() else {"galore_torch": version("galore_torch")}


def energies(record: dict[str, Any]) -> str | None:
    """How the captured energies compare, over all seeds: one line; None where none are there."""
    seeds = record["seeds"].values()
    found = [each for runs in seeds if "ours" in runs for each in runs["ours"]["energies"]]
    if not found:
        return None
    shares = sorted(own / best for _, _, own, best in found)
    mean = sum(shares) / len(shares)
    return (
        f"captured energy over an SVD's, {len(shares)} refreshes: least {shares[0]:.4f}, "
        f"mean {mean:.4f}"
    )


if __name__ == "__main__":
    trained_gpt.ALL_FP32, trained_gpt.BAND = True, next(iter(KINDS))
    trained_gpt.STEPS, trained_gpt.BATCH = 1000, 8
    joined = main(__doc__, KINDS, versions, MODELS)
    if joined is not None and energies(joined) is not None:
        print(energies(joined))
