"""Draws the picture of docs/how-to/muon.md, docs/benchmarks/h100-muon.png, from its record.

python tools/draw_muon.py
"""

import json
from pathlib import Path
from typing import Any

from megaopt.commands.muon.bench import SETS, draw
from megaopt.commands.regression.picture import save

RECORD = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "h100-muon.json"
PICTURE = RECORD.with_suffix(".png")


def cases() -> list[dict[str, Any]]:
    """Those that have a time, but for experts, for whom no other library was timed."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    left_out = SETS["E"].description
    return [case for case in record["cases"] if case["set"] != left_out and "step_ms" in case]


if __name__ == "__main__":
    save(PICTURE, draw({"cases": cases(), "environment": {"gpu": "H100"}}))
