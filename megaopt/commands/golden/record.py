"""The file of digests: a line for each case, so that a review shows what moved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from megaopt.commands.golden.cases import CASES, NVIDIA_GPU

MADE_ON = f"{NVIDIA_GPU}, made on"

Digests = dict[str, dict[str, str]]
"""The digest of each quantity of each case."""


@dataclass(frozen=True)
class Record:
    """What was recorded."""

    digests: Mapping[str, Digests]
    """The digests of each part; a part that was not recorded yet is empty."""
    made_on: Mapping[str, str | None]
    """The versions and the hardware behind the part of NVIDIA GPUs."""

    def is_recorded(self, part: str) -> bool:
        """Whether there is anything to compare with."""
        return bool(self.digests[part])

    def strays(self) -> dict[str, str]:
        """Cases that a recorded part lacks, and lines of no case: what is wrong, by name."""
        found = {}
        for part, cases in CASES.items():
            recorded, names = self.digests[part], {case.name for case in cases}
            if recorded:
                found.update(dict.fromkeys(names - set(recorded), "not in the record"))
            found.update(dict.fromkeys(set(recorded) - names, "no case has this name"))
        return dict(sorted(found.items()))


def packaged() -> Record:
    """The record that comes with this version."""
    return parse(files("megaopt.commands.golden").joinpath("record.json").read_text("utf-8"))


def parse(text: str) -> Record:
    """The record of which `render` made a text."""
    content = json.loads(text)
    return Record({part: content[part] for part in CASES}, content[MADE_ON])


def render(record: Record) -> str:
    """JSON with a line for each case."""
    parts = [f"{json.dumps(part)}: {_lines(record.digests[part])}" for part in CASES]
    parts.append(f"{json.dumps(MADE_ON)}: {json.dumps(dict(record.made_on), indent=2)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(digests: Digests) -> str:
    if not digests:
        return "{}"
    lines = [f"  {json.dumps(name)}: {json.dumps(own)}" for name, own in digests.items()]
    return "{\n" + ",\n".join(lines) + "\n}"
