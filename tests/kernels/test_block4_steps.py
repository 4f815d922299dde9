"""Steps with moments of 4 bits: kernel, twin and oracle agree in every bit, shards included."""

import dataclasses

import pytest
import torch
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
EVERY = list(block_combinations([32]))
# each weight and master with some of the moments' formats
NAMES = (
    "bfloat16-bfloat16_stochastic-none-block32_e3m0-block32_e4m0",
    "float32-float16_stochastic-none-block32_e3m0-float32",
    "bfloat16-bfloat16-float32-block32_e3m0-block32_e4m0_nearest",
    "float32-bfloat16-remainder16-block32_e3m0_nearest-block32_e4m0",
    "bfloat16-bfloat16-remainder8_stochastic-bfloat16_stochastic-block32_e4m0",
    "float16-float16-kahan_float16_stochastic-block32_e3m0-block32_e4m0",
    "bfloat16-bfloat16-kahan-block32_e3m0_nearest-bfloat16",
    "float32-float32-none-block32_e3m0_nearest-block32_e4m0_nearest",
)
BY_NAME = {name_of(formats): formats for formats in EVERY}
CURATED = [BY_NAME[name] for name in NAMES]
COUNTS = [2, 30, 32, 34, 0, 64, 62, 1000]
# from blocks' beginnings on and within them, in quads and not, beyond 2**31 elements
FIRSTS = [0, 32, 6, 1 << 34, 16, 64 + 16, (1 << 31) - 2, 78]
PLACES = [Place(index + 3, first) for index, first in enumerate(FIRSTS)]
SMALL = Geometry(256, 2)
GEOMETRIES = [Geometry(128, 1), Geometry(256, 3, span=1), Geometry(1024, 2), Geometry(2048, 1, 8)]
QUICK = CURATED[0]
each_curated = pytest.mark.parametrize(
    "formats",
    [pytest.param(f, marks=[] if index in (0, 3) else pytest.mark.slow, id=name_of(f))
     for index, f in enumerate(CURATED)],
)  # fmt: skip


def test_each_format_is_among_them():
    """And each weight without a master, and each master but those with a scale."""
    names = {form.name for formats in CURATED for form in formats.by_slot.values()}
    assert {form.name for form in MOMENTS.values() if form.packed == 2} <= names
    assert {form.name for form in (*WEIGHTS.values(), *STOCHASTIC_WEIGHTS.values())} <= names
    masters = {form.name.removesuffix("_stochastic") for form in MASTERS.values()}
    found = {formats.master.name.removesuffix("_stochastic") for formats in CURATED}
    assert masters - found == {"scaled_float16", "kahan_float16"} - found


@each_curated
def test_kernel_twin_and_oracle_agree(formats, device):
    assert_all_agree(formats, ADAMW, GROUP, COUNTS, device, SMALL, places=PLACES)


@pytest.mark.parametrize("rule", OTHER_RULES, ids=lambda rule: rule.name)
def test_other_rules_agree(rule, device):
    if not rule.moments:
        return
    formats = dataclasses.replace(with_rule(QUICK, rule), maximize=rule.name == "lion")
    assert_all_agree(formats, rule, GROUP, [34, 62], device, SMALL, places=PLACES[:2])


def test_decay_in_the_gradient_agrees(device):
    assert_all_agree(QUICK, RULES["adam", "ieee"], GROUP, [300, 78], device, SMALL)


def one_of_each_pair():
    """A combination for each weight and master, gradients and moments in turn."""
    found = {}
    for formats in EVERY:
        found.setdefault((formats.weight.name, formats.master.name), []).append(formats)
    return [own[(5 * index + 3) % len(own)] for index, own in enumerate(found.values())]


def test_some_combinations_agree(device):
    """All of them below."""
    sampled = one_of_each_pair()
    assert {formats.grad.name for formats in sampled} == {"float32", "bfloat16", "float16"}
    for formats in sampled:
        assert_all_agree(formats, ADAMW, GROUP, COUNTS[-2:-1], device, places=PLACES[-2:-1])


@pytest.mark.slow
@pytest.mark.thirds
@pytest.mark.parametrize("remainder", range(10))
def test_every_combination_agrees(remainder, device):
    for formats in EVERY[remainder::10]:
        assert_all_agree(formats, ADAMW, GROUP, COUNTS, device, places=PLACES)


