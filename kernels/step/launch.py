"""Puts the addresses of tensors into a table on the device and launches the kernel over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from megaopt.kernels.calling import call
from megaopt.kernels.norm.launch import NormPlan
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.lanes import vectorized
from megaopt.kernels.step import kernel
from megaopt.kernels.step import rows as table_rows
from megaopt.kernels.step.batch import Buffers, Formats
from megaopt.kernels.step.scales import scratch_rows
from megaopt.kernels.step.table import (
    OWN,
    OWN_SCALED,
    Chunks,
    DeviceTable,
    Geometry,
    chunk_rows,
    to_device,
    two_phase_chunk_rows,
)
from megaopt.kernels.step.watch import note_row

# Programs at work at a time on an H200: 132 processors, at most 16 of 4 warps each.
LAG = 2112


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
        self.geometry = geometry or (OWN_SCALED if formats.scaled else OWN)
        self._rows = numpy.zeros((formats.row_count, len(numels)), dtype=numpy.int64)
        self._rows[table_rows.NUMEL.value] = numels
        self._rows[table_rows.GROUP.value] = groups
        self.addresses = {slot: self._rows[formats.rows[slot]] for slot in formats.slots}
        self.stale = True
        self._chunks = Chunks(numels, self.geometry, device)
        self._programs, self._count = self._chunks.table, self._chunks.count
        if formats.scaled:
            programs = two_phase_chunk_rows(chunk_rows(numels, self.geometry), LAG)
            self._programs, self._count = to_device(programs, device), programs.shape[1]
        self._table, self._scalars = DeviceTable(device), DeviceTable(device)
        rows = scratch_rows(formats.moment_count)
        scratch = rows * len(numels) + 1 if formats.scaled else 0
        self._scratch = torch.zeros(scratch, dtype=torch.int32, device=device)

    def look(self, buffers: Buffers) -> None:
        """Notes where the buffers lie, for the step.

        Args:
            buffers: for each slot of the formats a list of one contiguous tensor per parameter.
        """
        moved = [note_row(row, buffers[slot]) for slot, row in self.addresses.items()]
        self.stale = self.stale or any(moved)

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the gradients' squares to the bins of megaopt.kernels.norm: one launch."""
        norm = NormPlan(self.formats.grad, self.geometry)
        norm.accumulate(self.table(), self._chunks, bins)

    def step(
        self,
        scalars: Sequence[tuple[float, ...]] | torch.Tensor,
        controls: torch.Tensor | None = None,
    ) -> None:
        """One step of every tensor, where `look` last saw it.

        Args:
            scalars: the rule's row for each parameter group; or these rows on the device, fp32.
            controls: fp32 [CONTROLS] on the device: what happens to gradients first, and whether
                the step is skipped. None leaves gradients as they are.
        """
        if self._count == 0:
            return
        table = self.table()
        scalars = self.on_device(scalars)
        sizes = (self._rows.shape[1], self._count, scalars.shape[1])
        arguments = (table, self._programs, scalars, controls, self._scratch, *sizes)
        options = {"FORMATS": self.formats, "RULE": self.rule, "CONTROLLED": controls is not None}
        launch(kernel.step_kernel, self._count, arguments, options, self.geometry)

    def on_device(self, scalars: Sequence[tuple[float, ...]] | torch.Tensor) -> torch.Tensor:
        """fp32 [groups, numbers] there; nothing is copied where they are what they were."""
        if isinstance(scalars, torch.Tensor):
            return scalars
        return self._scalars.update(numpy.array(scalars, dtype=numpy.float32))

    def cast(self) -> None:
        """Nothing: these weights are stored with the step."""

    def move_scales(self, histories: Sequence[torch.Tensor]) -> None:
        """Nothing: these weights have no scales."""

    def table(self) -> torch.Tensor:
        """int64 [Formats.row_count, tensors] on the device, brought up to date."""
        if not self.stale:
            return self._table.kept()
        in_use = self._rows[[self.formats.rows[slot] for slot in self.formats.by_slot]]
        self._rows[table_rows.ALIGNED.value] = numpy.bitwise_or.reduce(in_use, axis=0) % 16 == 0
        if self.rule.lanes:
            self._rows[table_rows.VECTORIZED.value] = self._vectorized()
        table = self._table.update(self._rows)
        self.stale = False  # only now: without memory for the copy the next step tries again
        return table

    def _vectorized(self) -> numpy.ndarray:
        columns = [
            (self.addresses[slot], self.formats.dtype(slot).itemsize) for slot in self.formats.slots
        ]
        return vectorized(self._rows[table_rows.NUMEL.value], columns)


def launch(
    function: object,
    programs: int,
    arguments: tuple[object, ...],
    options: dict[str, object],
    geometry: Geometry,
) -> None:
    """Launches a kernel over tensors' chunks."""
    options = {
        **options,
        "BLOCK": geometry.block,
        "ITERATIONS": geometry.iterations,
        "SPAN": geometry.span,
        "num_warps": geometry.warps,
    }
    call(function, programs, arguments, options)
