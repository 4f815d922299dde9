"""The peers whose bits the contracts promise: which are here, and whether the promise holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from rich.table import Table

from megaopt.commands.bench.equality import check
from megaopt.commands.bench.modes import MODES
from megaopt.commands.bench.peers import PEERS
from megaopt.commands.bench.sets import TensorSet
from megaopt.commands.environment import installed_version
from megaopt.kernels.contracts import CONTRACTS

__all__ = ["Parity", "examine_parity", "peers_table"]

# below, at and above a program's chunk, one that is unaligned in 16 bytes, and many chunks
CHECKED = TensorSet(
    name="check", description="shapes of a check", sizes=(1, 7, 2047, 2048, 2049, 65_537)
)
CHECKED_MATRICES = TensorSet.of_shapes(
    "check", "shapes of a check, in fp8", [(16, 16), (96,), (128, 256), (272, 304), (640, 1024)]
)


@dataclass(frozen=True)
class Parity:
    """What became of one of our modes beside the optimizer that it promises to equal."""

    mode: str
    against: str
    holds: bool | None
    """Whether the bits are equal; None where the peer is not installed, or there is no GPU."""
    note: str


def examine_parity(names: Iterable[str]) -> list[Parity]:
    """Steps modes of contracts that another library keeps beside that library, on the GPU.

    Args:
        names: of MODES; those that promise nobody's bits are left out.
    """
    return [_examine(name) for name in names if MODES[name].twin is not None]


def gpu_is_there() -> bool:
    """Whether promises can be checked here."""
    return torch.cuda.is_available()


def _examine(name: str) -> Parity:
    mode = MODES[name]
    peer = PEERS[str(mode.twin)]
    reason = peer.why_not()
    if not gpu_is_there():
        reason = "there is no CUDA GPU"
    if reason is not None:
        return Parity(name, peer.name, None, reason)
    checked = CHECKED if mode.weight is None else CHECKED_MATRICES
    difference = check(mode, checked, torch.device("cuda")).difference
    if difference is not None:
        return Parity(name, peer.name, False, difference)
    return Parity(name, peer.name, True, CONTRACTS[mode.contract].promise)


def peers_table() -> Table:
    """The libraries that the bench knows, with their versions.

    None is imported: that takes seconds, and some write to stderr of what they cannot load.
    """
    table = Table(title="other libraries", title_justify="left")
    for heading in ("library", "version"):
        table.add_column(heading, overflow="fold")
    for library in dict.fromkeys(peer.package for peer in PEERS.values()):
        absent = "not installed" if find_spec(library) is None else "not known"
        table.add_row(library, installed_version(library) or absent)
    return table
