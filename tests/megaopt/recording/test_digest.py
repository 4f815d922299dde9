"""megaopt.digest as users call it: shards, strides, DTensors, refusals."""

import warnings

import pytest
import torch
from digest_oracle import oracle
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megaopt import digest, digest_many, hexadecimal
from megaopt.kernels.place import Place
from megaopt.recording.digest import Digester


def digests_of_shards(whole, placements):
    """The digests of this rank's shards of a tensor, for each placement over two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    return [digest(distribute_tensor(whole, mesh, [each])) for each in placements]


def matrix():
    return torch.randn(24, 40).bfloat16()


def test_boxes_of_a_matrix_add_up():
    whole = matrix()
    starts = [(rows, columns) for rows in (0, 10) for columns in (0, 7, 32)]
    boxes = [whole[r : r + (10, 14)[r > 0], c : {0: 7, 7: 32, 32: 40}[c]] for r, c in starts]
    flat = [row * 40 + column for row, column in starts]
    found = digest_many(boxes, flat, [whole.shape] * 6)
    assert torch.equal(found.sum(0), digest(whole))
    assert torch.equal(found[4], digest(boxes[4], flat[4], whole.shape))


def test_the_order_of_elements_is_that_of_rows():
    whole = matrix()
    assert torch.equal(digest(whole.t()), digest(whole.t().contiguous()))
    assert not torch.equal(digest(whole.t()), digest(whole))
    assert torch.equal(digest(whole[::2, 1::3]), digest(whole[::2, 1::3].clone()))


def test_pending_signs_and_conjugates_are_of_the_values():
    values = torch.randn(30, dtype=torch.complex64)
    assert torch.equal(digest(values.conj()), digest(values.conj().resolve_conj()))
    assert torch.equal(digest(values.conj().imag), digest(-values.imag))


def test_digits_are_those_of_the_page():
    values = matrix()
    lanes = oracle(values, Place(0))[:2]
    assert hexadecimal(digest(values)) == "".join(f"{lane:016x}" for lane in lanes)
    assert hexadecimal(digest(torch.zeros(0))) == "0" * 32


def test_an_empty_list_has_no_digests():
    assert digest_many([]).shape == (0, 2)


def test_gradients_and_parameters_are_read_as_they_are():
    param = torch.nn.Parameter(matrix().float())
    assert torch.equal(digest(param), digest(param.detach()))
    assert not digest(param).requires_grad


def test_shards_of_dtensors_add_up(on_ranks):
    whole = matrix()
    found = on_ranks(2, digests_of_shards, whole, [Shard(0), Shard(1), Replicate()])
    for one, other in zip(*(each[:2] for each in found), strict=True):
        assert torch.equal(one + other, digest(whole))
    assert torch.equal(found[0][2], digest(whole))


WHOLE = torch.zeros(4, 6)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch takes quantized tensors out
    QUANTIZED = torch.quantize_per_tensor(WHOLE, 1.0, 0, torch.qint8)
REFUSED = {
    "tensors\\[0\\] must be a torch.Tensor with elements": [
        (WHOLE.to_sparse(),),
        (WHOLE.to("meta"),),
        ([1.0],),
    ],
    "tensors\\[0\\].dtype must be one of 1, 2, 4 or 8 bytes": [
        (QUANTIZED,),
    ],
    "start must be a whole number >= 0, got": [(WHOLE, -1), (WHOLE, 1.0), (WHOLE, True)],
    "start must be a place in shape \\(4, 6\\)": [
        (WHOLE[:2], 13, (4, 6)),
        (WHOLE[:2, :3], 4, (4, 6)),
    ],
    "whole must be a shape that holds tensors\\[0\\]": [(WHOLE, 0, (24,)), (WHOLE, 0, (4, 5))],
    "whole must be cut in at most one": [(torch.zeros(2, 3, 4), 0, (2, 4, 5))],
    "last place must be at most": [(WHOLE, 2**40)],
}


@pytest.mark.parametrize(
    ("message", "arguments"), [(message, own) for message, all_ in REFUSED.items() for own in all_]
)
def test_what_is_refused(message, arguments):
    with pytest.raises(ValueError, match=message):
        digest(*arguments)


def test_lists_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="starts must be a list of 1, one for each tensor"):
        digest_many([WHOLE], [0, 1])


@pytest.mark.parametrize("other", [torch.zeros(23), torch.zeros(4, 6).bfloat16()])
def test_a_digester_refuses_other_tensors_than_those_before(other):
    digester = Digester([WHOLE], [Place(0)])
    assert torch.equal(digester([WHOLE + 1])[0, :2], digest(WHOLE + 1))
    with pytest.raises(ValueError, match="tensors must be of the sizes, dtypes and device"):
        digester([other])
