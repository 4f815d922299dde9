"""The page of `megaopt diff --html`: one file, with its pictures in it, that asks nobody else."""

from __future__ import annotations

import html
import warnings
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from megaopt.lab.regression.picture import COLOURS
from megaopt.recording.compare import Comparison, Growth
from megaopt.recording.pair import shown
from megaopt.recording.printable import printable, short

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem;
       margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem }
.verdict { padding: .7rem 1rem; border-left: .4rem solid #c0392b; background: #fbeeec }
.fine { border-color: #2e8b57; background: #edf7f1 }
.unknown { border-color: #d9a400; background: #fdf7e3 }
table { border-collapse: collapse } td, th { padding: .2rem .9rem .2rem 0; text-align: left;
       vertical-align: top; border-bottom: 1px solid #eee; overflow-wrap: anywhere }
th { font-weight: 600; color: #666 } p.small { color: #666 } svg { max-width: 100%; height: auto }
"""
SHADES = {
    "same": "fine",
    "as two repeats differ": "fine",
    "within tolerance": "fine",
    "not comparable": "unknown",
}
EQUAL, LITTLE, MUCH = "#dfe9df", "#f6c9a8", "#c0392b"
"""Colours of a quantity at a step: nothing differs, less than half of its tensors, half or more."""
MOST = 12
"""Tensors that are listed."""
WIDEST = 60
"""Characters of a label in a picture."""


def escape(text: str) -> str:
    """A text as HTML has it."""
    return html.escape(short(text))


def page(
    comparison: Comparison, growth: Sequence[Sequence[str]], noise: Sequence[Sequence[str]]
) -> str:
    """A comparison as a page of HTML; growth and noise: the rows of tables, titles first."""
    verdict, _, rest = comparison.line.partition(":")
    parts = [
        f"<h1>{escape(comparison.a)} and {escape(comparison.b)}</h1>",
        f'<p class="verdict {SHADES.get(comparison.verdict, "")}">'
        f"<b>{escape(verdict)}</b>:{escape(rest)}</p>",
        *(f'<p class="small">{escape(line)}</p>' for line in comparison.remarks()),
    ]
    differences = [
        (d.name, shown(d.a), shown(d.b)) for d in (*comparison.environment, *comparison.options)
    ]
    parts += _section("Environment and options", _table(("", "A", "B"), differences))
    if comparison.growth:
        parts += _section("What parts when", _picture(draw_timeline, comparison.growth))
        parts += _section("How it grows", _picture(draw_growth, comparison.growth))
        parts += _section("", _table(growth[0], growth[1:]))
    if comparison.histogram:
        title = "Units in the last place, at the last step with samples"
        parts += _section(title, _picture(_draw_histogram, comparison.histogram))
    if comparison.blame is not None and comparison.blame.tensors:
        rows = comparison.blame.tensors[:MOST]
        title = f"Step {comparison.blame.step}: {len(comparison.blame.tensors)} differ"
        title += f", the first {MOST}" if len(rows) < len(comparison.blame.tensors) else ""
        parts += _section(title, _table(("tensor", "quantity"), rows))
    parts += _section("B against repeats of A", _table(noise[0], noise[1:]))
    head = f'<meta charset="utf-8"><title>megaopt diff</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _section(title: str, content: str) -> list[str]:
    return [f"<h2>{escape(title)}</h2>" if title else "", content] if content else []


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    body = ["<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in rows]
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    return f"<table><tr>{head}</tr>{''.join(body)}</table>" if body else ""


def _label(name: str) -> str:
    """A name as matplotlib takes it for text: neither a formula, nor one that legends leave out."""
    text = printable(name).replace("$", r"\$")
    return (" " * text.startswith("_") + text)[:WIDEST]


def _picture(draw: Callable[[Any, Any], None], content: Any) -> str:
    """Returns a function's drawing as SVG that stands in a page; its text stays text."""
    settings: Any = {"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "megaopt"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # the picture's text stays text: whoever shows it has the letters that the font lacks
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure = Figure(figsize=(9, 3), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes, content)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("<svg")[2].join(("<svg", ""))


def draw_timeline(axes: Any, growth: Sequence[Growth]) -> None:
    """A row for each quantity, a cell for each step that was looked at."""
    steps = sorted({entry.step for entry in growth})
    names = list(dict.fromkeys(entry.quantity for entry in growth))
    for entry in growth:
        share = entry.differ / max(entry.of, 1)
        colour = EQUAL if not share else LITTLE if share < 0.5 else MUCH
        place = (steps.index(entry.step) - 0.46, names.index(entry.quantity) - 0.4)
        axes.add_patch(matplotlib.patches.Rectangle(place, 0.92, 0.8, color=colour))
    axes.set_xlim(-0.5, max(len(steps), 8) - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), map(_label, names))
    shown_steps = range(0, len(steps), -(-len(steps) // 16))
    axes.set_xticks(shown_steps, [steps[i] for i in shown_steps])
    axes.set_xlabel("step")
    labels = {EQUAL: "equal", LITTLE: "less than half differ", MUCH: "half or more differ"}
    patches = [matplotlib.patches.Patch(color=c, label=label) for c, label in labels.items()]
    axes.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)


def draw_growth(axes: Any, growth: Sequence[Growth]) -> None:
    """The relative norm of the difference over steps, on a logarithmic scale."""
    names = dict.fromkeys(entry.quantity for entry in growth if entry.relative)
    for i, name in enumerate(names):
        curve = [(e.step, e.relative) for e in growth if e.quantity == name and e.relative]
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(
            *zip(*curve, strict=True), marker="o", markersize=3, color=colour, label=_label(name)
        )
    if names:
        axes.set_yscale("log")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axes.grid(alpha=0.25)
    axes.set_xlabel("step")
    axes.set_ylabel("norm of the difference / norm")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_histogram(axes: Any, histogram: dict[str, dict[int, int]]) -> None:
    """The share of sampled elements, by how many units they lie apart."""
    bins = range(max(max(counts, default=0) for counts in histogram.values()) + 1)
    width = 0.8 / len(histogram)
    for i, (name, counts) in enumerate(histogram.items()):
        total = sum(counts.values()) or 1
        places = [position - 0.4 + width * (i + 0.5) for position in bins]
        shares = [100 * counts.get(position, 0) / total for position in bins]
        axes.bar(places, shares, width, color=COLOURS[i % len(COLOURS)], label=_label(name))
    words = ["0", *(f"$2^{{{i}}}$" for i in range(len(bins)))]
    every = -(-len(bins) // 12)
    axes.set_xticks(bins[::every], words[: len(bins) : every])
    axes.set_xlabel("units in the last place, from ... on")
    axes.set_ylabel("% of samples")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
