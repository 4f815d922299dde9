"""The step: kernel = twin = oracle, in every bit, over rules, formats, layouts and hard values."""

import dataclasses
import itertools

import pytest
import torch
from bits import assert_same_bits
from step_cases import (
    CURATED,
    EVERY_RULE,
    GROUP,
    IEEE_RULES,
    NO_BLOCKS,
    PAIRS,
    assert_all_agree,
    assert_same_buffers,
    block_combinations,
    buffers,
    combinations,
    copied,
    name_of,
    oracle_step,
    reference_step,
    triton_step,
    with_rule,
)

from megaopt.kernels.chunks.table import Geometry
from megaopt.kernels.formats import GRADS, MASTERS, MOMENTS, STOCHASTIC_WEIGHTS, WEIGHTS
from megaopt.kernels.place import Place
from megaopt.kernels.rules import RULES


def one_in_15(remainder=0):
    """One in 15 of all combinations, in which each two formats of any two slots are together.

    Two moments' places differ by that of weight and master, modulo 5, which are more than 5; the
    gradient's goes by these and the first moment's, modulo 3.
    """
    sizes = [len(each) for each in (GRADS, PAIRS, NO_BLOCKS, NO_BLOCKS)]
    assert (sizes[0], sizes[2], sizes[1] > 5) == (3, 5, True)
    for place, formats in zip(itertools.product(*map(range, sizes)), combinations(), strict=True):
        grad, pair, first, second = place
        if (second - first - pair) % 5 * 3 + (grad - pair - first) % 3 == remainder:
            yield formats


def one_of_each_pair(block):
    """A combination for each weight and master, gradients and moments in turn."""
    found = {}
    for formats in block_combinations([block]):
        found.setdefault((formats.weight.name, formats.master.name), []).append(formats)
    return [own[(5 * index + 3) % len(own)] for index, own in enumerate(found.values())]


IN_BLOCKS = {
    block: one_of_each_pair(block)
    for block in sorted({f.block for f in MOMENTS.values() if f.block})
}
"""Curated combinations by the size of blocks."""


def company(formats):
    """Sizes and places of tensors that are hard for these formats, and a geometry of many chunks.

    Blocks begin with the tensor or before it, in quads and not, beyond 2**31 elements.
    """
    if not formats.block:
        return [1, 127, 128, 129, 0, 300], None, Geometry(64, 2)
    counts = [1, 127, 128, 129, 0, 64, 63, 1000]
    firsts = [0, 128, 5, 1 << 34, 64, 64 + 16, (1 << 31) - 3, 77]
    if formats.block == 32:  # two elements a byte
        counts = [2, 30, 32, 34, 0, 64, 62, 1000]
        firsts = [0, 32, 6, 1 << 34, 16, 64 + 16, (1 << 31) - 2, 78]
    places = [Place(index + 3, first) for index, first in enumerate(firsts)]
    return counts, places, Geometry(256, 2)


def assert_hard_tensors_agree(formats, rule, device, group=GROUP):
    counts, places, geometry = company(formats)
    assert_all_agree(formats, rule, group, counts, device, geometry, places=places)


SMALL = Geometry(64, 2)
ADAMW = RULES["adamw", "ieee"]
BLOCKED = [formats for own in IN_BLOCKS.values() for formats in own]
FEW_BLOCKED = [own[index] for own in IN_BLOCKS.values() for index in (0, 4)]
"""Of each size of blocks without a master, and with one."""
UNSCALED = [*(formats for formats in CURATED if not formats.scaled), *FEW_BLOCKED]
each_rule = pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.name)
both_ways = pytest.mark.parametrize("step", [triton_step, reference_step], ids=["kernel", "twin"])


def each_of(formats):
    return pytest.mark.parametrize("formats", formats, ids=name_of)


def on_the_cpu(tensors):
    return {slot: [tensor.cpu() for tensor in each] for slot, each in copied(tensors).items()}


# --- rules and formats


TABLES = {
    "grad": GRADS,
    "weight": {**WEIGHTS, **STOCHASTIC_WEIGHTS},
    "master": MASTERS,
    **dict.fromkeys(ADAMW.moments, MOMENTS),
}


def test_each_format_is_among_the_curated_ones():
    """And of each size of blocks each format of moments, weight and gradient."""
    for slot, table in TABLES.items():
        names = {formats.by_slot[slot].name for formats in (*CURATED, *BLOCKED)}
        signs = {"exp_avg": False, "exp_avg_sq": True}
        known = [f for f in table.values() if not f.block or f.unsigned == signs[slot]]
        assert names >= {form.name for form in known}
    assert {len(rule.moments) for rule in EVERY_RULE} == {0, 1, 2, 3}


