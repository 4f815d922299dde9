"""Equality of bits, and the first place where it fails.

A NaN equals every NaN in its place: its sign and payload come from the processor, and from which
operation met it first. A NaN beside a number is a difference, and so is 0.0 beside -0.0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from megaopt.commands.bits import Snapshot, compared_integers, first_unequal


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where a variant first differs from its baseline."""

    step: int
    """The step, counted from 1, after whose update the tensor differs, or whose loss differs."""
    variant: str
    baseline: str
    tensor: str
    """The quantity: a loss, a norm, or the parameter's name and the kind: "norm.weight exp_avg"."""
    index: int | None = None
    """Flat index of the first differing element; None: the bits are those of a fingerprint."""
    bits: str
    """The variant's, hexadecimal."""
    baseline_bits: str
    """The baseline's, hexadecimal."""

    def __str__(self) -> str:
        what = self.tensor if self.index is None else f"tensor {self.tensor}, index {self.index}"
        return (
            f"step {self.step}, variant {self.variant}, {what}: {self.bits}, but "
            f"{self.baseline_bits} in {self.baseline}"
        )


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first differing element of two snapshots."""

    tensor: str
    index: int
    bits: str
    baseline_bits: str


def find_mismatch(snapshot: Snapshot, baseline: Snapshot) -> Mismatch | None:
    """The first element that differs, in model order; None where every bit is the same.

    NaNs are compared by place alone.

    Raises:
        RuntimeError: the two do not hold the same tensors, so that there is nothing to compare.
    """
    layout, baseline_layout = _layout(snapshot), _layout(baseline)
    if layout != baseline_layout:
        odd = sorted(set(layout) ^ set(baseline_layout))
        raise RuntimeError(f"the variant and its baseline hold different tensors: {odd[:4]}")
    for name, kinds in baseline.items():
        for kind, expected in kinds.items():
            if (found := first_unequal(snapshot[name][kind], expected)) is not None:
                return Mismatch(f"{name} {kind}", *found)
    return None


def _layout(snapshot: Snapshot) -> list[tuple[str, str, str, tuple[int, ...]]]:
    """Parameters in model order, each with its kinds sorted: their order carries no meaning."""
    return [
        (name, kind, str(kinds[kind].dtype), tuple(kinds[kind].shape))
        for name, kinds in snapshot.items()
        for kind in sorted(kinds)
    ]


def earliest(differences: Iterable[Difference | None]) -> Difference | None:
    """The one of the lowest step; the first of these where several share it."""
    found = [difference for difference in differences if difference is not None]
    return min(found, key=lambda difference: difference.step, default=None)


def hash_snapshot(snapshot: Snapshot) -> dict[str, str]:
    """For each kind the SHA-256 of its tensors' bytes, concatenated in model order.

    The bytes are those that are compared: every NaN has the same.
    """
    digests: dict[str, hashlib._Hash] = {}
    for kinds in snapshot.values():
        for kind, tensor in kinds.items():
            digest = digests.setdefault(kind, hashlib.sha256())
            digest.update(compared_integers(tensor).cpu().numpy().tobytes())
    return {kind: digest.hexdigest() for kind, digest in sorted(digests.items())}
