"""Buffers full of hard values, the combinations of formats, and the three ways to take a step."""

import dataclasses
import itertools

import numpy as np
import oracle
import torch
from bits import INTEGERS, assert_same_bits

from megaopt.kernels.formats import GRADS, MASTERS, MOMENTS, WEIGHTS
from megaopt.kernels.rules import RULES
from megaopt.kernels.step.batch import Formats
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
}


EVERY_RULE = [rule for (_, contract), rule in RULES.items() if contract == "ieee"]
IEEE_RULES = [rule for rule in EVERY_RULE if rule.name in ("adamw", "adam")]
OTHER_RULES = [rule for rule in EVERY_RULE if rule not in IEEE_RULES]


ADAM = ("exp_avg", "exp_avg_sq")
POSITIVE = ("exp_avg_sq", "max_exp_avg_sq")
"""Moments that are never below 0."""


def combinations():
    """Every combination of formats that can be asked for."""
    tables = (GRADS, WEIGHTS, MASTERS, MOMENTS, MOMENTS)
    for row in itertools.product(*(table.values() for table in tables)):
        formats = Formats(*row[:3], row[3:], ADAM)
        is_own_master = formats.weight.name == "float32" and formats.master.present
        if not is_own_master and not (formats.master.joined and formats.weight.name != "bfloat16"):
            yield formats


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
    }
]
assert len(CURATED) == 18


def hard_values(count, generator, positive=False):
    """fp32 numbers of all magnitudes, with denormals, zeros of both signs, infinities and NaNs."""
    exponent = torch.randint(-60, 20, (count,), generator=generator)
    values = torch.randn(count, generator=generator) * torch.exp2(exponent.float())
    kind = torch.randint(0, 40, (count,), generator=generator)
    signs = torch.randn(count, generator=generator).sign()
    for code, value in enumerate((1e-41, 1.4e-45, 0.0, torch.inf, torch.nan, 3.4e38, 2.0**-126)):
        values = torch.where(kind == code, value * signs, values)
    return values.abs() if positive else values


def tensor_of(slot, formats, count, generator):
    if slot.endswith("_scale"):
        return torch.full((1,), 3.1e-5)
    dtype = formats.dtype(slot)
    if dtype == torch.int16:
        return torch.randint(-(2**15), 2**15, (count,), generator=generator).to(dtype)
    if slot in ("grad", "weight", "master") or dtype == torch.float32:
        values = hard_values(count, generator, positive=slot in POSITIVE)
    else:
        values = torch.randn(count, generator=generator)
        values = values.abs() if slot in POSITIVE else values
    return values.to(dtype)


def buffers(formats, counts, device, seed=0):
    """For each slot a tensor of each count."""
    generator = torch.Generator().manual_seed(seed)
    return {
        slot: [tensor_of(slot, formats, count, generator).to(device) for count in counts]
        for slot in formats.slots
    }


def with_rule(formats, rule):
    """The formats with those of Adam's moments for the moments of another rule."""
    moments = [*formats.moments, formats.moments[0]][: len(rule.moments)]
    return dataclasses.replace(formats, moments=tuple(moments), moment_names=rule.moments)


def with_format(formats, slot, form):
    """The formats with another one in a slot."""
    forms = {**formats.by_slot, slot: form}
    moments = tuple(forms[name] for name in formats.moment_names)
    own = {name: forms[name] for name in ("grad", "weight", "master")}
    return dataclasses.replace(formats, **own, moments=moments)


def copied(tensors):
    return {slot: [tensor.clone() for tensor in each] for slot, each in tensors.items()}


def triton_step(tensors, formats, rule, group, geometry=None, groups=None, controls=None):
    """Steps the buffers in place on the kernel; `group` may be a list of groups."""
    counts = [weight.numel() for weight in tensors["weight"]]
    listed = group if isinstance(group, list) else [group]
    device = tensors["weight"][0].device
    plan = TritonPlan(formats, rule, counts, groups or [0] * len(counts), device, geometry)
    plan.look(tensors)
    plan.step([rule.scalars(each) for each in listed], controls)


def reference_step(tensors, formats, rule, group, groups=None, controls=None):
    """Steps the buffers in place on the twin."""
    listed = group if isinstance(group, list) else [group]
    plan = ReferencePlan(formats, rule, groups or [0] * len(tensors["weight"]))
    plan.look(tensors)
    plan.step([rule.scalars(each) for each in listed], controls)


def oracle_step(tensors, formats, rule, group):
    """Steps the buffers in place on the oracle, with tensors of at least one element."""
    names = {slot: form.name for slot, form in formats.by_slot.items() if form.present}
    for index in range(len(tensors["weight"])):
        codes = {}
        for slot in formats.slots:
            tensor = tensors[slot][index].cpu()
            codes[slot] = tensor.view(INTEGERS[tensor.element_size()]).numpy()
            if slot.endswith("_scale"):
                codes[slot] = tensor.numpy()
        after = oracle.step(names, codes, group, rule.name, rule.moments, formats.maximize)
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


def assert_all_agree(formats, rule, group, counts, device, geometry=None, ties=False):
    """Fails unless kernel, twin and oracle take the same step, bit for bit."""
    kernel = buffers(formats, counts, device)
    kernel = put_ties(kernel) if ties else kernel
    twin = {slot: [t.cpu() for t in each] for slot, each in copied(kernel).items()}
    truth = copied(twin)
    triton_step(kernel, formats, rule, group, geometry)
    reference_step(twin, formats, rule, group)
    oracle_step(truth, formats, rule, group)
    assert_same_buffers(twin, truth)
    assert_same_buffers(kernel, truth)


def assert_same_buffers(found, expected):
    """Fails unless all tensors of two sets of buffers have the same bits."""
    assert found.keys() == expected.keys()
    for slot in found:
        for index, (one, other) in enumerate(zip(found[slot], expected[slot], strict=True)):
            assert_same_bits(one, other, f"{slot}[{index}]")
