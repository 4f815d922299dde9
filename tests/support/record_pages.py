"""Records of docs/benchmarks, and the tables that pages show of them."""

import importlib
import json
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "docs" / "benchmarks"
PAGE = "docs/benchmarks/README.md"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def read(name):
    """A record by its file's name."""
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def tables_of(page, heading):
    """The rows' cells of each table that begins with this heading."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    tables = [part.split("\n\n")[0].splitlines()[2:] for part in text.split(f"\n{heading}")[1:]]
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in t] for t in tables]


def rows_of(page, heading):
    """The cells of the rows of the first of them."""
    return tables_of(page, heading)[0]


def assert_says(row, *values):
    """Fails unless the numbers of the row's cells are these, rounded to as many places."""
    numbers = [number for cell in row for number in NUMBER.findall(cell)]
    assert len(numbers) == len(values), row
    for number, value in zip(numbers, values, strict=True):
        places = len(number.partition(".")[2])
        assert f"{value:,.{places}f}" == f"{float(number.replace(',', '')):,.{places}f}", row


def tool(name, monkeypatch):
    """A module of tools/."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    return importlib.import_module(name)
