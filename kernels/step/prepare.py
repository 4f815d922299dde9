"""Numbers that a step reads from the device before it starts: groups' scalars and controls.

One small launch, so that lr, step, gradient scale, clip coefficient and found_inf may live on the
device: nothing waits for them, and a CUDA graph that captured the step reads them at every replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from megaopt.kernels.calling import Again, kinds_of
from megaopt.kernels.chunks.table import DeviceTable, is_capturing
from megaopt.kernels.norm.kernel import total_of
from megaopt.kernels.optional_triton import helper, jit, tl
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.adam_ieee import canonical
from megaopt.kernels.rules.base import MOST_TABLES
from megaopt.kernels.rules.loading import store_row
from megaopt.kernels.step.controls import COUNT
from megaopt.kernels.step.kernel import (
    COEFFICIENT,
    CONTROLS,
    GRAD_SCALE,
    INVERSE_SCALE,
    SKIP,
    UNSCALED,
)
from megaopt.kernels.step.preparation import Group, Measured, Preparation, Request

# Columns of the int64 table of groups, a row a group: addresses of lr (fp32) and step (int32), then
# the seed of random bits, the bits of Rule.hyper in fp64, and addresses and lengths of the rule's
# tables.
LR: tl.constexpr = tl.constexpr(0)
STEP: tl.constexpr = tl.constexpr(1)
SEED: tl.constexpr = tl.constexpr(2)
HYPER: tl.constexpr = tl.constexpr(3)


@helper
def number_of(ptr, row):
    """A row's fp32 number; 1 where there is none."""
    if ptr is None:  # noqa: SIM108 at compile time
        value = tl.full((), 1.0, tl.float32)
    else:
        value = tl.load(ptr + row).to(tl.float32)
    return value


@helper
def is_set(ptr, row):
    """Returns whether a row's number is not 0; false where there is none."""
    if ptr is None:  # noqa: SIM108 at compile time
        value = tl.full((), 0, tl.int32) != 0
    else:
        value = tl.load(ptr + row) != 0
    return value


@helper
def clip_coefficient(norm, clip_norm):
    """torch.nn.utils.clip_grad_norm_'s, each operation rounded once; NaN where the norm is."""
    coefficient = tl.math.div_rn(clip_norm, norm + 1e-6)
    return tl.where(coefficient > 1.0, 1.0, coefficient)


@helper
def store_draw_numbers(row_ptr, seed, step):
    """megaopt.kernels.rules.base.draw_numbers."""
    for piece in tl.static_range(4):
        tl.store(row_ptr + piece, ((seed >> (16 * piece)) & 0xFFFF).to(tl.float32))
    tl.store(row_ptr + 4, (step & 0xFFFF).to(tl.float32))
    tl.store(row_ptr + 5, (step >> 16).to(tl.float32))


@helper
def prepared_scalars(group_ptr, scalars_ptr, skip, RULE: tl.constexpr):
    """Counts the step, unless it is skipped, and stores the group's row of scalars."""
    # lr, fp32, and step, int32, through the addresses in the table
    lr = tl.load(tl.load(group_ptr + LR).to(tl.pointer_type(tl.float32)))
    step_ptr = tl.load(group_ptr + STEP).to(tl.pointer_type(tl.int32))
    step = tl.load(step_ptr) + 1
    # a skipped step does not count
    tl.store(step_ptr, step, mask=skip == 0)
    # the rule's numbers, then the seed's and step's pieces of 16 bits
    store_row(scalars_ptr, RULE.prepare(group_ptr + HYPER, lr, step), RULE.row_length)
    if RULE.draws:
        store_draw_numbers(scalars_ptr + RULE.row_length, tl.load(group_ptr + SEED), step)


@jit(do_not_specialize=["columns", "scalar_count", "clip_norm"])
def prepare_kernel(
    groups_ptr,  # *int64 [groups, columns], or None: the scalars come from the host
    scalars_ptr,  # *fp32 [groups, scalar_count], written
    controls_ptr,  # *fp32 [groups, CONTROLS], written
    grad_scale_ptr,  # *fp32, or None: the loss scale that gradients were multiplied by
    found_inf_ptr,  # *fp32, or None: not 0 skips the step
    coefficient_ptr,  # *fp32, or None: what gradients are multiplied by
    bins_ptr,  # of megaopt.kernels.norm, or None
    norm_ptr,  # *fp32, written with the norm of the unscaled gradients where there are bins
    clip_norm,  # fp32, or None: gradients of a larger norm are multiplied down to this one
    columns,
    scalar_count,
    RULE: tl.constexpr,
    SKIP_NONFINITE: tl.constexpr,
    APART: tl.constexpr,  # which of the three are a number for each group, in their order
):
    """A program makes the scalars and the controls of one group."""
    group = tl.program_id(0)
    # the caller's numbers; APART 0 makes every group read the first one
    grad_scale = number_of(grad_scale_ptr, group * APART[0])
    # the reciprocal in fp64, rounded to fp32 once
    inverse = (tl.full((), 1.0, tl.float64) / grad_scale.to(tl.float64)).to(tl.float32)
    coefficient = number_of(coefficient_ptr, group * APART[2])
    skip = is_set(found_inf_ptr, group * APART[1])
    # the norm of all groups' gradients; every program computes the same
    if bins_ptr is not None:
        norm, nonfinite = total_of(bins_ptr)
        norm = canonical(norm * inverse)
        # one program stores the norm
        tl.store(norm_ptr, norm, mask=group == 0)
        if clip_norm is not None:
            coefficient = clip_coefficient(norm, clip_norm)
        if SKIP_NONFINITE:
            skip = skip | nonfinite
    # the group's row of controls, which step_kernel reads
    controls_ptr += group * CONTROLS
    tl.store(controls_ptr + GRAD_SCALE, grad_scale)
    tl.store(controls_ptr + INVERSE_SCALE, inverse)
    tl.store(controls_ptr + COEFFICIENT, coefficient)
    tl.store(controls_ptr + SKIP, tl.where(skip, 1.0, 0.0))
    tl.store(controls_ptr + UNSCALED, 0.0 if grad_scale_ptr is None else 1.0)
    # the group's row of scalars, where lr and step are on the device
    if groups_ptr is not None:
        row_ptr = scalars_ptr + group * scalar_count
        prepared_scalars(groups_ptr + group * columns, row_ptr, skip, RULE)


