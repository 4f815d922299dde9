"""The built wheel holds exactly the tree's modules, and nothing beside `megaopt`."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
from modules import loaded

import megaopt
from megaopt.integration.megatron import SUPPORTED
from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.contracts import CONTRACTS
from megaopt.kernels.float8 import RECIPES
from megaopt.kernels.galore.products import PRECISIONS
from megaopt.lab import cli
from megaopt.lab.toml_tables import tomllib
from megaopt.options import choices

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return loaded("tools/check_package.py")


@pytest.fixture(scope="module")
def built(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if not tool.builds_offline():
        pytest.skip("needs setuptools >= 77 here: building would download it")
    return tool.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(built: tuple[Path, Path]) -> Path:
    return built[1]


def test_wheel_holds_the_tree(tool: ModuleType, wheel: Path) -> None:
    expected = tool.modules_of_tree()
    assert {"megaopt/__init__.py", "megaopt/kernels/__init__.py"} <= expected
    assert "megaopt/lab/bench/__init__.py" in expected
    tool.compare(wheel, expected)


def test_wheel_holds_the_golden_record(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = archive.read("megaopt/lab/golden/record.json")
    assert found == (ROOT / "megaopt/lab/golden/record.json").read_bytes()


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


EACH_NAME = """
import os, sys
import torch.distributed.tensor, torch.optim, triton.language  # not megaopt's, and slow
import megaopt

for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            eval(name)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


@pytest.mark.slow
def test_every_name_of_the_api_page_is_there_after_import_megaopt() -> None:
    """In a process each: what one name imports would bring others along."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert {
        "megaopt.checkpoint",
        *(f"megaopt.{name}" for name in megaopt.__all__ if name[0] != "_"),
    } == set(names)
    subprocess.run([sys.executable, "-W", "ignore", "-c", EACH_NAME, *names], cwd=ROOT, check=True)


def requirements() -> dict[str, list[str]]:
    """What is installed by extra, "" for all, as pyproject.toml has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def package_of(requirement: str) -> str:
    name = re.split(r"[^\w-]", requirement)[0].replace("-", "_")
    return {"megatron_core": "megatron"}.get(name, name)


def test_what_is_imported_is_declared() -> None:
    """Of the commands in extra cli; whatever else an integration imports is what it integrates."""
    declared = {extra: {package_of(each) for each in of} for extra, of in requirements().items()}
    missing = set()
    for path in [*ROOT.glob("megaopt/**/*.py"), *ROOT.glob("kernels/**/*.py")]:
        allowed = declared[""] | declared["record"] | {"megaopt"}
        if path.is_relative_to(ROOT / "megaopt/lab"):
            allowed |= declared["cli"] | declared["megatron"] | {"pydantic_core", "mpl_toolkits"}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
            missing |= {(path.name, package) for package in packages - allowed}
    # imported where these run already
    assert missing == {
        ("plugin.py", "pytest"), ("samples.py", "bitsandbytes"), ("measure.py", "transformers"),
    }  # fmt: skip


def test_the_commands_ask_for_what_their_extra_has() -> None:
    assert {package_of(each) for each in requirements()["cli"]} == {*cli.PACKAGES, "tomli"}


def test_the_extra_of_megatron_has_the_releases_that_are_supported() -> None:
    pinned = [each for each in requirements()["megatron"] if each.startswith("megatron-core")]
    assert [re.split("==|;", each)[1].strip() for each in pinned] == [*SUPPORTED]
    # megatron-core's processes that write checkpoints end without it
    assert "psutil" in requirements()["megatron"]


@pytest.mark.parametrize("name", ["kernels", "integration"])
def test_folders_are_not_importable_by_their_own_name(tmp_path: Path, name: str) -> None:
    # elsewhere than in the tree, as a user would be: `kernels` would be a second module object
    code = (
        f"import importlib.util as u; print(u.find_spec({name!r}), u.find_spec('megaopt.{name}'))"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=True).stdout
    assert found.startswith("None ModuleSpec(")


def test_data_is_in_the_wheel_and_the_rest_in_the_sdist(
    tool: ModuleType, built: tuple[Path, Path]
) -> None:
    sdist, wheel = built
    tool.compare_data(wheel, sdist)
    assert {"megaopt/py.typed", "megaopt/configs/gpt_tiny.toml"} <= tool.data_of_tree()


@pytest.mark.parametrize("name", ["megaopt/py.typed", "megaopt/configs/gpt_tiny.toml"])
def test_a_file_too_few_is_seen(
    tool: ModuleType, built: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    sdist, wheel = built
    with pytest.raises(tool.PackageError, match=f"not in the wheel: .*{name}"):
        tool.compare_data(changed(wheel, tmp_path, leave_out=name), sdist)


def test_a_relative_link_is_seen(
    tool: ModuleType, built: tuple[Path, Path], tmp_path: Path
) -> None:
    sdist, wheel = built
    other = changed(wheel, tmp_path, appended="[design](docs/design.md)")
    with pytest.raises(tool.PackageError, match=r"links \['\]\(docs/design\.md\)'\]"):
        tool.compare_data(other, sdist)


def changed(wheel: Path, folder: Path, leave_out: str = "", appended: str = "") -> Path:
    """A copy of the wheel without a file, or with a line more in its metadata."""
    other = folder / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(other, "w") as target:
        for name in source.namelist():
            more = appended if name.endswith("/METADATA") else ""
            if name != leave_out:
                target.writestr(name, source.read(name) + more.encode())
    return other


SOURCES = ("megaopt", "kernels", "integration", "examples", "docs/how-to", "tools", "tests")


def test_sources_are_those_of_the_oldest_python() -> None:
    """Its syntax; `make types` asks the same of what is imported, by python_version = "3.10"."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.10"' in pyproject
    assert 'python_version = "3.10"' in pyproject
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 400
    for path in files:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))
    with pytest.raises(SyntaxError):
        ast.parse("try: pass\nexcept* ValueError: pass", feature_version=(3, 10))


def test_one_version_everywhere() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{megaopt.__version__}"' in pyproject
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {megaopt.__version__}" in citation


@pytest.mark.slow
def test_a_users_script_passes_strict_type_checking(
    tool: ModuleType, wheel: Path, tmp_path: Path
) -> None:
    """Strict also wants every `type: ignore` of the script to be needed: choices are closed."""
    pytest.importorskip("mypy")
    python = tool.install(wheel, tmp_path / "venv")
    script = ROOT / "tests" / "support" / "users_script.py"
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    command += ["--cache-dir", str(tmp_path / "cache"), str(script)]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True)
    assert done.stdout.startswith("Success"), done.stdout + done.stderr


def test_what_a_type_checker_allows_is_what_the_optimizers_allow() -> None:
    allowed = {
        choices.Contract: tuple(CONTRACTS),
        choices.Backend: ("auto", *BACKENDS),
        choices.Recipe: tuple(RECIPES),
        choices.Precision: PRECISIONS,
    }
    for kind, names in allowed.items():
        assert sorted(get_args(kind)) == sorted(names)
