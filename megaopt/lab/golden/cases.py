"""The golden record: in its two parts a line for each case, its name and what it hashes to.

Not every combination. Each format of a slot stands beside each format that it is read or written
with: each exp_avg beside each exp_avg_sq, both beside each master, weights beside masters, and
gradients beside weights. Each recipe of fp8 has cases, and each option where it has something to
do. The tests of the record say what lacks a case. A new case is a line of its name and no digests,
{}; `megaopt verify --record` writes them, and a review shows what moved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from megaopt.lab.golden.case import GoldenCase

ANY_MACHINE, NVIDIA_GPU = "any machine", "NVIDIA GPU"
MADE_ON = f"{NVIDIA_GPU}, made on"
FILE = files("megaopt.lab.golden").joinpath("record.json")

Digests = dict[str, dict[str, str]]
"""The digest of each quantity of each case."""

CASES: dict[str, list[GoldenCase]] = {
    part: [GoldenCase(name) for name in json.loads(FILE.read_text("utf-8"))[part]]
    for part in (ANY_MACHINE, NVIDIA_GPU)
}
"""The cases of each part: those for any machine, and those for an NVIDIA GPU alone."""


def covering(
    cases: Sequence[GoldenCase], features: Callable[[GoldenCase], Collection[Hashable]]
) -> list[GoldenCase]:
    """Few of the cases that together have each feature of all: next is who adds the most of them.

    Where several add as many it is the first, so that the choice is the same everywhere.
    """
    chosen, missing = [], {feature for case in cases for feature in features(case)}
    while missing:
        case = max(cases, key=lambda case: len(missing.intersection(features(case))))
        missing.difference_update(features(case))
        chosen.append(case)
    return chosen


@dataclass(frozen=True)
class Record:
    """The digests that were recorded, and what they were made on."""

    digests: Mapping[str, Digests]
    """The digests of each part."""
    made_on: Mapping[str, str | None]
    """The versions and the hardware behind the part of NVIDIA GPUs."""


def packaged() -> Record:
    """The record that comes with this version."""
    return parse(FILE.read_text("utf-8"))


def parse(text: str) -> Record:
    """The record of which `render` made a text."""
    content = json.loads(text)
    return Record({part: content[part] for part in CASES}, content[MADE_ON])


def render(record: Record) -> str:
    """JSON with a line for each case."""
    parts = []
    for part in CASES:
        cases = record.digests[part].items()
        lines = [f"  {json.dumps(name)}: {json.dumps(quantities)}" for name, quantities in cases]
        parts.append(f"{json.dumps(part)}: " + "{\n" + ",\n".join(lines) + "\n}")
    parts.append(f"{json.dumps(MADE_ON)}: {json.dumps(dict(record.made_on), indent=2)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
