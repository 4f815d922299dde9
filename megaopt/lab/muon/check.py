"""`megaopt muon test`: errors of FusedMuon's updates beside torch.optim.Muon's, and their bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch.nn import Parameter

from megaopt import FusedMuon
from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.muon.orthogonal import COEFFICIENTS, GRAM, GRAM_RATIO, RATIOS, STANDARD
from megaopt.lab.bench.errors import VERDICTS, conclude, current_device, distance
from megaopt.lab.console import coloured, make_console, make_table, print_table
from megaopt.lab.toml_tables import require

PARTS = {(STANDARD, "bf16"): 1.0, (STANDARD, "fp16"): 1 / 8, (GRAM, "fp16"): 1.0}
"""Forms, and the part of torch.optim.Muon's error that each may have in the mean. Both round after
each product; torch also the norm, and what it divides by it. fp16 rounds to three bits more than
torch's bf16; polynomials of X X^T, as Gram's form takes them, lose some of these."""
LEAST_CHANCE = 1e-4
"""Roundings are of one size, but not the same: of some matrices ours are larger. Where that is as
likely as not, more of them are so with a chance that `chance` gives; below this one it is a fault.
"""
FEWEST = 14
"""Matrices of which all may be so with less than that chance."""
DECADES = 3
"""The decades by which the columns of a decaying matrix fall off."""
SPECTRA = ("random", "decaying")
SHAPES = {
    "cpu": ((48, 48), (64, 96), (96, 40), (40, 128)),
    "cuda": ((256, 256), (256, 640), (768, 768), (3072, 768), (1024, 4096), (1408, 2048)),
}
"""Rows and columns of the matrices, by the kind of device."""
MOST = 2**14
"""Rows or columns; of their square in fp64 torch can still say that there is no memory for it."""
MOST_TWINS = 2**31
"""Multiplications of an update that is compared with its twin, which makes some 10**9 a second on
two cores of a CPU."""
EXACT: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
"""With these an fp32 weight of zeros becomes the update, times -1, without a rounding."""

Matrices = list[torch.Tensor]


@dataclass(frozen=True)
class OrthogonalCase:
    """Matrices of one kind, and how they are made orthogonal."""

    rows: int
    columns: int
    spectrum: str
    """One of SPECTRA."""
    method: str
    precision: str

    @property
    def is_there(self) -> bool:
        """Returns whether there is such a case: Gram's form is of long matrices, with fp16."""
        is_long = max(self.rows, self.columns) >= GRAM_RATIO * min(self.rows, self.columns)
        return (self.method, self.precision) in PARTS and (self.method != GRAM or is_long)

    @property
    def part(self) -> float:
        """The part of torch's error that this one's may have in the mean."""
        return PARTS[self.method, self.precision]


@dataclass(frozen=True)
class CaseErrors:
    """A case's errors: norms of all matrices together, in parts of what fp64 gives."""

    case: OrthogonalCase
    error: float
    torchs: float
    """The same of torch.optim.Muon, which multiplies in bf16."""
    count: int
    """The number of matrices."""
    above: int
    """The number of them with more than the case's part of torch's error."""
    same_bits: bool | None
    """Whether launches gave the twin's bits; None where only one of the two ran."""

    @property
    def holds(self) -> bool:
        """Returns whether errors are, by chance's measure, at most torch's, and no bit differs."""
        is_likely = chance(self.count, self.above) >= LEAST_CHANCE
        return is_likely and math.isfinite(self.error) and self.same_bits is not False


def chance(count: int, above: int) -> float:
    """Returns the chance of so many or more of a count, where each is as likely as not."""
    return float(sum(math.comb(count, number) for number in range(above, count + 1)) / 2**count)


def main(
    *,
    shapes: tuple[tuple[int, int], ...] = (),
    spectra: tuple[str, ...] = SPECTRA,
    methods: tuple[str, ...] = (STANDARD, GRAM),
    precisions: tuple[str, ...] = ("bf16", "fp16"),
    matrices: int = 16,
    seed: int = 0,
    launches: bool = True,
) -> int:
    """Make matrices orthogonal by FusedMuon; compare errors against fp64 with torch.optim.Muon's.

    Args:
        shapes: Rows and columns, as 64 96 96 64; some small ones by default, larger ones on a GPU.
        spectra: random: of normal numbers; decaying: whose columns fall off.
        methods: standard; gram, of matrices as long as method auto wants for it.
        precisions: bf16, or fp16; gram is of fp16 alone.
        matrices: How many of each kind are stepped together; errors are of all. At least 14.
        seed: Of the matrices.
        launches: Also take the launches of a GPU, or of Triton's interpreter, which is slow and
            steps two of the matrices, and compare the first one's bits with those that it has alone
            on a CPU, if it is small.

    Returns:
        0 where no error is above its part of torch's by more than chance, and no bit differs; else
        1.

    Raises:
        ConfigError: an argument is out of its range, or nothing is left to be tested.
    """
    device = current_device()
    choices = (("spectra", spectra, SPECTRA), ("methods", methods, (STANDARD, GRAM)))
    for name, values, allowed in (*choices, ("precisions", precisions, ("bf16", "fp16"))):
        for value in values:
            require(value in allowed, name, value, f"of {', '.join(allowed)}")
    sizes = f"whole numbers from 1 to {MOST}"
    for shape in shapes:
        require(all(1 <= size <= MOST for size in shape), "shapes", shape, sizes)
    require(matrices >= FEWEST, "matrices", matrices, f"a whole number >= {FEWEST}")
    require(0 <= seed < 2**63, "seed", seed, "a whole number from 0 to 2**63 - 1")
    combinations = itertools.product(shapes or SHAPES[device.type], spectra, methods, precisions)
    cases = [
        case for shape, *how in combinations if (case := OrthogonalCase(*shape, *how)).is_there
    ]
    long = f"a matrix at least {GRAM_RATIO:g} times as long as wide"
    require(len(cases) > 0, "methods", methods, f"gram alone with fp16 and {long}")
    reason = BACKENDS["triton"].why_not(device) if launches else "it was not asked for"
    console = make_console()
    console.print(f"on {device}; launches: {reason or 'by Triton'}", highlight=False)
    findings = [measure(case, matrices, seed, device, reason is None) for case in cases]
    print_table(console, table_of(findings))
    count = sum(not finding.holds for finding in findings)
    wrong = f"above torch's part, or of other bits: {count}" if count else None
    return conclude(console, wrong, "none is above its part")


