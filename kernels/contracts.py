"""The contracts: how each arithmetic operation of a step is rounded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contract:
    """A promise about bits. The rules that keep it are in megaopt.kernels.rules.RULES."""

    name: str
    promise: str
    backends: tuple[str, ...]
    """The backends on which the promise can be kept."""


IEEE = Contract(
    "ieee",
    "fp32, each operation rounded to nearest even once, in a written order: the same bits on every "
    "backend",
    ("triton", "reference"),
)

CONTRACTS = {contract.name: contract for contract in (IEEE,)}
