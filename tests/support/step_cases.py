"""Buffers full of hard values, the combinations of formats, and the three ways to take a step."""

import dataclasses
import itertools

import numpy as np
import oracle
import torch
from bits import INTEGERS, assert_same_bits

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.formats import GRADS, MASTERS, MOMENTS, NONE, STOCHASTIC_WEIGHTS, WEIGHTS
from megaopt.kernels.place import in_order
from megaopt.kernels.rules import RULES
from megaopt.kernels.step.launch import TritonPlan
from megaopt.kernels.step.reference import ReferencePlan

GROUP = {
    "lr": 3e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "bias_correction": True,
    "step": 3,
    "momentum": 0.9,
    "dampening": 0.3,
    "seed": 0x9ABC_DEF0_8765_4321,
}


EVERY_RULE = [rule for (_, contract), rule in RULES.items() if contract == "ieee"]
IEEE_RULES = [rule for rule in EVERY_RULE if rule.name in ("adamw", "adam")]


ADAM = ("exp_avg", "exp_avg_sq")
POSITIVE = ("exp_avg_sq", "max_exp_avg_sq")
"""Moments that are never below 0."""


def weights_and_masters():
    """Every format of a weight beside every master that it can have."""
    for weight, master in itertools.product(WEIGHTS.values(), MASTERS.values()):
        is_own_master = weight.name == "float32" and master.present
        if not is_own_master and master.requires_weight in (None, weight.dtype):
            yield weight, master
    for weight in STOCHASTIC_WEIGHTS.values():
        yield weight, NONE


PAIRS = list(weights_and_masters())
NO_BLOCKS = [form for form in MOMENTS.values() if not form.block]


def combinations():
    """Every combination of formats that can be asked for, but of moments in blocks."""
    tables = (GRADS.values(), PAIRS, NO_BLOCKS, NO_BLOCKS)
    for grad, (weight, master), *moments in itertools.product(*tables):
        yield Formats(grad, weight, master, tuple(moments), ADAM)


def name_of(formats):
    return "-".join(form.name for form in formats.by_slot.values())


# Each format of each slot, next to each format of the slot that it is read or written with.
CURATED = [
    formats
    for formats in combinations()
    if name_of(formats)
    in {
        "float32-float32-none-float32-float32",
        "bfloat16-bfloat16-float32-float32-float32",
        "float32-bfloat16-float32-float32-float32",
        "bfloat16-bfloat16-remainder16-float32-float32",
        "bfloat16-bfloat16-remainder16-bfloat16-bfloat16",
        "float32-bfloat16-remainder16-scaled_float16-scaled_float16",
        "bfloat16-bfloat16-scaled_float16-bfloat16-scaled_float16",
        "float16-float16-scaled_float16-scaled_float16-bfloat16",
        "float16-float16-float32-bfloat16-float32",
        "bfloat16-bfloat16-none-bfloat16-bfloat16",
        "float16-float16-none-float32-float32",
        "float32-float32-none-scaled_float16-bfloat16",
        "bfloat16-float32-none-bfloat16-scaled_float16",
        "float16-bfloat16-float32-scaled_float16-float32",
        "bfloat16-bfloat16-float32-scaled_float8_e4m3-scaled_float8_e4m3",
        "float32-bfloat16-remainder16-bfloat16-scaled_float8_e4m3",
        "float16-float16-scaled_float16-scaled_float8_e4m3-scaled_float16",
        "float32-float32-none-scaled_float8_e4m3-float32",
        "bfloat16-bfloat16-remainder8-bfloat16_stochastic-float32",
        "float32-bfloat16-remainder8_stochastic-bfloat16_stochastic-bfloat16_stochastic",
        "bfloat16-bfloat16-kahan-bfloat16-bfloat16_stochastic",
        "bfloat16-bfloat16-kahan_stochastic-bfloat16_stochastic-scaled_float16",
        "float16-float16-kahan_float16-float32-float32",
        "float32-float16-kahan_float16_stochastic-scaled_float8_e4m3-bfloat16_stochastic",
        "bfloat16-bfloat16_stochastic-none-bfloat16_stochastic-bfloat16_stochastic",
        "float16-float16_stochastic-none-float32-bfloat16",
    }
]
assert len(CURATED) == 26
DRAWING = [formats for formats in CURATED if formats.draws]


