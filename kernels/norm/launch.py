"""Launches the norm over the tables of a step, or over tables of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from megaopt.kernels.calling import Again, call
from megaopt.kernels.chunks.rows import ALIGNED, GRAD, NUMEL
from megaopt.kernels.chunks.table import OWN, Chunks, Geometry, to_device
from megaopt.kernels.formats import Format
from megaopt.kernels.norm import kernel
from megaopt.kernels.norm.bins import MOST
from megaopt.kernels.optional_triton import INTERPRETED

# On a GPU one warp takes a block, so that no warp waits for another: 64 elements a thread share the
# reductions and atomics. Tiles of 256 keep it at 96 to 128 registers; 230 without tiles.
BLOCK, TILE = 2048, 256
# A program takes several chunks, one after another: starting one costs about as much as reading
# 2,048 elements of 16 bits. Up to as many programs as fill a large GPU, each has one chunk.
CHUNKS = 8
PROGRAMS = 2048


class NormPlan:
    """The launch over gradients of one format.

    The tables that it is given are those of a step (megaopt.kernels.step): of the addresses only
    the rows GRAD, NUMEL and ALIGNED are read. `tables_of` makes such tables for gradients alone.

    Args:
        form: of the gradients, from GRADS.
        geometry: with which the table of chunks was made.
        programs: for tests; chosen by the number of chunks otherwise.
    """

    def __init__(
        self, form: Format, geometry: Geometry | None = None, programs: int | None = None
    ) -> None:
        self.form, self.programs = form, programs
        geometry = geometry or OWN
        chunk = geometry.block * geometry.iterations
        # the largest power of two that divides a chunk
        self.block = min(chunk & -chunk, MOST if INTERPRETED else BLOCK)
        self.iterations, self.span = chunk // self.block, geometry.span
        self._launches: dict[tuple[int, bool], Again] = {}

    def accumulate(self, table: torch.Tensor, chunks: Chunks, bins: torch.Tensor) -> None:
        """Adds the squares of all elements to the bins: one launch, nothing is waited for.

        Gradients that were multiplied by a loss scale give that multiple of the norm: multiplying
        the norm by the inverse is exact for powers of two, as long as it does not leave fp32.

        Args:
            table: int64 [rows, tensors], the addresses and sizes of contiguous tensors.
            chunks: of these tensors.
            bins: int64, of megaopt.kernels.norm.bins.new_bins; all three on one device. Or such
                bins for each tensor, one behind another in the first of four dimensions.
        """
        if chunks.count == 0:
            return
        # a program for each chunk up to PROGRAMS; beyond, as many as leave each at most CHUNKS
        fewest = -(-chunks.count // CHUNKS)
        programs = self.programs or max(min(chunks.count, PROGRAMS), fewest)
        # one compiled launch for each number of programs, and for bins apart
        kind = programs, bins.dim() == 4
        if kind not in self._launches:
            options = {
                "FORMAT": self.form,
                "BLOCK": self.block,
                "TILE": self.block if INTERPRETED else min(self.block, TILE),
                "ITERATIONS": self.iterations,
                "SPAN": self.span,
                "APART": kind[1],
                "num_warps": 1,
            }
            self._launches[kind] = Again(kernel.norm_kernel, programs, options)
        self._launches[kind]((table, chunks.table, bins, table.shape[1], chunks.count))


def total(bins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of what was added to the bins, which stay as they are; nothing is waited for.

    Args:
        bins: int64 [BANKS, ROWS, 2], of one table or the sum of several.

    Returns:
        norm: fp32, shape (), on the bins' device. 0 without elements; NaN if there was a NaN, else
            infinity if there was one or if the norm is too large for fp32.
        nonfinite: bool, shape (): whether there was an infinity or a NaN among the elements.
    """
    norm = torch.empty((), dtype=torch.float32, device=bins.device)
    nonfinite = torch.empty((), dtype=torch.int8, device=bins.device)
    call(kernel.total_kernel, 1, (bins, norm, nonfinite), {"num_warps": 1})
    return norm, nonfinite.view(torch.bool)


def tables_of(
    grads: Sequence[torch.Tensor], geometry: Geometry | None = None
) -> tuple[torch.Tensor, Chunks]:
    """The table of addresses and that of chunks, for contiguous gradients on one device."""
    geometry = geometry or OWN
    # int64 [rows, tensors]: only the rows that norm_kernel reads are filled
    rows = numpy.zeros((int(ALIGNED) + 1, len(grads)), dtype=numpy.int64)
    rows[int(GRAD)] = [grad.data_ptr() for grad in grads]
    rows[int(NUMEL)] = [grad.numel() for grad in grads]
    rows[int(ALIGNED)] = rows[int(GRAD)] % 16 == 0
    device = grads[0].device
    return to_device(rows, device), Chunks(rows[int(NUMEL)].tolist(), geometry, device)
