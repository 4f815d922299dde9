"""The optimizers that are stepped over ranks, the sets of each, and how their steps grow.

A small model says how a step's time grows with the cards: exchange, products, memory, host.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megaopt.lab.bench.sets import Shape, TensorSet
from megaopt.lab.bench.subjects import Subject
from megaopt.lab.muon import bench as muon

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


MUON = "FusedMuon"
FP16 = {"precision": "fp16", "method": "auto"}
GALORE = {"precision": "bf16", "rank": RANK, **NO_REFRESH}
ADAMW = Subject(
    name="torch",
    title="torch AdamW, fused",
    description="bf16, no masters",
    module="torch.optim",
    kind="AdamW",
    options={"fused": True},
    bytes_per_parameter=14,
)
ENTRIES = {
    entry.subject.name: entry
    for entry in (
        Entry(_ours("muon", "bf16", MUON, muon.BYTES), ("L", "G", "E", LLAMA), True),
        Entry(_ours("muon-fp16", "fp16", MUON, muon.BYTES, **FP16), ("L", "G", "E"), True),
        Entry(_ours("galore", f"bf16, rank {RANK}", "GaLoreAdamW", 12, **GALORE), ("L",), True),
        Entry(_ours("adam", "bf16", "FusedAdam", 28), ("L", "G", LLAMA), True),
        Entry(ADAMW, ("L", "G", LLAMA)),
        Entry(muon.SUBJECTS["dion"], ("L", "G")),
    )
}

# the 64 experts' matrices of one kind are one weight of three dimensions
_kinds = muon.SETS["E"].shapes[: len(muon.SETS["E"].shapes) // 64]
_stacked = [(64, *shape) for shape in _kinds]
SETS = {**muon.SETS, "E": TensorSet.of_shapes("E", muon.SETS["E"].description, _stacked)}


# --- the model of growth


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of a step, over all cards."""

    moved: float
    """Bytes of gradients, weights and states that are read and written, each element on one card.
    """
    owned: tuple[float, ...] = ()
    """Operations of each matrix that one card makes for all, its owner."""
    shared: float = 0.0
    """Operations that the cards share evenly."""
    exchanged: float = 0.0
    """Bytes of all matrices that go to owners, and back from them."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The speeds of one card."""

    memory: float
    """Bytes moved a second."""
    link: float
    """Bytes sent a second, to all other cards together."""
    operations: float
    """Operations a second; of no meaning where there are none."""
    host_ms: float
    """Milliseconds of the host's share of a step on one card."""


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


def most_of(costs: Iterable[float], cards: int) -> float:
    """The load of the card with most, where the largest are dealt out first, to who has least."""
    loads = [0.0] * cards
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def predicted_ms(work: StepWork, speeds: Speeds, cards: int) -> float:
    """Milliseconds of a step on so many cards.

    Its operations, its bytes and what it sends follow each other; the host goes on beside them, in
    the time that it takes on one card.
    """
    # a card sends of its part what others own, and what it made for others
    sent = work.exchanged / cards * (cards - 1) / cards
    seconds = work.moved / cards / speeds.memory + sent / speeds.link
    if operations := most_of(work.owned, cards) + work.shared / cards:
        seconds += operations / speeds.operations
    return max(1e3 * seconds, speeds.host_ms)


def speeds_of(work: StepWork, step_ms: float, host_ms: float, memory: float, link: float) -> Speeds:
    """The speeds that explain a step on one card.

    Args:
        work: Of the step.
        step_ms: Its milliseconds.
        host_ms: Milliseconds of the host.
        memory: Bytes a second of a copy; of a step without operations its own speed takes its
            place.
        link: Bytes a second of an exchange of all cards.
    """
    seconds, operations = step_ms / 1e3, sum(work.owned) + work.shared
    if not operations:
        return Speeds(memory=work.moved / seconds, link=link, operations=0.0, host_ms=host_ms)
    # a tenth of the time at least: a step may move less than is counted, as from the cache
    left = max(seconds - work.moved / memory, seconds / 10)
    return Speeds(memory=memory, link=link, operations=operations / left, host_ms=host_ms)
