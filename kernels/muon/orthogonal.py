"""The settings of Muon's updates: a set of polynomials, the factor of an update, how to iterate.

A parameter is one matrix or several (`Orthogonal.pieces`), each of which has the bits that it has
alone. docs/numbers.md has every operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch

from megaopt.kernels.muon.normuon import BETA2
from megaopt.kernels.rules.matrix import SECOND_MOMENT, Cut, Shape

# --- the polynomials

Triple = tuple[float, float, float]
"""a, b and c of a step X' = a X + b (X X^T) X + c (X X^T)^2 X."""

COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "deepseekv4": ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
    "cubic5": (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
}
"""Sets by the names and with the values of Emerging-Optimizers' muon_utils.py at fd77292.

"simple": Jordan et al. 2024. "quintic": modded-nanogpt's. "polar_express": Amsel et al. 2025,
arXiv:2505.16932, each divided by 1.01 to its power. "cans": arXiv:2506.10935. "deepseekv4":
DeepSeek-V4's ten steps. "cubic5": arXiv:2606.00371, of no square, and of five steps only.
"""
LAST_AGAIN = ("polar_express", "cans", "deepseekv4")
"""Sets of which further steps take the last again, as Emerging-Optimizers'; others begin anew."""
MOST_STEPS = 99


def coefficients_of(coefficients: str | Sequence[Any], steps: int) -> tuple[Triple, ...]:
    """Returns the coefficients of so many steps, 1 to 99.

    coefficients: a set's name; three numbers, for all steps; or such triples, at least one for each
    step. Raises ValueError for anything else.
    """
    if type(steps) is not int or not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"ns_steps must be a whole number from 1 to {MOST_STEPS}, got {steps!r}")
    if isinstance(coefficients, str):
        triples = COEFFICIENTS.get(coefficients, ())
        if not triples:
            names = ", ".join(map(repr, COEFFICIENTS))
            raise ValueError(
                f"ns_coefficients must be numbers or one of {names}, got {coefficients!r}"
            )
        # "cubic5" is made for its five steps alone
        if coefficients == "cubic5" and steps != len(triples):
            raise ValueError(
                f"ns_steps must be {len(triples)} with ns_coefficients='cubic5', got {steps}"
            )
        # more steps than the set has: its last triple again, or the whole set from its first on
        again = triples[-1:] if coefficients in LAST_AGAIN else triples
        return (*triples[:steps], *islice(cycle(again), max(steps - len(triples), 0)))

    # three numbers are one triple for all steps; anything else is a list of triples
    rows: list[Any] = [coefficients] * steps if _is_triple(coefficients) else list(coefficients)
    for row in rows:
        if not _is_triple(row):
            raise ValueError(f"ns_coefficients must be triples of numbers a, b and c, got {row!r}")
    if len(rows) < steps:
        raise ValueError(
            f"ns_coefficients must have a triple for each of {steps} steps, got {len(rows)}"
        )
    # triples beyond the steps are left out
    return tuple((float(a), float(b), float(c)) for a, b, c in rows[:steps])


def _is_triple(value: Any) -> bool:
    """Checks that a value is three finite numbers of fp32."""
    # a bool is an int; NaN fails the comparison
    most = torch.finfo(torch.float32).max
    return (isinstance(value, Sequence) and len(value) == 3) and all(
        isinstance(number, (int, float)) and not isinstance(number, bool) and abs(number) <= most
        for number in value
    )


# --- how much an update counts

RATIOS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
    "deepseekv4": lambda rows, columns: 0.18 * math.sqrt(max(rows, columns)),
}
"""Factors of an update [rows, columns], by name: torch.optim.Muon's first two (Jordan et
al. 2024; Liu et al. 2025, arXiv:2502.16982), Emerging-Optimizers' "spectral" and unit_rms_norm
(Bernstein), which is "spectral_unclamped" here, and DeepSeek-V4's, whose updates have an RMS of
0.18 where "match_rms_adamw" has 0.2."""
TORCH_RATIOS = (None, "original", "match_rms_adamw")

# --- how matrices are stepped

STANDARD, GRAM, AUTO = METHODS = ("standard", "gram", "auto")
BF16, FP16 = PRECISIONS = ("bf16", "fp16")
DTYPES = {BF16: torch.bfloat16, FP16: torch.float16}
NORMUON = "normuon"
OWN, TORCH, EO = CONTRACTS = ("ieee", "torch", "eo")

