"""Texts that ranks leave for each other in the store of the process group, beside collectives.

They do so only where they differ, or wait for long: nobody has to answer, and a step asks nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("megaopt")

PATIENCE, SHORT = 10.0, 1.0
"""Seconds in which ranks that differ tell what they have; SHORT where others may hear of it in the
next step alone, as on GPUs."""
LONG = 60.0
"""Seconds after which a rank says for whom it waits."""
MOST_SHOWN, MOST_KINDS, MOST_CHARACTERS = 3, 4, 120
"""Differences that a message shows, ranks that differ from one another whose facts are read, and
characters of each value."""
PLAIN = (int, float, str, bool, tuple, type(None))
LONGEST = 300
"""Characters of an error that other ranks show."""
FAILED = "!"
"""Begins what a rank tells that raises an error of its own."""
RAISED = "megaopt/raised"
"""The key under which ranks tell of errors in the middle of a step."""


# --- ranks that differ


def of_groups(groups: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The plain options of each group, by the names that a message gives them."""
    return {
        f"{name} of group {index}": repr(value)
        for index, group in enumerate(groups)
        for name, value in group.items()
        if isinstance(value, PLAIN)
    }


def tell_failure(key: str, error: BaseException | None) -> None:
    """Tells, in the place of this rank's facts, that it raises an error of its own.

    Args: as for `differences`; error: None where it is not known.
    """
    text = "an error" if error is None else f"{type(error).__name__}: {error}"
    # under the key of this rank's facts, and no difference found, so that nobody waits for these
    tell(key, FAILED + text[:LONGEST])
    tell(f"{key}/found", "")


def tell_raised(error: Exception, step: Any) -> None:
    """Tells ranks that will wait for this one that it raises in the middle of a step.

    step: the number of steps taken before.
    """
    where = f" in step {step + 1}" if type(step) is int else ""
    tell(RAISED, f"{type(error).__name__}: {error}"[:LONGEST] + where)


def tell(key: str, text: str) -> None:
    """Leaves a text for ranks that ask for it under the same key."""
    with contextlib.suppress(Exception):  # it is on the way to an error: the store may be gone
        _store().set(f"{key}/{dist.get_rank()}", text)


def differences(key: str, ranks: Sequence[int], facts: Mapping[str, str], patience: float) -> str:
    """Returns the facts in which these ranks differ, as text; "" where that is not known.

    Args:
        key: the same on all of them, and of this event alone.
        ranks: of the default group.
        facts: this rank's, by what they are called, in an order that all have.
        patience: in seconds, for what others tell.
    """
    try:
        return "; ".join(_differences(key, ranks, facts, patience))
    except Exception:  # the store is gone with its process: the error is raised without more
        return ""


def passed_on(key: str, ranks: Sequence[int], message: str, patience: float) -> str:
    """Returns this rank's message, or that of another which met other ranks; tells its own.

    Args: as for `differences`; message: their result.
    """
    # before it reads: all ranks of the meeting leave theirs first
    tell(f"{key}/found", message)
    with contextlib.suppress(Exception):
        # who knows no difference waits for the others' texts, and takes the first that says one
        messages = () if message else _read([f"{key}/found/{rank}" for rank in ranks], patience)
        return next((text for text in messages if text), message)
    return message