@each_of(CURATED)
@pytest.mark.sample(2)
def test_every_format_agrees(formats, device):
    assert_hard_tensors_agree(formats, ADAMW, device)


@pytest.mark.sample(4)
@pytest.mark.thirds
@each_of(BLOCKED)
def test_every_format_beside_blocks_agrees(formats, device):
    assert_hard_tensors_agree(formats, ADAMW, device)


@pytest.mark.parametrize(
    ("rule", "number"),
    [
        pytest.param(rule, number, marks=[pytest.mark.slow] * ((place + number) % 3 > 0))
        for place, rule in enumerate(EVERY_RULE)
        for number in range(3)
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_rule_agrees(rule, number, device):
    """Minimizing by some formats, maximizing by others, in blocks."""
    for formats in (CURATED[9 * number], FEW_BLOCKED[2 * number]):
        formats = dataclasses.replace(with_rule(formats, rule), maximize=formats.block > 0)
        assert_hard_tensors_agree(formats, rule, device)


@pytest.mark.sample(2)
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@each_rule
def test_twin_is_the_oracle(rule, maximize):
    for formats in (*CURATED, *BLOCKED[::5]):
        formats = dataclasses.replace(with_rule(formats, rule), maximize=maximize)
        found = buffers(formats, [2, 700], "cpu")
        expected = copied(found)
        reference_step(found, formats, rule, GROUP)
        oracle_step(expected, formats, rule, GROUP)
        assert_same_buffers(found, expected)


@pytest.mark.parametrize(
    "remainder", [0, *(pytest.param(other, marks=pytest.mark.exhaustive) for other in range(1, 15))]
)
@pytest.mark.slow
def test_each_two_formats_of_any_two_slots_agree(remainder, device):
    for formats in one_in_15(remainder):
        assert_all_agree(formats, ADAMW, GROUP, [1, 65], device, SMALL)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(other, marks=pytest.mark.exhaustive) for other in (10, 20, 30))]
)
@pytest.mark.slow
def test_some_combinations_beside_blocks_agree(first, device):
    for formats in list(block_combinations(IN_BLOCKS))[first::40]:
        assert_hard_tensors_agree(formats, ADAMW, device)


@pytest.mark.sample(8)
@pytest.mark.gpu
@each_rule
@each_of(CURATED)
def test_compiled_kernel_is_the_twin(formats, rule, device):
    formats = with_rule(formats, rule)
    found = buffers(formats, [1, 4095, 4096, 4097, 0, 100_000], device)
    expected, on_gpu = on_the_cpu(found), copied(found)
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


