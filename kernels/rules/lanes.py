"""Which of a thread's four elements an element is in torch's fused kernels.

nvcc contracts a product and a sum for some of the four and not for the others, so that torch's bits
depend on where an element lies (ATen/native/cuda/MultiTensorApply.cuh: chunks of 65,536 elements;
four neighbours a thread where all tensors are aligned and the size is a multiple of four, else four
that lie 512 apart).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

PER_THREAD = 4
THREADS = 512


def vectorized(
    numels: numpy.ndarray, columns: Sequence[tuple[numpy.ndarray, int]]
) -> numpy.ndarray:
    """For each tensor whether torch's kernel takes four neighbours a thread.

    Args:
        numels: elements of each tensor.
        columns: for each kind of buffer the tensors' addresses and the bytes of an element.
    """
    fits: numpy.ndarray = numels % PER_THREAD == 0
    for addresses, size in columns:
        fits &= addresses % (PER_THREAD * size) == 0
    return fits


def first_lane_reference(numel: int, is_vectorized: bool, device: torch.device) -> torch.Tensor:
    """Bool [numel]: whether an element is the first of its thread's four."""
    index = torch.arange(numel, device=device)
    return (index if is_vectorized else index // THREADS) % PER_THREAD == 0
