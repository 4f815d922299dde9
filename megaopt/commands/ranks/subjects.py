"""The optimizers that are stepped over ranks, the sets of each, and what their steps do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megaopt.commands.bench.sets import Shape, TensorSet
from megaopt.commands.bench.subjects import Subject
from megaopt.commands.muon import bench as muon
from megaopt.commands.ranks.growth import StepWork

LLAMA = "llama"
"""The set of whole iterations of a model in place of steps by random gradients."""
RANK = 128
"""The rank of GaLore's projections."""
NO_REFRESH = {"update_proj_gap": 2**30, "stagger": False}
"""Only the first step, which warms up, makes projections."""


@dataclass(frozen=True)
class Entry:
    """A subject, and where it is measured."""

    subject: Subject
    sets: tuple[str, ...]
    same_bits: bool = False
    """Whether any number of ranks is promised one process's bits."""


def _ours(name: str, description: str, kind: str, moved: float, **options: object) -> Subject:
    """One of ours with fp32 masters; `moved`: the bytes of each parameter in a step."""
    return Subject(
        name=name,
        title=f"{kind}, {options.get('precision', 'bf16')}",
        description=f"{description}, fp32 masters",
        kind=kind,
        bytes_per_parameter=moved,
        options={"dtype": torch.float32, **options},
    )


def _entries() -> Iterator[Entry]:
    kind, moved = "FusedMuon", muon.BYTES
    yield Entry(_ours("muon", "bf16", kind, moved), ("L", "G", "E", LLAMA), True)
    fp16 = {"precision": "fp16", "method": "auto"}
    yield Entry(_ours("muon-fp16", "fp16", kind, moved, **fp16), ("L", "G", "E"), True)
    options = {"precision": "bf16", "rank": RANK, **NO_REFRESH}
    yield Entry(_ours("galore", f"bf16, rank {RANK}", "GaLoreAdamW", 12, **options), ("L",), True)
    yield Entry(_ours("adam", "bf16", "FusedAdam", 28), ("L", "G", LLAMA), True)
    adamw = Subject(
        name="torch",
        title="torch AdamW, fused",
        description="bf16, no masters",
        module="torch.optim",
        kind="AdamW",
        options={"fused": True},
        bytes_per_parameter=14,
    )
    yield Entry(adamw, ("L", "G", LLAMA))
    yield Entry(muon.SUBJECTS["dion"], ("L", "G"))


ENTRIES = {entry.subject.name: entry for entry in _entries()}


def _stacked(tensors: TensorSet, together: int) -> TensorSet:
    """The set with so many matrices of one kind in each weight of three dimensions."""
    kinds = tensors.shapes[: len(tensors.shapes) // together]
    shapes = tuple((together, *shape) for shape in kinds)
    return TensorSet.of_shapes(tensors.name, tensors.description, shapes)


SETS = {**muon.SETS, "E": _stacked(muon.SETS["E"], 64)}


def work_of(name: str, shapes: Sequence[Shape]) -> StepWork:
    """Returns the work of a subject's step on weights of these shapes.

    Muon's directions go to owners and updates back, in 2 bytes each; experts are whole on a rank.
    GaLore's wide matrices have owners, too: 2 bytes a number there, 4 back, and 8 of each number of
    the projected gradient between.
    """
    moved = ENTRIES[name].subject.bytes_per_parameter * sum(map(math.prod, shapes))
    if name in ("adam", "torch"):
        return StepWork(moved=moved)
    if name == "galore":
        wide = [shape for shape in shapes if shape[0] < shape[1]]
        owned = tuple(4.0 * RANK * math.prod(shape) for shape in wide)
        shared = 4.0 * RANK * sum(map(math.prod, shapes)) - sum(owned)
        exchanged = sum(6.0 * math.prod(shape) + 8 * RANK * shape[1] for shape in wide)
        return StepWork(moved=moved, owned=owned, shared=shared, exchanged=exchanged)
    matrices = [shape[-2:] for shape in shapes for _ in range(math.prod(shape[:-2]))]
    owned = tuple(map(float, map(muon.operations_of, matrices)))
    exchanged = 4.0 * sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    return StepWork(moved=moved, owned=owned, exchanged=exchanged)
