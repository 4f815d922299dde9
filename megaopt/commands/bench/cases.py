"""The cases of a run: a mode of ours or a peer, on a set of tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megaopt.commands.bench.modes import MODES, Mode
from megaopt.commands.bench.peers import PEERS, Peer
from megaopt.commands.bench.sets import HOST, SETS, TensorSet

__all__ = ["Case", "select"]


@dataclass(frozen=True)
class Case:
    """One measurement: a set of tensors, and the optimizer that steps them."""

    tensors: TensorSet
    subject: Mode | Peer

    @property
    def name(self) -> str:
        """The name in tables and records, "A/bf16"."""
        return f"{self.tensors.name}/{self.subject.name}"


def select(
    sets: tuple[str, ...] = (), only: tuple[str, ...] = (), peers: Sequence[Peer] = ()
) -> list[Case]:
    """Return the cases of a run, set by set, a peer behind the modes that it is compared with.

    fp8 weights are measured on sets whose tensors have shapes.

    Args:
        sets: Names of SETS, and HOST, which has no cases; none means all.
        only: Names of modes and peers; none means all. A mode brings the peers it is against.
        peers: Those that may be measured.

    Raises:
        ValueError: A name is none of SETS, or none of MODES and PEERS; or all names are of fp8
            weights, and no set has shapes.
    """
    for parameter, names, table in (
        ("sets", sets, (*SETS, HOST)),
        ("only", only, (*MODES, *PEERS)),
    ):
        if unknown := [name for name in names if name not in table]:
            allowed = ", ".join(table)
            raise ValueError(f"{parameter}={unknown}: unknown; allowed are {allowed}")
    modes = [mode for mode in MODES.values() if mode.name in (only or MODES)]
    wanted = {*only, *(name for mode in modes for name in mode.against)}
    chosen = [peer for peer in peers if not only or peer.name in wanted]
    cases = [
        Case(tensor_set, subject)
        for tensor_set in SETS.values()
        if tensor_set.name in (sets or SETS)
        for subject in _in_order(modes, chosen)
        if subject.weight is None or tensor_set.shapes
    ]
    if not cases and only and modes + chosen and {*sets} != {HOST}:
        allowed = ", ".join(tensor_set.name for tensor_set in SETS.values() if tensor_set.shapes)
        raise ValueError(f"sets={[*sets]}: no matrices for fp8 weights; allowed are {allowed}")
    return cases


def _in_order(modes: Sequence[Mode], peers: Sequence[Peer]) -> Iterator[Mode | Peer]:
    last = {name: mode.name for mode in modes for name in mode.against}
    for mode in modes:
        yield mode
        yield from (peer for peer in peers if last.get(peer.name) == mode.name)
    yield from (peer for peer in peers if peer.name not in last)
