"""The step: kernel = twin = oracle, in every bit, over formats, layouts, rules and hard values."""

import pytest
import torch
from step_cases import (
    CURATED,
    GROUP,
    IEEE_RULES,
    assert_all_agree,
    assert_same_buffers,
    buffers,
    combinations,
    copied,
    name_of,
    oracle_step,
    reference_step,
    triton_step,
)

from megaopt.kernels.rules import RULES
from megaopt.kernels.step.table import Geometry

SMALL = Geometry(64, 2)
ADAMW = RULES["adamw", "ieee"]


@pytest.mark.parametrize("rule", IEEE_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("formats", list(combinations()), ids=name_of)
def test_twin_is_the_oracle(formats, rule):
    found = buffers(formats, [1, 700], "cpu")
    expected = copied(found)
    reference_step(found, formats, rule, GROUP)
    oracle_step(expected, formats, rule, GROUP)
    assert_same_buffers(found, expected)


@pytest.mark.parametrize("formats", list(combinations()), ids=name_of)
def test_kernel_is_the_twin_in_every_combination(formats, device):
    found = buffers(formats, [1, 65], device)
    expected = {slot: [t.cpu() for t in each] for slot, each in copied(found).items()}
    triton_step(found, formats, ADAMW, GROUP, SMALL)
    reference_step(expected, formats, ADAMW, GROUP)
    assert_same_buffers(found, expected)


@pytest.mark.parametrize("rule", IEEE_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("formats", CURATED, ids=name_of)
def test_kernel_is_the_twin(formats, rule, device):
    found = buffers(formats, [1, 127, 128, 129, 0, 300], device)
    expected = {slot: [t.cpu() for t in each] for slot, each in copied(found).items()}
    triton_step(found, formats, rule, GROUP, SMALL)
    reference_step(expected, formats, rule, GROUP)
    assert_same_buffers(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", CURATED, ids=name_of)
def test_compiled_kernel_is_the_twin(formats, device):
    found = buffers(formats, [1, 4095, 4096, 4097, 0, 100_000], device)
    expected = {slot: [t.cpu() for t in each] for slot, each in copied(found).items()}
    on_gpu = copied(found)
    triton_step(found, formats, ADAMW, GROUP)
    reference_step(expected, formats, ADAMW, GROUP)
    reference_step(on_gpu, formats, ADAMW, GROUP)
    assert_same_buffers(found, expected)
    assert_same_buffers(found, on_gpu)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_decay": 0.0},
        {"bias_correction": False},
        {"step": 1},
        {"step": 1_000_000},
        {"eps": 0.0},
        {"betas": (0.0, 0.0)},
        {"lr": 0.0},
        {"lr": 1e30},
        {"betas": (0.9, 0.999), "eps": 1e-15, "step": 17},
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", IEEE_RULES, ids=lambda rule: rule.name)
def test_hyperparameters(changes, rule, device):
    assert_all_agree(CURATED[0], rule, {**GROUP, **changes}, [500], device)


@pytest.mark.parametrize("formats", CURATED[:6], ids=name_of)
def test_many_steps(formats, device):
    """Errors would compound: nothing is synchronised in between."""
    found = buffers(formats, [200], device)
    expected = {slot: [t.cpu() for t in each] for slot, each in copied(found).items()}
    for step in range(1, 8):
        generator = torch.Generator().manual_seed(step)
        grad = torch.randn(200, generator=generator).to(formats.dtype("grad"))
        found["grad"][0].copy_(grad)
        expected["grad"][0].copy_(grad)
        triton_step(found, formats, ADAMW, {**GROUP, "step": step})
        oracle_step(expected, formats, ADAMW, {**GROUP, "step": step})
    assert_same_buffers(found, expected)


GEOMETRIES = [Geometry(32, 1), Geometry(64, 3), Geometry(256, 1), Geometry(16, 16)]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("formats", [CURATED[1], CURATED[2], CURATED[7]], ids=name_of)
def test_geometry_changes_no_bit(formats, geometry, device):
    found = buffers(formats, [257], device)
    expected = copied(found)
    triton_step(found, formats, ADAMW, GROUP, geometry)
    triton_step(expected, formats, ADAMW, GROUP, Geometry(1024, 1))
    assert_same_buffers(found, expected)


@pytest.mark.parametrize("formats", [f for f in CURATED if not f.scaled], ids=name_of)
def test_unaligned_views_change_no_bit(formats, device):
    """Each slot one element further off alignment, so that no two share a path by chance."""
    expected = buffers(formats, [200], device)
    found = {}
    for shift, (slot, tensors) in enumerate(expected.items()):
        base = torch.zeros(300, dtype=tensors[0].dtype, device=device)
        found[slot] = [base[shift + 1 : shift + 201].copy_(tensors[0])]
    assert any(each[0].data_ptr() % 16 for each in found.values())
    triton_step(found, formats, ADAMW, GROUP, SMALL)
    triton_step(expected, formats, ADAMW, GROUP, SMALL)
    assert_same_buffers(found, expected)


@pytest.mark.parametrize("formats", [f for f in CURATED if not f.scaled], ids=name_of)
def test_pieces_of_a_tensor_are_the_whole(formats, device):
    whole = buffers(formats, [300], device)
    pieces = {slot: list(each[0].clone().split([1, 129, 170])) for slot, each in whole.items()}
    triton_step(whole, formats, ADAMW, GROUP, SMALL)
    triton_step(pieces, formats, ADAMW, GROUP, SMALL)
    joined = {slot: [torch.cat(each)] for slot, each in pieces.items()}
    assert_same_buffers(joined, whole)


@pytest.mark.parametrize("backend", [triton_step, reference_step], ids=["triton", "reference"])
def test_every_tensor_takes_its_own_groups_numbers(backend, device):
    formats = CURATED[0]
    groups = [GROUP, {**GROUP, "lr": 0.1, "step": 9}, {**GROUP, "weight_decay": 0.7}]
    found = buffers(formats, [70, 0, 200, 5], device)
    expected = copied(found)
    backend(found, formats, ADAMW, groups, groups=[2, 0, 1, 0])
    for index, group in ((0, 2), (2, 1), (3, 0)):
        alone = {slot: [each[index]] for slot, each in expected.items()}
        backend(alone, formats, ADAMW, groups[group])
    assert_same_buffers(found, expected)


@pytest.mark.parametrize("formats", CURATED, ids=name_of)
def test_nothing_is_written_beside_the_tensors(formats, device):
    """Guard bands of a known pattern around every buffer."""
    inner = buffers(formats, [131], device)
    bases = {}
    for slot, each in inner.items():
        # as bytes: torch compares no fp8
        bases[slot] = torch.full((each[0].nbytes + 64,), 77, dtype=torch.uint8, device=device)
        bases[slot][32:-32] = each[0].view(torch.uint8)
    views = {slot: [base[32:-32].view(inner[slot][0].dtype)] for slot, base in bases.items()}
    triton_step(views, formats, ADAMW, GROUP, SMALL)
    for slot, base in bases.items():
        assert bool((base[:32] == 77).all()), slot
        assert bool((base[-32:] == 77).all()), slot
