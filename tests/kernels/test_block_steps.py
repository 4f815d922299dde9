"""Steps with moments in blocks: kernel, twin and oracle agree in every bit, shards included."""

import dataclasses

import pytest
import torch
from bits import assert_same_bits
from step_cases import (
    GROUP,
    OTHER_RULES,
    assert_all_agree,
    assert_geometry_changes_no_bit,
    assert_nothing_is_written_beside,
    assert_same_buffers,
    assert_some_agree,
    block_combinations,
    buffers,
    copied,
    name_of,
    oracle_step,
    reference_step,
    triton_step,
    with_rule,
)

from megaopt.kernels.formats import MASTERS, MOMENTS, STOCHASTIC_WEIGHTS, WEIGHTS
from megaopt.kernels.rules import RULES
from megaopt.kernels.step.draws import Place
from megaopt.kernels.step.table import Geometry

ADAMW = RULES["adamw", "ieee"]
EVERY = list(block_combinations())
# each weight and master with each of the moments' formats, of the sizes of blocks in turn
CURATED = [
    formats
    for formats in EVERY
    if name_of(formats)
    in {
        "bfloat16-bfloat16_stochastic-none-block_e4m3-block_e5m3",
        "bfloat16-bfloat16_stochastic-none-block64_e4m3_nearest-block64_e5m3_nearest",
        "float32-float16_stochastic-none-block_e4m3-float32",
        "bfloat16-bfloat16-float32-block64_e4m3-block64_e5m3",
        "float32-bfloat16-remainder16-block_e4m3_nearest-block_e5m3",
        "bfloat16-bfloat16-remainder8-block_e4m3-block_e5m3_nearest",
        "bfloat16-bfloat16-remainder8_stochastic-bfloat16_stochastic-block64_e5m3",
        "bfloat16-bfloat16-kahan-block64_e4m3_nearest-bfloat16",
        "float16-float16-kahan_float16_stochastic-block_e4m3-block_e5m3",
        "float32-float32-none-block64_e4m3-block64_e5m3",
        "float32-float32-none-block_e4m3_nearest-block_e5m3_nearest",
    }
]
assert len(CURATED) == 11
COUNTS = [1, 127, 128, 129, 0, 64, 63, 1000]
# from blocks' beginnings on and within them, in quads and not, beyond 2**31 elements
FIRSTS = [0, 128, 5, 1 << 34, 64, 64 + 16, (1 << 31) - 3, 77]
PLACES = [Place(index + 3, first) for index, first in enumerate(FIRSTS)]
SMALL = Geometry(256, 2)
GEOMETRIES = [Geometry(128, 1), Geometry(256, 3, span=1), Geometry(1024, 2), Geometry(2048, 1, 8)]
each_curated = pytest.mark.parametrize("formats", CURATED, ids=name_of)


def test_each_format_is_among_them():
    """And each weight without a master, and each master but those with a scale."""
    names = {form.name for formats in CURATED for form in formats.by_slot.values()}
    assert {form.name for form in MOMENTS.values() if form.block and form.packed == 1} <= names
    assert {form.name for form in (*WEIGHTS.values(), *STOCHASTIC_WEIGHTS.values())} <= names
    masters = {form.name for form in MASTERS.values() if not form.scaled}
    found = {formats.master.name.removesuffix("_stochastic") for formats in CURATED}
    assert {name.removesuffix("_stochastic") for name in masters} == found


@each_curated
def test_kernel_twin_and_oracle_agree(formats, device):
    assert_all_agree(formats, ADAMW, GROUP, COUNTS, device, SMALL, places=PLACES)


@pytest.mark.parametrize("rule", OTHER_RULES, ids=lambda rule: rule.name)
def test_other_rules_agree(rule, device):
    if not rule.moments:
        return
    for maximize, formats in ((False, CURATED[0]), (True, CURATED[4])):
        formats = dataclasses.replace(with_rule(formats, rule), maximize=maximize)
        assert_all_agree(formats, rule, GROUP, COUNTS, device, SMALL, places=PLACES)


def test_decay_in_the_gradient_agrees(device):
    for formats in CURATED[:2]:
        assert_all_agree(formats, RULES["adam", "ieee"], GROUP, [300, 77], device, SMALL)


