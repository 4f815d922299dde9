"""The sets of tensors: the models' shapes, and how they lie in memory."""

import math

import pytest
import torch

from megaopt.commands.bench.instance import Instance, build
from megaopt.commands.bench.modes import MODES
from megaopt.commands.bench.sets import SETS, TensorSet

CPU = torch.device("cpu")


def test_set_b_is_llamas_291_tensors() -> None:
    sizes = SETS["B"].sizes
    assert len(sizes) == 291
    assert sum(sizes) * 8 == 8_030_261_248  # the parameters of Llama-3.1-8B
    assert sizes.count(4096 // 8) == 65  # two norms a layer and the last


def test_set_b_is_an_eighth_of_every_matrixs_rows_and_of_every_norm() -> None:
    shapes = SETS["B"].shapes
    assert len([shape for shape in shapes if len(shape) == 2]) == 226
    assert {(16032, 4096), (128, 4096), (1792, 4096), (512, 14336), (512,)} <= {*shapes}


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


def test_matrix_is_shrunk_in_its_proportions_to_sizes_of_16() -> None:
    tensors = TensorSet.of_shapes("s", "", [(16032, 4096), (4, 4096), (512,)])
    assert tensors.shrunk(2**20).shapes == ((2032, 512), (16, 16), (8,))
    assert tensors.shrunk(10).shapes == ((9, 1), (1, 1), (1,))
    narrow = TensorSet.of_shapes("s", "", [(50257, 768)])
    assert narrow.shrunk(2**16).shapes == ((512, 128),)


def test_sets_a_and_c() -> None:
    assert SETS["A"].sizes == (268_435_456,)
    assert SETS["C"].sizes == (1024,) * 4000


def test_llama70b_is_a_64th_of_723_tensors_in_one_buffer() -> None:
    tensors = SETS["llama70b-64"]
    assert tensors.flat
    assert len(tensors.sizes) == 723
    assert sum(tensors.sizes) == 70_553_706_496 // 64 + 1  # its parameters; one element over
    starts = [sum(tensors.sizes[:index]) for index in range(723)]
    # in 16 bits, 8 elements are 16 bytes
    assert [start % 8 != 0 for start in starts] == [index % 2 == 1 for index in range(723)]


def test_gpt2_has_its_124_million_parameters_in_148_tensors() -> None:
    sizes = SETS["gpt2"].sizes
    assert len(sizes) == 148
    assert sum(sizes) == 124_439_808


def test_moe64_has_a_tensor_for_each_expert_and_matrix() -> None:
    sizes = SETS["moe64"].sizes
    assert sizes.count(2048 * 1408) == 4 * 64 * 3
    assert len(sizes) == 4 * (64 * 3 + 4 + 1 + 2)


@pytest.mark.parametrize("tensors", SETS.values(), ids=SETS)
def test_shrunk_set_is_small_and_of_the_same_kind(tensors: TensorSet) -> None:
    small = tensors.shrunk(2**16)
    assert (small.name, small.flat) == (tensors.name, tensors.flat)
    assert 1 <= len(small.sizes) <= 64
    assert sum(small.sizes) <= 2**16 + 64
    assert min(small.sizes) >= 1
    assert max(small.sizes) <= max(tensors.sizes)
    assert len(set(small.sizes)) > (len(set(tensors.sizes)) > 1)


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


def test_moved_gradients_have_other_addresses_and_the_same_values() -> None:
    instance = instance_of(TensorSet(name="s", description="", sizes=(5, 7)))
    before = instance.gradients
    instance.move_gradients()
    for old, new in zip(before, instance.gradients, strict=True):
        assert old.data_ptr() != new.data_ptr()
        assert torch.equal(old, new)


def test_same_seed_draws_the_same_case_and_another_seed_another() -> None:
    tensors = TensorSet(name="s", description="", sizes=(50,))
    mode = MODES["bf16"]
    one, same, other = (
        build(mode.optimizer, tensors, torch.bfloat16, CPU, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(one.parameters[0], same.parameters[0])
    assert torch.equal(one.gradients[0], same.gradients[0])
    assert not torch.equal(one.parameters[0], other.parameters[0])
