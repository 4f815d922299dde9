"""Digests and sampled elements of lists of tensors, taken with few calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from megaopt.kernels.place import Place
from megaopt.recording.files import NOT_COUNTED, ROW, SAMPLE, SAMPLES, Value, places_of_samples
from megaopt.recording.places import Piece
from megaopt.recording.quantities import Held
from megaopt.recording.standin import of_places

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Array = numpy.ndarray[Any, Any]
Number = Callable[[Value], int]


class Rows(NamedTuple):
    """Digests that the device may still be making."""

    numbers: Sequence[int]
    """Of the values."""
    digests: torch.Tensor
    """int64 (n, 3), on the host: both lanes, and how many elements are not finite."""

    def array(self) -> Array:
        """The rows as files have them; when the device is done."""
        found, rows = self.digests.numpy(), numpy.empty(len(self.numbers), ROW)
        rows["value"] = self.numbers
        rows["low"], rows["high"] = found[:, 0].view("u8"), found[:, 1].view("u8")
        rows["nonfinite"] = found[:, 2].clip(0, NOT_COUNTED - 1)
        return rows


def fetched(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, which is there when the device gets to it."""
    if tensor.device.type == "cpu":
        return tensor.detach().clone()
    return tensor.detach().to("cpu", non_blocking=True)


def value_of(held: Held, piece: Piece | None) -> Value:
    """What a row is of."""
    dtype = str(held.tensor.dtype).removeprefix("torch.")
    if piece is None:
        return Value(held.known.name, held.quantity, dtype, tuple(held.tensor.shape))
    place = (piece.place.first, piece.place.run, piece.place.stride, piece.numel)
    return Value(held.known.name, held.quantity, dtype, held.known.shape, place)


def rows_of(found: Iterable[Held], number: Number) -> list[Rows]:
    """The digests of tensors, for each device."""
    parts: dict[torch.device, list[tuple[int, torch.Tensor, Place]]] = {}
    for held in found:
        for value, tensor, place in _parts(held):
            parts.setdefault(tensor.device, []).append((number(value), tensor, place))
    made = []
    for each in parts.values():
        numbers, tensors, places = zip(*each, strict=True)
        made.append(Rows(numbers, fetched(of_places(tensors, places))))
    return made


def _parts(held: Held) -> Iterable[tuple[Value, torch.Tensor, Place]]:
    numel, pieces = held.tensor.numel(), held.known.pieces
    if pieces is None:
        yield value_of(held, None), held.tensor, Place(0)
        return
    for piece in pieces:
        part = held.tensor
        if piece.numel != numel:
            part = part.reshape(-1)[piece.begin : piece.begin + piece.numel]
        yield value_of(held, piece), part, piece.place


class Sampled(NamedTuple):
    """Sampled elements that the device may still be fetching."""

    number: int
    held: int
    """A bit for each sample that this rank has."""
    places: Sequence[int]
    """Which samples these are."""
    words: torch.Tensor
    """The elements' bits, on the host."""

    def into(self, row: Any) -> None:
        """Fills a row as files have it; when the device is done."""
        width = self.words.element_size()
        words = self.words.numpy().view(f"u{width}")
        row["value"], row["width"], row["held"] = self.number, width, self.held
        target = row["words"].view("<u8") if width == 8 else row["words"]
        target[list(self.places)] = words


def samples_of(found: Iterable[Held], number: Number) -> list[Sampled]:
    """The sampled elements of tensors that ranks hold together."""
    return [each for held in found for each in _sampled(held, number)]


def _sampled(held: Held, number: Number) -> Iterable[Sampled]:
    tensor, pieces = held.tensor, held.known.pieces
    if not pieces or tensor.element_size() > 8:
        return
    numel = int(numpy.prod(held.known.shape))
    wanted = places_of_samples(held.known.name, numel, tensor.element_size())
    here = [(i, j) for i, place in enumerate(wanted) for j in _local(pieces, place)]
    if not here:
        return
    flat = tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])
    index = torch.tensor([j for _, j in here], device=tensor.device)
    bits = sum(1 << i for i, _ in here)
    first = number(value_of(held, pieces[0]))
    yield Sampled(first, bits, [i for i, _ in here], fetched(flat[index]))


def _local(pieces: Sequence[Piece], place: int) -> Iterable[int]:
    """Where the rank has an element of the whole: its flat index there."""
    for begin, numel, (_, first, run, stride) in pieces:
        runs, rest = divmod(place - first, stride) if stride else (0, place - first)
        if place >= first and (rest < run or not stride) and runs * run + rest < numel:
            yield begin + runs * run + rest


def sample_rows(found: Sequence[Sampled]) -> Array:
    """The rows of samples as files have them."""
    rows = numpy.zeros(len(found), SAMPLE)
    for row, sampled in zip(rows, found, strict=True):
        sampled.into(row)
    return rows


assert SAMPLES == 64  # the bits of `held`
