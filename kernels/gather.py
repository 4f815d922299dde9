"""Some elements of many tensors, in one launch: for samples that wait for nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from megaopt.kernels.calling import call
from megaopt.kernels.chunks.table import DeviceTable, to_device
from megaopt.kernels.optional_triton import jit, tl

BLOCK = 256
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype whose numbers are the bits, by its size in bytes."""


@jit(do_not_specialize=["count"])
def gather_kernel(
    table_ptr, tensors_ptr, offsets_ptr, widths_ptr, out_ptr, count, BLOCK: tl.constexpr
):
    """Loads elements of 1, 2, 4 or 8 bytes at offsets in bytes from their tensors' addresses."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = place < count
    # int64 [BLOCK], each element's address and its bytes
    tensor = tl.load(tensors_ptr + place, here, 0)
    address = tl.load(table_ptr + tensor, here, 0) + tl.load(offsets_ptr + place, here, 0)
    width = tl.load(widths_ptr + place, here, 0)
    # of four loads one is unmasked for each element, the others give 0
    one = tl.load(address.to(tl.pointer_type(tl.uint8)), here & (width == 1), 0).to(tl.int64)
    two = tl.load(address.to(tl.pointer_type(tl.uint16)), here & (width == 2), 0).to(tl.int64)
    four = tl.load(address.to(tl.pointer_type(tl.uint32)), here & (width == 4), 0).to(tl.int64)
    eight = tl.load(address.to(tl.pointer_type(tl.int64)), here & (width == 8), 0)
    tl.store(out_ptr + place, one | two | four | eight, here)


class Gather:
    """The same elements of tensors that are alike; tables are kept from call to call.

    Args:
        tensors: on one device, of elements of 1, 2, 4 or 8 bytes.
        indices: of each tensor's elements, flat.
        launches: whether to launch the kernel; otherwise the twin computes.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], indices: Sequence[Sequence[int]], launches: bool
    ) -> None:
        device = tensors[0].device
        self._launches, self._table = launches, DeviceTable(device)
        # for each element the tensor, its offset in bytes, and its width
        counts = [len(index) for index in indices]
        widths = numpy.repeat([tensor.element_size() for tensor in tensors], counts)
        places = numpy.concatenate(indices).astype(numpy.int64)
        self._indices = [torch.tensor(index, device=device) for index in indices if not launches]
        self._columns = [
            to_device(array, device)
            for array in (numpy.repeat(numpy.arange(len(tensors)), counts), places * widths, widths)
            if launches
        ]
        self._count = len(places)

    def __call__(
        self, tensors: Sequence[torch.Tensor], addresses: numpy.ndarray | None = None
    ) -> torch.Tensor:
        """int64 [n], the elements' bits with zeros before them, tensor by tensor.

        addresses: int64 [tensors], of their elements, which lie in their order; None: looked up.
        """
        if not self._launches:
            parts = []
            for tensor, index in zip(tensors, self._indices, strict=True):
                width = tensor.element_size()
                bits = tensor.detach().reshape(-1).view(INTEGERS[width])[index].long()
                parts.append(bits if width == 8 else bits & ((1 << 8 * width) - 1))
            return torch.cat(parts)
        # addresses change, the other tables stay
        sources = tensors
        if addresses is None:
            sources = [tensor.detach().reshape(-1) for tensor in tensors]  # which may be copies
            addresses = numpy.array([*map(torch.Tensor.data_ptr, sources)], numpy.int64)
        out = torch.empty(self._count, dtype=torch.int64, device=sources[0].device)
        arguments = (self._table.update(addresses[None]), *self._columns, out, self._count)
        call(gather_kernel, -(-self._count // BLOCK), arguments, {"BLOCK": BLOCK})
        return out
