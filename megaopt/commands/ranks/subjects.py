"""The optimizers that are stepped over ranks, the sets of each, and what their steps do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megaopt.commands.bench.sets import Shape, TensorSet
from megaopt.commands.bench.subjects import Subject
from megaopt.commands.muon import bench as muon
from megaopt.commands.ranks.growth import Work

LLAMA = "llama"
"""The set of whole iterations of a model in place of steps by random gradients."""
RANK = 128
"""Of GaLore's projections."""
NO_REFRESH = 2**30
"""Steps from refresh to refresh: only the first one, which warms up, has them."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A subject, and where it is measured."""

    subject: Subject
    sets: tuple[str, ...]
    same_bits: bool = False
    """Whether any number of ranks is promised one process's bits."""

    @property
    def name(self) -> str:
        """Its name in tables, records and arguments."""
        return self.subject.name


def _ours(
    name: str, title: str, description: str, kind: str, moved: float, **options: object
) -> Subject:
    return Subject(
        name=name, title=title, description=description, kind=kind, bytes_per_parameter=moved,
        options={"dtype": torch.float32, **options},
    )  # fmt: skip


_adamw = Subject(
    name="torch",
    title="torch AdamW, fused",
    description="bf16, no masters",
    module="torch.optim",
    kind="AdamW",
    options={"fused": True},
    bytes_per_parameter=14,
)
_fp16 = {"precision": "fp16", "method": "auto"}
_galore = {"precision": "bf16", "rank": RANK, "update_proj_gap": NO_REFRESH}
_words = f"bf16, rank {RANK}, fp32 masters"
ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(
            subject=_ours("muon", "FusedMuon, bf16", "bf16, fp32 masters", "FusedMuon", muon.BYTES),
            sets=("L", "G", "E", LLAMA),
            same_bits=True,
        ),
        Entry(
            subject=_ours(
                "muon-fp16", "FusedMuon, fp16", "fp16, fp32 masters", "FusedMuon", muon.BYTES,
                **_fp16,
            ),
            sets=("L", "G", "E"),
            same_bits=True,
        ),
        Entry(
            subject=_ours("galore", "GaLoreAdamW, bf16", _words, "GaLoreAdamW", 12, **_galore),
            sets=("L",),
        ),
        Entry(
            subject=_ours("adam", "FusedAdam", "bf16, fp32 masters", "FusedAdam", 28),
            sets=("L", "G", LLAMA),
            same_bits=True,
        ),
        Entry(subject=_adamw, sets=("L", "G", LLAMA)),
        Entry(subject=muon.SUBJECTS["dion"], sets=("L", "G")),
    )
}  # fmt: skip


def _stacked(tensors: TensorSet, together: int) -> TensorSet:
    """The set with so many matrices of one kind in each weight of three dimensions."""
    kinds = tensors.shapes[: len(tensors.shapes) // together]
    shapes = tuple((together, *shape) for shape in kinds)
    return TensorSet.of_shapes(tensors.name, tensors.description, shapes)


SETS = {**muon.SETS, "E": _stacked(muon.SETS["E"], 64)}


def work_of(name: str, shapes: Sequence[Shape]) -> Work:
    """What a step of a subject does to weights of these shapes; of experts all matrices.

    Muon's directions go to owners and updates back, in 2 bytes each. GaLore's wide matrices have
    owners, too: 2 bytes a number there, 4 back, and 8 of each number of the projected gradient
    between.
    """
    moved = ENTRIES[name].subject.bytes_per_parameter * sum(map(math.prod, shapes))
    matrices = [shape[-2:] for shape in shapes for _ in range(math.prod(shape[:-2]))]
    if name == "galore":
        wide = [shape for shape in matrices if shape[0] < shape[1]]
        tall = sum(4.0 * RANK * math.prod(shape) for shape in matrices if shape not in wide)
        bytes_sent = sum(6 * math.prod(shape) + 8 * RANK * shape[1] for shape in wide)
        owned = tuple(4.0 * RANK * math.prod(shape) for shape in wide)
        return Work(moved=moved, owned=owned, shared=tall, exchanged=bytes_sent)
    if name in ("adam", "torch"):
        return Work(moved=moved)
    owned = tuple(
        float(muon.operations(TensorSet.of_shapes("", "", [shape]))) for shape in matrices
    )
    return Work(moved=moved, owned=owned, exchanged=4.0 * sum(map(math.prod, matrices)))
