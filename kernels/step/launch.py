"""Puts the addresses of tensors into a table on the device and launches the kernel over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from megaopt.kernels.optional_triton import INTERPRETED
from megaopt.kernels.rules import Rule
from megaopt.kernels.step import kernel
from megaopt.kernels.step.batch import SLOTS, Buffers, Formats
from megaopt.kernels.step.watch import note_row


@dataclass(frozen=True)
class Geometry:
    """How the elements are dealt out to programs; it changes no bit of the result."""

    block: int
    """Elements that a program loads at a time; a power of two."""
    iterations: int
    """Blocks that a program works through."""
    warps: int = 4


# On an H200, percent of copy on set B for fp32 masters, remainders, bf16 moments, both:
# 512 x 4: 97.0 98.3 97.0 96.0; 1024 x 4: 96.5 97.1 94.3 94.8; 512 x 8: 95.6 96.3 96.0 96.5;
# 1024 x 8: 95.1 96.2 94.9 95.2; 512 x 16: 94.8 95.4 94.9 95.0; 8 warps: 79.9 to 96.3
COMPILED = Geometry(512, 4)
# An interpreted operation costs some 15 microseconds whatever its size: fewer, larger programs.
INTERPRETER = Geometry(16384, 1)


class TritonPlan:
    """The tables of one combination of formats on one device, and the launch.

    Args:
        formats: of every buffer.
        rule: the update rule.
        numels: elements of each tensor; a tensor may be empty.
        groups: for each tensor, its row in the scalars that `step` is given.
        device: a CUDA device, or the CPU under Triton's interpreter.
        geometry: for tests; the device's own otherwise.
    """

    def __init__(
        self,
        formats: Formats,
        rule: Rule,
        numels: Sequence[int],
        groups: Sequence[int],
        device: torch.device,
        geometry: Geometry | None = None,
    ) -> None:
        self.formats, self.rule, self.device = formats, rule, device
        self.geometry = geometry or (INTERPRETER if INTERPRETED else COMPILED)
        self._rows = numpy.zeros((kernel.ROWS, len(numels)), dtype=numpy.int64)
        self._rows[len(SLOTS)] = numels
        self._rows[len(SLOTS) + 1] = groups
        self.addresses = {slot: self._rows[SLOTS.index(slot)] for slot in formats.slots}
        self.stale = True
        self._chunks = to_device(chunk_table(numels, self.geometry), device)
        self._table = torch.empty(0)
        self._scratch = torch.zeros(
            (kernel.SCRATCH_ROWS if formats.scaled else 0, len(numels)),
            dtype=torch.int32,
            device=device,
        )

    def look(self, buffers: Buffers) -> None:
        """Notes where the buffers lie, for the step.

        Args:
            buffers: for each slot of the formats a list of one contiguous tensor per parameter.
        """
        moved = [note_row(row, buffers[slot]) for slot, row in self.addresses.items()]
        self.stale = self.stale or any(moved)

    def step(self, scalars: Sequence[tuple[float, ...]]) -> None:
        """One step of every tensor, where `look` last saw it.

        Args:
            scalars: the rule's row for each parameter group.
        """
        self._refresh()
        rows = to_device(numpy.array(scalars, dtype=numpy.float32), self.device)
        if self._chunks.shape[1] == 0:
            return
        if self.formats.scaled:
            self._scratch.zero_()
            self._launch(kernel.amax_kernel, rows)
        self._launch(kernel.step_kernel, rows)

    def _refresh(self) -> None:
        """Brings the table on the device up to date."""
        if not self.stale:
            return
        in_use = self._rows[: SLOTS.index("second") + 1]
        self._rows[len(SLOTS) + 2] = numpy.bitwise_or.reduce(in_use, axis=0) % 16 == 0
        self._table = to_device(self._rows, self.device)
        self.stale = False

    def _launch(self, function: object, scalars: torch.Tensor) -> None:
        chunks = self._chunks.shape[1]
        sizes = (self._rows.shape[1], chunks, scalars.shape[1])
        arguments = (self._table, self._chunks, scalars, self._scratch, *sizes)
        formats = self.formats
        options = {
            "GRAD_FORMAT": formats.grad,
            "WEIGHT_FORMAT": formats.weight,
            "MASTER_FORMAT": formats.master,
            "FIRST_FORMAT": formats.first,
            "SECOND_FORMAT": formats.second,
            "RULE": self.rule,
            "BLOCK": self.geometry.block,
            "ITERATIONS": self.geometry.iterations,
            "num_warps": self.geometry.warps,
            # the contract rounds every operation: no contraction of a product and a sum
            "enable_fp_fusion": False,
        }
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                function[(chunks,)](*arguments, **options)  # type: ignore[index]
        else:
            # numpy, which the interpreter computes with, warns of what IEEE 754 defines
            with numpy.errstate(all="ignore"):
                function[(chunks,)](*arguments, **options)  # type: ignore[index]


def chunk_table(numels: Sequence[int], geometry: Geometry) -> numpy.ndarray:
    """int32 [2, chunks]: for each program its tensor and its place there, in units of chunks."""
    size = geometry.block * geometry.iterations
    counts = -(-numpy.array(numels, dtype=numpy.int64) // size)
    tensors = numpy.repeat(numpy.arange(len(numels)), counts)
    firsts = numpy.repeat(numpy.cumsum(counts) - counts, counts)
    return numpy.stack([tensors, numpy.arange(len(tensors)) - firsts]).astype(numpy.int32)


def to_device(array: numpy.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, made without waiting for the work queued there.

    The pinned memory goes back to torch's host allocator, which reuses it only after the copy.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)
