"""Matrices of low rank, for their kernels: formats, buffers, projections."""

import itertools
from pathlib import Path

import torch
from step_cases import copied, hard_values

from megaopt import kernels
from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.formats import NONE, WEIGHTS
from megaopt.kernels.galore.launch import launched_plan
from megaopt.kernels.galore.rule import GALORE, RIGHT
from megaopt.kernels.galore.tiles import BackTile, ProjectionTiles, ProjectTile
from megaopt.kernels.matrix.plan import MatrixPlan
from megaopt.kernels.rules.galore import GALORE_ADAMW
from megaopt.kernels.rules.matrix import Matrix
from megaopt.kernels.step import controls as order

GROUP = {
    "lr": 0.03, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": True,
    "scale": 0.25, "step": 3, "seed": 0x1234_5678_9ABC_DEF0,
}  # fmt: skip
ROW = GALORE_ADAMW.drawing.row(GROUP)
_TILES = (ProjectTile(16, 16, 16, 4, 1), BackTile(16, 16, 16, 4, 1, strip=2))
SMALL = ProjectionTiles(*_TILES, *_TILES)
"""Tiles: the matrices take one, several, and parts of some."""
FLOAT32 = WEIGHTS["float32"]
PLAIN = (FLOAT32, NONE)
KERNEL = Path(kernels.__path__[0]) / "galore" / "kernel.py"


def formats_of(pair, low_rank, grad=FLOAT32, moment=FLOAT32):
    names = ("exp_avg", "exp_avg_sq")
    return Formats(grad, *pair, (moment, moment), names, matrix=Matrix(GALORE, low_rank))


def buffers(formats, shapes, seed=0, hard=True):
    """Of each slot a tensor for each matrix."""
    generator = torch.Generator().manual_seed(seed)
    found = {slot: [] for slot in formats.slots}
    for shape, slot in itertools.product(shapes, formats.slots):
        dtype = formats.dtype(slot)
        is_low = slot.startswith("exp_avg")
        size = torch.Size(formats.matrix.low_shape(shape) if is_low else shape)
        if not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            tensor = torch.randint(limits.min, limits.max + 1, size, generator=generator)
        elif hard and slot in ("weight", "master"):
            tensor = hard_values(size.numel(), generator).view(size)
        else:
            tensor = torch.randn(size, generator=generator)
            tensor = tensor.abs() if slot == "exp_avg_sq" else tensor
        found[slot].append(tensor.to(dtype))
    return found


def give(plan, projections):
    """What a refresh gives a plan."""
    for work, projection in zip(plan.works, projections, strict=True):
        work.kept["projection"] = projection


def projections_of(low_rank, shapes, single=False):
    """Orthonormal ones; single: an element a row or column, so that a sum has one number not 0.

    Then the order in which a product is added up shows in no bit.
    """
    found = []
    for index, shape in enumerate(shapes):
        size = low_rank.projection_shape(shape)
        wide = size[1] if low_rank.side == RIGHT else size[0]
        generator = torch.Generator().manual_seed(index)
        if single:
            places = torch.arange(wide) % low_rank.rank
            values = torch.randn(wide, 1, generator=generator)
            matrix = torch.zeros(wide, low_rank.rank).scatter_(1, places[:, None], values)
        else:
            matrix = torch.linalg.qr(torch.randn(wide, low_rank.rank, generator=generator))[0]
        found.append((matrix.mT if low_rank.side == RIGHT else matrix).contiguous())
    return found


def moved(buffers, device):
    """Buffers on a device."""
    return {slot: [tensor.to(device) for tensor in each] for slot, each in buffers.items()}


def steps(
    formats, shapes, before, projections, device, tiles=SMALL, kernel="grouped", rows=(ROW,),
    controls=None,
):  # fmt: skip
    """Steps copies of the buffers by launches and by the twin, once for each row; both of them."""
    sizes, groups = [torch.Size(shape) for shape in shapes], [0] * len(shapes)
    twin, own = copied(before), moved(copied(before), device)
    options = {"kernel": kernel, "tiles": tiles}
    plans = (
        (MatrixPlan(formats, groups), twin, "cpu"),
        (launched_plan(formats, sizes, groups, device, **options), own, device),
    )
    for plan, tensors, where in plans:
        give(plan, [projection.to(where) for projection in projections])
        for row in rows:
            plan.look(tensors)
            plan.step([row], None if controls is None else controls.to(where))
    return own, twin


def shifted(tensor):
    """The same one element further in memory, where no whole 16 bytes begin."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return memory[1:].view(tensor.shape).copy_(tensor)


def guarded(tensor, room=4096):
    """The tensor within memory of ones' bits, and that memory."""
    memory = torch.full((tensor.numel() + 2 * room,), -1, dtype=torch.int32, device=tensor.device)
    own = memory[room : room + tensor.numel()].view(tensor.dtype).view(tensor.shape)
    return own.copy_(tensor), (memory[:room], memory[room + tensor.numel() :])


def controls_of(skip=0.0):
    """Controls of one group: a loss scale of 8, a clip coefficient, and whether it is skipped."""
    row, own = torch.zeros(1, order.COUNT), {order.GRAD_SCALE: 8.0, order.INVERSE_SCALE: 0.125}
    own |= {order.COEFFICIENT: 0.7, order.UNSCALED: 1.0, order.SKIP: skip}
    for place, value in own.items():
        row[0, place] = value
    return row
