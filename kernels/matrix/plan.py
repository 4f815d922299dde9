"""Steps matrices one by one: the transforms are torch's, what is elementwise is a step's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch

from megaopt.kernels.chunks.batch import Buffers, Formats, Scalars
from megaopt.kernels.formats import GRADS, NONE, WEIGHTS, Format
from megaopt.kernels.norm.reference import accumulate_reference
from megaopt.kernels.place import Place, in_order
from megaopt.kernels.rules.matrix import SAME, Matrix, Work
from megaopt.kernels.step.reference import skips_of, step_tensor
from megaopt.kernels.subnormals import check_subnormals

FLOAT32 = WEIGHTS["float32"]
Step = Callable[..., None]
"""`step_tensor`, or what does the same."""


def inner_formats(formats: Formats, direction: Format = FLOAT32) -> Formats:
    """Returns the formats of the inner rule's step: its weight is the direction.

    Its gradient is what `before` makes, fp32, or the matrix's own.
    """
    assert formats.matrix is not None
    # without `before` the step reads the parameter's own gradient; it never has a master
    grad = formats.grad if formats.matrix.rule.before is SAME else FLOAT32
    return replace(formats, grad=grad, weight=direction, master=NONE, matrix=None)


def apply_formats(formats: Formats, update: Format = GRADS["float32"]) -> Formats:
    """Returns the formats of the update of weight and master by a matrix of this format."""
    # the update is in the gradients' place, and moments have been stepped before
    update_formats = replace(
        formats, grad=update, moments=(), moment_names=(), maximize=False, matrix=None
    )
    # an update is not rounded to the gradients' format, nor written back
    return replace(update_formats, rounds_grad=False, writes_grad=False)


def check_update(
    matrix: Matrix, update: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]
) -> None:
    """Raises ValueError for what `after` made that is not of the direction's dtype, of the shape.

    dtype: fp32, and fp64 where tests compute so.
    """
    layout = (dtype, tuple(shape))
    if (update.dtype, tuple(update.shape)) != layout:
        raise ValueError(
            f"after of {matrix.rule.name} must return {layout[0]} of shape {layout[1]}, got "
            f"{update.dtype} of shape {tuple(update.shape)}"
        )


class MatrixPlan:
    """Steps the matrices of one combination of formats and matrix rule.

    With `step_tensor` it is in plain torch, and the twin of what a rule has of launches.

    Args:
        formats: of every buffer; `matrix` is set.
        groups: for each matrix, its row in the scalars that `step` is given.
        places: of each matrix in its parameter, for random bits.
        step: takes an elementwise step: `step_tensor`, LaunchedStep() or CompiledStep().
        launches: in its place, of a rule that has launches over many matrices (GaLoreLaunches),
            or other steps of its own.
        making: makes what says how updates of matrices that ranks share are made, an UpdateMaker
            (megaopt.kernels.matrix.exchange), of a rule that brings whole ones together; None: by
            its transform.
    """

    def __init__(
        self,
        formats: Formats,
        groups: Sequence[int],
        places: Sequence[Place] | None = None,
        step: Step = step_tensor,
        launches: Any = None,
        making: Callable[[], Any] | None = None,
    ) -> None:
        assert formats.matrix is not None
        self.making, self._is_shared = making, False
        self.formats, self.matrix, self.groups = formats, formats.matrix, groups
        # of each parameter what transforms know; states put in what they keep
        places = places or in_order(len(groups))
        self.works = [Work(self.matrix.how, place) for place in places]

        # a step is two elementwise ones with a transform between them
        self._inner, self._apply, self._step = inner_formats(formats), apply_formats(formats), step
        self._launches = launches
        self.many_calls = launches is None or bool(launches.many_calls)
        """True if a step is many calls on the host, as Plan has it."""
        self.addresses: dict[str, numpy.ndarray] = {}  # `look` is told the tensors
        self.stale = True
        self._buffers: Buffers = {}

    def share(self, steps: Any) -> None:
        """Steps matrices that are on several ranks by megaopt.kernels.matrix.shared's steps."""
        self._launches, self._is_shared = steps, True
        self.many_calls = bool(steps.many_calls)

    def renew(self) -> None:
        """Makes anew what ranks that share matrices keep, without a step; else nothing."""
        if self._is_shared:
            self._launches.renew(self._buffers, self.works)

    @property
    def is_captured(self) -> bool:
        """True if a CUDA graph can repeat a step: it has launches, and NCCL's messages at most."""
        return not self.many_calls and (not self._is_shared or self._launches.is_captured)

    def look(self, buffers: Buffers) -> None:
        """Notes the buffers for the step; RuntimeError where a CPU flushes subnormals."""
        if not buffers["weight"][0].is_cuda:  # all are on one device
            check_subnormals()
        self._buffers = buffers

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the squares of the whole gradients to the bins of megaopt.kernels.norm."""
        if self._launches:
            self._launches.accumulate(self._buffers, bins)
        else:
            accumulate_reference(self._buffers["grad"], bins)

    def grad(self, index: int) -> torch.Tensor:
        """Returns a matrix's gradient, as it is in memory."""
        return self._buffers["grad"][index]

    def ready(self, scalars: Any) -> Any:
        """Returns the rows: memory is taken on the way of the step, but that of an exchange."""
        if self._is_shared:
            self._launches.ready()
        return scalars

    def step(self, scalars: Scalars, controls: torch.Tensor | None = None) -> None:
        """Takes a step by what `works` keep; arguments as megaopt.kernels.backends.Plan's."""
        # all matrices at once, or as another library steps them, or with other ranks
        if self._launches is not None:
            self._launches.step(self._buffers, self.works, scalars, controls)
            self._buffers = {}  # gradients may go
            return
        # one by one: the host waits for the controls, and passes over groups that are left out
        left_out, rule = skips_of(controls, len(scalars)), self.matrix.rule
        for index, (group, work) in enumerate(zip(self.groups, self.works, strict=True)):
            if left_out[group] or not self._buffers["weight"][index].numel():
                continue
            # fp32, of the parameter's shape; low: what the moments are of
            taken = self._buffers["grad"][index]
            low = grad = self.formats.grad.decode_reference(taken)
            if rule.before is not SAME:
                low = taken = rule.before.run(grad, work).contiguous()

            # a gradient stays as it is; what `before` made may be written over
            direction = torch.empty_like(low) if low is grad else low
            buffers = {slot: matrices[index] for slot, matrices in self._buffers.items()}
            stepped = {**buffers, "grad": taken, "weight": direction}
            tensors = {slot: stepped[slot] for slot in self._inner.slots}
            place = self.matrix.low_place(work.place, grad.shape)
            # moments are stepped by the controls: unscaled, clipped
            row = None if controls is None else controls[group]
            self._step(tensors, self._inner, rule.inner, scalars[group], row, place)

            # fp32, of the parameter's shape again
            update = direction
            if rule.after is not SAME:
                update = rule.after.run(direction, work).contiguous()
            check_update(self.matrix, update, direction.dtype, grad.shape)
            # the weight is stepped without controls: an update is no gradient
            tensors = {slot: {**buffers, "grad": update}[slot] for slot in self._apply.slots}
            self._step(tensors, self._apply, rule.apply, scalars[group], None, work.place)
        self._buffers = {}
