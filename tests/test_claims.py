"""What the pages name is there: tests, files, records, links; a cell without a proof says so."""

import ast
import re
from pathlib import Path

import pytest
from record_pages import assert_says, rows_of

from megaopt.kernels.formats import MASTERS, MOMENTS

INNER = ("none", "kahan_float16", "kahan_float16_stochastic")
"""Formats that no user asks for by name."""
REPOSITORY = Path(__file__).parents[1]
NUMBERS = REPOSITORY / "docs" / "numbers.md"
BENCHMARKS = REPOSITORY / "docs" / "benchmarks"
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "SECURITY.md",
    REPOSITORY / "examples" / "README.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
FOLDERS = "configs|docs|examples|integration|kernels|megaopt|tests|tools"
FILE = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*[\w*]")
TEST = re.compile(r"(?P<file>tests/[\w./-]+\.py)(?:::(?P<name>\w+))?|(?<!\w)::(?P<alone>\w+)")
NAMED_BY_FILE = re.compile(r"\[[^]\s]*\.md\]\(")
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)")
RECORD = re.compile(r"(?<![\w/])[\w.-]+\.(?:json|png)\b")
CODE = re.compile(r"^```.*?^```|^    .*?$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
POWER = re.compile(r"(?<=[\w)\]|])\*\*(?=[-(\w])")
"""Two of these in a paragraph would make what is between them bold."""
WITHOUT_A_TEST = ("unverified", "the same", "as above", "as the step", "elementwise", "no:")


def functions(path):
    """The names of a file's functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def missing_tests(text):
    """Tests that are named and do not exist; `::name` is in the file named last before it."""
    missing, file = [], None
    for found in TEST.finditer(text):
        file = found["file"] or file
        name = found["name"] or found["alone"]
        if name is None:
            continue
        path = None if file is None else REPOSITORY / file
        if path is None or not path.is_file() or name not in functions(path):
            missing.append(f"{file}::{name}")
    return missing


def missing_files(text):
    """Files and folders of the repository that are named and do not exist."""
    return [name for name in FILE.findall(text) if not list(REPOSITORY.glob(name))]


def headings(path):
    """The anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def broken_links(text, page):
    """Relative links that lead nowhere."""
    broken = []
    for place, anchor in LINK.findall(text):
        path = page.parent / place if place else page
        if not path.exists() or (anchor and anchor not in headings(path)):
            broken.append(f"{place}#{anchor}" if anchor else place)
    return broken


def missing_records(text):
    """Records that a page of records names without a folder, and that are not beside it."""
    return [name for name in RECORD.findall(text) if not (BENCHMARKS / name).is_file()]


def cells_without_a_proof(text):
    """Cells of the guarantee table that name no test and no command, and do not say so."""
    table = text.split("## What is guaranteed")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [
        f"{row[0]}: {cell}"
        for row in rows[1:]
        for cell in row[1:]
        if "::test_" not in cell and "tests/" not in cell and "`megaopt " not in cell
        if not cell.startswith(WITHOUT_A_TEST) and not cell.endswith(" only")
    ]


def powers(text):
    """The powers that are written with ** outside of code."""
    return POWER.findall(CODE.sub("", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_no_power_is_printed_as_bold_text(page):
    assert powers(page.read_text(encoding="utf-8")) == []


def test_powers_are_found():
    text = "2**-24 of it, `2**3`, **bold** and (x)**n\n\n    2**5\n\n```\n2**7\n```\n**bold**: 1"
    assert len(powers(text)) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_what_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    assert missing_tests(text) == []
    assert missing_files(text) == []
    assert broken_links(text, page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_link_to_a_page_has_its_title(page):
    assert NAMED_BY_FILE.findall(page.read_text(encoding="utf-8")) == []


def test_every_cell_of_the_guarantees_names_its_test_or_says_that_it_has_none():
    assert cells_without_a_proof(NUMBERS.read_text(encoding="utf-8")) == []


def test_the_page_of_records_names_those_that_are_there_and_no_other():
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert missing_records(text) == []
    records = {path.name for path in BENCHMARKS.glob("*.json")}
    assert records - set(RECORD.findall(text)) == set()


def test_the_table_of_formats_names_every_one_with_its_bytes():
    rows = rows_of("docs/api.md", "| name | bytes | of |")
    masters = {name: form for name, form in MASTERS.items() if name not in INNER}
    expected = {**masters, **MOMENTS}
    named = {name for name in expected if not name.endswith("_nearest")}
    assert {row[0] for row in rows} == named
    for name, stated, of in rows:
        form = expected[name]
        width = 0.5 if name.startswith("block32") else form.dtype.itemsize
        assert_says([stated], width + (1 / form.block if form.block else 0))
        assert ("masters" in of) == (name in masters)
        assert ("moments" in of or "exp_avg" in of) == (name in MOMENTS)


def test_what_does_not_exist_is_found():
    text = (
        "tests/test_claims.py::test_what_does_not_exist_is_found, ::test_nothing, "
        "tests/nowhere.py::test_nothing, kernels/step, kernels/nothing.py, configs/gpt_*.toml, "
        "[a](../README.md), [b](nothing.json), [c](numbers.md#contract-ieee), "
        "[d](numbers.md#contract-nothing), [e](https://example.org/nothing)"
    )
    assert missing_tests(text) == [
        "tests/test_claims.py::test_nothing",
        "tests/nowhere.py::test_nothing",
    ]
    assert missing_files(text) == ["tests/nowhere.py", "kernels/nothing.py"]
    assert broken_links(text, NUMBERS) == ["nothing.json", "numbers.md#contract-nothing"]
    assert missing_records("h200-bench.json, h200-nothing.json") == ["h200-nothing.json"]
    rows = ["| a | b |", "|---|---|", "| x | yes |", "| y | ::test_z |", "| z | a GPU only |"]
    table = "\n".join(["## What is guaranteed", "", *rows])
    assert cells_without_a_proof(table) == ["x: yes"]
