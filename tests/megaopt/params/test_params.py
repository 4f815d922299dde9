"""Parameters of every kind through one interface: numbers, first elements, parts, wraps."""

import pytest
import torch
from fsdp2_ranks import mesh_of
from runs import BF16, FP32
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megaopt.float8 import Float8Weight
from megaopt.float8.shard import Float8Shard
from megaopt.params import view_of


def first_elements(shape, replicas, *dims):
    """For whole tensors that count their elements: what a view says, and the shard's first."""
    mesh = mesh_of(replicas)
    counts = torch.arange(torch.Size(shape).numel(), dtype=FP32).view(shape)
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    view = view_of(distribute_tensor(counts, mesh, placements, src_data_rank=None))
    own = view.local.flatten()[:1].tolist()
    return view.first_of(), own, view.number(7), view.wrap(view.local).full_tensor().tolist()


def test_a_plain_parameter_begins_at_its_first_element_and_has_its_place_as_number():
    param = torch.nn.Parameter(torch.randn(4, 6))
    view = view_of(param)
    assert (view.first_of(), view.number(7), view.local is param) == (0, 7, True)


def test_who_cuts_a_plain_tensor_says_its_number_and_where_it_begins():
    param = torch.nn.Parameter(torch.randn(4))
    param.megaopt_number, param.megaopt_first_element = 3, 20
    view = view_of(param)
    assert (view.first_of(), view.number(7)) == (20, 3)


@pytest.mark.parametrize(
    ("shape", "world", "replicas", "dims"),
    [
        ((7, 3), 2, 1, (0,)),
        ((7, 3), 3, 1, (0,)),
        ((5, 8), 2, 1, (1,)),
        ((4, 6, 2), 3, 1, (1,)),
        ((2, 5), 3, 1, (0,)),
        ((5, 3), 2, 1, (None,)),
        ((6, 4), 4, 2, (None, 0)),
        ((6, 5), 4, 2, (0, 1)),
    ],
    ids=str,
)
def test_a_shard_begins_where_its_first_element_lies_in_the_whole(
    on_ranks, shape, world, replicas, dims
):
    counts = torch.arange(torch.Size(shape).numel()).float().view(shape).tolist()
    found = on_ranks(world, first_elements, shape, replicas, *dims)
    for first, own, number, wrapped in found:
        assert own in ([], [float(first)])
        assert (number, wrapped) == (7, counts)
    distinct = {own[0] for _, own, *_ in found if own}
    assert distinct == {first for first, own, *_ in found if own}


def test_a_part_of_an_fp8_weight_is_its_elements():
    values = torch.arange(40, dtype=BF16).view(5, 8)
    weight = Float8Weight.from_values(values, "current")
    view = view_of(Float8Shard(weight, 11, 20, order=4))
    assert (view.first_of(), view.number(7), view.whole_shape) == (11, 4, (5, 8))
    assert torch.equal(
        view.codes.view(torch.uint8), weight.data8.flatten()[11:20].view(torch.uint8)
    )
    assert torch.equal(
        view.part_of(weight.dequantize()), weight.dequantize().flatten()[11:20].float()
    )
    whole = view_of(weight)
    assert (whole.first_of(), whole.number(7)) == (0, 7)