GRAM_RATIO = 3.0
"""The ratio of length to width from which on "auto" takes Gram's form, of fp16.

There its errors against fp64 are no more than torch.optim.Muon's. Over these, of a matrix 272 wide
whose columns fall by three decades: 2.24 at a ratio of 1.5, 1.47 at 2, 0.96 at 2.5, 0.59 at 3, 0.34
at 3.5, 0.23 at 4; with RESTARTS of (2, 4) 0.45, 0.40, 0.37, 0.34, 0.30, 0.27. Random ones have 0.10
to 0.15 at all ratios.

Of five steps it takes 6 s^2 l + 14 s^3 multiply-adds, twice that without symmetry, and the standard
form 15 s^2 l + 5 s^3. On an H200 a prototype took for 192 of 1408 x 2048, a ratio of 1.45, 29.0 and
27.2 ms.
"""
GRAM_SHORT = 256
"""The width up to which "auto" takes the standard form: small products are little but launches."""
RESTARTS = (2, 5, 8)
"""The steps, from 0, before which Gram's form makes X and its Gram matrix anew.

gram-newton-schulz restarts before step 2, and has five. Without the others ten steps of a matrix
whose singular values span four decades end in NaN. Errors against fp64 are 0.4 of
torch.optim.Muon's there; with (2, 4) they are an eighth, as those of the standard form in fp16, for
9 s^2 l + 11 s^3.
"""
LEAST_EPS = 1e-30
"""The least eps: powers of two that bring such a norm there are fp32 numbers."""
RATIO_RANGE = (2.0**-6, 2.0**12)
"""Factors that fp16 has room for beside an update's numbers, which are some 1 / sqrt(columns)."""