@pytest.mark.slow
@pytest.mark.thirds
@pytest.mark.parametrize("remainder", range(4))
def test_one_combination_in_ten_agrees(remainder, device):
    """All of them take too long for every run."""
    for formats in EVERY[remainder * 10 :: 40]:
        assert_all_agree(formats, ADAMW, GROUP, COUNTS, device, places=PLACES)


@pytest.mark.slow
@pytest.mark.thirds
@pytest.mark.parametrize("rule", OTHER_RULES, ids=lambda rule: rule.name)
def test_some_combinations_agree_by_other_rules(rule, device):
    assert_some_agree(EVERY[::43], rule, COUNTS, PLACES, device)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize(
    "formats",
    [
        CURATED[0],
        *(pytest.param(each, marks=pytest.mark.slow) for each in (CURATED[1], CURATED[4])),
    ],
    ids=name_of,
)
def test_geometry_changes_no_bit(formats, geometry, device):
    """Several chunks, blocks that go unmasked and such that do not."""
    counts, places = [5000, 2048, 700], [Place(0), Place(1, 48), Place(2, 128 * 5 + 3)]
    assert_geometry_changes_no_bit(formats, ADAMW, geometry, counts, places, device)


def test_unaligned_views_change_no_bit(device):
    for formats in CURATED[:2]:
        expected = buffers(formats, [600], device)
        found = {}
        for shift, (slot, (tensor,)) in enumerate(expected.items()):
            base = torch.zeros(700, dtype=tensor.dtype, device=device)
            found[slot] = [base[shift + 1 : shift + 1 + len(tensor)].copy_(tensor)]
        triton_step(found, formats, ADAMW, GROUP, SMALL)
        triton_step(expected, formats, ADAMW, GROUP, SMALL)
        assert_same_buffers(found, expected)


@pytest.mark.parametrize("place", [Place(0), Place(0, 37)], ids=["whole", "within a block"])
@each_curated
def test_nothing_is_written_beside_the_tensors(formats, place, device):
    assert_nothing_is_written_beside(formats, ADAMW, SMALL, place, device)


def take_steps(take, tensors, formats, rule, places, steps=5):
    """Steps with new gradients, of which one has NaNs, infinities and zeros."""
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        for tensor in tensors["grad"]:
            grad = torch.randn(len(tensor), generator=generator)
            if step == 3:
                grad[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])[: len(grad)]
                grad[200:500] = 0.0
            tensor.copy_(grad)
        take(tensors, formats, rule, {**GROUP, "step": step}, places=places)


@each_curated
def test_many_steps(formats, device):
    """Errors would compound: nothing is synchronised in between."""
    places = [Place(0), Place(1, 77)]
    found = buffers(formats, [700, 300], device, places=places)
    twin, truth = copied(found), copied(found)
    sides = ((triton_step, found), (reference_step, twin), (oracle_step, truth))
    for take, tensors in sides:
        take_steps(take, tensors, formats, ADAMW, places)
    assert_same_buffers(twin, truth)
    assert_same_buffers(found, truth)


# --- a parameter in parts


