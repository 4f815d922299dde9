"""Rules for whole matrices: elementwise rules, and transforms of whole matrices between.

A step makes of each matrix

    low = before(gradient)            fp32, of low_shape
    direction = inner(low)            elementwise, with the moments; loss scale and clip coefficient
    update = after(direction)         fp32, of the matrix's shape
    weight, master = apply(update)    elementwise

so that formats, groups, random bits and skipping are the elementwise step's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from megaopt.kernels.place import Place
from megaopt.kernels.rules.base import ZEROS, Rule

Shape = Sequence[int]

PROJECTION, CAPTURED_ENERGY = "projection", "captured_energy"
"""The names of what a state has for GaLore beside the moments; zeros until the first step."""
SECOND_MOMENT = "variance_neuron"
"""dion's name of what a state has for NorMuon, fp32 [rows]."""

NOBODY, ROWS, WHOLE = "nobody", "rows", "whole"
"""When a matrix whose parts are on several ranks must come together: never; where what states keep
is made anew of it, as `Parts` says; or in each step, for both transforms, at one of the ranks
(megaopt.kernels.matrix.shared)."""


class Parts(Protocol):
    """The ranks that hold parts of one matrix; all call the same in the same order."""

    ranks: int
    """The number of ranks, with those that have copies of the same part."""
    is_maker: bool
    """This rank makes what the states of all keep for the matrix."""

    def largest(self, magnitude: torch.Tensor) -> torch.Tensor:
        """The largest of all parts' magnitudes, fp32 or fp64 of shape (); NaN where one is."""

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """The whole matrix of all parts, for the maker; the others get anything."""

    def hand_out(self, tensor: torch.Tensor) -> None:
        """Gives all ranks the maker's tensor, in place."""


class Alone:
    """One process has the whole matrix."""

    ranks, is_maker = 1, True

    def largest(self, magnitude: torch.Tensor) -> torch.Tensor:
        """This one."""
        return magnitude

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """The part, which is all."""
        return part

    def hand_out(self, tensor: torch.Tensor) -> None:
        """Nobody else takes it."""


ALONE = Alone()


