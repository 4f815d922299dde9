"""The bench's cases: modes of ours under each contract, their bytes, and the order of a run."""

import math

import pytest
import torch

from megaopt.float8 import Float8Weight
from megaopt.lab.bench.command import select
from megaopt.lab.bench.instance import Instance, bytes_held, bytes_per_step
from megaopt.lab.bench.modes import MODES
from megaopt.lab.bench.sets import SETS, TensorSet
from megaopt.lab.bench.subjects import PEERS, Subject

CPU = torch.device("cpu")
SIZES = TensorSet(name="s", description="", sizes=(3, 8, 100))
IEEE_MODES = {name: mode for name, mode in MODES.items() if mode.contract == "ieee"}
# held a parameter without scales; moments, and how many bytes of them; elements of a block
BLOCKS = {
    "blocks": (4, 2, 2, 128),
    "blocks-nearest": (4, 2, 2, 128),
    "remainder8_stochastic-blocks": (5, 2, 2, 128),
    "bf16-remainders-blocks": (6, 2, 2, 128),
    "lion-blocks": (3, 1, 1, 128),
    "sgd-blocks": (3, 1, 1, 128),
    "blocks-4bit": (3, 2, 1, 32),
}
PLAIN = {
    name: mode for name, mode in IEEE_MODES.items() if mode.recipe is None and name not in BLOCKS
}
FLOAT8 = {name: mode for name, mode in IEEE_MODES.items() if mode.recipe is not None}
MATRICES = TensorSet.of_shapes("m", "", [(256, 384), (96,), (128, 128)])
SCALES = {  # bytes of the scales of MATRICES' blocks; the second has one block, of one number
    "fp8-delayed": 0,
    "fp8-current": 0,
    "fp8-block_128x128": 4 * 2 * 3,
    "fp8-mxfp8": 256 * 12 + 128 * 4,
}


@pytest.mark.parametrize("mode", PLAIN.values(), ids=PLAIN)
def test_declared_bytes_are_those_of_the_tensors(mode: Subject) -> None:
    instance = mode.instance(SIZES, CPU, backend="reference")
    instance.optimizer.step()
    assert bytes_per_step(instance) == 111 * mode.bytes_per_parameter


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", FLOAT8.values(), ids=FLOAT8)
def test_bytes_of_fp8_weights_with_scales_and_plain_norms(mode: Subject) -> None:
    instance = mode.instance(MATRICES, CPU, backend="reference")
    instance.optimizer.step()
    matrices = 256 * 384 + 128 * 128
    recipe, _, kept = mode.name.removeprefix("fp8-").partition("-")
    # of the norm, bf16; scales are read too, and moments have some, where there are no fp32 masters
    norm, scales = {"": (28, 1), "stochastic-8bit": (22, 2), "remainder8-8bit": (24, 2)}[kept]
    expected = matrices * mode.bytes_per_parameter + 96 * norm + scales * SCALES[f"fp8-{recipe}"]
    moments = 2 * 2 * matrices // 128 if kept else 0
    assert bytes_per_step(instance) == expected + moments
    assert [type(p.data) is Float8Weight for p in instance.parameters] == [True, False, True]


@pytest.mark.parametrize("name", BLOCKS)
def test_bytes_of_moments_in_blocks_with_scales_and_fp32_ones_of_norms(name: str) -> None:
    mode, (held, moments, stored, block) = MODES[name], BLOCKS[name]
    instance = mode.instance(MATRICES, CPU, backend="reference")
    instance.optimizer.step()
    matrices = 256 * 384 + 128 * 128
    scales, wider = moments * matrices // block, 4 * moments - stored
    expected = matrices * mode.bytes_per_parameter + 2 * scales
    assert bytes_per_step(instance) == expected + 96 * (mode.bytes_per_parameter + 2 * wider)
    assert bytes_held(instance) == matrices * held + scales + 96 * (held + wider)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_mode_has_its_contract(mode: Subject) -> None:
    """Which FusedAdam alone is given."""
    assert mode.options.get("contract", "ieee") == mode.contract
    assert ("contract" in mode.options) == (mode.kind == "FusedAdam")


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_peers_of_a_mode_exist_and_do_its_work(mode: Subject) -> None:
    for name in {*mode.against, *([mode.twin] if mode.twin else [])}:
        assert PEERS[name].weight_dtype == mode.weight_dtype
        assert PEERS[name].bytes_per_parameter == mode.bytes_per_parameter
        scalings = [each.recipe and each.recipe.scaling for each in (PEERS[name], mode)]
        assert scalings[0] == scalings[1]
        # one heading for both in the picture
        named = mode.recipe is not None or mode.name.removeprefix("te:") in BLOCKS
        assert not named or PEERS[name].description == mode.description


def test_a_mode_brings_its_peers_and_stands_before_them() -> None:
    everything = tuple(PEERS.values())
    names = [case.subject.name for case in select(("A",), ("fp32", "torchao-8bit"), everything)]
    assert names == ["fp32", "torch-fused-fp32", "torch-foreach-fp32", "apex-fp32", "torchao-8bit"]
    only_peer = select(("A",), ("bitsandbytes-8bit",), everything)
    assert [case.subject.name for case in only_peer] == ["bitsandbytes-8bit"]
    everywhere = [case.subject.name for case in select(("A",), (), everything)]
    assert sorted(everywhere) == sorted([*MODES, *PEERS])
    for mode in MODES.values():
        assert all(everywhere.index(mode.name) < everywhere.index(name) for name in mode.against)


@pytest.mark.parametrize(
    ("sets", "only", "message"),
    [
        (("A", "D"), (), r"sets must be of A, B, C, llama70b-64, .*, got 'D'"),
        ((), ("fp8",), r"only must be of bf16, .*, got 'fp8'"),
        (
            ("C",),
            ("fp8-mxfp8",),
            r"sets must be of A, B, moe64, gpt2, .*, got \['C'\]",
        ),
    ],
)
def test_select_refuses_unknown_names(sets, only, message) -> None:
    with pytest.raises(ValueError, match=message):
        select(sets, only)


# --- the sets of tensors: the models' shapes, and how they lie in memory


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
    return MODES["bf16"].instance(tensors, CPU)


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
