"""Draws README's picture, docs/benchmarks/step-times.png, from the records.

python tools/draw_first_page.py
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
PICTURE = FOLDER / "step-times.png"
STEPS, FLOAT8, BLOCKS = "h200-bench.json", "h200-bench-fp8-B.json", "h200-bench-blocks-B.json"
TE = "TransformerEngine FusedAdam"
SAME = "megaopt, the same bits"
GROUPS = {
    "bf16 weights, fp32 masters": [
        (TE, STEPS, "transformerengine-bf16"),
        (SAME, STEPS, "te:bf16"),
    ],
    "the same masters, in 2 bytes": [
        (TE, STEPS, "transformerengine-bf16-remainders"),
        (SAME, STEPS, "te:bf16-remainders"),
    ],
    "bf16 moments": [
        (TE, STEPS, "transformerengine-bf16-moments"),
        (SAME, STEPS, "te:bf16-moments"),
    ],
    "fp32 weights": [
        ("torch AdamW(fused=True)", STEPS, "torch-fused-fp32"),
        (SAME, STEPS, "torch:fp32"),
    ],
    "fp8 weights, blocks of 128 x 128": [
        (TE + " and a cast", FLOAT8, "transformerengine-fp8-block_128x128"),
        (SAME, FLOAT8, "te:fp8-block_128x128"),
    ],
    "8-bit moments, no masters": [
        ("bitsandbytes AdamW8bit", BLOCKS, "bitsandbytes-8bit"),
        ("flashoptim FlashAdamW", BLOCKS, "flashoptim-8bit-no-master"),
        ("megaopt, formats of its own", BLOCKS, "blocks"),
    ],
}
"""By heading: label, record and case of set B."""
LONGEST = 18.5
"""ms at which a bar is cut off, which its label says."""


def bars() -> list[tuple[str, str, float, float]]:
    """Heading, label, ms of the step, and ms of copying the bytes that it must move."""
    found = []
    for heading, rows in GROUPS.items():
        for label, record, case in rows:
            cases = json.loads((FOLDER / record).read_text(encoding="utf-8"))["cases"]
            own: Any = next(each for each in cases if each["case"] == f"B/{case}")
            time = own["step_ms"]
            found.append((heading, label, time, time * own["percent_of_copy"] / 100))
    return found


def draw(path: Path) -> None:
    """Draw the bars, a group for each heading."""
    figure = Figure(figsize=(9, 5.4), dpi=120)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    place, before, places, labels = 0.0, "", [], []
    for heading, label, time, copy in bars():
        if heading != before:
            place += 1.0
            axes.text(0.1, place, heading, fontsize=9, style="italic", color="#555555", va="center")
        before, place = heading, place + 1.0
        colour = "#3b6ea5" if label.startswith("megaopt") else "#b4b4b4"
        cut = ", beyond this picture" if time > LONGEST else ""
        axes.barh(place, min(time, LONGEST), color=colour, height=0.85)
        axes.plot([copy, copy], [place - 0.45, place + 0.45], color="#c04000", linewidth=2)
        axes.text(min(time, LONGEST) + 0.15, place, f"{time:.1f} ms{cut}", fontsize=8, va="center")
        places.append(place)
        labels.append(label)
    axes.set_yticks(places, labels, fontsize=8)
    axes.set_ylim(place + 0.8, 0.3)
    axes.set_xlim(0, LONGEST + 2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms of one step of 1.0 billion parameters on one H200; shorter is better")
    marks = [
        Patch(color="#3b6ea5", label="megaopt"),
        Patch(color="#b4b4b4", label="other libraries"),
        Line2D([], [], color="#c04000", label="copying the bytes that the step must move"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    draw(PICTURE)