class TritonPreparation(Preparation):
    """Makes scalars and controls by one small launch."""

    def __init__(self, rule: Rule, device: torch.device) -> None:
        super().__init__(rule, device)
        self._controls = torch.zeros((0, COUNT), dtype=torch.float32, device=device)
        self._scalars = torch.zeros((0, 0), dtype=torch.float32, device=device)
        self._groups = DeviceTable(device)
        self._captured: list[object] = []  # what CUDA graphs read and write
        self._launches: dict[tuple[Any, ...], Again] = {}

    def make(
        self,
        groups: Sequence[Group] | None,
        count: int,
        request: Request,
        plans: Sequence[Measured],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The scalars of groups whose lr and step are on the device, and the controls, both there.

        Counts a step in each group unless it is skipped.

        Args:
            groups: None where the scalars come from the host.
            count: the rows of scalars, wherever they come from.
            request: what to do with the gradients.
            plans: whose gradients the norm is of.

        Returns:
            The scalars, fp32 [count, numbers]; None without groups. The controls, fp32 [count,
            megaopt.kernels.step.controls.COUNT]; None where they would change nothing.
        """
        if groups is None and request.is_empty:
            return None, None
        table = scalars = None
        columns = 0
        # the table of groups, int64 [groups, columns], and memory for their rows of scalars
        if groups is not None:
            rows = self._rows(groups)
            columns, table = rows.shape[1], self._groups.update(rows)
            if len(self._scalars) != len(groups):
                shape = (len(groups), self.rule.width)
                # of normal mode: every later step may write it
                with torch.inference_mode(False):
                    self._scalars = torch.zeros(shape, dtype=torch.float32, device=self.device)
            scalars = self._scalars
            # a graph reads lr, step and tables, and writes the rows, at every replay
            if is_capturing(self.device):
                self._captured.append((scalars, *self._read(groups)))
        if len(self._controls) != count:
            with torch.inference_mode(False):
                self._controls = torch.zeros(count, COUNT, dtype=torch.float32, device=self.device)
        # the controls likewise: the graph's memory has to stay
        if is_capturing(self.device):
            self._captured.append(self._controls)
        # one launch a plan puts squares into the bins, before the launch below reads these
        bins = self.measure(plans) if request.needs_norm else None
        # the caller's numbers may be one for all groups, or one for each (APART)
        numbers = tuple(request.numbers.values())
        arguments = (table, scalars, self._controls, *numbers, bins, self.norm, request.clip_norm)
        apart = tuple(int(number is not None and number.numel() > 1) for number in numbers)

        # one compiled launch for each combination of what there is
        skips, clips = request.skip_nonfinite, request.clip_norm is not None
        kind = (count, skips, clips, apart, *kinds_of((table, bins, *numbers)))
        if kind not in self._launches:
            options = {"RULE": self.rule, "SKIP_NONFINITE": skips, "APART": apart, "num_warps": 1}
            self._launches[kind] = Again(prepare_kernel, count, options)
        controls = None if request.is_empty else self._controls
        # steps are counted by the launch: behind it, Ctrl-C must find nothing left to do
        self._launches[kind]((*arguments, columns, self.rule.width))
        return scalars, controls

    def _read(self, groups: Sequence[Group]) -> list[torch.Tensor]:
        """All tensors whose addresses `_rows` gives."""
        numbers = [group[name] for group in groups for name in ("lr", "step")]
        tables = [self.rule.tables(group, self.device) for group in groups]
        return [*numbers, *(table for group_tables in tables for table in group_tables)]

    def _rows(self, groups: Sequence[Group]) -> numpy.ndarray:
        """int64 [groups, columns], as prepare_kernel reads it."""
        rows = []
        for group in groups:
            tables = self.rule.tables(group, self.device)
            # every row has room for MOST_TABLES addresses, then for as many lengths
            missing = [0] * (MOST_TABLES - len(tables))
            # addresses of lr and step, the seed, fp64 bits of the rule's numbers, tables
            rows.append(
                [
                    group["lr"].data_ptr(),
                    group["step"].data_ptr(),
                    signed(group["seed"]) if self.rule.draws else 0,
                    *numpy.array(self.rule.hyper(group), dtype=numpy.float64).view(numpy.int64),
                    *(table.data_ptr() for table in tables),
                    *missing,
                    *(len(table) for table in tables),
                    *missing,
                ]
            )
        return numpy.array(rows, dtype=numpy.int64)


def signed(seed: int) -> int:
    """An int64 of the same bits."""
    return seed - (seed >> 63 << 64)
