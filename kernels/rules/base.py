"""Update rules, and the host arithmetic that they share."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping
from ctypes import c_float
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from megaopt.kernels.optional_triton import helper, tl

MOST_TABLES = 2
"""The most tensors on the device that a rule's prepare may read."""


DRAW_NUMBERS = 6
"""The numbers of a row for random bits."""


def draw_numbers(group: Mapping[str, Any]) -> tuple[float, ...]:
    """A group's seed, in four pieces of 16 bits, and its step, in two: exact in fp32."""
    seed, step = group["seed"], group["step"]
    # 16 bits are exact in fp32, the dtype of the row
    pieces = [seed >> 16 * place & 0xFFFF for place in range(4)]
    return tuple(map(float, (*pieces, step & 0xFFFF, step >> 16)))


@helper
def unscale(grad, grad_scale, inverse):
    return grad * inverse


def unscale_reference(
    grad: torch.Tensor, grad_scale: torch.Tensor, inverse: torch.Tensor
) -> torch.Tensor:
    """The gradient times the scale's reciprocal, fp32."""
    return grad * inverse


def no_tables(group: Mapping[str, Any], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The tables of a rule that needs none."""
    return ()


ZEROS, PARAM = "zeros", "param"


@dataclass(frozen=True)
class Moment:
    """A tensor that a rule keeps of each parameter from step to step."""

    name: str
    """Its name in the optimizer's state."""
    starts_as: str = ZEROS
    """ZEROS, or PARAM: the fp32 value that the rule updates, before the first step."""


# equal only to itself: launches hash it
@dataclass(frozen=True, eq=False)
class Rule:
    """One update rule under one contract: a pure function of fp32 values that knows no format.

    `update(param, moments, grad, scalars)` (Triton) and `update_reference` (torch) return the new
    param and a tuple of the new moments, with the same bits; moments and scalars are tuples, in the
    order of `moment_specs` and of the row. `scalars(group)` makes the row of numbers that a group
    needs, on the host. Where lr and step are on the device, `prepare(hyper_ptr, lr, step)` returns
    that row as a tuple, with the same bits. `unscale(grad, grad_scale, inverse)` takes a loss scale
    away.
    """

    name: str
    contract: str
    moment_specs: tuple[Moment, ...]
    """The moments, in the order in which `update` takes them; there may be none."""
    scalars: Callable[[Mapping[str, Any]], tuple[float, ...]]
    row_length: int
    """The number of numbers in a row."""
    hyper: Callable[[Mapping[str, Any]], tuple[float, ...]]
    """The numbers of a group but lr and step, in the order in which `prepare` finds their fp64
    bits (megaopt.kernels.rules.loading.number), before addresses and lengths of `tables`."""
    prepare: Any
    update: Any
    update_reference: Callable[..., tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
    unscale: Any = unscale
    unscale_reference: Callable[..., torch.Tensor] = unscale_reference
    tables: Callable[[Mapping[str, Any], torch.device], tuple[torch.Tensor, ...]] = no_tables
    """The fp32 tensors on the device that `prepare` reads, at most MOST_TABLES."""
    moments_use_param: bool = False
    """The new moments depend on the parameter (decay that is added to the gradient)."""
    reads_param: bool = True
    """`update` is given the parameter's value; otherwise zeros, and the step loads none."""
    lanes: bool = False
    """`update` and its twin take a last argument: for which elements torch's kernel rounds the L2
    decay before it adds it to the gradient (megaopt.kernels.rules.lanes)."""
    draws: bool = False
    """The row has what random bits are made of behind the rule's own numbers (draw_numbers)."""
    capturable: Rule | None = None
    """The rule in its place where lr and step are on the device, if its bits are others."""
    hyper_length: int | None = None
    """The number of numbers that `hyper` makes, for a rule that may follow another (`then`)."""

    # made of these fields
    moments: tuple[str, ...] = field(init=False)
    """The moments' names, as the optimizer's state has them."""
    makes_nan_canonical: bool = field(init=False)
    """The step gives every NaN that `update` returns one pattern: it differs by processor."""
    width: int = field(init=False)
    """The number of numbers in a group's row, with those for random bits."""

    def __post_init__(self) -> None:
        vars(self).update(
            moments=tuple(moment.name for moment in self.moment_specs),
            makes_nan_canonical=self.contract == "ieee",
            width=self.row_length + (DRAW_NUMBERS if self.draws else 0),
        )

    def then(self, other: Rule) -> Rule:
        """This rule, and after it another one that takes the new param: an average of weights, say.

        The other one's moments and numbers come behind this one's, and its param is the result.
        Raises ValueError where `other` has lanes or tables, or no hyper_length.
        """
        if other.lanes or other.tables is not no_tables or other.hyper_length is None:
            raise ValueError(f"other must be a rule that may follow one, like EMA, got {other!r}")
        # where the other one's moments and numbers begin
        count, length = len(self.moment_specs), self.row_length
        COUNT, LENGTH = tl.constexpr(count), tl.constexpr(length)
        first_update, other_update = self.update, other.update

        # Triton functions find constants by name: the bounds of both parts are constexpr
        @helper
        def update(param, moments, grad, scalars):  # noqa: ANN202
            param, head = first_update(param, moments[:COUNT], grad, scalars[:LENGTH])
            param, tail = other_update(param, moments[COUNT:], grad, scalars[LENGTH:])
            return param, head + tail

        # the same for a first rule whose update takes lanes
        @helper
        def update_in_lanes(param, moments, grad, scalars, rounded):  # noqa: ANN202
            param, head = first_update(param, moments[:COUNT], grad, scalars[:LENGTH], rounded)
            param, tail = other_update(param, moments[COUNT:], grad, scalars[LENGTH:])
            return param, head + tail

        # the twin, with the same bounds
        def reference(
            param: torch.Tensor,
            moments: Any,
            grad: torch.Tensor,
            scalars: Any,
            *lanes: torch.Tensor,
        ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            param, head = self.update_reference(
                param, moments[:count], grad, scalars[:length], *lanes
            )
            param, tail = other.update_reference(param, moments[count:], grad, scalars[length:])
            return param, (*head, *tail)

        # the moments count as made of the param, which the other rule reads
        return replace(
            self,
            name=f"{self.name}_{other.name}",
            moment_specs=(*self.moment_specs, *other.moment_specs),
            **joined_row(self, other),
            update=update_in_lanes if self.lanes else update,
            update_reference=reference,
            moments_use_param=True,
            capturable=self.capturable and self.capturable.then(other),
        )

    def within(self, row: Mapping[str, Any], begin: int, end: int) -> Rule:
        """This rule, which takes its numbers from `begin` to `end` of a row of several rules.

        row: the fields that all of these rules have in common, as joined_row makes them.
        """
        own_update, BEGIN, END = self.update, tl.constexpr(begin), tl.constexpr(end)

        @helper
        def update(param, moments, grad, scalars):  # noqa: ANN202
            return own_update(param, moments, grad, scalars[BEGIN:END])

        return replace(
            self,
            **row,
            update=update,
            update_reference=lambda param, moments, grad, scalars: self.update_reference(
                param, moments, grad, scalars[begin:end]
            ),
        )

    def row(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """A group's row for the update that is number group["step"]."""
        numbers = self.scalars(group)
        return (*numbers, *draw_numbers(group)) if self.draws else numbers

    @cached_property
    def drawing(self) -> Rule:
        """The same rule in an optimizer that rounds something stochastically."""
        return replace(self, draws=True)

    @cached_property
    def cache_key(self) -> str:
        """The key of Triton's compilation cache: a change of the source changes it."""
        # what the step's kernel is compiled differently for
        reads = (self.moments_use_param, self.reads_param, self.lanes, self.draws)
        fields = (self.name, self.contract, self.row_length, *reads)
        return digest(fields, self.prepare, self.update, self.unscale)

    def __repr__(self) -> str:
        """Short, as Triton writes it down at every launch; not the same for two sources."""
        return f"Rule({self.name}, {self.contract}, {self.cache_key})"


def joined_row(first: Rule, second: Rule) -> dict[str, Any]:
    """The fields of a rule whose row has the numbers of one, and behind them those of another."""
    NUMBERS = tl.constexpr(second.hyper_length)
    first_prepare, second_prepare = first.prepare, second.prepare

    # hyper: the second rule's numbers, and behind them the first one's
    @helper
    def prepare(hyper_ptr, lr, step):  # noqa: ANN202
        row = first_prepare(hyper_ptr + NUMBERS, lr, step)
        return row + second_prepare(hyper_ptr, lr, step)

    return {
        "scalars": lambda group: (*first.scalars(group), *second.scalars(group)),
        "row_length": first.row_length + second.row_length,
        # the first one's last: its tables stand behind them
        "hyper": lambda group: (*second.hyper(group), *first.hyper(group)),
        "prepare": prepare,
    }


def in_one_row(first: Rule, *others: Rule) -> tuple[Rule, ...]:
    """These rules with one row for all: the first one's numbers, and behind them the others'.

    So one optimizer steps some parameters by the first and some by the others, which have one row
    among them already, no lanes and no tables, and say their hyper_length. Raises ValueError where
    one does not.
    """
    for rule in others:
        if rule.hyper_length is None or rule.lanes or rule.tables is not no_tables:
            raise ValueError(f"others must be rules that may follow one, got {rule!r}")
    # `scalars`, `hyper` and `prepare` of all: the others share one row among them
    row = joined_row(first, others[0])
    # the first rule has the head of the row, each of the others all that follows
    middle, end = first.row_length, row["row_length"]
    return (first.within(row, 0, middle), *(rule.within(row, middle, end) for rule in others))


def digest(what: object, *functions: Any) -> str:
    """A short name for a value and Triton functions, for keys that are compared at every launch."""
    keys = [getattr(function, "cache_key", "") for function in functions]
    return hashlib.sha256(f"{what}:{keys}".encode()).hexdigest()[:32]


def round_row(values: Iterable[float]) -> tuple[float, ...]:
    """The fp32 nearest to each fp64, as `round_to_fp32`."""
    return tuple(array("f", values))


def round_to_fp32(value: float) -> float:
    """The fp32 nearest to an fp64 (ties to even; too large becomes infinity), as a Python float."""
    # a step rounds some ten numbers: numpy, told not to warn, takes 3 us for one
    return c_float(value).value


# a step goes on from where the steps before were half as far
@lru_cache(maxsize=256)
def power(base: float, exponent: int) -> float:
    """base**exponent in fp64 by squaring, from the exponent's highest bit down.

    Only IEEE multiplications in a fixed order: the C library's pow differs in the last bit from one
    system to another, and a kernel can repeat this.
    """
    if exponent == 0:
        return 1.0
    root = power(base, exponent >> 1)
    return root * root * base if exponent & 1 else root * root
