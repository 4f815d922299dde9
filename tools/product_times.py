"""Measures products of lists of matrices beside torch's on a GPU, and writes a record.

python tools/product_times.py RECORD

bf16, results in bf16: full products, symmetric ones beside torch's full ones, lists of small
matrices, and two such lists in one launch; and each by every tile. Launches are captured, so that
no host is waited for. TFLOP/s are those of the full product. The bits are compared with torch's.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from digest_times import gpu_ms, summary

from megaopt.commands.environment import describe
from megaopt.commands.source import describe_source
from megaopt.kernels.products.launch import TILES, ProductTile, Tables, products, symmetric_products

ROUNDS = 5


class Case(NamedTuple):
    """So many products of shape (m, n, k) each; symmetric: n is m."""

    count: int
    m: int
    n: int
    k: int
    symmetric: bool = False

    @property
    def flop(self) -> int:
        """Of full products."""
        return 2 * self.count * self.m * self.n * self.k


SMALL = (Case(12, 768, 768, 3072, True), Case(64, 1408, 1408, 2048, True))
CASES: tuple[tuple[Case, ...], ...] = (
    (Case(1, 4096, 4096, 4096),),
    (Case(1, 4096, 14336, 4096),),
    (Case(8, 4096, 4096, 4096),),
    (Case(12, 4096, 14336, 4096),),
    (Case(12, 768, 3072, 768),),
    (Case(64, 1408, 2048, 1408),),
    (Case(8, 4096, 4096, 4096, True),),
    (Case(12, 4096, 4096, 14336, True),),
    (Case(8, 1024, 1024, 4096, True),),
    *((case,) for case in SMALL),
    SMALL,
)


class Lists:
    """The matrices of a case, and what multiplies them."""

    def __init__(self, cases: tuple[Case, ...]) -> None:
        new = {"device": "cuda", "dtype": torch.bfloat16}
        self.symmetric = cases[0].symmetric
        self.left = [torch.randn(case.count, case.m, case.k, **new) for case in cases]
        self.right = [
            left.mT if case.symmetric else torch.randn(case.count, case.k, case.n, **new)
            for case, left in zip(cases, self.left, strict=True)
        ]
        self.wanted = [torch.empty(case.count, case.m, case.n, **new) for case in cases]
        self.found = [torch.empty_like(each) for each in self.wanted]
        self.tables = Tables()

    def by_torch(self) -> None:
        """A batch for each case."""
        for left, right, out in zip(self.left, self.right, self.wanted, strict=True):
            if len(left) == 1:
                torch.mm(left[0], right[0], out=out[0])
            else:
                torch.bmm(left, right, out=out)

    def by_launch(self, tile: ProductTile | None = None) -> None:
        """One launch for all cases."""
        left, right, out = (
            [matrix for each in batches for matrix in each]
            for batches in (self.left, self.right, self.found)
        )
        if self.symmetric:
            symmetric_products(left, out, tables=self.tables, tile=tile)
        else:
            products(left, right, out, tables=self.tables, tile=tile)


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """A graph's replay of it."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def tiles_of(lists: Lists) -> dict[str, ProductTile]:
    """Those that such results take, by name."""
    return {
        f"{tile.rows} x {tile.columns}, {tile.warps} warps": tile
        for tile in TILES
        if tile.columns in (tile.rows, 2 * tile.rows)
    }


def measured(cases: tuple[Case, ...]) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of torch and of the launch, in turns; and of each tile."""
    lists, flop = Lists(cases), sum(case.flop for case in cases)
    runs = {"torch": captured(lists.by_torch), "launch": captured(lists.by_launch)}
    same = all(map(torch.equal, lists.found, lists.wanted))
    for name, tile in tiles_of(lists).items():
        runs[name] = captured(lambda tile=tile: lists.by_launch(tile))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name] += gpu_ms(run)
    found = {
        name: {**summary(each), "TFLOP_s": flop / statistics.median(each) / 1e9}
        for name, each in times.items()
    }
    own = {name: found.pop(name) for name in ("torch", "launch")}
    speed = own["torch"]["ms"] / own["launch"]["ms"]
    return {"same_bits": same, "of_torch": speed, **own, "tiles": found}


def name_of(cases: tuple[Case, ...]) -> str:
    """What is measured, in words."""
    kinds = [f"{c.count} of {c.m} x {c.k} @ {c.k} x {c.n}" for c in cases]
    return ", ".join(kinds) + (", symmetric" if cases[0].symmetric else "")


def main(out: Path) -> None:
    """Measures, and writes the record."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    record = {"source": describe_source(), "environment": describe()}
    record["command"] = "python tools/product_times.py"
    record["cases"] = {}
    for cases in CASES:
        found = record["cases"][name_of(cases)] = measured(cases)
        print(name_of(cases), f"{found['of_torch']:.2f} of torch, same bits {found['same_bits']}")
        print({name: round(each["ms"], 4) for name, each in found["tiles"].items()}, flush=True)
    out.write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
