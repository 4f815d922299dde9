"""Builds the sdist and the wheel, compares both with the tree, installs the wheel and takes a step.

    python tools/check_package.py

Three folders become one package (setup.py): a module that the mapping misses, or a folder that
leaks onto site-packages under its own name, shows only in a built wheel. The wheel is pure Python,
one for all versions: every python3.N on PATH compiles it and shows its version. Exit status 0 when
all is well, 1 with the reason otherwise.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = {
    "megaopt": "megaopt",
    "kernels": "megaopt/kernels",
    "integration": "megaopt/integration",
}
IN_SDIST = ("tests", "tests/support", "configs", "docs", "docs/how-to", "examples", "tools")
"""Folders whose files, those directly in them, an sdist has too."""
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
"""Those that pyproject.toml names."""
RELATIVE_LINK = re.compile(r"\]\((?!https?:|#)[^)]*\)")
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "out", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)

INSTALLED_STEP = """
import importlib.util
import sys

import torch

for name in ("kernels", "integration", "tests", "configs", "examples", "tools"):
    found = importlib.util.find_spec(name)
    if found is not None and found.origin and found.origin.startswith(sys.prefix):
        raise SystemExit(f"top-level {name} came with the wheel: {found.origin}")

import megaopt

if not megaopt.__file__.startswith(sys.prefix):
    raise SystemExit(f"megaopt came from {megaopt.__file__}, not from the wheel")

weight = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
weight.grad = torch.ones_like(weight)
optimizer = megaopt.FusedAdam([weight], lr=0.1, dtype=torch.float32, backend="reference")
optimizer.step()
if not bool((weight < 1).all()):
    raise SystemExit(f"the step did not move the weights: {weight}")
"""

TWO_STEPS = ["--steps", "2", "--variant", "reference"]
VERIFIED = "ieee/adamw/bf16-weight/fp32-master/fp32-fp32"

# None in sys.modules makes `import triton` fail as it does where Triton is not installed
WITHOUT_TRITON = (
    """
import sys

sys.modules["triton"] = None
"""
    + INSTALLED_STEP
    + """
try:
    other = torch.nn.Parameter(torch.ones(5))
    other.grad = torch.ones_like(other)
    megaopt.FusedAdam([other], backend="triton").step()
except (ValueError, RuntimeError, ImportError) as error:
    if "triton" not in str(error).lower():
        raise SystemExit(f"the message does not say why Triton is out: {error}")
else:
    raise SystemExit("backend='triton' worked without Triton")
"""
)


class PackageError(Exception):
    """The package is not what the tree says it is."""


def build(out: Path) -> tuple[Path, Path]:
    """Build the sdist of a copy of the tree, and the wheel from that sdist, into `out`.

    A copy, since setuptools puts into a wheel whatever an earlier build left in build/lib.

    Returns:
        The sdist and the wheel.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        shutil.copytree(REPOSITORY, tree, ignore=NOT_SOURCE)
        isolation = ["--no-isolation"] if builds_offline() else []
        command = [sys.executable, "-m", "build", "--outdir", str(out), *isolation, str(tree)]
        run(command, cwd=Path(scratch))
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


def builds_offline() -> bool:
    """Return whether setuptools is new enough here, so that a build has nothing to download."""
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


def modules_of_tree(root: Path = REPOSITORY) -> set[str]:
    """Return the .py files of the three folders, by the place where a wheel must have them."""
    return {
        (Path(place) / file.relative_to(root / folder)).as_posix()
        for folder, place in PACKAGES.items()
        for file in (root / folder).rglob("*.py")
        if "__pycache__" not in file.parts
    }


def data_of_tree(root: Path = REPOSITORY) -> set[str]:
    """Return the other files that a wheel must have: configs, the golden record, sources, types."""
    configs = {f"megaopt/configs/{path.name}" for path in (root / "configs").glob("*.toml")}
    records = ("golden/record.json", "regression/losses.json")
    others = ("kernels/native.cpp", "kernels/products/product.h", "py.typed")
    data = [*(f"lab/{name}" for name in records), *others]
    return configs | {f"megaopt/{name}" for name in data}


