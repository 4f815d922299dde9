"""What a step works on: tensors that share their formats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from megaopt.kernels.formats import Format
from megaopt.kernels.rules.base import digest

SLOTS = (
    "grad",
    "weight",
    "master",
    "first",
    "second",
    "master_scale",
    "first_scale",
    "second_scale",
)
"""The kinds of buffer, in the order of the kernel's table of addresses."""

Buffers = dict[str, list[torch.Tensor]]
"""For each slot in use, one contiguous tensor per parameter, in one order."""


@dataclass(frozen=True)
class Formats:
    """One combination of formats: one launch."""

    grad: Format
    weight: Format
    master: Format
    first: Format
    second: Format

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that hold tensors."""
        buffers = [slot for slot in SLOTS[:5] if getattr(self, slot).present]
        scales = [f"{slot}_scale" for slot in SLOTS[2:5] if getattr(self, slot).scaled]
        return (*buffers, *scales)

    @property
    def scaled(self) -> bool:
        """Whether a scale has to be known before the codes can be stored."""
        return any(slot.endswith("_scale") for slot in self.slots)

    @cached_property
    def cache_key(self) -> str:
        """What Triton's compilation cache needs to know: a change of the source changes it."""
        return digest("/".join(getattr(self, slot).cache_key for slot in SLOTS[:5]))

    def __repr__(self) -> str:
        """Short, as Triton writes it down at every launch; not the same for two sources."""
        names = ", ".join(getattr(self, slot).name for slot in SLOTS[:5])
        return f"Formats({names}, {self.cache_key})"

    def dtype(self, slot: str) -> torch.dtype:
        """The dtype that a slot's tensors have; scales are fp32 tensors of one element."""
        if slot.endswith("_scale"):
            return torch.float32
        form: Format = getattr(self, slot)
        assert form.dtype is not None
        return form.dtype
