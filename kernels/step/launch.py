"""Puts the addresses of tensors into a table on the device and launches the kernel over them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from typing import Any

import numpy
import torch

from megaopt.kernels.calling import Again
from megaopt.kernels.chunks import rows as table_rows
from megaopt.kernels.chunks.batch import Buffers, Formats
from megaopt.kernels.chunks.scales import scratch_rows
from megaopt.kernels.chunks.spec import KernelSpec
from megaopt.kernels.chunks.table import (
    OWN,
    OWN_BLOCK_PAIR,
    OWN_BLOCKS,
    OWN_DRAWN,
    OWN_SCALED,
    Chunks,
    DeviceTable,
    Geometry,
    chunk_rows,
    note_row,
    to_device,
    two_phase_chunk_rows,
)
from megaopt.kernels.norm.launch import NormPlan
from megaopt.kernels.place import Place, in_order
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.lanes import vectorized
from megaopt.kernels.step import kernel

# Programs at work at a time on an H200: 132 processors, at most 16 of 4 warps each.
LAG = 2112
MOST_DIGESTS = 8


class TritonPlan:
    """The tables of one combination of formats on one device, and the launch.

    Args:
        formats: of every buffer.
        rule: the update rule.
        numels: elements of each tensor; a tensor may be empty.
        groups: for each tensor, its row in the scalars that `step` is given.
        device: a CUDA device, or the CPU under Triton's interpreter.
        geometry: for tests; the device's own otherwise.
        places: of each tensor in its parameter, for random bits; None: each is a whole one, and
            its number is its place here.
    """

    many_calls = False

    def __init__(
        self,
        formats: Formats,
        rule: Rule,
        numels: Sequence[int],
        groups: Sequence[int],
        device: torch.device,
        geometry: Geometry | None = None,
        places: Sequence[Place] | None = None,
    ) -> None:
        self.formats, self.rule, self.device = formats, rule, device
        if geometry is None and formats.scaled:
            geometry = OWN_SCALED
        elif geometry is None and formats.block:
            geometry = OWN_BLOCK_PAIR if formats.block_pair else OWN_BLOCKS
        elif geometry is None:
            drawn = sum(form.draws for form in formats.by_slot.values())
            geometry = OWN_DRAWN if drawn > 1 else OWN
        self.geometry = geometry
        # the table on the host, int64 [Formats.row_count, tensors]; who writes it sets `stale`
        self.rows = numpy.zeros((formats.row_count, len(numels)), dtype=numpy.int64)
        self.rows[table_rows.NUMEL.value] = numels
        self.rows[table_rows.GROUP.value] = groups
        # whether each tensor's blocks may go unmasked by its place, and whether one has a stride
        self._in_quads, self._is_split = numpy.ones(len(numels), dtype=bool), False
        if formats.draws or formats.block:
            self._note_places(places or in_order(len(numels)))
        # views of the table's rows, by slot: `look` writes addresses through them
        self.addresses = {slot: self.rows[formats.rows[slot]] for slot in formats.slots}
        self.stale = True
        # rows that can change from step to step; with fp8 weights any row can
        own_rows = [table_rows.ALIGNED.value, table_rows.VECTORIZED.value]
        own_rows += [formats.rows[slot] for slot in formats.slots]
        self._changing = None if formats.cast else own_rows
        # elements of each tensor, with those of its first block that lie before it
        lengths = self.rows[table_rows.NUMEL.value]
        if formats.block:
            lead = self.rows[table_rows.FIRST_ELEMENT.value] % formats.block
            lengths = numpy.where(lengths == 0, 0, lengths + lead)
        # the table of chunks; with scales per tensor each chunk comes twice, once a phase
        self.chunks = Chunks(lengths.tolist(), self.geometry, device)
        self._programs, self._count = self.chunks.table, self.chunks.count
        if formats.scaled:
            programs = two_phase_chunk_rows(chunk_rows(numels, self.geometry), LAG)
            self._programs, self._count = to_device(programs, device), programs.shape[1]
        # copies on the device, uploaded where the host's differ
        self._table, self._scalars = DeviceTable(device), DeviceTable(device)
        # scratch of scales.py: int32, a column a tensor, and the ticket
        rows = scratch_rows(formats.moment_count)
        scratch = rows * len(numels) + 1 if formats.scaled else 0
        self._scratch = torch.zeros(scratch, dtype=torch.int32, device=device)
        self.digest_slots: tuple[str, ...] = ()
        self.digests: torch.Tensor | None = None
        self._launches: dict[tuple[Any, ...], Again] = {}
        self._at_hand: torch.Tensor | None = None  # the table, from `ready` to `step`

    def sum_digests(self, slots: Sequence[str], places: Sequence[Place]) -> torch.Tensor | None:
        """Lets steps add the digests of slots up; where they do, int64 [tensors, slots, 2].

        The caller sets it to what it starts from before each step. None where the launch cannot:
        of codes that are known when other elements are through, or lie in blocks, of more slots
        than are reduced at once, and of tensors that begin within four places or have a stride.
        """
        formats = self.formats
        is_plain = formats.cast is None and not formats.scaled and not formats.block
        if not is_plain or len(slots) > MOST_DIGESTS or not all(p.in_quads for p in places):
            return None
        self._note_places(places)
        self.stale, self.digest_slots = True, tuple(slots)
        shape = (len(places), len(slots), 2)
        self.digests = torch.zeros(shape, dtype=torch.int64, device=self.device)
        return self.digests

    def look(self, buffers: Buffers) -> None:
        """Notes where the buffers lie, for the step.

        Args:
            buffers: for each slot of the formats a list of one contiguous tensor per parameter.
        """
        moved = [note_row(row, buffers[slot]) for slot, row in self.addresses.items()]
        self.stale = self.stale or any(moved)

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the gradients' squares to the bins of megaopt.kernels.norm: one launch."""
        norm, chunks = self._norm
        norm.accumulate(self.table(), chunks, bins)

    @cached_property
    def _norm(self) -> tuple[NormPlan, Chunks]:
        """The norm, and its chunks of the tensors themselves, not of their first blocks."""
        if not self.formats.block:
            return NormPlan(self.formats.grad, self.geometry), self.chunks
        numels = self.rows[table_rows.NUMEL.value].tolist()
        return NormPlan(self.formats.grad, OWN), Chunks(numels, OWN, self.device)

    def ready(self, scalars: Sequence[tuple[float, ...]] | None) -> torch.Tensor | None:
        """Brings the table and the rows of scalars, if there are any, up to date on the device."""
        if self._count:
            self._at_hand = self.table()
        return None if scalars is None else self.on_device(scalars)

    def step(
        self,
        scalars: Sequence[tuple[float, ...]] | torch.Tensor,
        controls: torch.Tensor | None = None,
    ) -> None:
        """One step of every tensor, where `look` last saw it.

        Args:
            scalars: the rule's row for each parameter group; or these rows on the device, fp32.
            controls: fp32 [groups, CONTROLS] on the device: for each row of scalars what happens to
                gradients first, and whether these are skipped. None leaves gradients as they are.
        """
        if self._count == 0:
            return
        # the table that `ready` brought up to date, unless an address has moved since
        at_hand, self._at_hand = self._at_hand, None
        table = self.table() if at_hand is None or self.stale else at_hand
        scalars = self.on_device(scalars)
        # in the order of step_kernel
        arguments = (
            *(table, self._programs, scalars, controls, self._scratch, self.digests),
            *(self.rows.shape[1], self._count, scalars.shape[1]),
        )
        # one compiled launch for each of these; the first step of a kind makes it
        kind = (controls is not None, self._is_split, self.digest_slots)
        launch = self._launches.get(kind)
        if launch is None:
            fields = (self.formats, self.rule, kind[0], self.geometry, self._is_split)
            spec = KernelSpec(*fields, digests=self.digest_slots)
            options: dict[str, object] = {"SPEC": spec, "num_warps": self.geometry.warps}
            if self.geometry.registers is not None and torch.version.hip is None:
                options["maxnreg"] = self.geometry.registers
            launch = Again(kernel.step_kernel, self._count, options)
            self._launches[kind] = launch
        launch(arguments)

    def on_device(self, scalars: Sequence[tuple[float, ...]] | torch.Tensor) -> torch.Tensor:
        """fp32 [groups, numbers] there; nothing is copied where they are what they were."""
        if isinstance(scalars, torch.Tensor):
            return scalars
        return self._scalars.update(numpy.array(scalars, dtype=numpy.float32))

    def table(self) -> torch.Tensor:
        """int64 [Formats.row_count, tensors] on the device, brought up to date."""
        if not self.stale:
            return self._table.kept()
        # aligned: every buffer of a tensor at a multiple of 16 bytes, and its place fits
        in_use = [self.rows[self.formats.rows[slot]] for slot in self.formats.by_slot]
        aligned = reduce(numpy.bitwise_or, in_use) & 15 == 0
        self.rows[table_rows.ALIGNED.value] = aligned & self._in_quads
        if self.rule.lanes:
            columns = [
                (address_row, self.formats.dtype(slot).itemsize)
                for slot, address_row in self.addresses.items()
            ]
            numels = self.rows[table_rows.NUMEL.value]
            self.rows[table_rows.VECTORIZED.value] = vectorized(numels, columns)
        table = self._table.update(self.rows, self._changing)
        self.stale = False  # only now: without memory for the copy the next step tries again
        return table

    def _note_places(self, places: Sequence[Place]) -> None:
        rows = (table_rows.NUMBER, table_rows.FIRST_ELEMENT, table_rows.RUN, table_rows.RUN_STRIDE)
        for row, values in zip(rows, zip(*places, strict=True), strict=True):
            self.rows[row.value] = values
        self._is_split = any(place.stride for place in places)
        # which tensors' blocks may go unmasked, by place alone; `table` looks at addresses. Those
        # in rows begin up to a row before the tensor: with 16 elements there all its buffers are
        # aligned there too
        whole = [place.in_quads for place in places]
        if self.formats.block:
            draws = self.formats.draws
            whole = [place.first % 16 == 0 and not (place.stride and draws) for place in places]
        self._in_quads = numpy.array(whole, dtype=bool)
