"""What a step works on: tensors that share their formats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy
import torch

from megaopt.kernels.float8 import Float8Recipe
from megaopt.kernels.formats import WEIGHTS, Format
from megaopt.kernels.rules.base import digest

FIXED_ROWS = {
    "grad": 0,
    "weight": 1,
    "master": 2,
    "master_scale": 3,
    "weight_scale": 4,
    "weight_scale_inv": 5,
    "weight_amax": 6,
}
"""The kinds of buffer that every rule has, and their rows in the kernel's table of addresses."""
FIRST_MOMENT_ROW = 15
"""After rows of numbers; two rows a moment: its address, and that of its scale."""

Buffers = dict[str, list[torch.Tensor]]
"""For each slot in use, one contiguous tensor per parameter, in one order."""


@dataclass(frozen=True)
class Cast:
    """How the new values of fp8 weights become codes."""

    recipe: Float8Recipe
    dtype: torch.dtype
    """The weights' own, to which values are rounded first, unless the recipe is direct."""

    @property
    def rounding(self) -> Format:
        """The format through which values go before they are encoded."""
        return WEIGHTS[torch.float32 if self.recipe.direct else self.dtype]

    @property
    def slots(self) -> tuple[str, ...]:
        """What lies beside the codes."""
        delayed = ("weight_scale",) if self.recipe.scaling == "delayed" else ()
        return (*delayed, "weight_scale_inv", "weight_amax")


class Extent(NamedTuple):
    """Which elements of a weight a tensor holds: `numel` from `start` on, row by row."""

    rows: int
    columns: int
    start: int
    shared: bool = False
    """Other ranks hold the rest, and need the amaxes."""


@dataclass(frozen=True)
class Formats:
    """One combination of formats: one launch."""

    grad: Format
    weight: Format
    master: Format
    moments: tuple[Format, ...]
    """Of the rule's moments, in its order."""
    moment_names: tuple[str, ...]
    """What the rule calls them, and the optimizer's state."""
    cast: Cast | None = None
    """Where weights are fp8 codes with scales of their own; else None."""
    rounds_grad: bool = False
    """An unscaled or clipped gradient is rounded to its own format, as one written back is."""
    writes_grad: bool = False
    """An unscaled gradient takes the place of the one in memory."""
    maximize: bool = False
    """The step follows the gradient instead of going against it."""

    @property
    def moment_count(self) -> int:
        """How many moments the rule has."""
        return len(self.moments)

    @cached_property
    def by_slot(self) -> dict[str, Format]:
        """The formats of gradient, weight, master and moments, by slot."""
        own = {"grad": self.grad, "weight": self.weight, "master": self.master}
        return {**own, **dict(zip(self.moment_names, self.moments, strict=True))}

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """The slots that hold tensors."""
        buffers = [slot for slot, form in self.by_slot.items() if form.present]
        scales = [f"{slot}_scale" for slot, form in self.by_slot.items() if form.scaled]
        return (*buffers, *scales, *(self.cast.slots if self.cast else ()))

    @cached_property
    def rows(self) -> dict[str, int]:
        """For each slot its row in the kernel's table of addresses."""
        moments = {}
        for index, name in enumerate(self.moment_names):
            moments[name] = FIRST_MOMENT_ROW + 2 * index
            moments[f"{name}_scale"] = FIRST_MOMENT_ROW + 2 * index + 1
        return {**FIXED_ROWS, **moments}

    @property
    def row_count(self) -> int:
        """The rows of the kernel's table."""
        return FIRST_MOMENT_ROW + 2 * self.moment_count

    # what kernels ask of the cast, as plain values
    @property
    def is_delayed(self) -> bool:
        """fp8 weights with delayed scaling: their codes can be stored with the step."""
        return self.cast is not None and self.cast.recipe.scaling == "delayed"

    @property
    def casts_along(self) -> bool:
        """fp8 weights that the step's own pass can cast, or at least find amaxes for.

        Not where the master is scaled: its stored value, of which the weight is made, is known only
        when the tensor is through. Nor blocks beside scaled moments.
        """
        if self.cast is None or self.master.scaled:
            return False
        return self.cast.recipe.block is None or not self.scaled

    @property
    def is_e8m0(self) -> bool:
        """fp8 weights whose scales are exponents."""
        return self.cast is not None and self.cast.recipe.scaling == "mxfp8"

    @property
    def shares_rows(self) -> bool:
        """fp8 weights in blocks of several rows."""
        return self.block_rows > 1

    @property
    def block_columns(self) -> int:
        """Of fp8 weights in blocks."""
        return self._block[1]

    @property
    def block_rows(self) -> int:
        """Of fp8 weights in blocks."""
        return self._block[0]

    @property
    def _block(self) -> tuple[int, int]:
        return (self.cast and self.cast.recipe.block) or (0, 0)

    @property
    def rounding(self) -> Format:
        """Through which values go before they become fp8."""
        return self.cast.rounding if self.cast else WEIGHTS[torch.float32]

    @property
    def code_max(self) -> float:
        """What a scale takes an amax of fp8 weights to; for E8M0 its reciprocal, an fp32."""
        if self.cast is None:
            return 1.0
        code_max = self.cast.recipe.code_max
        return float(numpy.float32(1 / code_max)) if self.is_e8m0 else code_max

    @property
    def amax_epsilon(self) -> float:
        """The least amax of fp8 weights."""
        return float(self.cast.recipe.amax_epsilon) if self.cast else 0.0

    @property
    def power_of_two_scales(self) -> bool:
        """Whether scales of fp8 weights are rounded down to powers of two."""
        return self.cast is not None and bool(self.cast.recipe.power_of_two_scales)

    @cached_property
    def state_slots(self) -> tuple[str, ...]:
        """The slots whose tensors are in the optimizer's state."""
        return tuple(slot for slot in self.slots[2:] if not slot.startswith("weight"))

    @property
    def scaled(self) -> bool:
        """Whether a scale has to be known before the codes can be stored."""
        return any(form.scaled for form in self.by_slot.values())

    @cached_property
    def cache_key(self) -> str:
        """What Triton's compilation cache needs to know: a change of the source changes it."""
        keys = [form.cache_key for form in self.by_slot.values()]
        flags = (self.rounds_grad, self.writes_grad, self.maximize)
        return digest(f"{'/'.join(keys)}/{self.cast}/{flags}")

    def __hash__(self) -> int:
        """Quick: launches look for their kernel by it."""
        return hash(self.cache_key)

    def __repr__(self) -> str:
        """Short, as Triton writes it down at every launch; not the same for two sources."""
        names = ", ".join(form.name for form in self.by_slot.values())
        return f"Formats({names}, {self.cache_key})"

    def dtype(self, slot: str) -> torch.dtype:
        """The dtype that a slot's tensors have; scales are fp32 tensors of one element."""
        if slot == "weight_scale_inv" and self.cast and self.cast.recipe.scaling == "mxfp8":
            return torch.uint8
        if slot.endswith(("_scale", "_scale_inv", "_amax")):
            return torch.float32
        dtype = self.by_slot[slot].dtype
        assert dtype is not None
        return dtype
