"""Equality of bits, and the first place where it fails.

A NaN equals every NaN in its place: its sign and payload come from the processor, and from which
operation met it first. A NaN beside a number is a difference, and so is 0.0 beside -0.0.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megaopt.commands.training.trainer import Snapshot

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where a variant first differs from its baseline."""

    step: int
    """The step, counted from 1, after whose update the tensor differs, or whose loss differs."""
    variant: str
    baseline: str
    tensor: str
    """Either "loss", or the parameter's name and the kind: "norm.weight exp_avg"."""
    index: int
    """Flat index of the first differing element."""
    bits: str
    """The variant's bit pattern, hexadecimal."""
    baseline_bits: str
    """The baseline's bit pattern, hexadecimal."""

    def __str__(self) -> str:
        return (
            f"step {self.step}, variant {self.variant}, tensor {self.tensor}, index {self.index}: "
            f"{self.bits}, but {self.baseline_bits} in {self.baseline}"
        )


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first differing element of two snapshots."""

    tensor: str
    index: int
    bits: str
    baseline_bits: str


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns, as integers of the same width."""
    return tensor.detach().contiguous().view(INTEGER_OF_SIZE[tensor.element_size()])


def compared_integers(tensor: torch.Tensor) -> torch.Tensor:
    """What is compared: the bit patterns as integers, of every NaN that of torch.nan."""
    integers = as_integers(tensor)
    if not tensor.is_floating_point():
        return integers
    nan = as_integers(torch.tensor(math.nan).to(tensor.dtype))
    return integers.masked_fill(tensor.detach().isnan(), int(nan.item()))


def from_integers(integers: torch.Tensor, dtype: str, device: torch.device) -> torch.Tensor:
    """What `as_integers` made of a tensor of that dtype, by its name ("torch.float32"); moved."""
    return integers.to(device).view(getattr(torch, dtype.removeprefix("torch.")))


def hexadecimal(tensor: torch.Tensor, index: int) -> str:
    """The bit pattern of one element, by flat index."""
    width = 8 * tensor.element_size()
    value = int(as_integers(tensor).view(-1)[index].item())
    return f"0x{value % (1 << width):0{width // 4}x}"


def loss_bits(loss: float) -> str:
    """The fp32 bit pattern of a loss; of every NaN 0x7fc00000."""
    loss = math.nan if math.isnan(loss) else loss
    return f"0x{struct.unpack('<I', struct.pack('<f', loss))[0]:08x}"


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
            actual = snapshot[name][kind]
            if torch.equal(as_integers(actual), as_integers(expected)):
                continue
            differs = compared_integers(actual) != compared_integers(expected)
            if not differs.any():
                continue
            index = int(differs.view(-1).nonzero()[0].item())
            bits, baseline_bits = (hexadecimal(tensor, index) for tensor in (actual, expected))
            return Mismatch(f"{name} {kind}", index, bits, baseline_bits)
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
