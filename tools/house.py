"""Prints how the source reads, in figures; exit status 1 where one is not as wanted.

    python tools/house.py

Names, repeated classes, functions with one use, lines, imports, and what a first step enters.
tests/test_house.py holds the figures.
"""

import ast
import os
import re
import subprocess
import sys
import tokenize
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("megaopt", "kernels", "integration")
PRONOUNS = {
    *("own", "found", "each", "others", "other", "kept", "given", "asked", "there", "made"),
    *("wanted", "known", "told", "said", "beside", "theirs", "ours"),
}
"""Pronouns and participles, which say nothing of what is there; tests/test_names.py allows none."""
OPTIMIZER = re.compile(r"megaopt\.(params|state|options|saving|step|optimizer)\b")
FIRST_WORDS = re.compile(
    r"(Of|By|As|None|Nothing|Where|In|What|Those|That|Which|How|Whether it|So) "
)

LOADED = """
import sys
import torch
import megaopt
param = torch.nn.Parameter(torch.randn(64, 32).bfloat16())
param.grad = torch.randn_like(param)
megaopt.FusedAdam([param], dtype=torch.float32).step()
files = {
    module.__file__ for name, module in list(sys.modules.items())
    if name.split(".")[0] == "megaopt" and (getattr(module, "__file__", None) or "").endswith(".py")
}
print(len(files), sum(open(file).read().count("\\n") for file in files))
"""
ENTERED = """
import sys
import torch
import megaopt

root, functions, classes = ROOT, set(), set()

def trace(frame, event, _):
    code = frame.f_code
    is_ours = code.co_filename.startswith(root) and ".venv" not in code.co_filename
    if event != "call" or not is_ours or code.co_name.startswith("<"):
        return
    name = getattr(code, "co_qualname", code.co_name)
    functions.add((code.co_filename, name))
    if "." in name:
        classes.add((code.co_filename, name.rsplit(".", 1)[0]))

params = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((64, 32), (32,))]
sys.setprofile(trace)
optimizer = megaopt.OPTIMIZER(params, lr=1e-3, dtype=torch.float32)
for _ in range(3):
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
sys.setprofile(None)
print(len(functions), len(classes))
"""


class Figure(NamedTuple):
    """A figure of the source."""

    name: str
    value: float
    wanted: float
    at_least: bool = False

    @property
    def is_good(self) -> bool:
        """Whether the figure is as wanted."""
        return self.value >= self.wanted if self.at_least else self.value <= self.wanted


