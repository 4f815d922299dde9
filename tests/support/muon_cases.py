"""Matrices that Muon steps, in every format, by the twin and by the launches."""

import itertools

import torch
from step_cases import hard_values

from megaopt.kernels.matrix.muon import Orthogonal, coefficients_of

SIMPLE = coefficients_of("simple", 5)
FORMS = {
    "standard bf16": {"method": "standard"},
    "standard fp16": {"method": "standard", "precision": "fp16"},
    "gram fp16": {"method": "gram", "precision": "fp16"},
}


def how_of(form="standard bf16", **others):
    return Orthogonal(**{"coefficients": SIMPLE, **FORMS[form], **others})


def buffers(formats, shapes, seed=0, hard=False):
    """Of each slot a tensor for each parameter."""
    generator = torch.Generator().manual_seed(seed)
    found = {slot: [] for slot in formats.slots}
    for shape, slot in itertools.product(map(torch.Size, shapes), formats.slots):
        dtype, own = formats.dtype(slot), formats.by_slot.get(slot.removesuffix("_scale"))
        if slot.endswith("_scale"):
            blocks = -(-shape.numel() // own.block) if own.block else 1
            tensor = torch.full((blocks,), 120.0 if own.block else 0.01)
        elif not dtype.is_floating_point:
            limits, size = torch.iinfo(dtype), (*shape[:-1], shape[-1] // own.packed)
            tensor = torch.randint(limits.min, limits.max + 1, size, generator=generator)
        elif hard and slot in ("weight", "master"):
            tensor = hard_values(shape.numel(), generator).view(shape)
        else:
            tensor = torch.randn(shape, generator=generator)
        found[slot].append(tensor.to(dtype))
    return found