def hard_values(count, generator, positive=False):
    """fp32 numbers of all magnitudes, with denormals, zeros of both signs, infinities and NaNs."""
    exponent = torch.randint(-60, 20, (count,), generator=generator)
    values = torch.randn(count, generator=generator) * torch.exp2(exponent.float())
    kind = torch.randint(0, 40, (count,), generator=generator)
    signs = torch.randn(count, generator=generator).sign()
    for code, value in enumerate((1e-41, 1.4e-45, 0.0, torch.inf, torch.nan, 3.4e38, 2.0**-126)):
        values = torch.where(kind == code, value * signs, values)
    return values.abs() if positive else values


def block_combinations(blocks=(128, 64)):
    """Every combination that has a moment in blocks, of 8 bits; with blocks of 32, of 4."""
    for block in blocks:
        signed, unsigned = (
            [f for f in MOMENTS.values() if f.block == block and f.unsigned == is_unsigned]
            for is_unsigned in (False, True)
        )
        plain = [form for form in NO_BLOCKS if not form.scaled]
        pairs = [pair for pair in PAIRS if not pair[1].scaled]
        tables = (GRADS.values(), pairs, [*signed, *plain], [*unsigned, *plain])
        for grad, (weight, master), *moments in itertools.product(*tables):
            if any(form.block for form in moments):
                yield Formats(grad, weight, master, tuple(moments), ADAM)


def scales_of_blocks(count, block, first, generator):
    """Bytes: most are those of usual moments, some of any, the ends among them."""
    blocks = -(-(count + first % block) // block) if count else 0
    usual = torch.randint(70, 135, (blocks,), generator=generator)
    kind = torch.randint(0, 8, (blocks,), generator=generator)
    other = torch.randint(1, 254, (blocks,), generator=generator)
    found = torch.where(kind == 0, other, usual)
    return torch.where(kind == 1, torch.where(other > 127, 253, 1), found).to(torch.uint8)


def tensor_of(slot, formats, count, generator, first=0):
    if slot.endswith("_scale"):
        block = formats.by_slot[slot.removesuffix("_scale")].block
        own = scales_of_blocks(count, block, first, generator) if block else None
        return torch.full((1,), 3.1e-5) if own is None else own
    dtype, packed = formats.dtype(slot), formats.by_slot[slot].packed
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        stored = (count // packed,)
        return torch.randint(limits.min, limits.max + 1, stored, generator=generator).to(dtype)
    if slot in ("grad", "weight", "master") or dtype == torch.float32:
        values = hard_values(count, generator, positive=slot in POSITIVE)
    else:
        values = torch.randn(count, generator=generator)
        values = values.abs() if slot in POSITIVE else values
    return values.to(dtype)


def buffers(formats, counts, device, seed=0, places=None):
    """For each slot a tensor of each count; places: for moments in blocks."""
    generator = torch.Generator().manual_seed(seed)
    places = places or in_order(len(counts))
    return {
        slot: [
            tensor_of(slot, formats, count, generator, place.first).to(device)
            for count, place in zip(counts, places, strict=True)
        ]
        for slot in formats.slots
    }


def with_rule(formats, rule):
    """The formats with those of Adam's moments for the moments of another rule."""
    third = formats.moments[1 if formats.block else 0]  # never negative
    moments = [*formats.moments, third][: len(rule.moments)]
    return dataclasses.replace(formats, moments=tuple(moments), moment_names=rule.moments)


def with_format(formats, slot, form):
    """The formats with another one in a slot."""
    forms = {**formats.by_slot, slot: form}
    moments = tuple(forms[name] for name in formats.moment_names)
    own = {name: forms[name] for name in ("grad", "weight", "master")}
    return dataclasses.replace(formats, **own, moments=moments)


def copied(tensors):
    return {slot: [tensor.clone() for tensor in each] for slot, each in tensors.items()}


def rows_of(formats, rule, groups):
    """What a plan takes: the rule, drawing where the formats need it, and its rows."""
    rule = rule.drawing if formats.draws else rule
    return rule, [rule.row(each) for each in (groups if isinstance(groups, list) else [groups])]


def triton_step(
    tensors, formats, rule, group, geometry=None, groups=None, controls=None, places=None
):
    """Steps the buffers in place on the kernel; `group` may be a list of groups.

    controls: a row for each group, or one for all.
    """
    counts = [weight.numel() for weight in tensors["weight"]]
    rule, rows = rows_of(formats, rule, group)
    device = tensors["weight"][0].device
    plan = TritonPlan(formats, rule, counts, groups or [0] * len(counts), device, geometry, places)
    plan.look(tensors)
    plan.step(rows, controls_of_rows(controls, rows))


def controls_of_rows(controls, rows):
    """A row of controls for each row of scalars; the one that is given for all of them."""
    return None if controls is None else controls.expand(len(rows), -1).contiguous()


def reference_step(tensors, formats, rule, group, groups=None, controls=None, places=None):
    """Steps the buffers in place on the twin."""
    rule, rows = rows_of(formats, rule, group)
    plan = ReferencePlan(formats, rule, groups or [0] * len(tensors["weight"]), places)
    plan.look(tensors)
    plan.step(rows, controls_of_rows(controls, rows))


def oracle_step(tensors, formats, rule, group, places=None):
    """Steps the buffers in place on the oracle; it leaves out tensors without an element."""
    names = {slot: form.name for slot, form in formats.by_slot.items() if form.present}
    places = places or in_order(len(tensors["weight"]))
    for index, place in enumerate(places):
        if not tensors["weight"][index].numel():
            continue
        codes = {}
        for slot in formats.slots:
            tensor = tensors[slot][index].cpu()
            codes[slot] = tensor.view(INTEGERS[tensor.element_size()]).numpy()
            if slot.endswith("_scale"):
                codes[slot] = tensor.numpy()
        own = (rule.name, rule.moments, formats.maximize, place)
        own = (*own, formats.draws)
        after = oracle.step(names, codes, group, *own)
        for slot, code in after.items():
            tensor = tensors[slot][index]
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(code)).view(tensor.dtype))


