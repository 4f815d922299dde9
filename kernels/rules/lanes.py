"""The elements whose L2 decay torch's fused Adam rounds before adding it to the gradient.

nvcc compiled grad + param * weight_decay to one multiply-add (fma) or to two operations, as it
found each copy of the loop's body. Seen on an H200 (torch 2.11, CUDA 13.0) with beta1 = 0, where
exp_avg is the decayed gradient itself, by the four elements that a thread takes:

    no loss scale, minimize     rounded fma fma fma
    no loss scale, maximize     rounded for all four
    a loss scale; AMSGrad       fma for all four

So torch's bits depend on where an element lies (ATen/native/cuda/MultiTensorApply.cuh: chunks of
65,536 elements; four neighbours a thread where all tensors are aligned and the size is a multiple
of four, else four that lie 512 apart).
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
    """Returns for each tensor whether torch's kernel takes four neighbours a thread.

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
