"""Digests and sampled elements of lists of tensors, taken with few calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from megaopt.kernels.backends import default_backend
from megaopt.kernels.chunks.table import is_capturing
from megaopt.kernels.digest.launch import StepDigests
from megaopt.kernels.gather import Gather
from megaopt.kernels.place import Place
from megaopt.recording.digest import Digester
from megaopt.recording.files import NOT_COUNTED, ROW, SAMPLE, Value, places_of_samples
from megaopt.recording.pieces import ShardRange
from megaopt.recording.places import Known

Array = numpy.ndarray[Any, Any]
Number = Callable[[Value], int]
Tensors = Sequence[torch.Tensor]


MASTER = "master_param"
"""The master in the states of megaopt's optimizers."""
WEIGHTS = ("weight", "codes", "scale_inv")
"""Quantities that make up a weight."""


class Held(NamedTuple):
    """The description of a tensor of this rank."""

    placement: Known
    quantity: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape in the rank's own memory."""
    param: torch.Tensor | None = None
    """The parameter of an optimizer that it belongs to."""

    @property
    def values(self) -> Iterator[tuple[Value, ShardRange]]:
        """The values that its rows are of, each with its piece."""
        dtype = str(self.dtype).removeprefix("torch.")
        for piece in self.placement.pieces or ():
            place = (*piece.place[1:], piece.numel)
            yield (
                Value(self.placement.name, self.quantity, dtype, self.placement.shape, place),
                piece,
            )
        if self.placement.pieces is None:
            value = Value(self.placement.name, self.quantity, dtype, self.shape)
            yield value, ShardRange(0, math.prod(self.shape), Place(0))


def held(
    placement: Known, quantity: str, tensor: torch.Tensor, param: torch.Tensor | None = None
) -> Held:
    """Returns the description of a tensor, which is not kept."""
    return Held(placement, quantity, tensor.dtype, tuple(tensor.shape), param)


class UnpreparedError(RuntimeError):
    """A CUDA graph would capture digests whose tables no step before has made."""


def check_prepared(tensors: Tensors) -> None:
    """Raises UnpreparedError within a capture: tables cannot be made there."""
    if any(is_capturing(device) for device in {tensor.device for tensor in tensors}):
        raise UnpreparedError


