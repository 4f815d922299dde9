"""The case that a step's kernel is compiled for, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    @property
    def block(self) -> int:
        """Elements of a block."""
        return self.geometry.block

    @property
    def width(self) -> int:
        """Elements of a row, which a thread takes; 0 where moments are not in blocks."""
        return self.geometry.width if self.formats.block else 0

    @property
    def digest_count(self) -> int:
        """The number of slots that have digests."""
        return len(self.digests)

    @property
    def digest_places(self) -> int:
        """Both lanes of all slots, filled up to a power of two."""
        return 1 << (2 * len(self.digests) - 1).bit_length()

    @property
    def digest_rows(self) -> tuple[int, ...]:
        """The slots' rows in the table of addresses."""
        return tuple(self.formats.rows[slot] for slot in self.digests)

    @property
    def digest_formats(self) -> tuple[Format, ...]:
        """The slots' formats."""
        return tuple(self.formats.by_slot[slot] for slot in self.digests)

    @property
    def digests_grad(self) -> bool:
        """Returns whether the gradient is among the slots."""
        return "grad" in self.digests

    @property
    def reads_param(self) -> bool:
        """Returns whether what is computed needs the parameter's value."""
        if self.stores:
            return self.rule.reads_param
        return self.rule.moments_use_param or self.formats.master.scaled

    @property
    def writes_grad(self) -> bool:
        """An unscaled gradient takes the place of the one in memory."""
        return self.stores and self.formats.writes_grad

    @property
    def amaxes(self) -> KernelSpec:
        """The same for the phase that finds amaxes."""
        return replace(self, stores=False)