def compare(wheel: Path, expected: set[str]) -> None:
    """Compare the wheel's .py files with `expected`, both ways, and its top-level names.

    Raises:
        PackageError: A module is missing or too many, or the wheel has another top-level folder
            than megaopt and its metadata.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    if leaked := sorted(top for top in tops if top != "megaopt" and not top.endswith(".dist-info")):
        raise PackageError(f"the wheel has top-level names beside megaopt: {leaked}")
    found = {name for name in names if name.endswith(".py")}
    if missing := sorted(expected - found):
        raise PackageError(f"in the tree, but not in the wheel: {missing}")
    if surplus := sorted(found - expected):
        raise PackageError(f"in the wheel, but not in the tree: {surplus}")


def compare_data(wheel: Path, sdist: Path, root: Path = REPOSITORY) -> None:
    """Compare what is no module: the wheel's other files, the sdist's, and the page of an index.

    Raises:
        PackageError: A file is missing, a link of the page is relative, or the wheel is not one for
            every version of Python.
    """
    if not wheel.name.endswith("-py3-none-any.whl"):
        raise PackageError(f"the wheel is not for every Python 3: {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        page = archive.read(metadata).decode()
    if missing := sorted(data_of_tree(root) - names):
        raise PackageError(f"in the tree, but not in the wheel: {missing}")
    if links := RELATIVE_LINK.findall(page):
        raise PackageError(f"an index cannot follow README's links {links[:5]}")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    folders = [folder for folder in IN_SDIST if (root / folder).is_dir()]
    files = {path for folder in folders for path in (root / folder).iterdir() if path.is_file()}
    if missing := sorted({path.relative_to(root).as_posix() for path in files} - packed):
        raise PackageError(f"in the tree, but not in the sdist: {missing[:10]}")


def compile_with(python: str, wheel: Path, folder: Path) -> None:
    """Compile the wheel's modules with another interpreter, and ask the package for its version."""
    place = folder / f"python{python}"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    command = [f"python{python}", "-W", "error", "-m"]
    run([*command, "compileall", "-q", "megaopt"], cwd=place)
    found = run([*command, "megaopt", "--version"], cwd=place).split()
    if found[:1] != ["megaopt"]:
        raise PackageError(f"python{python} -m megaopt --version printed {found}")


def works(python: str) -> bool:
    """Whether python3.N is there and runs, which a version manager's stand-in may not."""
    code = f"import sys; assert '%d.%d' % sys.version_info[:2] == {python!r}"
    command = [f"python{python}", "-c", code]
    return bool(shutil.which(command[0])) and subprocess.run(command).returncode == 0


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel into a fresh virtual environment that sees this one's other packages.

    Returns:
        The new environment's interpreter.
    """
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], cwd=folder)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run([str(python), "-I", "-c", where], cwd=folder).strip())
    # .pth files of a folder named in a .pth file are not read: an editable install stays unseen
    (site_packages / "outer.pth").write_text("\n".join(outer_packages()), encoding="utf-8")
    return python


def outer_packages() -> list[str]:
    """Return the folders from which this environment imports torch and the rest."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise PackageError("torch is not installed here: the installed wheel cannot take a step")
    ends = ("site-packages", "dist-packages")
    folders = [str(Path(torch.origin).parents[1]), *(p for p in sys.path if p.endswith(ends))]
    return list(dict.fromkeys(folders))


def run(command: list[str], cwd: Path) -> str:
    """Run a command away from the tree and return its output.

    Raises:
        PackageError: It ends with another status than 0; the message has its output.
    """
    # PYTHONPATH could put the tree back in front of the wheel
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise PackageError(f"{' '.join(command[:3])} ... failed:\n{done.stdout[-4000:]}")
    return done.stdout


def main() -> int:
    """Run every check and say which passed."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            sdist, wheel = build(folder / "dist")
            print(f"built {sdist.name} and {wheel.name}")
            expected = modules_of_tree()
            compare(wheel, expected)
            print(f"the wheel has the tree's {len(expected)} modules and no other")
            compare_data(wheel, sdist)
            print("configs, record and types are in the wheel; tests, configs, docs in the sdist")
            found = [version for version in PYTHONS if works(version)]
            for version in found:
                compile_with(version, wheel, folder)
            print(f"one wheel for all Pythons; compiled by {', '.join(found) or 'none but this'}")
            python = install(wheel, folder / "venv")
            run([str(python), "-I", "-c", INSTALLED_STEP], cwd=folder)
            print("the installed wheel takes a step")
            verify = ["-m", "megaopt", "verify", "--backends", "reference", "--only", VERIFIED]
            run([str(python), "-I", *verify], cwd=folder)
            print(f"the installed wheel has the bits of the golden record for {VERIFIED}")
            run([str(python), "-I", "-m", "megaopt", "train", "gpt_tiny", *TWO_STEPS], cwd=folder)
            print("the installed wheel trains two steps of its config gpt_tiny in an empty folder")
            run([str(python), "-I", "-c", WITHOUT_TRITON], cwd=folder)
            print(
                "without Triton the reference backend takes a step, backend='triton' says why not"
            )
    except PackageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
