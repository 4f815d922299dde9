"""A step's batch: tensors that share their formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from megaopt.kernels.chunks.rows import FIRST_MOMENT_ROW, FIXED_ROWS
from megaopt.kernels.chunks.store import LATER, PLAIN, Left, Quantizer, Recipe, Store
from megaopt.kernels.formats import NONE, WEIGHTS, Format
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

    # made of these fields
    quantizer: Quantizer = field(init=False, repr=False, compare=False)
    """The recipe's."""
    rounding: Format = field(init=False, repr=False, compare=False)
    """The format through which values go before they are encoded."""
    slots: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The slots of what lies beside the codes."""

    def __post_init__(self) -> None:
        quantizer, is_wide = self.recipe.quantizer, self.recipe.direct or self.exact
        scale_slots = ("weight_scale",) if quantizer.keeps_scale else ()
        remainder_slots = ("weight_remainder",) if self.remainder.present else ()
        vars(self).update(
            quantizer=quantizer,
            rounding=WEIGHTS[torch.float32 if is_wide else self.dtype],
            slots=(*scale_slots, "weight_scale_inv", "weight_amax", *remainder_slots),
        )


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

    # made of these fields
    by_slot: dict[str, Format] = field(init=False, compare=False)
    """The formats of gradient, weight, master and moments, by slot."""
    slots: tuple[str, ...] = field(init=False, compare=False)
    """The slots that hold tensors."""
    state_slots: tuple[str, ...] = field(init=False, compare=False)
    """The slots whose tensors are in the optimizer's state."""
    moment_count: int = field(init=False, compare=False)
    """The number of the rule's moments."""
    rows: dict[str, int] = field(init=False, compare=False)
    """The row of each slot in the kernel's table of addresses."""
    row_count: int = field(init=False, compare=False)
    """The rows of that table."""
    scaled: bool = field(init=False, compare=False)
    """A scale has to be known before the codes can be stored."""
    block: int = field(init=False, compare=False)
    """Elements that share a scale where moments are kept in blocks, else 0."""
    block_pair: bool = field(init=False, compare=False)
    """There are two moments, both in blocks."""
    draws: bool = field(init=False, compare=False)
    """Something is rounded stochastically."""
    reads_weight: bool = field(init=False, compare=False)
    """A step updates the weight's value, alone or with a joined master."""
    store: Store = field(init=False, compare=False)
    """The way in which the step's pass stores weights."""
    in_place: bool = field(init=False, compare=False)
    """One pass reads and stores fp8 codes, with no fp32 value for the step."""
    remainder: Format = field(init=False, compare=False)
    """The format of what lies beside fp8 codes; NONE where nothing does."""
    cast_draws: bool = field(init=False, compare=False)
    """The codes, or what lies beside them, are rounded stochastically."""

    def __post_init__(self) -> None:
        cast, master, moments = self.cast, self.master, self.moments
        by_slot = {"grad": self.grad, "weight": self.weight, "master": master}
        by_slot |= zip(self.moment_names, moments, strict=True)
        # gradient and weight come first: states have neither
        buffers = [slot for slot, form in by_slot.items() if form.present]
        scales = [f"{slot}_scale" for slot, form in by_slot.items() if form.has_scale]
        slots = (*buffers, *scales, *(cast.slots if cast else ()))
        # in the table two rows a moment: its address, and that of its scale
        rows = dict(FIXED_ROWS)
        for index, name in enumerate(self.moment_names):
            rows[name] = FIRST_MOMENT_ROW + 2 * index
            rows[f"{name}_scale"] = FIRST_MOMENT_ROW + 2 * index + 1

        scaled = any(form.scaled for form in by_slot.values())
        block = max((form.block for form in moments), default=0)
        reads_weight = master.joined or not master.present
        # plain weights are stored as they are, fp8 ones as the quantizer does if nothing stands
        # against it
        store, remainder = PLAIN, NONE
        if cast is not None:
            remainder, store = master if master.joined else cast.remainder, cast.quantizer.store
            # they wait where the master is scaled: its stored value, of which the weight is made,
            # is known only when the tensor is through. So do tiles beside moments that are scaled,
            # or in blocks, which lie along the tensor
            waits = scaled or (block > 0 and not cast.rows_hold_blocks)
            waits = master.scaled or (store.tile and waits)
            # or the pass would store codes to nearest, and nothing beside them
            loses = cast.exact and not store.in_place and store.left is Left.NOTHING
            store = LATER if waits or loses else store
        vars(self).update(
            by_slot=by_slot,
            slots=slots,
            state_slots=tuple(slot for slot in slots[2:] if not slot.startswith("weight")),
            moment_count=len(moments),
            rows=rows,
            row_count=FIRST_MOMENT_ROW + 2 * len(moments),
            scaled=scaled,
            block=block,
            block_pair=len(moments) == 2 and all(form.block for form in moments),
            draws=any(form.draws for form in by_slot.values())
            or (cast is not None and cast.remainder.draws),
            reads_weight=reads_weight,
            store=store,
            # codes, with what lies beside them, are masters then: no update is lost
            in_place=reads_weight and cast is not None and cast.exact and store.in_place,
            remainder=remainder,
            cast_draws=cast is not None and (self.weight.draws or remainder.draws),
        )

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
        return digest((keys, self.cast, flags))

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