def cut(whole, block, firsts):
    """Parts of one parameter from these elements on, each with scales of all blocks it is in."""
    ends = [*firsts[1:], len(whole["weight"][0])]
    parts = {}
    for slot, (tensor,) in whole.items():
        own = (
            slice if not slot.endswith("_scale") else lambda a, b: slice(a // block, -(-b // block))
        )
        pairs = zip(firsts, ends, strict=True)
        parts[slot] = [tensor[own(first, end)].clone() for first, end in pairs]
    return parts, [Place(0, first) for first in firsts]


def fresh(formats, count, device):
    """Moments of 0 and gradients within some octaves of one another, as those of a layer."""
    tensors = buffers(formats, [count], device)
    generator = torch.Generator().manual_seed(1)
    octaves = torch.randint(-25, 3, (count,), generator=generator).float()
    tensors["grad"][0].copy_(torch.randn(count, generator=generator) * torch.exp2(octaves))
    tensors["weight"][0].copy_(torch.randn(count, generator=generator))
    for slot, (tensor,) in tensors.items():
        if slot.startswith("exp_avg"):
            tensor.fill_(1 if slot.endswith("_scale") else 0)
    return tensors


@pytest.mark.parametrize("step", [triton_step, reference_step], ids=["kernel", "twin"])
@each_curated
def test_parts_cut_between_blocks_are_the_whole(formats, step, device):
    whole = buffers(formats, [900], device)
    parts, places = cut(whole, formats.block, [0, formats.block, 4 * formats.block])
    step(whole, formats, ADAMW, GROUP, places=[Place(0)])
    step(parts, formats, ADAMW, GROUP, places=places)
    joined = {slot: [torch.cat(each)] for slot, each in parts.items()}
    assert_same_buffers(joined, whole)


BLOCKED = [
    f for f in CURATED if all(form.block for form in f.moments) and f.weight.name != "float16"
]


def values_of(formats, tensors, slot, first):
    form = formats.by_slot[slot]
    code = tensors[slot][0]
    factor = torch.exp2(tensors[f"{slot}_scale"][0].double() - 127).float()
    lead = first % form.block
    factor = factor.repeat_interleave(form.block)[lead : lead + len(code)]
    return form.decode_reference(code.cpu(), factor.cpu())


@pytest.mark.parametrize("first", [1, 64 + 5, 128 * 2 + 100])
@pytest.mark.parametrize("formats", BLOCKED, ids=name_of)
def test_parts_cut_within_a_block_differ_in_its_smallest_values_alone(formats, first, device):
    """After a step from 0, where all parts start alike.

    Each part's window is at most the whole block's: 2**(s - 127) < amax with that one's s. A code
    has 3 bits of mantissa for normal numbers, which a finer window leaves where they are: the same
    draw, in units of the same last place, gives the same value. Subnormal in the whole's window are
    values below 8 units: of e4m3 8 * 2**-16 * 2**(s - 127), less than 2**-13 of amax, of e5m3
    8 * 2**-32, less than 2**-29. What is up to there may round up to just that, so <=.
    """
    whole = fresh(formats, 700, device)
    parts, places = cut(whole, formats.block, [0, first])
    triton_step(whole, formats, ADAMW, {**GROUP, "step": 1}, places=[Place(0)])
    triton_step(parts, formats, ADAMW, {**GROUP, "step": 1}, places=places)
    begin = first // formats.block * formats.block
    inside = slice(begin, begin + formats.block)
    outside = torch.ones(700, dtype=torch.bool)
    outside[inside] = False
    for slot, bound in (("exp_avg", 2.0**-13), ("exp_avg_sq", 2.0**-29)):
        expected = values_of(formats, whole, slot, 0)
        own = [{name: [each[i]] for name, each in parts.items()} for i in (0, 1)]
        found = torch.cat([values_of(formats, own[0], slot, 0),
                           values_of(formats, own[1], slot, first)])  # fmt: skip
        assert_same_bits(found[outside], expected[outside], slot)
        amax = expected[inside].abs().max()
        differs = found[inside] != expected[inside]
        largest = torch.maximum(found[inside].abs(), expected[inside].abs())
        assert bool((largest[differs] <= bound * amax).all()), slot
    for slot in ("weight", "master"):
        if slot in whole:  # the step takes the moments before they are stored
            assert_same_bits(torch.cat(parts[slot]), whole[slot][0], slot)


def test_the_bound_is_reached(device):
    """Some values below it do differ: a finer window keeps more of their bits."""
    formats = next(f for f in BLOCKED if name_of(f).endswith("e4m3_nearest-block_e5m3_nearest"))
    whole = fresh(formats, 128, device)
    scale = torch.full((64,), 2.0**-14)
    scale[0] = 1.0
    whole["grad"][0][:64] = torch.linspace(1.0, 1.9, 64, device=device)
    whole["grad"][0][64:] = torch.linspace(1.0, 1.9, 64, device=device) * 2.0**-14
    parts, places = cut(whole, 128, [0, 64])
    for tensors, own in ((whole, [Place(0)]), (parts, places)):
        triton_step(tensors, formats, ADAMW, {**GROUP, "step": 1}, places=own)
    second = {slot: [each[1]] for slot, each in parts.items()}
    found, expected = (values_of(formats, each, "exp_avg", first)
                       for each, first in ((second, 64), (whole, 0)))  # fmt: skip
    assert int((found != expected[64:]).sum()) > 32