def take_steps(take, formats, rule, device):
    """Five steps with new gradients, of which one has NaN, infinities and zeros."""
    places = [Place(0), Place(1, 78)] if formats.block else None
    tensors = buffers(formats, [700, 300], device, places=places)
    for step in range(1, 6):
        generator = torch.Generator().manual_seed(step)
        for tensor in tensors["grad"]:
            grad = torch.randn(len(tensor), generator=generator)
            if step == 3:
                grad[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
                grad[200:500] = 0.0
            tensor.copy_(grad)
        take(tensors, formats, rule, {**GROUP, "step": step}, places=places)
    return tensors


# a format does not know the rule: all rules on one of them
@pytest.mark.sample(13)
@pytest.mark.parametrize(
    ("rule", "formats"),
    [(ADAMW, formats) for formats in (*CURATED, *FEW_BLOCKED)]
    + [(rule, with_rule(CURATED[1], rule)) for rule in EVERY_RULE if rule is not ADAMW],
    ids=lambda value: value.name if value in EVERY_RULE else name_of(value),
)
@pytest.mark.thirds
def test_many_steps(rule, formats, device):
    """Errors would compound: nothing is synchronised in between. The run is repeated: equal too."""
    first, second = (take_steps(triton_step, formats, rule, device) for _ in range(2))
    assert_same_buffers(first, second)
    twin, expected = (take_steps(t, formats, rule, "cpu") for t in (reference_step, oracle_step))
    assert_same_buffers(twin, expected)
    assert_same_buffers(first, expected)


# --- layouts


GEOMETRIES = [Geometry(32, 1), Geometry(64, 3), Geometry(256, 1), Geometry(16, 16)]
OF_BLOCKS = [Geometry(128, 1), Geometry(256, 3, span=1), Geometry(1024, 2), Geometry(2048, 1, 8)]


@pytest.mark.sample(7)
@pytest.mark.parametrize("index", range(4))
@each_of([*CURATED[::3], *FEW_BLOCKED])
@pytest.mark.thirds
def test_geometry_changes_no_bit(formats, index, device):
    """Several chunks, blocks that go unmasked and such that do not; beside the oracle."""
    geometry, counts, places = GEOMETRIES[index], [257], None
    if formats.block:
        geometry, counts = OF_BLOCKS[index], [2600, 2048, 700]
        places = [Place(0), Place(1, 48), Place(2, 128 * 5 + 6)]
    found = buffers(formats, counts, device, places=places)
    expected = on_the_cpu(found)
    triton_step(found, formats, ADAMW, GROUP, geometry, places=places)
    oracle_step(expected, formats, ADAMW, GROUP, places)
    assert_same_buffers(found, expected)


@pytest.mark.sample(4)
@each_of(UNSCALED)
@pytest.mark.thirds
def test_unaligned_views_change_no_bit(formats, device):
    """Each slot one element further off alignment, so that no two share a path by chance."""
    expected = buffers(formats, [600], device)
    found = {}
    for shift, (slot, (tensor,)) in enumerate(expected.items(), 1):
        base = torch.zeros(len(tensor) + 100, dtype=tensor.dtype, device=device)
        found[slot] = [base[shift : shift + len(tensor)].copy_(tensor)]
    assert any(each[0].data_ptr() % 16 for each in found.values())
    for tensors in (found, expected):
        triton_step(tensors, formats, ADAMW, GROUP, company(formats)[2])
    assert_same_buffers(found, expected)


def cut(whole, formats, firsts):
    """Parts of one parameter from these elements on, each with scales of all blocks it is in."""
    ends, parts = [*firsts[1:], len(whole["weight"][0])], {}
    for slot, (tensor,) in whole.items():
        is_scale = slot.endswith("_scale")
        unit = formats.block if is_scale else formats.by_slot[slot].packed
        pairs = zip(firsts, ends, strict=True)
        parts[slot] = [tensor[a // unit : -(-b // unit)].clone() for a, b in pairs]
    return parts, [Place(0, first) for first in firsts]


@both_ways
@pytest.mark.parametrize(
    ("rule", "formats"),
    [(ADAMW, formats) for formats in UNSCALED]
    + [(rule, with_rule(CURATED[-2], rule)) for rule in EVERY_RULE if rule is not ADAMW],
    ids=lambda value: value.name if value in EVERY_RULE else name_of(value),
)
@pytest.mark.sample(2)
@pytest.mark.thirds
def test_pieces_of_a_tensor_are_the_whole(rule, formats, step, device):
    """Random bits too, where the pieces say which elements of the parameter they are."""
    whole = buffers(formats, [900], device)
    block = formats.block
    pieces, places = cut(whole, formats, [0, block, 4 * block] if block else [0, 1, 130])
    step(whole, formats, rule, GROUP, places=[Place(0)])
    step(pieces, formats, rule, GROUP, places=places)
    joined = {slot: [torch.cat(each)] for slot, each in pieces.items()}
    assert_same_buffers(joined, whole)


@both_ways
def test_every_tensor_takes_its_own_groups_numbers(step, device):
    formats = CURATED[0]
    groups = [GROUP, {**GROUP, "lr": 0.1, "step": 9}, {**GROUP, "weight_decay": 0.7}]
    found = buffers(formats, [70, 0, 200, 5], device)
    expected = copied(found)
    step(found, formats, ADAMW, groups, groups=[2, 0, 1, 0])
    for index, group in ((0, 2), (2, 1), (3, 0)):
        alone = {slot: [each[index]] for slot, each in expected.items()}
        step(alone, formats, ADAMW, groups[group])
    assert_same_buffers(found, expected)


@pytest.mark.parametrize("first", [0, 38], ids=["whole", "within a block"])
@each_of([*CURATED, *FEW_BLOCKED])
@pytest.mark.sample(3)
@pytest.mark.thirds
def test_nothing_is_written_beside_the_tensors(formats, first, device):
    """Guard bands of a known pattern around every buffer, scales too."""
    places, bases = [Place(0, first)], {}
    inner = buffers(formats, [300], device, places=places)
    for slot, (tensor,) in inner.items():
        # as bytes: torch compares no fp8
        bases[slot] = torch.full((tensor.nbytes + 256,), 77, dtype=torch.uint8, device=device)
        bases[slot][128:-128] = tensor.view(torch.uint8)
    views = {slot: [base[128:-128].view(inner[slot][0].dtype)] for slot, base in bases.items()}
    triton_step(views, formats, ADAMW, GROUP, company(formats)[2], places=places)
    for slot, base in bases.items():
        assert bool((base[:128] == 77).all()), slot
        assert bool((base[-128:] == 77).all()), slot


# --- parts that are cut within a block


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


OF_8_BITS = [
    formats
    for formats in block_combinations([128, 64])
    if formats.grad.name == "bfloat16" and formats.weight.name == "bfloat16"
    if formats.master.name == "float32" and all(form.block for form in formats.moments)
]


def values_of(formats, tensors, slot, first):
    form = formats.by_slot[slot]
    code = tensors[slot][0]
    factor = torch.exp2(tensors[f"{slot}_scale"][0].double() - 127).float()
    lead = first % form.block
    factor = factor.repeat_interleave(form.block)[lead : lead + len(code)]
    return form.decode_reference(code.cpu(), factor.cpu())


@pytest.mark.parametrize("first", [1, 64 + 5, 128 * 2 + 100])
@each_of(OF_8_BITS)
@pytest.mark.sample(3)
@pytest.mark.thirds
def test_parts_cut_within_a_block_differ_in_its_smallest_values_alone(formats, first, device):
    """After a step from 0, where all parts start alike.

    Each part's window is at most the whole block's: 2**(s - 127) < amax with that one's s. A code
    has 3 bits of mantissa for normal numbers, which a finer window leaves where they are: the same
    draw, in units of the same last place, gives the same value. Subnormal in the whole's window are
    values below 8 units: of e4m3 8 * 2**-16 * 2**(s - 127), less than 2**-13 of amax, of e5m3
    8 * 2**-32, less than 2**-29. What is up to there may round up to just that, so <=. Linear codes
    differ anywhere, by less than one of the whole's, of which its largest number has 63 or more.
    """
    whole = fresh(formats, 700, device)
    parts, places = cut(whole, formats, [0, first])
    triton_step(whole, formats, ADAMW, {**GROUP, "step": 1}, places=[Place(0)])
    triton_step(parts, formats, ADAMW, {**GROUP, "step": 1}, places=places)
    begin = first // formats.block * formats.block
    inside = slice(begin, begin + formats.block)
    outside = torch.ones(700, dtype=torch.bool)
    outside[inside] = False
    for slot, bound in (("exp_avg", 2.0**-13), ("exp_avg_sq", 2.0**-29)):
        expected = values_of(formats, whole, slot, 0)
        own = [{name: [each[i]] for name, each in parts.items()} for i in (0, 1)]
        pair = (values_of(formats, own[i], slot, begins) for i, begins in enumerate((0, first)))
        found = torch.cat(list(pair))
        assert_same_bits(found[outside], expected[outside], slot)
        amax = expected[inside].abs().max()
        differs = found[inside] != expected[inside]
        if "int8" in formats.by_slot[slot].name:
            apart = (found[inside] - expected[inside]).abs()
            assert bool((apart < amax / 63).all()), slot
            continue
        largest = torch.maximum(found[inside].abs(), expected[inside].abs())
        assert bool((largest[differs] <= bound * amax).all()), slot
    for slot in ("weight", "master"):  # the step takes the moments before they are stored
        assert_same_bits(torch.cat(parts[slot]), whole[slot][0], slot)


def test_the_bound_is_reached(device):
    """Some values below it do differ: a finer window keeps more of their bits."""
    formats = next(f for f in OF_8_BITS if f.block == 128 and not f.draws)
    whole = fresh(formats, 128, device)
    numbers = torch.linspace(1.0, 1.9, 64, device=device)
    whole["grad"][0][:64], whole["grad"][0][64:] = numbers, numbers * 2.0**-14
    parts, places = cut(whole, formats, [0, 64])
    for tensors, own in ((whole, [Place(0)]), (parts, places)):
        triton_step(tensors, formats, ADAMW, {**GROUP, "step": 1}, places=own)
    second = {slot: [each[1]] for slot, each in parts.items()}
    found, expected = (
        values_of(formats, second, "exp_avg", 64),
        values_of(formats, whole, "exp_avg", 0),
    )
    assert int((found != expected[64:]).sum()) > 32
