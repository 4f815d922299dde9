"""The cases of the record, in its two parts: the names of record.json's lines.

Not every combination. Each format of a slot stands beside each format that it is read or written
with: each exp_avg beside each exp_avg_sq, both beside each master, weights beside masters, and
gradients beside weights. Each recipe of fp8 has cases, and each option where it has something to
do. The tests of the record say what lacks a case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Sequence
from importlib.resources import files

from megaopt.commands.golden.case import GoldenCase

ANY_MACHINE, NVIDIA_GPU = "any machine", "NVIDIA GPU"
FILE = files("megaopt.commands.golden").joinpath("record.json")

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
