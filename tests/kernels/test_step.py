"""The step: kernel = twin = oracle, in every bit, over formats, layouts, rules and hard values."""

import itertools

import pytest
import torch
from step_cases import (
    CURATED,
    DRAWING,
    GROUP,
    IEEE_RULES,
    NEWER,
    NO_BLOCKS,
    assert_all_agree,
    assert_same_buffers,
    buffers,
    copied,
    name_of,
    oracle_step,
    reference_step,
    sampled_combinations,
    triton_step,
)

from megaopt.kernels.formats import GRADS, MASTERS, STOCHASTIC_WEIGHTS, WEIGHTS, FormatTable
from megaopt.kernels.rules import RULES
from megaopt.kernels.step.draws import Place
from megaopt.kernels.step.table import Geometry

SMALL = Geometry(64, 2)
ADAMW = RULES["adamw", "ieee"]


@pytest.mark.parametrize("rule", IEEE_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("formats", sampled_combinations(4))
def test_twin_is_the_oracle(formats, rule):
    found = buffers(formats, [1, 700], "cpu")
    expected = copied(found)
    reference_step(found, formats, rule, GROUP)
    oracle_step(expected, formats, rule, GROUP)
    assert_same_buffers(found, expected)


@pytest.mark.parametrize("formats", sampled_combinations(7))
def test_kernel_is_the_twin_in_every_combination(formats, device):
    found = buffers(formats, [1, 65], device)
    expected = {slot: [t.cpu() for t in each] for slot, each in copied(found).items()}
    triton_step(found, formats, ADAMW, GROUP, SMALL)
    reference_step(expected, formats, ADAMW, GROUP)
    assert_same_buffers(found, expected)


def pairs_of_rules():
    """AdamW with every row; L2, which changes what moments see, with those that draw nothing."""
    for rule, formats in itertools.product(IEEE_RULES, CURATED):
        marks = [pytest.mark.slow] if rule is not ADAMW and formats in NEWER else []
        yield pytest.param(rule, formats, marks=marks, id=f"{rule.name}-{name_of(formats)}")


@pytest.mark.parametrize(("rule", "formats"), list(pairs_of_rules()))
def test_kernel_is_the_twin(formats, rule, device):
    found = buffers(formats, [1, 127, 128, 129, 0, 300], device)
    expected = {slot: [t.cpu() for t in each] for slot, each in copied(found).items()}
    triton_step(found, formats, rule, GROUP, SMALL)
    reference_step(expected, formats, rule, GROUP)
    assert_same_buffers(found, expected)


@pytest.mark.sample(5)
@pytest.mark.gpu
@pytest.mark.parametrize("rule", IEEE_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("formats", CURATED, ids=name_of)
def test_compiled_kernel_is_the_twin(formats, rule, device):
    found = buffers(formats, [1, 4095, 4096, 4097, 0, 100_000], device)
    expected = {slot: [t.cpu() for t in each] for slot, each in copied(found).items()}
    on_gpu = copied(found)
    triton_step(found, formats, rule, GROUP)
    reference_step(expected, formats, rule, GROUP)
    reference_step(on_gpu, formats, rule, GROUP)
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


# each format of every slot in few combinations, and fp16 weights beside fp32 masters
EACH_FORMAT = [
    formats
    for formats in CURATED
    if name_of(formats)
    in {
        "float32-float32-none-scaled_float8_e4m3-float32",
        "float32-bfloat16-remainder16-bfloat16-scaled_float8_e4m3",
        "bfloat16-bfloat16-float32-float32-float32",
        "bfloat16-bfloat16-scaled_float16-bfloat16-scaled_float16",
        "float16-float16-scaled_float16-scaled_float16-bfloat16",
        "float16-float16-float32-bfloat16-float32",
    }
    or formats in NEWER
]
TABLES = {
    "grad": GRADS,
    "weight": {**WEIGHTS, **STOCHASTIC_WEIGHTS},
    "master": MASTERS,
    # those in blocks are in test_block_steps.py
    **dict.fromkeys(ADAMW.moments, FormatTable(*NO_BLOCKS)),
}


@pytest.mark.parametrize("slot", TABLES)
def test_each_format_is_among_them(slot):
    names = {formats.by_slot[slot].name for formats in EACH_FORMAT}
    assert names == {form.name for form in TABLES[slot].values()}


def run_steps(take, formats, rule, device):
    """Seven steps with new gradients; the buffers after each of them."""
    tensors = buffers(formats, [200], device)
    for step in range(1, 8):
        generator = torch.Generator().manual_seed(step)
        grad = torch.randn(200, generator=generator).to(formats.dtype("grad"))
        tensors["grad"][0].copy_(grad)
        take(tensors, formats, rule, {**GROUP, "step": step})
        yield copied(tensors)


# a format does not know the rule: both rules on one of them
@pytest.mark.parametrize(
    ("rule", "formats"),
    [(ADAMW, formats) for formats in EACH_FORMAT]
    + [(rule, CURATED[0]) for rule in IEEE_RULES if rule is not ADAMW],
    ids=lambda value: value.name if value in IEEE_RULES else name_of(value),
)
@pytest.mark.halved
def test_many_steps(rule, formats, device):
    """Errors would compound: nothing is synchronised in between. The run is repeated: equal too."""
    first, second = (run_steps(triton_step, formats, rule, device) for _ in range(2))
    expected = run_steps(oracle_step, formats, rule, "cpu")
    for found, again, truth in zip(first, second, expected, strict=True):
        assert_same_buffers(found, truth)
        assert_same_buffers(again, found)


GEOMETRIES = [Geometry(32, 1), Geometry(64, 3), Geometry(256, 1), Geometry(16, 16)]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
# of those that draw: beside the weight, in all slots, and with scales
@pytest.mark.parametrize(
    "formats", [*(f for f in EACH_FORMAT if f not in NEWER), *DRAWING[:3]], ids=name_of
)
@pytest.mark.halved
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
    """Random bits too, where the pieces say which elements of the parameter they are."""
    whole = buffers(formats, [300], device)
    pieces = {slot: list(each[0].clone().split([1, 129, 170])) for slot, each in whole.items()}
    triton_step(whole, formats, ADAMW, GROUP, SMALL)
    places = [Place(0, first) for first in (0, 1, 130)]
    triton_step(pieces, formats, ADAMW, GROUP, SMALL, places=places)
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
