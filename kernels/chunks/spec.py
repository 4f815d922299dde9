"""The case that a step's kernel is compiled for, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.chunks.table import OWN, Geometry
from megaopt.kernels.formats import Format
from megaopt.kernels.rules.base import Rule


@dataclass(frozen=True)
class KernelSpec:
    """One combination of formats and rule, and how a launch goes over it: one compiled kernel."""

    formats: Formats
    rule: Rule
    controlled: bool
    """There are controls."""
    geometry: Geometry = OWN
    split: bool = False
    """A tensor may have a stride (place.Place)."""
    stores: bool = True
    """False in the phase that finds amaxes, which computes the update and stores nothing."""
    digests: tuple[str, ...] = ()
    """Slots whose digests the launch sums up (megaopt.kernels.digest.step)."""

    # made of these fields
    block: int = field(init=False, repr=False, compare=False)
    """Elements of a block."""
    width: int = field(init=False, repr=False, compare=False)
    """Elements of a row, which a thread takes; 0 where moments are not in blocks."""
    digest_count: int = field(init=False, repr=False, compare=False)
    """The number of slots that have digests."""
    digest_places: int = field(init=False, repr=False, compare=False)
    """Both lanes of all slots, filled up to a power of two."""
    digest_rows: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The slots' rows in the table of addresses."""
    digest_formats: tuple[Format, ...] = field(init=False, repr=False, compare=False)
    """The slots' formats."""
    digests_grad: bool = field(init=False, repr=False, compare=False)
    """The gradient is among the slots."""
    reads_param: bool = field(init=False, repr=False, compare=False)
    """The parameter's value is needed for what is computed."""
    writes_grad: bool = field(init=False, repr=False, compare=False)
    """An unscaled gradient takes the place of the one in memory."""

    def __post_init__(self) -> None:
        formats, rule, slots = self.formats, self.rule, self.digests
        # without storing: what the amaxes are made of
        needs_param = rule.moments_use_param or formats.master.scaled
        vars(self).update(
            block=self.geometry.block,
            width=self.geometry.width if formats.block else 0,
            digest_count=len(slots),
            digest_places=1 << (2 * len(slots) - 1).bit_length(),
            digest_rows=tuple(formats.rows[slot] for slot in slots),
            digest_formats=tuple(formats.by_slot[slot] for slot in slots),
            digests_grad="grad" in slots,
            reads_param=rule.reads_param if self.stores else needs_param,
            writes_grad=self.stores and formats.writes_grad,
        )

    @property
    def amaxes(self) -> KernelSpec:
        """The same for the phase that finds amaxes."""
        return replace(self, stores=False)
