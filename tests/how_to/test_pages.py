"""The code of pages that have no script beside them runs as it is printed."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {
    "../README.md": "",
    "index.md": "",
    "audit.md": "",
    "how-to/formats.md": "",
    "how-to/clipping.md": "",
    "how-to/float8.md": "",
    "how-to/muon.md": "",
    "how-to/weights.md": "## Three ways to refresh a master",
}
"""The heading from which on, up to the next one, a page's code stands alone."""


def blocks(page, heading=""):
    text = (DOCS / page).read_text(encoding="utf-8")
    if heading:
        text = text.split(f"{heading}\n")[1].split("\n## ")[0]
    return BLOCK.findall(text)


def run(page, heading=""):
    """All of a page's code, in order; what it leaves behind."""
    found = {}
    for number, code in enumerate(blocks(page, heading)):
        exec(compile(code, f"{page}, block {number}", "exec"), found)
    return found


@pytest.mark.filterwarnings("ignore:.*was written outside the optimizer:UserWarning")
@pytest.mark.parametrize(("page", "heading"), PAGES.items(), ids=PAGES)
def test_the_code_of_a_page_runs(page, heading, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert blocks(page, heading)
    run(page, heading)


def test_what_the_pages_say_is_printed(capsys):
    run("how-to/formats.md")
    assert capsys.readouterr().out.split() == ["7", "None", "3.06", "5.015625"]
    run("how-to/float8.md")
    line = "(0): Float8Linear(in_features=256, out_features=256, bias=True, fp8 weight="
    assert line in capsys.readouterr().out
