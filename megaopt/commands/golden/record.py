"""The file of digests: a line for each case, so that a review shows what moved.

A new case is a line of its name and no digests, {}; `megaopt verify --record` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from megaopt.commands.golden.cases import CASES, FILE, NVIDIA_GPU

MADE_ON = f"{NVIDIA_GPU}, made on"

Digests = dict[str, dict[str, str]]
"""The digest of each quantity of each case."""


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
    parts = [f"{json.dumps(part)}: {_lines(record.digests[part])}" for part in CASES]
    parts.append(f"{json.dumps(MADE_ON)}: {json.dumps(dict(record.made_on), indent=2)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(digests: Digests) -> str:
    lines = [
        f"  {json.dumps(name)}: {json.dumps(quantities)}" for name, quantities in digests.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}"