def figures(root: Path = REPOSITORY) -> Iterator[Figure]:
    """Yields the figures of a copy of the repository."""
    texts = {
        path: path.read_text(encoding="utf-8")
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    yield from figures_of_names(texts, nodes)
    yield from figures_of_lines(texts, nodes)

    # files that recordings must not know, and what a step needs
    recording = [text for path, text in texts.items() if part_of(path) == "recording"]
    knows = sum(bool(OPTIMIZER.search(text)) for text in recording)
    yield Figure("files of recording that import the optimizer", knows, 0)
    files, lines = run(LOADED)
    yield Figure("files imported for a step of FusedAdam", files, 95)
    yield Figure("lines imported for a step of FusedAdam", lines, 15_000)
    for optimizer, functions, classes in (("FusedAdam", 330, 26), ("FusedMuon", 430, 34)):
        text = ENTERED.replace("ROOT", repr(str(root))).replace("OPTIMIZER", optimizer)
        entered = run(text)
        yield Figure(f"functions entered by three steps of {optimizer}", entered[0], functions)
        yield Figure(f"classes entered by three steps of {optimizer}", entered[1], classes)

    # tests and pages
    flat = len(list((root / "tests/megaopt").glob("*.py")))
    yield Figure("test files that lie flat in tests/megaopt", flat, 8)
    support = (path.read_text("utf-8") for path in (root / "tests/support").rglob("*.py"))
    yield Figure("lines of tests/support", sum(text.count("\n") for text in support), 8_000)
    for page, most in (("CHANGELOG", 22_000), ("CONTRIBUTING", 8_000), ("docs/design", 10_000)):
        yield Figure(f"bytes of {page}.md", len((root / f"{page}.md").read_bytes()), most)


def part_of(path: Path) -> str:
    """Names the part of the source that a file is of."""
    if "recording" in path.parts:
        return "recording"
    return "lab" if "lab" in path.parts else "library"


def figures_of_names(texts: dict[Path, str], nodes: list[tuple[Path, ast.AST]]) -> Iterator[Figure]:
    """Yields the figures of variables, classes, functions with one use, and docstrings."""
    bound = [node.id for _, node in nodes if is_stored(node)]
    bound += [node.arg for _, node in nodes if isinstance(node, ast.arg)]
    share = 100 * sum(name in PRONOUNS for name in bound) / len(bound)
    yield Figure("percent of names of variables that are pronouns", round(share, 1), 1)

    places = defaultdict(set)
    for path, node in nodes:
        is_public = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if is_public and "integration" not in path.parts:
            places[node.name].add(path)
    yield Figure("class names in several files", sum(len(p) > 1 for p in places.values()), 4)

    # a function whose name stands where it is defined and where it is used, and nowhere else
    words = Counter(word for text in texts.values() for word in re.findall(r"\w+", text))
    functions = [node for _, node in nodes if isinstance(node, ast.FunctionDef)]
    once = [
        node
        for node in functions
        if words[node.name] == 2
        and node.end_lineno - node.lineno < 25
        and not node.decorator_list
        and not node.name.startswith("__")
    ]
    yield Figure("short functions with one use", len(once), 150)
    lines = sum(text.count("\n") for text in texts.values())
    yield Figure("lines of a file for each function", round(lines / len(functions), 1), 19, True)
    documented = (ast.FunctionDef, ast.ClassDef, ast.Module)
    docs = [ast.get_docstring(node) or "" for _, node in nodes if isinstance(node, documented)]
    inverted = sum(bool(FIRST_WORDS.match(doc)) for doc in docs)
    yield Figure("docstrings that begin with Of, By, What, ...", inverted, 40)


def is_stored(node: ast.AST) -> bool:
    """Whether a node binds a name."""
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def figures_of_lines(texts: dict[Path, str], nodes: list[tuple[Path, ast.AST]]) -> Iterator[Figure]:
    """Yields the figures of comments, of the library's code, and of recording and commands."""
    comments = 0
    for path in texts:
        with path.open("rb") as file:
            tokens = list(tokenize.tokenize(file.readline))
        marks = ("#!", "# type", "# noqa")
        comments += sum(
            token.type == tokenize.COMMENT and not token.string.startswith(marks)
            for token in tokens
        )
    lines = Counter()
    for path, text in texts.items():
        lines[part_of(path)] += text.count("\n")
    share = 100 * comments / lines.total()
    yield Figure("percent of lines with comments", round(share, 1), 4, True)

    # without docstrings, comments and blank lines
    code = 0
    for path, text in texts.items():
        if part_of(path) == "library":
            rows = (row.strip() for row in text.splitlines())
            code += sum(bool(row) and not row.startswith("#") for row in rows)
    for path, node in nodes:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str) and part_of(path) == "library":
            code -= node.end_lineno - node.lineno + 1
    yield Figure("lines of code of the library", code, 20_500)
    yield Figure("lines of recording", lines["recording"], 7_800)
    yield Figure("lines of the commands", lines["lab"], 8_600)


def run(text: str) -> list[int]:
    """Runs a program in a process of its own, and returns the numbers that it prints."""
    command = [sys.executable, "-W", "ignore", "-c", text]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return [int(word) for word in done.stdout.split()]


def main() -> int:
    """Prints the figures; returns 1 where one is short."""
    rows = list(figures())
    for row in rows:
        bound = "at least" if row.at_least else "at most"
        mark = "ok   " if row.is_good else "SHORT"
        print(f"{mark} {row.name}: {row.value:,} ({bound} {row.wanted:,})")
    return int(not all(row.is_good for row in rows))


if __name__ == "__main__":
    sys.exit(main())
