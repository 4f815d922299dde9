"""Imports go one way, and the drawing in docs/design.md is that of the source."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
print([name for name in sys.modules if name.startswith("megaopt.commands")])
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("draw_imports", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tool, tmp_path):
    """A copy of the source, and of the page with the drawing."""
    for folder in tool.FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / tool.PAGE).parent.mkdir()
    shutil.copy(ROOT / tool.PAGE, tmp_path / tool.PAGE)
    return tmp_path


def test_the_library_does_not_import_the_commands(tool):
    names = [name for name in tool.modules_of(ROOT) if tool.part_of(name) != "commands"]
    assert {"megaopt.float8", "megaopt.integration.apex", "megaopt.kernels.step"} <= set(names)
    command = [sys.executable, "-W", "ignore", "-c", IMPORTED, *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_arrows_and_drawing_are_right():
    done = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_arrow_to_the_commands_is_found(tool, copy):
    with (copy / "megaopt/adam.py").open("a") as file:
        file.write("\n\ndef late():\n    from megaopt.commands import exits\n")
    found = tool.faults(copy)
    assert "against the order: megaopt.adam imports megaopt.commands.exits" in found


def test_an_arrow_from_the_kernels_is_found(tool, copy):
    with (copy / "kernels/calling.py").open("a") as file:
        file.write("\nimport megaopt.saving.parse\n")
    assert "against the order: megaopt.kernels.calling imports megaopt.saving.parse" in tool.faults(
        copy
    )


def test_a_circle_is_found_and_types_make_none(tool, copy):
    for name in ("one", "two", "typed"):
        (copy / f"megaopt/{name}.py").write_text("")
    (copy / "megaopt/one.py").write_text("from megaopt.two import x\n")
    (copy / "megaopt/two.py").write_text(
        "from typing import TYPE_CHECKING\n\nfrom megaopt import typed\n\n"
        "def f():\n    import megaopt.one\n"
    )
    (copy / "megaopt/typed.py").write_text("if TYPE_CHECKING:\n    from megaopt.two import y\n")
    assert tool.faults(copy) == ["circle: megaopt.one, megaopt.two"]


def test_a_circle_of_folders_is_found(tool, copy):
    with (copy / "megaopt/options/checks.py").open("a") as file:
        file.write("\nimport megaopt.saving.formats\n")
    (copy / "megaopt/saving/formats.py").write_text("import megaopt.options.names\n")
    (copy / "megaopt/options/names.py").write_text("")
    assert any("circle of folders" in fault for fault in tool.faults(copy))


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("chunks/table.py", "import megaopt.kernels.step.launch"),
        ("chunks/table.py", "if TYPE_CHECKING:\n    import megaopt.kernels.step.launch"),
        ("rules/lanes.py", "def f():\n    from megaopt.kernels.chunks.rows import GRAD"),
        ("optional_triton.py", "if TYPE_CHECKING:\n    import megaopt.kernels.backends"),
        ("quantizers/scale.py", "if TYPE_CHECKING:\n    import megaopt.kernels.float8"),
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


@pytest.mark.parametrize(
    "line", ["isinstance(param, Float8Shard)", "is_dtensor(param)"], ids=["isinstance", "function"]
)
def test_a_question_for_a_parameters_kind_is_found(tool, copy, line):
    with (copy / "megaopt/saving/parse.py").open("a") as file:
        file.write(f"\n\ndef f(param):\n    return {line}\n")
    (fault,) = tool.faults(copy)
    assert fault.startswith("asks for a parameter's kind: megaopt.saving.parse, line")
    assert fault.endswith(line)
