"""Final losses that were recorded of a config, on processors of several kinds.

The text is the same everywhere, and so is the optimizer's arithmetic (`megaopt verify`). Matrix
products are torch's and the processor's. So a run's losses are the recorded ones wherever those
products are, and others elsewhere, which is no fault: nothing here decides about an exit status.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("losses.json")


def recorded() -> dict[str, Any]:
    """Returns by config its file's SHA-256, torch's version, losses by processor and variant."""
    records: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return records


def digest_of(config_path: Path) -> str:
    """SHA-256 of a config's text, whatever its line ends."""
    return hashlib.sha256(config_path.read_text(encoding="utf-8").encode()).hexdigest()


def describe_losses(config_path: Path, losses: Mapping[str, float]) -> str:
    """A line about a run's final losses, by variant.

    Args:
        config_path: of the run.
        losses: of all variants.
    """
    record = recorded().get(config_path.stem)
    if record is None or record["config"] != digest_of(config_path):
        return "losses: none are recorded of this config"
    hexadecimals = {name: loss.hex() for name, loss in losses.items()}
    for processor, recorded_losses in record["losses"].items():
        if recorded_losses == hexadecimals:
            return (
                f"losses: those recorded with {processor} and torch {record['torch']}, to the bit"
            )
    kinds = ", ".join(record["losses"])
    return (
        f"losses: not those recorded with torch {record['torch']} ({kinds}): matrix products have "
        "other bits here, which is no fault"
    )