# Halfway between two bf16, and between two fp16: 257 and 2,049 times a power of two.
TIES = torch.tensor([32896.0, -32896.0, 16392.0, -16392.0, 8224.0, 4098.0])


def put_ties(tensors):
    """Makes the first values of fp32 weights and masters ties, which a step leaves alone."""
    for slot, own in tensors.items():
        value = TIES if slot in ("weight", "master") else torch.zeros_like(TIES)
        for tensor in own:
            is_tie = value is TIES and tensor.dtype == torch.float32
            if tensor.numel() > len(TIES) and (is_tie or slot in ("grad", *ADAM)):
                tensor[: len(TIES)] = value.to(tensor)
    return tensors


def assert_all_agree(formats, rule, group, counts, device, geometry=None, ties=False, places=None):
    """Fails unless kernel, twin and oracle take the same step, bit for bit."""
    kernel = buffers(formats, counts, device, places=places)
    kernel = put_ties(kernel) if ties else kernel
    twin = {slot: [t.cpu() for t in each] for slot, each in copied(kernel).items()}
    truth = copied(twin)
    triton_step(kernel, formats, rule, group, geometry, places=places)
    reference_step(twin, formats, rule, group, places=places)
    oracle_step(truth, formats, rule, group, places)
    assert_same_buffers(twin, truth)
    assert_same_buffers(kernel, truth)


def assert_same_buffers(found, expected):
    """Fails unless all tensors of two sets of buffers have the same bits."""
    assert found.keys() == expected.keys()
    for slot in found:
        for index, (one, other) in enumerate(zip(found[slot], expected[slot], strict=True)):
            assert_same_bits(one, other, f"{slot}[{index}]")
