"""The sets of tensors: the models' shapes, and how they lie in memory."""

import math

import pytest
import torch

from megaopt.commands.bench.instance import Instance, build
from megaopt.commands.bench.modes import MODES
from megaopt.commands.bench.sets import SETS, TensorSet

CPU = torch.device("cpu")


def test_sets_have_the_tensors_of_their_models() -> None:
    """Llama-3.1-8B's by an eighth of the rows, GPT-2's, and a tensor for each expert and matrix."""
    found = {name: (len(tensors.sizes), sum(tensors.sizes)) for name, tensors in SETS.items()}
    assert found["A"] == (1, 268_435_456)
    assert found["B"] == (291, 8_030_261_248 // 8)
    assert found["C"] == (4000, 4000 * 1024)
    assert found["gpt2"] == (148, 124_439_808)
    assert SETS["moe64"].sizes.count(2048 * 1408) == 4 * 64 * 3


@pytest.mark.parametrize("tensors", SETS.values(), ids=SETS)
def test_shapes_are_of_the_sizes_also_shrunk(tensors: TensorSet) -> None:
    for each in (tensors, tensors.shrunk(2**20), tensors.shrunk(100)):
        assert bool(each.shapes) == bool(tensors.shapes)
        assert each.sizes == (tuple(math.prod(shape) for shape in each.shapes) or each.sizes)
    if tensors.shapes:
        small = tensors.shrunk(2**20)
        matrices = [shape for shape in small.shapes if len(shape) == 2]
        assert {len(shape) for shape in tensors.shapes} == {len(shape) for shape in small.shapes}
        assert any(rows >= 128 and columns >= 128 for rows, columns in matrices)
        assert {size % 16 for shape in matrices for size in shape} == {0}


def test_llama70b_is_a_64th_of_723_tensors_in_one_buffer() -> None:
    tensors = SETS["llama70b-64"]
    assert tensors.flat
    assert len(tensors.sizes) == 723
    assert sum(tensors.sizes) == 70_553_706_496 // 64 + 1  # its parameters; one element over
    starts = [sum(tensors.sizes[:index]) for index in range(723)]
    # in 16 bits, 8 elements are 16 bytes
    assert [start % 8 != 0 for start in starts] == [index % 2 == 1 for index in range(723)]


def instance_of(tensors: TensorSet) -> Instance:
    mode = MODES["bf16"]
    return build(mode.optimizer, tensors, mode.weight_dtype, CPU)


def test_flat_set_is_slices_of_one_buffer_weights_and_gradients_alike() -> None:
    instance = instance_of(TensorSet(name="f", description="", sizes=(3, 4, 5), flat=True))
    for tensors in (instance.parameters, instance.gradients):
        starts = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors]
        assert starts == [0, 2 * 3, 2 * 7]
    instance.optimizer.step()
    before = [gradient.clone() for gradient in instance.gradients]
    address = instance.gradients[0].data_ptr()
    old = instance.gradients  # held, so that its memory is not given out again
    instance.move_gradients()
    assert instance.gradients[0].data_ptr() != address
    assert instance.gradients[1].data_ptr() - instance.gradients[0].data_ptr() == 2 * 3
    for one, other, kept in zip(instance.gradients, before, old, strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != kept.data_ptr()
