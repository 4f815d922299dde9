"""A small model of how a step's time grows with the cards: exchange, products, memory, host."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


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


def most_of(costs: Iterable[float], cards: int) -> float:
    """The load of the card with most, where the largest are dealt out first, to who has least."""
    loads = [0.0] * cards
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def sent(work: StepWork, cards: int) -> float:
    """Bytes that each card sends: of its part, what others own; and what it made for others."""
    return work.exchanged / cards * (cards - 1) / cards


def predicted_ms(work: StepWork, speeds: Speeds, cards: int) -> float:
    """Milliseconds of a step on so many cards.

    Its operations, its bytes and what it sends follow each other; the host goes on beside them, in
    the time that it takes on one card.
    """
    operations = most_of(work.owned, cards) + work.shared / cards
    seconds = work.moved / cards / speeds.memory + sent(work, cards) / speeds.link
    if operations:
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
