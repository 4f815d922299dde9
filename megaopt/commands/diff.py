"""`megaopt diff`: what differs first between two recorded runs, and who is to blame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from json import loads
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megaopt.commands.console import make_console
from megaopt.commands.exits import DIFFERENT, DONE, REFUSED
from megaopt.recording.compare import Blame, Comparison, Growth, compare, shown
from megaopt.recording.files import Recording, RecordingError
from megaopt.saving.files import replacing, write_json

STATUS = {
    "same": DONE,
    "as two repeats differ": DONE,
    "differ": DIFFERENT,
    "not comparable": REFUSED,
}
COLOURS = {"same": "green", "as two repeats differ": "green", "not comparable": "yellow"}
MOST = 12
"""Tensors that are listed."""


def diff(
    a: Path,
    b: Path,
    map: Path | None = None,
    json: Path | None = None,
    html: Path | None = None,
    github: bool = False,
    noise: Sequence[Path] = (),
) -> int:
    """Compares two recordings and tells what was found.

    Returns:
        0 where they are the same, or differ as repeats do; 1 where they differ; 2 where they cannot
        be compared.
    """
    names = None if map is None else read_names(map)
    found = compare(Recording(a), Recording(b), names, [Recording(each) for each in noise])
    tell(found, make_console())
    if json is not None:
        write_json(json, found.as_json())
    if html is not None:
        # its pictures are matplotlib's, which takes a second to import
        from megaopt.commands.page import page

        with replacing(html) as file:
            file.write(page(found).encode())
    if github:
        print(annotation(found))
    return STATUS[found.verdict]


def read_names(path: Path) -> dict[str, str]:
    """A map of names: a JSON file of one dict of texts; RecordingError for another."""
    try:
        found = loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordingError(f"map must be a file of JSON, got {str(path)!r}: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise RecordingError(f"map must be names of B and of A, as {{'b': 'a'}}, got {str(path)!r}")
    return found


def annotation(found: Comparison) -> str:
    """A line that GitHub shows beside a pull request."""
    kind = {DONE: "notice", DIFFERENT: "error", REFUSED: "warning"}[STATUS[found.verdict]]
    text = found.line.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{kind} title=megaopt diff::{text}"


def tell(found: Comparison, console: Console) -> None:
    """Prints the verdict, then what belongs to it."""
    colour = COLOURS.get(found.verdict, "red")
    verdict, colon, rest = found.line.partition(":")
    console.print(f"[{colour}]{escape(verdict)}[/]{colon}{escape(rest)}", highlight=False)
    for line in found.remarks():
        console.print(escape(line), highlight=False)
    for title, differences in (("environment", found.environment), ("options", found.options)):
        rows = [(each.name, shown(each.a), shown(each.b)) for each in differences]
        print_table(console, title, ("", "A", "B"), rows)
    if found.blame is not None and found.blame.tensors:
        console.print(escape(_tensors(found.blame)), highlight=False)
    print_table(console, "how it grows", GROWTH, growth_rows(found.growth))
    noise = [(str(n.step), n.quantity, f"{n.change:.2g}", f"{n.repeats:.2g}") for n in found.noise]
    print_table(console, "B against repeats of A", ("step", "quantity", "B", "repeats"), noise)


def _tensors(blame: Blame) -> str:
    several = len({quantity for _, quantity in blame.tensors}) > 1
    names = [f"{quantity} of {name}" if several else name for name, quantity in blame.tensors]
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return f"step {blame.step}: {len(names)} differ: {', '.join(names[:MOST])}{more}"


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """Prints a table; nothing where it has no rows."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(escape, row))
    if table.row_count:
        console.print(table, highlight=False)


GROWTH = ("quantity", "parts at step", "differ then", "at the last", "relative norm", "largest ulp")


def growth_rows(growth: Sequence[Growth]) -> list[tuple[str, ...]]:
    """A row for each quantity that differs: when, how many, and how far apart."""
    rows = []
    for quantity in dict.fromkeys(each.quantity for each in growth):
        apart = [each for each in growth if each.quantity == quantity and each.differ]
        if apart:
            first, last = apart[0], apart[-1]
            counts = (f"{each.differ} of {each.of}" for each in (first, last))
            far = (f"{_number(first.relative)} to {_number(last.relative)}", _number(last.ulp))
            rows.append((quantity, str(first.step), *counts, *far))
    return rows


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.2g}" if isinstance(value, float) else str(value)