def measure(
    case: OrthogonalCase, count: int, seed: int, device: torch.device, launches: bool
) -> CaseErrors:
    """Steps so many matrices at once; the first alone, too, by the twin on a CPU."""
    # random matrices, fp32 on the CPU: the same numbers for every device
    generator, columns = torch.Generator().manual_seed(seed), case.columns
    falls = torch.logspace(0, -DECADES, columns) if case.spectrum == "decaying" else 1.0
    matrices = [torch.randn(case.rows, columns, generator=generator) * falls for _ in range(count)]
    placed = [matrix.to(device) for matrix in matrices]

    def updates(kind: Callable[..., Any], grads: Matrices, **how: str) -> Matrices:
        """Returns what an optimizer subtracts in a step of these gradients, fp32."""
        params = [Parameter(torch.zeros_like(grad)) for grad in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        kind(params, **EXACT, **how).step()
        return [-param.detach() for param in params]

    fused = partial(updates, FusedMuon, method=case.method, precision=case.precision)
    is_slow = launches and device.type == "cpu"
    first = fused(placed[:2], backend="triton") if is_slow else []
    fused_updates = fused(placed, backend="triton" if launches and not is_slow else "reference")
    torchs = updates(torch.optim.Muon, placed)
    short, long = sorted((case.rows, case.columns))
    same = None
    if launches and 10 * short * short * (2 * long + short) <= MOST_TWINS:
        (twin,) = fused(matrices[:1], backend="reference")
        launched = (first or fused_updates)[0].cpu()
        same = torch.equal(twin.view(torch.int32), launched.view(torch.int32))
    exact = [in_fp64(matrix) for matrix in placed]
    triples = zip(fused_updates, torchs, exact, strict=True)
    above = [not distance([a], [c]) <= case.part * distance([b], [c]) for a, b, c in triples]
    norm = math.sqrt(sum(float(matrix.square().sum()) for matrix in exact))
    error, torchs_error = (distance(values, exact) / norm for values in (fused_updates, torchs))
    return CaseErrors(case, error, torchs_error, count, sum(above), same)


def in_fp64(grad: torch.Tensor) -> torch.Tensor:
    """The update by the same coefficients, times the ratio of its shape, without fp32's roundings.

    A gradient of zeros is divided by 0.
    """
    matrix = grad.double() / grad.double().norm()
    is_tall = len(matrix) > matrix.shape[1]
    matrix = matrix.mT if is_tall else matrix
    for a, b, c in COEFFICIENTS["simple"] * 5:
        gram = matrix @ matrix.mT
        matrix = a * matrix + (b * gram + c * gram @ gram) @ matrix
    update: torch.Tensor = (matrix.mT if is_tall else matrix) * RATIOS["original"](*grad.shape)
    return update


def table_of(findings: Sequence[CaseErrors]) -> Table:
    """Errors beside torch's and the bound, a case a row."""
    headings = ("matrix", "spectrum", "method", "precision", ">error", ">torch's error",
                ">error / torch's", ">in the mean", ">above", "twin's bits", "")  # fmt: skip
    table = make_table("against fp64, by norm", headings)
    same, differ = "the same", coloured("red", "OTHERS")
    bits: dict[bool | None, str | Text] = {None: "", True: same, False: differ}
    for finding in findings:
        case, part = finding.case, finding.error / finding.torchs if finding.torchs else math.nan
        table.add_row(
            f"{case.rows} x {case.columns}", case.spectrum, case.method, case.precision,
            f"{finding.error:.3g}", f"{finding.torchs:.3g}", f"{part:.3f}", f"<= {case.part:g}",
            f"{finding.above} of {finding.count}", bits[finding.same_bits],
            VERDICTS[finding.holds],
        )  # fmt: skip
    return table
