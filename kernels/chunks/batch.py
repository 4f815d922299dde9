"""A step's batch: tensors that share their formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from megaopt.kernels.chunks.rows import FIRST_MOMENT_ROW, FIXED_ROWS
from megaopt.kernels.chunks.store import LATER, PLAIN, Left, Quantizer, Recipe, Store
from megaopt.kernels.formats import MASTERS, NONE, WEIGHTS, Format
from megaopt.kernels.rules.base import digest

if TYPE_CHECKING:
    from megaopt.kernels.rules.matrix import Matrix

Buffers = dict[str, list[torch.Tensor]]
"""Lists by slot, of one contiguous tensor per parameter, in one order."""
Scalars = Sequence[tuple[float, ...]] | torch.Tensor
"""The rule's row for each group; or these rows on the device, fp32."""


@dataclass(frozen=True)
class Cast:
    """A way in which the new values of fp8 weights become codes."""

    recipe: Recipe
    dtype: torch.dtype
    """The weights' own, to which values are rounded first, unless the recipe is direct."""
    exact: bool = False
    """Values are rounded to no other format, neither where codes are read nor where they are made:
    those of weights without fp32 masters that keep small updates."""
    rows_hold_blocks: bool = False
    """Weights are whole, and each of their rows is whole blocks of the moments, which a tile's
    lines then hold."""
    remainder: Format = field(default=NONE, repr=False)
    """The format beside codes of which the step has values for its own time (plan_formats)."""

    @property
    def rounding(self) -> Format:
        """The format through which values go before they are encoded."""
        return WEIGHTS[torch.float32 if self.recipe.direct or self.exact else self.dtype]

    @property
    def quantizer(self) -> Quantizer:
        """The recipe's."""
        return self.recipe.quantizer

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of what lies beside the codes."""
        scale_slots = ("weight_scale",) if self.quantizer.keeps_scale else ()
        remainder_slots = ("weight_remainder",) if self.remainder.present else ()
        return (*scale_slots, "weight_scale_inv", "weight_amax", *remainder_slots)


class Extent(NamedTuple):
    """The elements of a weight that a tensor holds: `numel` from `start` on, row by row."""

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
    """The formats of the rule's moments, in its order."""
    moment_names: tuple[str, ...]
    """The names of the moments in the rule and in the optimizer's state."""
    cast: Cast | None = None
    """The cast of weights that are fp8 codes with scales of their own; else None."""
    rounds_grad: bool = False
    """An unscaled or clipped gradient is rounded to its own format, as one written back is."""
    writes_grad: bool = False
    """An unscaled gradient takes the place of the one in memory."""
    maximize: bool = False
    """The step follows the gradient instead of going against it."""
    matrix: Matrix | None = None
    """The rule that steps whole matrices; None where there is none."""
    from_param: tuple[str, ...] = field(default=(), compare=False)
    """Names of moments that start as the parameter, not as zeros."""

    @property
    def moment_count(self) -> int:
        """The number of the rule's moments."""
        return len(self.moments)

    @cached_property
    def by_slot(self) -> dict[str, Format]:
        """The formats of gradient, weight, master and moments, by slot."""
        formats = {"grad": self.grad, "weight": self.weight, "master": self.master}
        return {**formats, **dict(zip(self.moment_names, self.moments, strict=True))}

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """The slots that hold tensors."""
        # gradient and weight come first: state_slots leaves the first two out
        buffers = [slot for slot, form in self.by_slot.items() if form.present]
        scales = [f"{slot}_scale" for slot, form in self.by_slot.items() if form.has_scale]
        return (*buffers, *scales, *(self.cast.slots if self.cast else ()))

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of each slot in the kernel's table of addresses."""
        # two rows a moment: its address, and that of its scale
        moments = {}
        for index, name in enumerate(self.moment_names):
            moments[name] = FIRST_MOMENT_ROW + 2 * index
            moments[f"{name}_scale"] = FIRST_MOMENT_ROW + 2 * index + 1
        return {**FIXED_ROWS, **moments}

    @property
    def row_count(self) -> int:
        """The rows of the kernel's table."""
        return FIRST_MOMENT_ROW + 2 * self.moment_count

    @cached_property
    def store(self) -> Store:
        """The way in which the step's pass stores weights.

        fp8 weights wait where the master is scaled: its stored value, of which the weight is made,
        is known only when the tensor is through. So do tiles beside moments that are scaled, or in
        blocks, which lie along the tensor.
        """
        if self.cast is None:
            return PLAIN
        # what the quantizer would do, if nothing stands against it
        store = self.cast.quantizer.store
        if self.cast.exact and not store.in_place and store.left is Left.NOTHING:
            return LATER  # it stores codes to nearest, and nothing beside them
        waits = self.scaled or (self.block > 0 and not self.cast.rows_hold_blocks)
        return LATER if self.master.scaled or (store.tile and waits) else store

    @cached_property
    def state_slots(self) -> tuple[str, ...]:
        """The slots whose tensors are in the optimizer's state."""
        return tuple(slot for slot in self.slots[2:] if not slot.startswith("weight"))

    @property
    def scaled(self) -> bool:
        """Returns whether a scale has to be known before the codes can be stored."""
        return any(form.scaled for form in self.by_slot.values())

    @cached_property
    def block(self) -> int:
        """Elements that share a scale where moments are kept in blocks, else 0."""
        return max((form.block for form in self.moments), default=0)

    @property
    def block_pair(self) -> bool:
        """Returns whether there are two moments, both in blocks."""
        return len(self.moments) == 2 and all(form.block for form in self.moments)

    @cached_property
    def draws(self) -> bool:
        """Returns whether something is rounded stochastically."""
        drawn = any(form.draws for form in self.by_slot.values())
        return drawn or (self.cast is not None and self.cast.remainder.draws)

    @cached_property
    def in_place(self) -> bool:
        """Returns whether one pass reads and stores fp8 codes, with no fp32 value for the step."""
        return self.is_exact and self.store.in_place

    @property
    def is_exact(self) -> bool:
        """Returns whether fp8 codes, with what lies beside them, are masters: no update is lost."""
        return self.reads_weight and self.cast is not None and self.cast.exact

    @property
    def reads_weight(self) -> bool:
        """Returns whether a step updates the weight's value, alone or with a joined master."""
        return self.master.joined or not self.master.present

    def with_values(self) -> Formats:
        """The same for a step that is given fp32 values for its time, beside the codes."""
        assert self.cast is not None
        cast = replace(self.cast, remainder=self.master)
        return replace(self, master=MASTERS[torch.float32], cast=cast)

    @property
    def cast_draws(self) -> bool:
        """Returns whether fp8 codes, or what lies beside them, are rounded stochastically."""
        return self.cast is not None and (self.weight.draws or self.remainder.draws)

    @property
    def remainder(self) -> Format:
        """The format of what lies beside fp8 codes; NONE where nothing does."""
        if self.cast is None:
            return NONE
        return self.master if self.master.joined else self.cast.remainder

    @cached_property
    def cache_key(self) -> str:
        """The key of Triton's compilation cache: a change of the source changes it."""
        # every format, then how weights are stored, then the cast's own
        keys = [form.cache_key for form in self.by_slot.values()]
        keys.append(self.store.cache_key)
        if self.cast:
            keys += [self.cast.quantizer.cache_key, self.cast.rounding.cache_key]
            keys.append(self.cast.remainder.cache_key)
        flags = (self.rounds_grad, self.writes_grad, self.maximize, self.matrix)
        return digest(f"{'/'.join(keys)}/{self.cast}/{flags}")

    def __hash__(self) -> int:
        """Quick: launches look for their kernel by it."""
        return hash(self.cache_key)

    def __repr__(self) -> str:
        """Short, as Triton writes it down at every launch; not the same for two sources."""
        names = ", ".join(form.name for form in self.by_slot.values())
        return f"Formats({names}, {self.cache_key})"

    def dtype(self, slot: str) -> torch.dtype:
        """The dtype that a slot's tensors have; scales are fp32, of blocks uint8."""
        if slot == "weight_scale_inv" and self.cast:
            return self.cast.quantizer.scale_dtype
        if slot.endswith(("_scale", "_scale_inv", "_amax")):
            # the format of the slot whose scale this is: scales of blocks are bytes
            form = self.by_slot.get(slot.removesuffix("_scale"))
            return torch.uint8 if form is not None and form.block else torch.float32
        if slot == "weight_remainder":
            return torch.int8
        dtype = self.by_slot[slot].dtype
        assert dtype is not None
        return dtype
