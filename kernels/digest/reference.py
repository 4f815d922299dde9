"""The digest in plain torch: the truth in tests, and what works without Triton."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy
import torch
from torch.nn.functional import pad

from megaopt.kernels.chunks.table import to_device
from megaopt.kernels.digest.codes import FINITE, NONFINITE, ROW, codes_of, count_of, place_of_codes
from megaopt.kernels.place import Place

WORD = 2**32 - 1
ROW_BITS = ROW.bit_length() - 1
PIECE = {"cpu": 2**16, "cuda": 2**21}
"""Elements that are worked on at a time: what fits into a processor's cache, or fills a GPU."""


def factors_reference(number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The odd factors of both lanes of numbers from 0 to 2**32 - 1, int64."""
    mixed = (number + 0x9E3779B9).bitwise_and_(WORD)
    mixed = (mixed ^ mixed >> 16).mul_(0x21F0AAAD).bitwise_and_(WORD)
    mixed = (mixed ^ mixed >> 15).mul_(0x735A2D97).bitwise_and_(WORD)
    mixed ^= mixed >> 15
    second = (mixed * 0x9E3779B1).bitwise_and_(WORD)
    return mixed | 1, (second ^ second >> 16) | 1


@lru_cache(maxsize=8)
def column_factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of places within a row, int64 [ROW]."""
    with torch.inference_mode(False):
        return factors_reference(torch.arange(ROW, device=device) + 2**31)


def words_of(codes: torch.Tensor) -> list[torch.Tensor]:
    """The bits as int64 from 0 to 2**32 - 1; of 8 bytes the lower and the upper words."""
    if codes.dtype is torch.int64:
        return [codes & WORD, codes >> 32 & WORD]
    return [codes.long().bitwise_and_(2 ** (8 * codes.element_size()) - 1)]


def lanes_of(
    words: Sequence[torch.Tensor],
    columns: tuple[torch.Tensor, torch.Tensor],
    rows: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """int64 [rows, 2], each row's sums of words [rows, width], and factors of columns and rows."""
    (column0, column1), (row0, row1) = columns, rows
    lane0, lane1 = words[0] * column0, words[0] * column1
    if len(words) == 2:
        lane0 += words[1] * column1
        lane1 += words[1] * (2 * column0)
    return torch.stack([lane0.sum(1) * row0, lane1.sum(1) * row1], 1)


def nonfinite_of(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The number of infinities and NaNs of a dtype in each row of codes, the last dimension."""
    mask, pattern = NONFINITE.get(dtype, FINITE)
    return (codes & mask == pattern).sum(-1)


class CodeRange(NamedTuple):
    """Codes of one tensor that follow each other."""

    number: int
    """The tensor's."""
    codes: torch.Tensor
    numel: int
    first: int
    """The place of the first."""

    @property
    def rows(self) -> int:
        """The rows that they lie in."""
        return -(-(self.first % ROW + self.numel) // ROW)


def joined(parts: Iterable[CodeRange], size: int) -> Iterator[list[CodeRange]]:
    """Lists of parts that fill whole rows of `size` elements at most; large ones are cut."""
    batch, room = list[CodeRange](), size
    for part in parts:
        begin, (number, codes, count, first) = 0, part
        while begin < count:
            # as many as the room has, up to the end of a row of places
            end = min(begin + room - (first + begin) % ROW, count)
            piece = codes if end - begin == count else codes[begin:end]
            batch.append(CodeRange(number, piece, end - begin, first + begin))
            begin, room = end, room - batch[-1].rows * ROW
            # the batch is full; a large part goes on in the next one
            if not room:
                yield batch
                batch, room = [], size
    yield batch


def add_in_rows(parts: Sequence[CodeRange], dtype: torch.dtype, out: torch.Tensor) -> None:
    """Adds the sums of parts, whose codes are of one dtype, to their tensors' rows of `out`."""
    # zeros before and behind, so that each part fills whole rows of places
    zeros = parts[0].codes.new_zeros(ROW)
    pieces = ((zeros[: p.first % ROW], p.codes, zeros[: -(p.first + p.numel) % ROW]) for p in parts)
    codes = torch.cat([*itertools.chain.from_iterable(pieces)]).view(-1, ROW)
    # for each row of codes its number in its tensor, and its tensor: int64 [rows]
    counts = numpy.array([part.rows for part in parts])
    begins = numpy.array([part.first // ROW for part in parts]) - counts.cumsum() + counts
    rows = numpy.repeat(begins, counts) + numpy.arange(counts.sum())
    numbers = numpy.repeat([part.number for part in parts], counts)
    row, number = to_device(numpy.stack([rows, numbers]), codes.device)
    # int64 [rows, 3], added to the tensors' rows of `out`
    lanes = lanes_of(words_of(codes), column_factors(codes.device), factors_reference(row))
    sums = [lanes, nonfinite_of(codes, dtype)[:, None]]
    out.index_add_(0, number, torch.cat(sums, 1))


def add_in_runs(codes: torch.Tensor, place: Place, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Adds the sums of a tensor whose codes lie in runs to its row."""
    size, device = piece_of(codes.device), codes.device
    # as many as always follow each other in one row
    width = math.gcd(ROW, place.first, place.run, place.stride)
    # the first piece ends where a row does, and so do all but the last
    for end in range(size - place.first % ROW, len(codes) + size, size):
        begin = max(end - size, 0)
        piece = codes[begin:end]
        # int64: every width-th element, its run, and its place in the whole tensor
        index = torch.arange(begin, begin + len(piece), width, device=device)
        run = index.div(place.run, rounding_mode="floor")
        places = index.add_(place.first).add_(run, alpha=place.stride - place.run)
        # [n, width] columns; words padded with 0 to whole rows of width
        column = (places & ROW - 1)[:, None] + torch.arange(width, device=device)
        words = [pad(word, (0, -len(word) % width)).view(-1, width) for word in words_of(piece)]
        column0, column1 = (table[column] for table in column_factors(device))
        row_factors = factors_reference(places >> ROW_BITS)
        out[:2] += lanes_of(words, (column0, column1), row_factors).sum(0)
        out[2] += nonfinite_of(piece, dtype)


def piece_of(device: torch.device) -> int:
    """Returns how many elements are worked on at a time."""
    return PIECE.get(device.type, PIECE["cuda"])


def add_reference(
    places: Sequence[Place], tensors: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Adds the sums of tensors at places, and their counts, to rows of `out`, int64 [n, 3]."""
    alike: dict[torch.dtype, list[CodeRange]] = {}
    for i, (tensor, tensor_place) in enumerate(zip(tensors, places, strict=True)):
        # tensors in one run are batched by dtype, those with a stride go one by one
        codes, place = codes_of(tensor).flatten(), place_of_codes(tensor, tensor_place)
        dtype = tensor.dtype.to_real()
        if place.stride:
            add_in_runs(codes, place, dtype, out[i])
        else:
            alike.setdefault(dtype, []).append(CodeRange(i, codes, count_of(tensor), place.first))
    for dtype, parts in alike.items():
        for batch in filter(None, joined(parts, piece_of(out.device))):
            add_in_rows(batch, dtype, out)