def _differences(
    key: str, ranks: Sequence[int], facts: Mapping[str, str], patience: float
) -> list[str]:
    """Returns the lines of `differences`: ranks tell digests, and one of each kind its facts."""
    # each rank leaves a digest of 32 hexadecimal digits, not all its facts
    this_rank, text = dist.get_rank(), json.dumps(facts)
    tell(key, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
    # waits until all ranks have told, or patience is over; None for a rank that told nothing
    answers = _read([f"{key}/{rank}" for rank in ranks], patience)
    # ranks that told the same are of one kind
    kinds: dict[str, list[int]] = {}
    for rank, answer in zip(ranks, answers, strict=True):
        if answer is not None:
            kinds.setdefault(answer, []).append(rank)
    # ranks that raise an error of their own told its text instead
    lines = [
        f"{answer[1:]} on {_ranks(who)}" for answer, who in kinds.items() if answer[:1] == FAILED
    ]
    kinds = {answer: who for answer, who in kinds.items() if answer[:1] != FAILED}

    # the first rank of each kind leaves its facts, as JSON; all read these, of some kinds
    firsts = [who[0] for who in kinds.values()]
    if this_rank in firsts:
        tell(f"{key}/facts", text)
    shown = firsts[:MOST_KINDS]
    texts = _read([f"{key}/facts/{rank}" for rank in shown], patience)
    facts_by_rank = {
        rank: json.loads(encoded) for rank, encoded in zip(shown, texts, strict=True) if encoded
    }
    # names in the order of the first kind; then those that other kinds have beside
    names = list(
        dict.fromkeys(name for peer_facts in facts_by_rank.values() for name in peer_facts)
    )
    unlike = [
        name
        for name in names
        if len({peer_facts.get(name) for peer_facts in facts_by_rank.values()}) > 1
    ]
    # of each name that differs: its values, each with all ranks whose kind has it
    for name in unlike[:MOST_SHOWN]:
        values: dict[str, list[int]] = {}
        for who in kinds.values():
            if who[0] in facts_by_rank:
                values.setdefault(facts_by_rank[who[0]].get(name, "not there"), []).extend(who)
        pairs = (f"{value[:MOST_CHARACTERS]} on {_ranks(who)}" for value, who in values.items())
        lines.append(f"{name}: {', '.join(pairs)}")
    if len(unlike) > MOST_SHOWN:
        lines.append(f"and {len(unlike) - MOST_SHOWN} more")

    # ranks that left nothing in time
    silent = [rank for rank, answer in zip(ranks, answers, strict=True) if answer is None]
    return [*lines, f"{_ranks(silent)} did not answer"] if silent and lines else lines


def _store() -> Any:
    return dist.group.WORLD.get_group_store()  # type: ignore[union-attr]  # there is one


def _read(keys: Sequence[str], patience: float) -> list[str | None]:
    """Returns the text under each key, once all are there, or after so many seconds."""
    store = _store()
    with contextlib.suppress(Exception):
        # blocks until all keys are there
        store.wait(list(keys), timedelta(seconds=patience))
        return [store.get(key).decode() for key in keys]
    # time is over: what there is
    return [store.get(key).decode() if store.check([key]) else None for key in keys]


def _ranks(ranks: Iterable[int]) -> str:
    """Returns numbers of ranks in words: rank 3, ranks 0 to 2, ranks 0 to 2, 5."""
    runs: list[list[int]] = []
    # first and last rank of each run
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    is_one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"{'rank' if is_one else 'ranks'} {', '.join(parts)}"


# --- ranks that wait


class Wait:
    """A context in which this rank may wait for others; after a minute it says for whom.

    One thread looks at all of them, four times a minute.

    Args:
        ranks: those that are met, of the default group.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._since: float | None = None
        self._said: float | None = None
        self.step: Any = None
        """The number of steps taken before."""
        # the thread finds it there, as long as somebody has it
        _WAITS.add(self)

    def __enter__(self) -> None:
        # the thread reads one attribute: no lock is needed
        self._since = time.monotonic()
        if _Watch.thread is None or not _Watch.thread.is_alive():  # as in a process that was forked
            _Watch.start()

    def __exit__(self, *_: object) -> None:
        self._since = None

    def look(self) -> None:
        """Tells that this rank waits, if it does for long, and, once, for whom."""
        since = self._since
        # None: this rank does not wait
        waited = 0.0 if since is None else time.monotonic() - since
        if waited < LONG / 2:
            return
        # one key for each meeting; ranks leave the time below it, again and again while they wait
        where = f"megaopt/waits/{'-'.join(map(str, self._ranks))}"
        with contextlib.suppress(Exception):
            tell(where, str(time.time()))
        # each wait is told of once
        if waited >= LONG and self._said != since:
            self._said = since
            step = f" in step {self.step + 1}" if type(self.step) is int else ""
            logger.warning(
                "rank %d has waited %d s for %s%s, which hold parts of the same parameters: %s",
                *(dist.get_rank(), waited, _ranks(self._others), step, self._who_comes(where)),
            )

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self._ranks if rank != dist.get_rank()]

    def _who_comes(self, where: str) -> str:
        """Returns in words who waits as well, and who has said nothing of that."""
        waiting: list[int] = []
        raised = ""
        with contextlib.suppress(Exception):
            store = _store()
            for rank in self._others:
                key, error = f"{where}/{rank}", f"{RAISED}/{rank}"
                # who wrote it within the last minute still waits
                if store.check([key]) and time.time() - float(store.get(key)) < LONG:
                    waiting.append(rank)
                # who raised in the middle of a step may have said why
                elif store.check([error]):
                    raised += f"; rank {rank} raised {store.get(error).decode()}"
        missing = [rank for rank in self._others if rank not in waiting]
        too = f"{_ranks(waiting)} waiting too; " if waiting else ""
        # nobody is late: a collective itself does not end
        if not missing:
            return f"{too}all are there, so a collective hangs"
        return f"{too}not there yet: {_ranks(missing)}{raised}"


_WAITS: weakref.WeakSet[Wait] = weakref.WeakSet()


class _Watch:
    """The thread that looks at waits; it begins with the first."""

    thread: threading.Thread | None = None

    @classmethod
    def start(cls) -> None:
        cls.thread = threading.Thread(target=cls.run, name="megaopt waits", daemon=True)
        cls.thread.start()

    @staticmethod
    def run() -> None:
        # a daemon's loop: it ends with the process
        while True:
            time.sleep(LONG / 4)
            for wait in list(_WAITS):
                with contextlib.suppress(Exception):
                    wait.look()
