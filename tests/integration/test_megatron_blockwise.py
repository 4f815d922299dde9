"""How far Megatron's own "blockwise" Muon goes from whole matrices: the table of the page."""

import importlib.util
import re
from pathlib import Path

import pytest

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from blockwise import measure

PAGE = Path(__file__).parents[2] / "docs/how-to/megatron.md"
ROW = re.compile(r"^\| (\d+) x (\d+) \| (rows|columns) \| (alike|falling) \|(.*)\|$", re.MULTILINE)


def rows_of_the_page():
    text = PAGE.read_text(encoding="utf-8")
    return [
        (int(rows), int(columns), dim, kind, [float(each) for each in numbers.split("|")])
        for rows, columns, dim, kind, numbers in ROW.findall(text)
    ]


def test_the_page_says_how_far_blockwise_goes(pools):
    """To one of the last digit: processors sum products of 16 bits in other orders."""
    told = rows_of_the_page()
    assert len(told) == 8
    for rows, columns, dim, kind, numbers in told:
        (found,) = pools(1)(measure, rows, columns, 0 if dim == "rows" else 1, kind)
        assert found[0] == 0
        assert all(abs(a - b) < 0.015 for a, b in zip(found, numbers, strict=True)), found