@dataclass
class Work:
    """A matrix's facts beside its numbers, as transforms know them."""

    how: Any
    """The way the matrix is stepped: the `how` of its `Matrix`."""
    place: Place
    """The matrix's place in its parameter, and the parameter's number."""
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors that the rule keeps in the state, by name."""
    parts: Parts = ALONE
    is_made: bool | None = None
    """True where a gradient has made what is kept; None: not looked up yet."""


@dataclass(frozen=True)
class Transform:
    """A function of whole matrices."""

    run: Callable[[torch.Tensor, Work], torch.Tensor]
    """Makes a new tensor of an fp32 one; the input stays. `before` must be linear: loss scale and
    clip coefficient are taken from what it makes."""
    renew: Callable[..., None] | None = None
    """Makes what is kept anew, before a step. It is given works, the gradient of the matrix at an
    index, the group of each matrix, and, unless it is None, what gives for the matrix at an index
    one number that is not 0 where its step is left out. It writes what is kept in place, and sets
    `is_made`."""
    turns: Callable[..., list[int]] = lambda works, groups, counts: list(range(len(works)))
    """The indices of the works that `renew` is given, the same on all ranks: by works, the group of
    each, and the steps that each has taken (None, for all or for one: it is nobody's turn)."""


SAME = Transform(lambda matrix, work: matrix)
"""Makes nothing, and nothing comes together for it."""


class Cut(NamedTuple):
    """A matrix of a parameter."""

    shape: Shape
    runs: Sequence[tuple[int, int]]
    """Its numbers, in order: where those that follow each other begin in the parameter, and how
    many they are. They are whole rows, or matrices of a batch."""


def split(cuts: Sequence[Cut], whole: torch.Tensor) -> list[torch.Tensor]:
    """The matrices of a parameter's tensor: views where their numbers follow each other."""
    flat, matrices = whole.reshape(-1), []
    for shape, runs in cuts:
        # one run is a view; several are copied together
        parts = [flat[first : first + size] for first, size in runs]
        matrices.append((parts[0] if len(parts) == 1 else torch.cat(parts)).view(*shape))
    return matrices


def joined(cuts: Sequence[Cut], matrices: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
    """A tensor of a parameter's shape, of all its matrices."""
    whole = matrices[0].new_empty(math.prod(shape))
    for cut, matrix in zip(cuts, matrices, strict=True):
        # the matrix's numbers, cut to its runs, go back to where they came from
        parts = torch.split(matrix.reshape(-1), [size for _, size in cut.runs])
        for (first, size), part in zip(cut.runs, parts, strict=True):
            whole[first : first + size] = part
    return whole.view(*shape)


@dataclass(frozen=True)
class MatrixRule:
    """A rule that works on whole matrices.

    All its elementwise rules, and the optimizer's own, which steps other parameters, make the same
    row of scalars (in_one_row puts two together); inner may have moments of its own.
    """

    name: str
    before: Transform
    inner: Rule
    """Steps the moments, and leaves a direction in the weight's place: fp32, never read."""
    after: Transform
    apply: Rule
    """Takes the update, in the gradient's place, from the weight; without moments."""
    low_shape: Callable[[Any, Shape], tuple[int, ...]] = lambda how, shape: tuple(shape)
    """The shape of what `before` makes, and of the moments, by `Matrix.how` and a matrix's."""
    state_shapes: Callable[[Any, Shape], dict[str, tuple[int, ...]]] = lambda how, shape: {}
    """Names and shapes of fp32 tensors that a state has beside moments and master."""
    meets: str = NOBODY
    """NOBODY, ROWS or WHOLE."""
    cut: Callable[[Any, Shape], Sequence[Cut]] = lambda how, shape: [
        Cut(tuple(shape), [(0, math.prod(shape))])
    ]
    """The matrices of a parameter, by `Matrix.how` and its shape; one where `low_shape` is another.
    """
    is_whole: bool = field(init=False)
    """Ranks bring a whole matrix together at its owner."""

    def __post_init__(self) -> None:
        """Raises ValueError for what no plan steps."""
        vars(self).update(is_whole=self.meets == WHOLE)
        if self.meets not in (NOBODY, ROWS, WHOLE):
            ways = f"{NOBODY!r}, {ROWS!r} or {WHOLE!r}"
            raise ValueError(f"meets of {self.name} must be {ways}, got {self.meets!r}")
        if self.apply.moments:
            names = ", ".join(self.apply.moments)
            raise ValueError(f"apply of {self.name} must have no moments, got {names}")
        # the inner rule is given no weight: none of its moments can start as one
        copied = [moment.name for moment in self.inner.moment_specs if moment.starts_as != ZEROS]
        if copied:
            raise ValueError(
                f"inner of {self.name} must have moments that start as zeros, as it never sees the "
                f"weight, got {', '.join(copied)}: no average of weights follows a matrix rule"
            )


@dataclass(frozen=True)
class Matrix:
    """A matrix rule with what it leaves open: what the matrices of a batch have in common."""

    rule: MatrixRule
    how: Any = None
    """The rule's own choices; it has a repr of its own, the same on all ranks."""

    def low_shape(self, shape: Shape) -> tuple[int, ...]:
        """The shape of what `before` makes of a matrix, and of the moments."""
        return self.rule.low_shape(self.how, shape)

    def low_place(self, place: Place, shape: Shape) -> Place:
        """Returns the place, in all moments, of those of a part of the matrix, of this shape."""
        low = self.low_shape(shape)
        if not place.first or low == tuple(shape):
            return place
        # whole rows lie before the part: of shape[1] elements, and in the moments of low[1]
        return place._replace(first=place.first // shape[1] * low[1])

    def __repr__(self) -> str:
        """Short and the same in every process: ranks compare it."""
        return f"{self.rule.name}({self.how})"