@dataclass(frozen=True)
class Orthogonal:
    """The way to make matrices orthogonal: MUON's `how`, the same for all matrices of a batch."""

    coefficients: tuple[Triple, ...]
    """The coefficients of each step: `coefficients_of`."""
    eps: float = 1e-7
    """The least norm by which a direction is divided."""
    method: str = AUTO
    """The method, one of METHODS; "auto" goes by a matrix's shape and the precision alone."""
    precision: str = BF16
    """The precision of numbers between products, one of PRECISIONS; the products' sums are fp32."""
    adjust: str | float | None = None
    """The factor of an update, one of RATIOS' names or a number; None: "original"."""
    second_moment: str | None = None
    """With "normuon" rows are divided by the root of a mean of their squares over steps."""
    beta2: float = BETA2
    """The part of that mean that a step keeps."""
    split_sizes: tuple[int, ...] | None = None
    """Rows of each of several matrices that lie one below another; None: it is one. Sizes that add
    up to a part of the rows come again until these are used up, and the rows of one size are one
    matrix, as in Megatron-Core's QKV weights, which have q, k and v of each query group."""
    restarts: tuple[int, ...] = RESTARTS
    """The restarts of Gram's form, in ascending order."""
    contract: str = OWN
    """The contract, one of CONTRACTS; peers.py has what the others take of all this."""
    dtype: torch.dtype = field(init=False, repr=False)
    """The dtype of all numbers between products."""

    def __post_init__(self) -> None:
        """Raises ValueError for what is not one of these, or does not go together."""
        # each choice alone, then what does not go together
        adjust, (least, most) = self.adjust, RATIO_RANGE
        is_named = adjust is None or isinstance(adjust, str)
        for name, choice, choices in (
            ("method", self.method, METHODS),
            ("precision", self.precision, PRECISIONS),
            ("second_moment", self.second_moment, (None, NORMUON)),
            ("contract", self.contract, CONTRACTS),
            ("adjust_lr_fn", adjust if is_named else None, (None, *RATIOS)),
        ):
            if choice not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, choices))}, got {choice!r}"
                )
        if self.method == GRAM and self.precision == BF16:
            raise ValueError(
                "method='gram' must have precision='fp16': with 'bf16' updates are 11 to 33% off"
            )
        if not LEAST_EPS <= self.eps <= 1.0:
            raise ValueError(f"eps must be from {LEAST_EPS} to 1, got {self.eps!r}")

        # an update's factor that is a number
        if adjust is not None and not isinstance(adjust, str):
            if not 0.0 <= adjust < math.inf:
                names = ", ".join(map(repr, (None, *RATIOS)))
                raise ValueError(
                    f"adjust_lr_fn must be one of {names} or a finite number >= 0, got {adjust!r}"
                )
            # a factor far from 1 would take fp16 updates out of its range
            if self.precision == FP16 and not least <= adjust <= most:
                raise ValueError(
                    f"adjust_lr_fn must be from {least} to {most} with precision='fp16', "
                    f"got {adjust!r}"
                )
        if self.contract != OWN:
            self._check_contract()
        vars(self).update(dtype=DTYPES[self.precision])

    def _check_contract(self) -> None:
        """Raises ValueError for what other libraries do not have."""
        # beside what both lack "torch" has one triple for all steps, no cuts and two ratios
        of_torch, is_one = self.contract == TORCH, len(set(self.coefficients)) == 1
        ratios = "one of " + ", ".join(map(repr, TORCH_RATIOS))
        # by the user's name of each: the value, whether the library has it, what it has
        settings = {
            "method": (self.method, self.method != GRAM, "'auto' or 'standard'"),
            "precision": (self.precision, self.precision == BF16, "'bf16'"),
            "second_moment": (self.second_moment, self.second_moment is None, "None"),
            "split_sizes": (self.split_sizes, not of_torch or self.split_sizes is None, "None"),
            "ns_coefficients": (
                self.coefficients, is_one or not of_torch, "the same three numbers in all steps",
            ),
            "adjust_lr_fn": (self.adjust, not of_torch or self.adjust in TORCH_RATIOS, ratios),
        }  # fmt: skip
        for name, (value, is_there, allowed) in settings.items():
            if not is_there:
                raise ValueError(
                    f"{name} must be {allowed} with contract={self.contract!r}, got {value!r}"
                )

    def ratio(self, shape: Shape) -> float:
        """Returns the factor of the update of a matrix [rows, columns]; 1 without columns."""
        # a name is of a formula by shape
        if self.adjust is None or isinstance(self.adjust, str):
            rows, columns = shape
            return RATIOS[self.adjust or "original"](rows, columns) if columns else 1.0
        return float(self.adjust)

    def pieces(self, shape: Shape) -> list[tuple[int, int]]:
        """Returns the shapes of a parameter's matrices, as they lie one behind another in memory.

        Two dimensions are a matrix; three a batch of them; more, as of convolutions, one of
        [first, all others]. `split_sizes` cuts each into matrices of so many rows, or so many in
        each of several parts. Raises ValueError for fewer dimensions, and for sizes that do not
        add up to the rows or a part of them.
        """
        return [(rows, columns) for (rows, columns), _ in self.cuts(shape)]

    def cuts(self, shape: Shape) -> list[Cut]:
        """Returns the matrices of a parameter, and where their rows lie in it.

        Raises ValueError as `pieces`.
        """
        if len(shape) < 2:
            raise ValueError(
                f"a parameter that Muon steps must have two dimensions or more, got {list(shape)}"
            )
        # three dimensions are a batch of matrices, which are cut alike; of others all behind the
        # first are columns
        count, rows, columns = shape if len(shape) == 3 else (1, shape[0], math.prod(shape[1:]))
        sizes, again = self.split_sizes or (rows,), 1
        if self.split_sizes is not None:
            # how often these sizes come in the rows of each matrix
            again, rest = divmod(rows, sum(sizes))
            must = f"split_sizes must add up to {rows} rows"
            if rest or not again:
                raise ValueError(
                    f"{must}, or to a part of them that comes again, got {list(sizes)}"
                )
            if again > 1 and self.second_moment is not None:
                raise ValueError(
                    f"{must} with second_moment={self.second_moment!r}, got {list(sizes)}"
                )
        all_cuts = []
        for batch in range(count):
            first = batch * rows
            for size in sizes:
                # one matrix of rows from each of `again` parts, which lie equally far apart
                starts = [(first + part * (rows // again)) * columns for part in range(again)]
                runs = [(start, size * columns) for start in starts]
                all_cuts.append(Cut((again * size, columns), runs))
                # the next size begins behind this one in each part
                first += size
        return all_cuts

    def is_gram(self, shape: Shape) -> bool:
        """Checks that a matrix is made orthogonal in Gram's form."""
        # "auto": Gram's form in fp16 alone, for matrices that are large and long enough
        short, long = sorted(shape)
        if self.method != AUTO:
            return self.method == GRAM
        return self.precision == FP16 and short > GRAM_SHORT and long >= GRAM_RATIO * short

    def state_shapes(self, shape: Shape) -> dict[str, tuple[int, ...]]:
        """Returns names and shapes of a state's tensors beside the momentum."""
        if self.second_moment is None:
            return {}
        return {SECOND_MOMENT: (sum(rows for rows, _ in self.pieces(shape)),)}
