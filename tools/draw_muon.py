"""Draws the picture of docs/how-to/muon.md, docs/benchmarks/h100-muon.png, from its record.

python tools/draw_muon.py
"""

import json
from pathlib import Path
from typing import Any

from megaopt.lab.muon.bench import SETS, draw, floor_ms
from megaopt.lab.regression.picture import save

BENCHMARKS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
RECORD, PRODUCTS = BENCHMARKS / "h100-muon.json", BENCHMARKS / "h100-products.json"
PICTURE = RECORD.with_suffix(".png")


def cases() -> list[dict[str, Any]]:
    """Those that have a time, but for experts, for whom no other library was timed.

    Their floors are of torch's fastest product among PRODUCTS: the record's own were timed while
    the card's clock was low.
    """
    products = json.loads(PRODUCTS.read_text(encoding="utf-8"))["cases"].values()
    speed = max(each["torch"]["TFLOP_s"] for each in products) * 1e12
    record, left_out = json.loads(RECORD.read_text(encoding="utf-8")), SETS["E"].description
    found = [case for case in record["cases"] if case["set"] != left_out and "step_ms" in case]
    for case in found:
        case["floor_ms"] = floor_ms(case, speed)
    return found


if __name__ == "__main__":
    save(PICTURE, draw({"cases": cases(), "environment": {"gpu": "H100"}}))