@pytest.mark.slow
@pytest.mark.thirds
@pytest.mark.parametrize("rule", OTHER_RULES, ids=lambda rule: rule.name)
def test_some_combinations_agree_by_other_rules(rule, device):
    assert_some_agree(EVERY[::23], rule, COUNTS, PLACES, device)


@pytest.mark.parametrize(
    "geometry",
    [
        pytest.param(each, marks=[] if each.block == 1024 else pytest.mark.slow, id=str(each))
        for each in GEOMETRIES
    ],
)
@pytest.mark.parametrize(
    "formats",
    [QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in (CURATED[2], CURATED[4]))],
    ids=name_of,
)
def test_geometry_changes_no_bit(formats, geometry, device):
    """Several chunks, blocks that go unmasked and such that do not."""
    counts, places = [5000, 2048, 700], [Place(0), Place(1, 48), Place(2, 32 * 5 + 6)]
    assert_geometry_changes_no_bit(formats, ADAMW, geometry, counts, places, device)


@pytest.mark.parametrize("shift", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_unaligned_views_change_no_bit(shift, device):
    expected = buffers(QUICK, [600], device)
    found = {}
    for more, (slot, (tensor,)) in enumerate(expected.items()):
        base = torch.zeros(700, dtype=tensor.dtype, device=device)
        begin = shift + more % 2
        found[slot] = [base[begin : begin + len(tensor)].copy_(tensor)]
    triton_step(found, QUICK, ADAMW, GROUP, SMALL)
    triton_step(expected, QUICK, ADAMW, GROUP, SMALL)
    assert_same_buffers(found, expected)


@pytest.mark.parametrize("place", [Place(0), Place(0, 38)], ids=["whole", "within a block"])
@pytest.mark.parametrize(
    "formats", [QUICK, pytest.param(CURATED[3], marks=pytest.mark.slow)], ids=name_of
)
def test_nothing_is_written_beside_the_tensors(formats, place, device):
    assert_nothing_is_written_beside(formats, ADAMW, SMALL, place, device)


@pytest.mark.parametrize(
    "formats", [QUICK, pytest.param(CURATED[3], marks=pytest.mark.slow)], ids=name_of
)
def test_many_steps(formats, device):
    """Errors would compound: nothing is synchronised in between. One gradient has no numbers."""
    places = [Place(0), Place(1, 78)]
    found = buffers(formats, [700, 300], device, places=places)
    twin, truth = copied(found), copied(found)
    for take, tensors in ((triton_step, found), (reference_step, twin), (oracle_step, truth)):
        for step in range(1, 5):
            generator = torch.Generator().manual_seed(step)
            for tensor in tensors["grad"]:
                grad = torch.randn(len(tensor), generator=generator)
                if step == 3:
                    grad[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
                    grad[200:500] = 0.0
                tensor.copy_(grad)
            take(tensors, formats, ADAMW, {**GROUP, "step": step}, places=places)
    assert_same_buffers(twin, truth)
    assert_same_buffers(found, truth)


# --- a parameter in parts


def cut(whole, formats, firsts):
    """Parts of one parameter from these elements on, which begin blocks."""
    ends, parts = [*firsts[1:], len(whole["weight"][0])], {}
    for slot, (tensor,) in whole.items():
        unit = 32 if slot.endswith("_scale") else formats.by_slot[slot].packed
        pairs = zip(firsts, ends, strict=True)
        parts[slot] = [tensor[a // unit : -(-b // unit)].clone() for a, b in pairs]
    return parts, [Place(0, first) for first in firsts]


@pytest.mark.parametrize("step", [triton_step, reference_step], ids=["kernel", "twin"])
@pytest.mark.parametrize(
    "formats",
    [QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in CURATED[1:4])],
    ids=name_of,
)
def test_parts_cut_between_blocks_are_the_whole(formats, step, device):
    whole = buffers(formats, [900], device)
    parts, places = cut(whole, formats, [0, 32, 128])
    step(whole, formats, ADAMW, GROUP, places=[Place(0)])
    step(parts, formats, ADAMW, GROUP, places=places)
    joined = {slot: [torch.cat(each)] for slot, each in parts.items()}
    assert_same_buffers(joined, whole)
