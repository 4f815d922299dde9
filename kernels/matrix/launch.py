"""Elementwise launches of matrices: one by one, or of many parts of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.place import Place
from megaopt.kernels.rules import Rule
from megaopt.kernels.step.launch import TritonPlan


class LaunchedStep:
    """`step_tensor` by the step's kernel: a launch, whose table is kept from step to step."""

    def __init__(self) -> None:
        self._plans: dict[Any, TritonPlan] = {}

    def __call__(
        self,
        tensors: dict[str, torch.Tensor],
        formats: Formats,
        rule: Rule,
        scalars: Any,
        controls: torch.Tensor | None = None,
        place: Place = Place(0),  # noqa: B008 a tuple
    ) -> None:
        """Steps as megaopt.kernels.step.reference.step_tensor; scalars may be on the device."""
        weight = tensors["weight"]
        # a plan is of one tensor; tensors of one size and place share it
        key = (rule, formats, weight.numel(), weight.device, place)
        if key not in self._plans:
            arguments = (formats, rule, [weight.numel()], [0], weight.device, None, [place])
            self._plans[key] = TritonPlan(*arguments)
        plan = self._plans[key]
        # a batch of one tensor, whose group has the only row
        plan.look({slot: [tensor] for slot, tensor in tensors.items()})
        row = None if controls is None else controls[None]
        plan.step(scalars[None] if isinstance(scalars, torch.Tensor) else [scalars], row)


class PartLaunch:
    """An elementwise launch of parts of parameters' tensors, which is told addresses alone.

    Args:
        formats: of the step's buffers.
        rule: the step's.
        params: for each part its parameter, by its place in the batch.
        firsts: how many numbers of the parameter's tensors lie before the part.
        sizes: how many numbers it has.
        groups, places: of the batch's parameters; or of their moments, whose parts these are.
        device: of all.
    """

    def __init__(
        self,
        formats: Formats,
        rule: Rule,
        params: Sequence[int],
        firsts: Sequence[int],
        sizes: Sequence[int],
        groups: Sequence[int],
        places: Sequence[Place],
        device: torch.device,
    ) -> None:
        # int64 [parts] each
        self._params = numpy.array(params, dtype=numpy.int64)
        self._firsts = numpy.array(firsts, dtype=numpy.int64)
        # random bits go by where a part's numbers lie in the parameter
        parts = list(zip(params, firsts, sizes, strict=True))
        part_places = [places[param].after(first, size) for param, first, size in parts]
        tables = (list(sizes), [groups[param] for param in params], device, None, part_places)
        self._plan = TritonPlan(formats, rule, *tables)

    def look(self, addresses: dict[str, numpy.ndarray], **part_addresses: numpy.ndarray) -> None:
        """Tells the launch where all lies.

        addresses: of each parameter's tensors; part_addresses: of each part, in the place of these,
        by slot.
        """
        # the plan's own rows are written: it has no tensors to look at
        plan = self._plan
        for slot, row in plan.addresses.items():
            now = part_addresses.get(slot)
            if now is None:
                # int64 [parts], bytes of the tensor before the part's numbers
                form = plan.formats.by_slot.get(slot)
                if form is not None:  # packed: numbers in one element of the tensor
                    offsets = self._firsts * plan.formats.dtype(slot).itemsize // form.packed
                else:  # a scale: of each block a byte, or of the whole tensor
                    block = plan.formats.by_slot[slot.removesuffix("_scale")].block
                    offsets = self._firsts // block if block else 0 * self._firsts
                now = addresses[slot][self._params] + offsets
            # stale: the table on the device differs, and is uploaded with the next step
            plan.stale = plan.stale or not numpy.array_equal(now, row)
            row[:] = now

    def step(self, scalars: torch.Tensor, controls: torch.Tensor | None) -> None:
        """Launches it; arguments as of TritonPlan.step."""
        self._plan.step(scalars, controls)
