"""Draws the picture of docs/how-to/muon.md, docs/benchmarks/h100-muon.png, from its record.

python tools/draw_muon.py
"""

import json
from pathlib import Path

from megaopt.commands.muon.bench import Bar, draw
from megaopt.commands.muon.peers import SETS

RECORD = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "h100-muon.json"
PICTURE = RECORD.with_suffix(".png")


def bars() -> list[Bar]:
    """Of each case that has a time, but for experts, for whom no other library was timed."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    names = {own.description: name for name, own in SETS.items() if name != "E"}
    cases = (case for case in record["cases"] if case["set"] in names and "step_ms" in case)
    return [
        Bar(names[case["set"]], case["optimizer"], case["step_ms"], case["floor_ms"])
        for case in cases
    ]


if __name__ == "__main__":
    draw(PICTURE, bars(), "H100")
