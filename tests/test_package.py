"""The built wheel holds exactly the tree's modules, and nothing beside `megaopt`."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_package", ROOT / "tools/check_package.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not tool.builds_offline():
        pytest.skip("needs setuptools >= 77 here: building would download it")
    return tool.build(tmp_path_factory.mktemp("dist"))[1]


def test_wheel_holds_the_tree(tool: ModuleType, wheel: Path) -> None:
    expected = tool.modules_of_tree()
    assert {"megaopt/__init__.py", "megaopt/kernels/__init__.py"} <= expected
    assert "megaopt/commands/bench/__init__.py" in expected
    tool.compare(wheel, expected)


def test_wheel_holds_the_golden_record(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = archive.read("megaopt/commands/golden/record.json")
    assert found == (ROOT / "megaopt/commands/golden/record.json").read_bytes()


def test_comparison_sees_a_module_too_few_and_too_many(tool: ModuleType, wheel: Path) -> None:
    expected = tool.modules_of_tree()
    with pytest.raises(tool.PackageError, match=r"not in the wheel: \['megaopt/new\.py'\]"):
        tool.compare(wheel, expected | {"megaopt/new.py"})
    with pytest.raises(tool.PackageError, match=r"not in the tree: \['megaopt/__init__\.py'\]"):
        tool.compare(wheel, expected - {"megaopt/__init__.py"})


@pytest.mark.parametrize("leak", ["kernels", "integration", "tests"])
def test_comparison_sees_a_leaked_folder(tool: ModuleType, tmp_path: Path, leak: str) -> None:
    wheel = tmp_path / "leaky.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("megaopt/__init__.py", "")
        archive.writestr(f"{leak}/__init__.py", "")
        archive.writestr("megaopt-0.1.0.dist-info/METADATA", "")
    with pytest.raises(tool.PackageError, match=rf"beside megaopt: \['{leak}'\]"):
        tool.compare(wheel, {"megaopt/__init__.py"})


@pytest.mark.parametrize("name", ["kernels", "integration"])
def test_folders_are_not_importable_by_their_own_name(tmp_path: Path, name: str) -> None:
    # elsewhere than in the tree, as a user would be: `kernels` would be a second module object
    code = (
        f"import importlib.util as u; print(u.find_spec({name!r}), u.find_spec('megaopt.{name}'))"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=True).stdout
    assert found.startswith("None ModuleSpec(")
