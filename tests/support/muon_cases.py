"""Matrices that Muon steps, in every format, by the twin and by the launches."""

import itertools

import torch
from step_cases import copied, hard_values

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.formats import NONE, WEIGHTS
from megaopt.kernels.muon.launch import ROOM
from megaopt.kernels.muon.orthogonal import Orthogonal, coefficients_of
from megaopt.kernels.muon.plan import muon_plan
from megaopt.kernels.muon.rule import MUON
from megaopt.kernels.rules.matrix import Matrix
from megaopt.kernels.rules.muon import MUON_DIRECTION

FLOAT32 = WEIGHTS["float32"]
PLAIN = (FLOAT32, NONE)
GROUP = {
    "lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "step": 3,
    "seed": 0x1234_5678_9ABC_DEF0,
}  # fmt: skip
ROW = MUON_DIRECTION.drawing.row(GROUP)
SIMPLE = coefficients_of("simple", 5)
FORMS = {
    "standard bf16": {"method": "standard"},
    "standard fp16": {"method": "standard", "precision": "fp16"},
    "gram fp16": {"method": "gram", "precision": "fp16"},
}
SHAPES = [(24, 40), (40, 24), (32, 32), (17, 33), (1, 9), (9, 1), (5, 64)]
"""Wide, tall and square; of whole 16 bytes and not; of one row, of one column."""


def how_of(form="standard bf16", **others):
    return Orthogonal(**{"coefficients": SIMPLE, **FORMS[form], **others})


def formats_of(how, pair=PLAIN, grad=FLOAT32, moment=FLOAT32):
    return Formats(grad, *pair, (moment,), ("momentum_buffer",), matrix=Matrix(MUON, how))


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


def stepped(
    backend, formats, shapes, before, device, controls=None, room=ROOM, steps=2, groups=None,
    places=None, rows=None, kept=None,
):  # fmt: skip
    """The buffers after steps of a backend."""
    own = {slot: [each.to(device) for each in some] for slot, some in copied(before).items()}
    sizes, groups = [torch.Size(shape) for shape in shapes], groups or [0] * len(shapes)
    plan = muon_plan(backend, formats, sizes, groups, places, torch.device(device), room)
    for work, each in zip(plan.works, kept or [{}] * len(shapes), strict=True):
        work.kept = each
    for _ in range(steps):
        plan.look(own)
        plan.step(rows or [ROW], None if controls is None else controls.to(device))
    return own
