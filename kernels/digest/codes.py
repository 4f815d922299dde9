"""The digest's view of a tensor: whole numbers, their places, and which are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from megaopt.kernels.chunks.table import to_device
from megaopt.kernels.place import Place

ROW = 512
"""Places that share one factor; the other factor is that of the place within the row."""
LAST_PLACE = 2**40 - 1
LENGTH_FACTORS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
"""The numbers that each element adds to the two lanes beside its bits: tensors of zeros differ by
length."""

WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype that a tensor's bits are read as, by its size in bytes."""
NONFINITE = {
    torch.float64: (0x7FF0 << 48, 0x7FF0 << 48),
    torch.float32: (0x7F800000, 0x7F800000),
    torch.bfloat16: (0x7F80, 0x7F80),
    torch.float16: (0x7C00, 0x7C00),
    torch.float8_e5m2: (0x7C, 0x7C),
    torch.float8_e4m3fn: (0x7F, 0x7F),
    torch.float8_e4m3fnuz: (0xFF, 0x80),
    torch.float8_e5m2fnuz: (0xFF, 0x80),
    torch.float8_e8m0fnu: (0xFF, 0xFF),
}
"""A mask and a pattern: elements whose masked bits are the pattern are infinities and NaNs."""
FINITE = (0, 1)
"""The same for dtypes without infinities and NaNs."""


def codes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as whole numbers, contiguous, in its memory where it is contiguous.

    A complex number is two elements, its parts.
    """
    elements = tensor.detach()
    if elements.is_complex():
        elements = torch.view_as_real(elements.resolve_conj())
    elements = elements.resolve_neg().contiguous()
    return elements.view(WHOLE[elements.itemsize])


def count_of(tensor: torch.Tensor) -> int:
    """The number of a tensor's codes."""
    return tensor.numel() * (1 + tensor.is_complex())


def place_of_codes(tensor: torch.Tensor, place: Place) -> Place:
    """The place of the codes: there are two for each complex number."""
    if not tensor.is_complex():
        return place
    return Place(place.number, 2 * place.first, 2 * place.run, 2 * place.stride)


def initial(numels: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [n, 3] on the device: what the lengths add to both lanes, and no count."""
    sums = numpy.zeros((len(numels), 3), dtype=numpy.uint64)
    sums[:, :2] = numpy.array(numels, dtype=numpy.uint64)[:, None] * numpy.array(
        LENGTH_FACTORS, dtype=numpy.uint64
    )
    return to_device(sums.view(numpy.int64), device)
