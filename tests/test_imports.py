"""Imports go one way, and the drawing in docs/design.md is that of the source."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from modules import loaded

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "draw_imports.py"

IMPORTED = """
import importlib, sys
import megaopt

for name in megaopt.__all__:
    getattr(megaopt, name)
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert not error.name.startswith("megaopt"), error
print([name for name in sys.modules if name.startswith("megaopt.lab")])
"""


@pytest.fixture(scope="module")
def tool():
    return loaded("tools/draw_imports.py")


@pytest.fixture
def copy(tool, tmp_path):
    """A copy of the source, and of the page with the drawing."""
    for folder in tool.FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / tool.PAGE).parent.mkdir()
    shutil.copy(ROOT / tool.PAGE, tmp_path / tool.PAGE)
    return tmp_path


def test_the_library_does_not_import_the_commands(tool):
    names = [name for name in tool.modules_of(ROOT) if tool.part_of(name) != "lab"]
    assert {"megaopt.float8", "megaopt.integration.apex", "megaopt.kernels.step"} <= set(names)
    command = [sys.executable, "-W", "ignore", "-c", IMPORTED, *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_arrows_and_drawing_are_right():
    done = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


SLOW, TYPES = pytest.mark.slow, "if TYPE_CHECKING:\n    import "
LATE = "\n\ndef late(param):\n    "
# by what is found: lines at the ends of files, which may be new ones
ADDED = {
    "against the order: megaopt.adam imports megaopt.lab.exits": {
        "megaopt/adam.py": f"{LATE}from megaopt.lab import exits\n"
    },
    "against the order: megaopt.kernels.calling imports megaopt.saving.parse": {
        "kernels/calling.py": "\nimport megaopt.saving.parse\n"
    },
    "against the order: megaopt.recording.sink imports megaopt.state.owned": {
        "megaopt/recording/sink.py": f"{LATE}import megaopt.state.owned\n"
    },
    "against the order: megaopt.recording.late imports megaopt.adam": {
        "megaopt/recording/late.py": "from megaopt.adam import FusedAdam\n"
    },
    "against the order: megaopt.lion imports megaopt.recording.digest": {
        "megaopt/lion.py": f"{LATE}from megaopt.recording.digest import digest\n"
    },
    "circle of folders": {
        "megaopt/options/checks.py": "\nimport megaopt.saving.formats\n",
        "megaopt/saving/formats.py": "import megaopt.options.others\n",
        "megaopt.options.others.py": "",
    },
    "asks for a parameter's kind: megaopt.saving.parse, line": {
        "megaopt/saving/parse.py": f"{LATE}return isinstance(param, Float8Shard)\n"
    },
    "asks for a parameter's kind: megaopt.saving.checkpoint, line": {
        "megaopt/saving/checkpoint.py": f"{LATE}return is_dtensor(param)\n"
    },
}


def add(copy, files):
    for name, lines in files.items():
        with (copy / name).open("a") as file:
            file.write(lines)


def test_faults_are_found(tool, copy):
    for files in ADDED.values():
        add(copy, files)
    faults = tool.faults(copy)
    for found in ADDED:
        assert any(found in fault for fault in faults), (found, faults)


def test_a_circle_is_found_and_types_make_none(tool, copy):
    two = "from typing import TYPE_CHECKING\n\nfrom megaopt import typed\n"
    files = {
        "megaopt/one.py": "from megaopt.two import x\n",
        "megaopt/two.py": f"{two}{LATE}import megaopt.one\n",
        "megaopt/typed.py": "if TYPE_CHECKING:\n    from megaopt.two import y\n",
    }
    add(copy, files)
    assert tool.faults(copy) == ["circle: megaopt.one, megaopt.two"]


@pytest.mark.parametrize(
    ("place", "line"),
    [
        pytest.param("chunks/table.py", "import megaopt.kernels.step.launch", marks=SLOW),
        ("chunks/table.py", "if TYPE_CHECKING:\n    import megaopt.kernels.step.launch"),
        ("rules/lanes.py", "def f():\n    from megaopt.kernels.chunks.rows import GRAD"),
        pytest.param("optional_triton.py", f"{TYPES}megaopt.kernels.backends", marks=SLOW),
        pytest.param("quantizers/scale.py", f"{TYPES}megaopt.kernels.float8", marks=SLOW),
    ],
    ids=["folders", "types", "function", "table", "module"],
)
def test_a_circle_of_the_kernels_folders_is_found(tool, copy, place, line):
    with (copy / "kernels" / place).open("a") as file:
        file.write(f"\n\n{line}\n")
    own = "megaopt.kernels." + place.removesuffix(".py").replace("/", ".")
    (*_, fault) = tool.faults(copy)
    assert fault.startswith("circle of folders: ")
    assert own in fault or own.rpartition(".")[0] in fault


def test_another_drawing_is_found(tool, copy):
    page = copy / tool.PAGE
    text = page.read_text()
    arrow = "    megaopt --> megaopt.saving\n"
    assert arrow in text
    page.write_text(text.replace(arrow, ""))
    (fault,) = tool.faults(copy)
    assert "has another drawing" in fault
    page.write_text(text.replace(tool.END, ""))
    (fault,) = tool.faults(copy)
    assert "must have the lines" in fault
