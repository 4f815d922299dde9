"""The bench's cases: the model's tensors, and the bytes that each mode declares."""

import pytest
import torch

from megaopt.bench.cases import MODES, SETS, select
from megaopt.bench.instance import build, bytes_per_step

CPU = torch.device("cpu")


def test_set_b_is_llamas_291_tensors() -> None:
    sizes = SETS["B"].sizes
    assert len(sizes) == 291
    assert sum(sizes) * 8 == 8_030_261_248  # the parameters of Llama-3.1-8B
    assert sizes.count(4096 // 8) == 65  # two norms a layer and the last


def test_sets_a_and_c() -> None:
    assert SETS["A"].sizes == (268_435_456,)
    assert SETS["C"].sizes == (1024,) * 4000


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_declared_bytes_are_those_of_the_tensors(mode) -> None:
    instance = build(mode, (3, 8, 100), CPU, "reference")
    instance.optimizer.step()
    assert bytes_per_step(instance) == 111 * mode.bytes_per_parameter


def test_modes_are_the_28_26_20_and_18_bytes() -> None:
    assert [mode.bytes_per_parameter for mode in MODES.values()] == [28, 26, 20, 18, 28]


@pytest.mark.parametrize("tensor_set", SETS.values(), ids=SETS)
def test_shrunk_set_is_small_and_of_the_same_kind(tensor_set) -> None:
    sizes = tensor_set.shrunk(2**16)
    assert 1 <= len(sizes) <= 64
    assert sum(sizes) <= 2**16 + 64
    assert min(sizes) >= 1
    assert max(sizes) <= max(tensor_set.sizes)
    assert len(set(sizes)) == len(set(tensor_set.sizes[:: max(1, len(tensor_set.sizes) // 64)]))


def test_same_seed_draws_the_same_case_and_another_seed_another() -> None:
    mode = MODES["bf16"]
    one, same = build(mode, (50,), CPU, "reference"), build(mode, (50,), CPU, "reference")
    other = build(mode, (50,), CPU, "reference", seed=1)
    assert torch.equal(one.parameters[0], same.parameters[0])
    assert torch.equal(one.parameters[0].grad, same.parameters[0].grad)
    assert not torch.equal(one.parameters[0], other.parameters[0])


def test_moved_gradients_have_other_addresses_and_the_same_values() -> None:
    instance = build(MODES["bf16"], (5, 7), CPU, "reference")
    before = [parameter.grad for parameter in instance.parameters]
    instance.move_gradients()
    for old, parameter in zip(before, instance.parameters, strict=True):
        assert old.data_ptr() != parameter.grad.data_ptr()
        assert torch.equal(old, parameter.grad)


def test_select_takes_names_in_the_tables_order() -> None:
    assert len(select()) == len(SETS) * len(MODES)
    names = [case.name for case in select(("C", "A"), ("fp32", "bf16"))]
    assert names == ["A/bf16", "A/fp32", "C/bf16", "C/fp32"]


@pytest.mark.parametrize(
    ("sets", "only", "message"),
    [
        (("A", "D"), (), r"sets=\['D'\]: unknown; allowed are A, B, C"),
        ((), ("fp8",), r"only=\['fp8'\]: unknown; allowed are bf16, "),
    ],
)
def test_select_refuses_unknown_names(sets, only, message) -> None:
    with pytest.raises(ValueError, match=message):
        select(sets, only)
