"""Records of docs/benchmarks, and the tables that pages show of them."""

import importlib
import json
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "docs" / "benchmarks"
PAGE = "docs/benchmarks/README.md"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def read(name):
    """A record by its file's name."""
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def text_of(page):
    """A page's text, wherever its lines break."""
    return " ".join((REPOSITORY / page).read_text(encoding="utf-8").split())


def rows_of(page, heading):
    """The cells of the rows of the table that begins with this heading."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    table = text.split(f"\n{heading}")[1].split("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def assert_says(row, *values):
    """Fails unless the numbers of the row's cells are these, rounded to as many places."""
    numbers = [number for cell in row for number in NUMBER.findall(cell)]
    assert len(numbers) == len(values), row
    for number, value in zip(numbers, values, strict=True):
        places = len(number.partition(".")[2])
        assert f"{value:,.{places}f}" == f"{float(number.replace(',', '')):,.{places}f}", row


def needs(*names):
    """Skips until the records are there."""
    missing = [name for name in names if not (FOLDER / name).exists()]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def tool(name, monkeypatch):
    """A module of tools/."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    return importlib.import_module(name)
