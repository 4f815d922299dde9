"""GaLoreAdamW's kernels on a GPU: matrices past 2**31 elements, and unaligned ones."""

import pytest
import torch
from bits import assert_same_bits
from runs import BF16

from megaopt import GaLoreAdamW

LAST = 256
"""So many last rows, or columns, are stepped as a matrix of their own."""
RANK = 16
WHERE = [
    pytest.param("cuda", 46464, id="large", marks=pytest.mark.gpu),
    pytest.param("cpu", LAST + 48, id="small"),
]


def selecting(size, side, device):
    """A projection of 0 and 1, with which every sum has one number that is not 0."""
    rows = torch.zeros(RANK, size, device=device)
    rows[torch.arange(RANK), size - 1 - 3 * torch.arange(RANK)] = 1.0
    return rows if side == "right" else rows.mT.contiguous()


def stepped(weight, grad, projection, side, kernel, precision):
    """The weight after two steps."""
    param = torch.nn.Parameter(weight.clone())
    group = {"params": [param], "param_numbers": [500]}  # whose turn is not yet
    own = {"rank": RANK, "proj_type": side, "kernel": kernel, "precision": precision}
    optimizer = GaLoreAdamW(
        [group], lr=0.1, eps=1e-4, weight_decay=0.1, update_proj_gap=1000, **own
    )
    optimizer.initialize_states()
    optimizer.state[param]["projection"].copy_(projection)
    param.grad = grad
    for _ in range(2):
        optimizer.step()
    return param.detach()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kernel", "precision"), [("grouped", "bf16"), ("hybrid", "ieee"), ("fused", "tf32")]
)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("device", "size"), WHERE)
def test_the_last_rows_or_columns_are_stepped_as_if_they_were_alone(
    device, size, side, kernel, precision
):
    """All of it has 2**31 elements and more; a row's sums, on the left a column's, are its own."""
    assert device == "cpu" or size**2 > 2**31
    torch.manual_seed(0)
    weight, grad = (torch.randn(size, size, device=device, dtype=BF16) for _ in range(2))
    projection = selecting(size, side, device)
    own = (projection, side, kernel, precision)
    found = stepped(weight, grad, *own)
    dim, first = (0, size - LAST) if side == "right" else (1, size - LAST)
    parts = [t.narrow(dim, first, LAST).contiguous() for t in (weight, grad)]
    expected = stepped(*parts, *own)
    assert_same_bits(found.narrow(dim, first, LAST).contiguous(), expected)
    assert not torch.equal(expected, parts[0])


def stepped_at(offset, precision, rows, rank, device, dtype):
    """The weight after two steps, weight and gradient so many elements behind their storage."""
    shape, generator = (rows, 2 * rows), torch.Generator().manual_seed(1)
    weight, grad = (
        torch.cat([torch.zeros(offset), torch.randn(2 * rows**2, generator=generator)])
        .to(device, dtype)[offset:]
        .view(shape)
        for _ in range(2)
    )
    assert (weight.data_ptr() % 16 == 0) == (offset == 0)
    param = torch.nn.Parameter(weight)
    own = {"rank": rank, "proj_type": "right", "kernel": "grouped", "precision": precision}
    optimizer = GaLoreAdamW([{"params": [param], "param_numbers": [500]}], lr=0.1, **own)
    optimizer.initialize_states()
    basis = torch.linalg.qr(torch.randn(2 * rows, rank, generator=generator))[0].mT
    optimizer.state[param]["projection"].copy_(basis)
    param.grad = grad
    for _ in range(2):
        optimizer.step()
    return param.detach().clone()


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16"])
@pytest.mark.parametrize(
    ("device", "rows", "rank"),
    [pytest.param("cuda", 256, 128, marks=pytest.mark.gpu), ("cpu", 16, 8)],
)
def test_an_unaligned_matrix_is_stepped_as_an_aligned_one(device, rows, rank, precision, dtype):
    """Where tiles are whole, loads of aligned addresses are vectors, and some come ahead."""
    found, expected = (stepped_at(off, precision, rows, rank, device, dtype) for off in (1, 0))
    assert_same_bits(found, expected)
    assert not expected.isnan().any()
