"""What an update rule is, and the host arithmetic that rules share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch


@dataclass(frozen=True)
class Rule:
    """One update rule under one contract: a pure function of fp32 values that knows no format.

    `update(param, first, second, grad, scalars)` (Triton) and `update_reference` (torch) return the
    new (param, first, second) and give the same bits. `scalars(group)` makes the row of numbers
    that a group needs; `load(row_ptr)` reads that row in the kernel as a tuple, in its order.
    """

    name: str
    contract: str
    moments: tuple[str, str]
    """The state's names for the first and second moment."""
    scalars: Callable[[Mapping[str, Any]], tuple[float, ...]]
    load: Any
    update: Any
    update_reference: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    @cached_property
    def cache_key(self) -> str:
        """What Triton's compilation cache needs to know: a change of the source changes it."""
        functions = [getattr(f, "cache_key", "") for f in (self.load, self.update)]
        return f"{self.name}:{self.contract}:{functions}"


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