def fetched(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, which is there when the device gets to it.

    Within a capture a copy on the device, which each replay writes.
    """
    if tensor.device.type == "cpu" or is_capturing(tensor.device):
        return tensor.detach().clone()
    return tensor.detach().to("cpu", non_blocking=True)  # into pinned memory, which torch keeps


class Rows(NamedTuple):
    """Digests that the device may still be making."""

    numbers: Array
    """The values' numbers."""
    digests: torch.Tensor
    """int64 (n, 3), on the host: both lanes, and how many elements are not finite; (n, 2) where
    nobody counts these."""
    chosen: Array | slice = slice(None)
    """The digests that the numbers are of."""

    def array(self) -> Array:
        """The rows as files have them; when the device is done."""
        digests, rows = self.digests.numpy()[self.chosen], numpy.empty(len(self.numbers), ROW)
        rows["value"] = self.numbers
        rows["low"], rows["high"] = digests[:, 0].view("u8"), digests[:, 1].view("u8")
        counts = numpy.minimum(digests[:, 2:], NOT_COUNTED - 1)
        rows["nonfinite"] = counts[:, 0] if counts.size else NOT_COUNTED
        return rows


class Samples(NamedTuple):
    """Sampled elements that the device may still be fetching."""

    rows: Array
    """Rows of files, but for the elements; those of other steps too, so nobody writes them."""
    where: tuple[Array, Array]
    """The row and the place in it of each element."""
    bits: torch.Tensor
    """int64 (n,), on the host: the elements."""

    def array(self) -> Array:
        """The rows as files have them; when the device is done."""
        bits, (row, place) = self.bits.numpy().view("u8"), self.where
        rows: Array = self.rows.copy()
        double = rows["width"][row] == 8
        rows["words"][row[~double], place[~double]] = bits[~double]
        pairs = rows["words"].view("<u8")
        pairs[row[double], place[double]] = bits[double]
        return rows


class Listed:
    """Tensors that are recorded together, step after step; they are given anew each time.

    Args:
        held: the tensors' descriptions.
    """

    def __init__(self, held: Iterable[Held]) -> None:
        self.held = list(held)
        self.weight_indices = {i for i, entry in enumerate(self.held) if entry.quantity in WEIGHTS}
        """The places of weights."""
        self._groups: list[_Group] | None = None
        self._sampled: list[_Sampled] | None = None
        self._before: dict[tuple[int, ...], Listed] = {}

    def rows(self, tensors: Tensors, number: Number, addresses: Array | None = None) -> list[Rows]:
        """The digests of the tensors, for each device.

        Args:
            tensors: the tensors.
            number: gives a value's number, as rows name it.
            addresses: the tensors' addresses, where somebody has looked at them.
        """
        if self._groups is None:
            check_prepared(tensors)
            parts = [(i, *pair) for i, held in enumerate(self.held) for pair in held.values]
            self._groups = [
                _Group(device_parts, tensors, number) for device_parts in _by_device(parts, tensors)
            ]
        return [group.rows(tensors, addresses) for group in self._groups]

    def samples(self, tensors: Tensors, number: Number, addresses: Array | None) -> list[Samples]:
        """The sampled elements of those that ranks hold together, for each device; see `rows`."""
        if self._sampled is None:
            check_prepared(tensors)
            parts = [(i, held) for i, held in enumerate(self.held) if held.placement.pieces]
            self._sampled = [
                _Sampled(device_parts, tensors, number)
                for device_parts in _by_device(parts, tensors)
            ]
        return [sampled.samples(tensors, addresses) for sampled in self._sampled]

    def before(self, indices: Sequence[int]) -> Listed:
        """Some of the tensors, as they are before the step."""
        key = tuple(indices)
        if key not in self._before:
            chosen = (self.held[i] for i in indices)
            self._before[key] = Listed(h._replace(quantity=f"old {h.quantity}") for h in chosen)
        return self._before[key]


class Launched:
    """The rows of tensors some of which an optimizer's launch sums up; the others have passes.

    Args:
        held: the tensors' descriptions.
        digests: the optimizer's digests.
        weight_names: a recording's name of each parameter's "weight".
        place_of: gives the part that the launch takes a parameter to be.
        number: gives a value's number, as rows name it.
    """

    def __init__(
        self,
        held: Sequence[Held],
        digests: Sequence[StepDigests],
        weight_names: Mapping[torch.Tensor, str],
        place_of: Callable[[Any], Place],
        number: Number,
    ) -> None:
        where = {(entry.param, entry.quantity): i for i, entry in enumerate(held)}
        self._numbers, summed = list[tuple[Array, Array]](), set[int]()
        for digest in digests:
            pairs = itertools.product(digest.params, digest.quantities)
            names = ((p, {"weight": weight_names[p], MASTER: "master"}.get(q, q)) for p, q in pairs)
            indices = dict[int, int]()
            for row, i in enumerate(map(where.get, names)):
                if i is None:
                    continue
                # a tensor of one piece, where the launch takes the parameter to be
                part = ShardRange(0, math.prod(held[i].shape), place_of(held[i].param))
                if [piece for _, piece in held[i].values] == [part]:
                    indices[row] = i
            numbers = [number(next(held[i].values)[0]) for i in indices.values()]
            self._numbers.append((numpy.array(numbers, "u4"), numpy.array([*indices], int)))
            summed.update(indices.values())
        self._rest = [i for i in range(len(held)) if i not in summed]
        self._others = Listed(held[i] for i in self._rest)

    def rows(self, tensors: Tensors, digests: Sequence[StepDigests], number: Number) -> list[Rows]:
        """The digests of the tensors; digests: the optimizer's, of this step."""
        launched_rows = [
            Rows(numbers, fetched(digest.lanes.flatten(0, 1)), rows)
            for (numbers, rows), digest in zip(self._numbers, digests, strict=True)
        ]
        return launched_rows + self._others.rows([tensors[i] for i in self._rest], number)


def _by_device(parts: Iterable[Any], tensors: Tensors) -> list[list[Any]]:
    """Parts of tensors, which begin with a tensor's number, by its device."""
    parts_by_device: dict[torch.device, list[Any]] = {}
    for part in parts:
        parts_by_device.setdefault(tensors[part[0]].device, []).append(part)
    return list(parts_by_device.values())


class _Group:
    """The rows of one device."""

    def __init__(
        self, parts: Sequence[tuple[int, Value, ShardRange]], tensors: Tensors, number: Number
    ) -> None:
        # (place of the tensor, the slice that the piece is; None where it is all of the tensor)
        self._parts = list[tuple[int, slice | None]]()
        for i, _, piece in parts:
            is_whole = piece.numel == tensors[i].numel()
            stretch = slice(piece.begin, piece.begin + piece.numel)
            self._parts.append((i, None if is_whole else stretch))
        self._takes_all = self._parts == [(i, None) for i in range(len(tensors))]
        self._numbers = numpy.array([number(value) for _, value, _ in parts], "u4")
        places = [piece.place for _, _, piece in parts]
        self._digester = Digester(self._chosen(tensors), places)

    def rows(self, tensors: Tensors, addresses: Array | None) -> Rows:
        part_addresses = addresses if self._takes_all else None
        return Rows(self._numbers, fetched(self._digester(self._chosen(tensors), part_addresses)))

    def _chosen(self, tensors: Tensors) -> Tensors:
        if self._takes_all:
            return tensors
        return [
            tensors[i] if stretch is None else tensors[i].reshape(-1)[stretch]
            for i, stretch in self._parts
        ]


class _Sampled:
    """The samples of one device."""

    def __init__(self, parts: Sequence[tuple[int, Held]], tensors: Tensors, number: Number) -> None:
        rows: list[tuple[int, int, int, int]] = []
        where: list[tuple[int, int]] = []
        self._chosen, indices = list[int](), list[list[int]]()
        for i, held in parts:
            width, placement, samples = tensors[i].element_size(), held.placement, []
            numel = math.prod(placement.shape) if width <= 8 else 0  # no complex numbers
            # (number, index in the rank's tensor) of each sample that this rank has
            for sample, place in enumerate(places_of_samples(placement.name, numel, width)):
                indices_here = (piece.local(place) for piece in placement.pieces or ())
                local = next((index for index in indices_here if index is not None), None)
                if local is not None:
                    samples.append((sample, local))
            if samples:
                where += [(len(rows), sample) for sample, _ in samples]
                bits = sum(1 << sample for sample, _ in samples)
                rows.append((number(next(held.values)[0]), width, bits, 0))
                self._chosen.append(i)
                indices.append([local for _, local in samples])
        self._rows = numpy.array(rows, SAMPLE)
        row, place = numpy.array(where, int).reshape(-1, 2).T
        self._where = row, place
        sampled_tensors = [tensors[i] for i in self._chosen]
        launches = bool(sampled_tensors) and default_backend(sampled_tensors[0].device) == "triton"
        self._gather = Gather(sampled_tensors, indices, launches) if sampled_tensors else None

    def samples(self, tensors: Tensors, addresses: Array | None) -> Samples:
        bits = torch.empty(0, dtype=torch.int64)
        if self._gather is not None:
            sampled_addresses = None if addresses is None else addresses[self._chosen]
            bits = self._gather([tensors[i] for i in self._chosen], sampled_addresses)
        return Samples(self._rows, self._where, fetched(bits))
