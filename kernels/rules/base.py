"""What an update rule is, and the host arithmetic that rules share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch

from megaopt.kernels.optional_triton import helper, tl

# Where a rule's prepare finds a group's numbers: the bits of their fp64, then the addresses and the
# lengths of the rule's tables.
BETA1: tl.constexpr = tl.constexpr(0)
BETA2: tl.constexpr = tl.constexpr(1)
EPS: tl.constexpr = tl.constexpr(2)
WEIGHT_DECAY: tl.constexpr = tl.constexpr(3)
BIAS_CORRECTION: tl.constexpr = tl.constexpr(4)
TABLES: tl.constexpr = tl.constexpr(5)
TABLE_LENGTHS: tl.constexpr = tl.constexpr(7)
HYPER_COLUMNS = 9


@helper
def unscale(grad, grad_scale, inverse):
    return grad * inverse


def unscale_reference(
    grad: torch.Tensor, grad_scale: torch.Tensor, inverse: torch.Tensor
) -> torch.Tensor:
    """The gradient times the scale's reciprocal, fp32."""
    return grad * inverse


def no_tables(group: Mapping[str, Any], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Of a rule that needs none."""
    return ()


# equal only to itself: launches hash it
@dataclass(frozen=True, eq=False)
class Rule:
    """One update rule under one contract: a pure function of fp32 values that knows no format.

    `update(param, first, second, grad, scalars)` (Triton) and `update_reference` (torch) return the
    new (param, first, second) and give the same bits. `scalars(group)` makes the row of numbers
    that a group needs; `load(row_ptr)` reads that row in the kernel as a tuple, in its order.
    Where lr and step are on the device, `prepare(hyper_ptr, lr, step, row_ptr)` makes the row
    there, the same bits. `unscale(grad, grad_scale, inverse)` takes a gradient scale away.
    """

    name: str
    contract: str
    moments: tuple[str, str]
    """The state's names for the first and second moment."""
    scalars: Callable[[Mapping[str, Any]], tuple[float, ...]]
    load: Any
    prepare: Any
    update: Any
    update_reference: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    unscale: Any = unscale
    unscale_reference: Callable[..., torch.Tensor] = unscale_reference
    row_length: int = 9
    """How many numbers a row has."""
    tables: Callable[[Mapping[str, Any], torch.device], tuple[torch.Tensor, ...]] = no_tables
    """At most two fp32 tensors on the device that `prepare` reads."""
    moments_use_param: bool = False
    """The new moments depend on the parameter (decay that is added to the gradient)."""
    lanes: bool = False
    """`update` and its twin take a last argument: whether torch's kernel has the element first
    among a thread's four (megaopt.kernels.rules.lanes), never so under a gradient scale."""
    capturable: Rule | None = None
    """The rule in its place where lr and step are on the device, if its bits are others."""

    @cached_property
    def cache_key(self) -> str:
        """What Triton's compilation cache needs to know: a change of the source changes it."""
        functions = (self.load, self.prepare, self.update, self.unscale)
        keys = [getattr(function, "cache_key", "") for function in functions]
        return digest(f"{self.name}:{self.contract}:{self.moments_use_param}:{self.lanes}:{keys}")

    def __repr__(self) -> str:
        """Short, as Triton writes it down at every launch; not the same for two sources."""
        return f"Rule({self.name}, {self.contract}, {self.cache_key})"


def digest(text: str) -> str:
    """A short name for a long text, for keys that are compared at every launch."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def round_row(values: Iterable[float]) -> tuple[float, ...]:
    """The fp32 nearest to each fp64, as `round_to_fp32`."""
    with numpy.errstate(over="ignore"):
        row: list[float] = numpy.array([*values]).astype(numpy.float32).tolist()
    return tuple(row)


def round_to_fp32(value: float) -> float:
    """The fp32 nearest to an fp64 (ties to even; too large becomes infinity), as a Python float."""
    with numpy.errstate(over="ignore"):
        return float(numpy.float32(value))


def power(base: float, exponent: int) -> float:
    """base**exponent in fp64 by squaring, from the exponent's highest bit down.

    Only IEEE multiplications in a fixed order: the C library's pow differs in the last bit from one
    system to another, and a kernel can repeat this.
    """
    result = 1.0
    for bit in bin(exponent)[2:]:
        result *= result
        if bit == "1":
            result *= base
    return result
