"""The source reads as tools/house.py counts it: figures that are as wanted stay so, others fall."""

import shutil
from pathlib import Path

import pytest
from modules import loaded

ROOT = Path(__file__).resolve().parents[1]
TODAY = {
    "lines of code of the library": 23_050,
    "lines of the commands": 11_200,
    # the extension in C may be there, or be built meanwhile
    "functions entered by three steps of FusedAdam": 340,
}
"""What is allowed of figures that are not as wanted yet, or differ a little between machines."""


@pytest.fixture(scope="module")
def house():
    return loaded("tools/house.py")


def test_the_figures_are_as_wanted_or_no_worse_than_today(house):
    worse = []
    for figure in house.figures(ROOT):
        bound = TODAY.get(figure.name, figure.wanted)
        is_worse = figure.value < bound if figure.at_least else figure.value > bound
        worse += [figure] * is_worse
    assert worse == []


@pytest.mark.slow
def test_a_worse_source_has_worse_figures(house, tmp_path):
    """A pronoun, a second class of a name, a helper with one use, an optimizer in a recording."""
    for name in (*house.FOLDERS, "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.json"))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    before = {figure.name: figure.value for figure in house.figures(tmp_path)}
    lines = [
        "import megaopt.step.stepper\n\n\n",
        "class Owned:\n    pass\n\n\n",
        "def used_here_alone(own):\n    return own\n\n\n",
        "found = used_here_alone(1)\n",
    ]
    with (tmp_path / "megaopt/recording/files.py").open("a") as file:
        file.writelines(lines)
    after = {figure.name: figure.value for figure in house.figures(tmp_path)}
    changed = {name for name in before if after[name] != before[name]}
    assert {
        "class names in several files",
        "short functions with one use",
        "files of recording that import the optimizer",
        "lines of recording",
    } <= changed
