"""Gathered elements: the kernel and the twin against numpy."""

import numpy
import pytest
import torch

from megaopt.kernels.gather import BLOCK, Gather

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64]


@pytest.mark.parametrize("launches", [False, True])
@pytest.mark.parametrize("most", [1, 64])
def test_elements_are_their_bits(device, launches, most):
    tensors, expected = [], []
    draws = numpy.random.default_rng(0)
    indices = []
    for number, dtype in enumerate(DTYPES * 2):
        count = 100 + 37 * number
        raw = draws.integers(0, 256, count * dtype.itemsize, dtype=numpy.uint8)
        index = sorted(draws.choice(count, most, replace=False).tolist())
        tensors.append(torch.from_numpy(raw.copy()).view(dtype).to(device))
        indices.append(index)
        expected += raw.view(f"u{dtype.itemsize}")[index].astype("u8").view("i8").tolist()
    assert most == 1 or len(expected) > 2 * BLOCK
    gather = Gather(tensors, indices, launches)
    assert gather(tensors).tolist() == expected
    moved = [tensor.clone() for tensor in tensors]
    assert gather(moved).tolist() == expected
    assert (
        gather([tensor * 0 if tensor.dtype == torch.int64 else tensor for tensor in moved])[-1] == 0
    )


@pytest.mark.parametrize("launches", [False, True])
def test_tensors_that_are_not_contiguous(device, launches):
    tensor = torch.arange(12, dtype=torch.int32, device=device).view(3, 4).t()
    assert Gather([tensor], [[0, 1, 5]], launches)([tensor]).tolist() == [0, 4, 9]
