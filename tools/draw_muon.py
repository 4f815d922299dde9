"""Draws the picture of docs/how-to/muon.md, docs/benchmarks/h100-muon.png, from its record.

python tools/draw_muon.py
"""

import json
import re
from pathlib import Path

from megaopt.commands.muon.bench import Bar, draw

RECORD = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "h100-muon.json"
PICTURE = RECORD.with_suffix(".png")


def bars() -> list[Bar]:
    """Of Llama's matrices as the first command printed it, of the GPT's as the second did.

    Of experts no other library was timed.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    found = {}
    for line in record["printed_by_the_second"]:
        tensors, subject, ms = re.split(", |: ", line.removesuffix(" ms"))
        found[tensors, subject] = Bar(tensors, subject, float(ms))
    for line in record["printed"]:
        tensors, subject, _, ms, _, of_floor, *_ = (each.strip() for each in line.split("|")[1:-1])
        if tensors == "L":
            floor = float(ms) * float(of_floor.rstrip("%")) / 100
            found[tensors, subject] = Bar(tensors, subject, float(ms), floor)
    return [bar for name in ("L", "G") for bar in found.values() if bar.tensors == name]


if __name__ == "__main__":
    draw(PICTURE, bars(), "H100")
