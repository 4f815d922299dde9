"""The file of digests: a line for each case, so that a review shows what moved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from megaopt.commands.golden.cases import ANY_MACHINE, CASES, NVIDIA_GPU

MADE_ON = f"{NVIDIA_GPU}, made on"
KEYS = (ANY_MACHINE, NVIDIA_GPU, MADE_ON)

Digests = dict[str, dict[str, str]]
"""The digest of each quantity of each case."""


class RecordError(ValueError):
    """A record that cannot be read."""


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
    path = files("megaopt.commands.golden").joinpath("record.json")
    return parse(path.read_text(encoding="utf-8"), "megaopt/commands/golden/record.json")


def parse(text: str, where: str) -> Record:
    """The record of a text; raises RecordError, which names `where`, unless `render` made it."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise RecordError(f"{where} must be JSON: {error}") from None
    if not isinstance(content, dict) or set(content) != set(KEYS):
        found = list(content) if isinstance(content, dict) else type(content).__name__
        raise RecordError(f"{where} must have the keys {', '.join(KEYS)}, got {found}")
    for key, value in content.items():
        if not isinstance(value, dict):
            raise RecordError(f"{where}: {key!r} must be an object, got {value!r}")
    for part in CASES:
        _check_digests(content[part], f"{where}: {part!r}")
    return Record({part: content[part] for part in CASES}, content[MADE_ON])


def _check_digests(found: dict[str, Any], where: str) -> None:
    for name, digests in found.items():
        texts = isinstance(digests, dict) and all(isinstance(d, str) for d in digests.values())
        if not texts:
            raise RecordError(f"{where}: {name!r} must have texts by quantity, got {digests!r}")


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


def write(path: Path, record: Record) -> None:
    """Writes it; raises OSError where that is not possible."""
    path.write_text(render(record), encoding="utf-8")
