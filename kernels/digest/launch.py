"""Launches the digest over tables that are kept from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy
import torch

from megaopt.kernels.calling import call
from megaopt.kernels.chunks.rows import (
    ALIGNED,
    FIRST_ELEMENT,
    GRAD,
    NUMEL,
    RUN,
    RUN_STRIDE,
)
from megaopt.kernels.chunks.table import INTERPRETER, Chunks, DeviceTable, Geometry, note_row
from megaopt.kernels.digest import kernel
from megaopt.kernels.digest.codes import (
    FINITE,
    NONFINITE,
    codes_of,
    count_of,
    initial,
    place_of_codes,
)
from megaopt.kernels.digest.reference import add_reference
from megaopt.kernels.optional_triton import INTERPRETED
from megaopt.kernels.place import Place

LONGEST_RUN = 2**30
OWN = INTERPRETER if INTERPRETED else Geometry(2048, 16)


class DigestPlan:
    """The tables of tensors on one device, and the launch.

    Args:
        tensors: at least one.
        places: of each tensor in its whole one.
        geometry: for tests; its block is a multiple of 512.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        places: Sequence[Place],
        geometry: Geometry | None = None,
    ) -> None:
        geometry, device = geometry or OWN, tensors[0].device
        # int64 [rows, tensors]; only addresses and alignment change from call to call
        self.rows = numpy.zeros((RUN_STRIDE.value + 1, len(tensors)), dtype=numpy.int64)
        places = [*map(place_of_codes, tensors, places)]
        kinds = [*map(_kind, tensors, places)]
        columns = [*map(_column, tensors, places, kinds)]
        for row in columns[0]:
            self.rows[row] = [column[row] for column in columns]
        # chunks are counted by elements and the lead, the places before the tensor's first element
        # that its first chunk begins with; an empty tensor has no chunk
        lengths = []
        for count, place, kind in zip(map(count_of, tensors), places, kinds, strict=True):
            is_in_runs = kind.order == kernel.IN_RUNS.value
            lead = place.first % kernel.WIDTH.value if is_in_runs else 0
            lengths.append(count and count + lead)
        self.chunks = Chunks(lengths, geometry, device)
        self._spec = kernel.DigestSpec(tuple(sorted(set(kinds))), geometry)
        self._is_complex = any(map(torch.Tensor.is_complex, tensors))
        self._table = DeviceTable(device)

    def add(
        self,
        tensors: Sequence[torch.Tensor],
        out: torch.Tensor,
        addresses: numpy.ndarray | None = None,
    ) -> None:
        """Adds each tensor's sums to its row of `out`, int64 [n, 3], in one launch.

        Args:
            tensors: of the sizes and dtypes, and on the device, that the plan was made for.
            out: what is added to.
            addresses: int64 [n], of the tensors' elements, which lie in their order as their bits
                are; None: somebody has yet to look.
        """
        # addresses of the codes, which are copies where a tensor's memory is not what it says
        row, codes = self.rows[GRAD.value], tensors
        if addresses is None or self._is_complex:
            codes = self._codes(tensors)  # which may be copies
            note_row(row, codes)
        else:
            row[:] = addresses

        # to the device only where an address moved
        self.rows[ALIGNED.value] = row % 16 == 0
        table = self._table.update(self.rows, [GRAD.value, ALIGNED.value])
        if not self.chunks.count:
            return
        options: dict[str, object] = {"SPEC": self._spec, "num_warps": self._spec.geometry.warps}
        arguments = (table, self.chunks.table, out, len(tensors))
        call(kernel.digest_kernel, self.chunks.count, arguments, options)

    def _codes(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        # most are their own codes, and looking at each takes the host longer than all else
        plain = all(map(torch.Tensor.is_contiguous, tensors)) and not any(
            map(torch.Tensor.is_neg, tensors)
        )
        return tensors if plain and not self._is_complex else [*map(codes_of, tensors)]


class Digests:
    """The digests of lists of tensors that are alike; tables are kept from call to call.

    Args:
        tensors: on one device, with memory of their own.
        places: of each tensor in its whole one.
        launches: whether to launch the kernel; otherwise the twin computes.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], places: Sequence[Place], launches: bool
    ) -> None:
        device = tensors[0].device if tensors else torch.device("cpu")
        self._initial = initial([*map(count_of, tensors)], device)
        in_32_bits = all(place.run <= LONGEST_RUN for place in places)
        is_launched = launches and in_32_bits and len(tensors) > 0
        self._places, self._plan = places, DigestPlan(tensors, places) if is_launched else None

    def __call__(
        self, tensors: Sequence[torch.Tensor], addresses: numpy.ndarray | None = None
    ) -> torch.Tensor:
        """int64 [n, 3] on their device: the two lanes, and how many elements are not finite.

        addresses: as DigestPlan.add takes them.
        """
        out = self._initial.clone()
        if self._plan is None:
            add_reference(self._places, tensors, out)
        else:
            self._plan.add(tensors, out, addresses)
        return out


def _kind(tensor: torch.Tensor, place: Place) -> kernel.TensorKind:
    width, size = kernel.WIDTH.value, tensor.dtype.to_real().itemsize
    if place.stride:
        # runs in which WIDTH elements always lie in one row, or places one by one
        fits = all(number % width == 0 for number in (place.first, place.run, place.stride))
        order = kernel.IN_RUNS if fits else kernel.SCATTERED
    else:
        # a tensor in one run; IN_ROWS where its first place is a multiple of WIDTH
        order = kernel.IN_RUNS if place.first % width else kernel.IN_ROWS
    return kernel.TensorKind(size, order.value)


def _column(tensor: torch.Tensor, place: Place, kind: kernel.TensorKind) -> dict[int, int]:
    """A tensor's column of the table, but for its address."""
    mask, pattern = NONFINITE.get(tensor.dtype.to_real(), FINITE)
    # of 8 bytes the upper word
    shift = 32 if mask >= 2**32 else 0
    return {
        NUMEL.value: count_of(tensor),
        kernel.OF_KIND.value: kind.number,
        kernel.MASK.value: mask >> shift,
        kernel.PATTERN.value: pattern >> shift,
        FIRST_ELEMENT.value: place.first,
        # runs that follow each other are none
        RUN.value: place.run if place.stride else LONGEST_RUN,
        RUN_STRIDE.value: place.stride or LONGEST_RUN,
    }


class StepDigests(NamedTuple):
    """The digests of parameters that are stepped alike, at the last step."""

    params: list[torch.Tensor]
    """The parameter of each row."""
    quantities: tuple[str, ...]
    """The quantity of each column: "grad", "weight", and names of the state."""
    lanes: torch.Tensor
    """int64 [parameters, quantities, 2], as megaopt.digest has them, on the parameters' device."""
