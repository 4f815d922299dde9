"""Names in backticks in docstrings are names that the source has."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("megaopt", "kernels", "integration")
SHARED = (ast.Attribute, ast.arg, ast.keyword)
"""Where a name stands that readers know without the file it is from."""
NAMED = re.compile(r"`([a-z_]\w*)(?:\(\))?`")


def names_of(node: ast.AST) -> Iterator[str]:
    """What a node of the source calls something."""
    for field in ("name", "id", "attr", "arg", "asname", "module"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield from value.split(".")


def texts_of(tree: ast.AST) -> dict[int, ast.Constant]:
    """Docstrings, and strings that stand alone below what they describe."""
    alone = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return {id(n): n for n in alone if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def shared_names(tree: ast.AST, texts: dict[int, ast.Constant]) -> Iterator[str]:
    """Attributes, members of classes, arguments, and words of strings, such as keys."""
    for node in ast.walk(tree):
        if isinstance(node, SHARED):
            yield from names_of(node)
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                yield from names_of(getattr(member, "target", member))
        is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_string and id(node) not in texts:
            yield from re.findall(r"\w+", node.value)


def unknown_names(root: Path) -> list[str]:
    """'file:line: name' of each name that neither the file's folder nor a class has."""
    paths = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    texts = {path: texts_of(tree) for path, tree in trees.items()}
    shared, beside = set(dir(builtins)), {path.parent: {path.parent.name} for path in paths}
    for path, tree in trees.items():
        shared.update(shared_names(tree, texts[path]))
        beside[path.parent].add(path.stem)
        beside[path.parent].update(name for node in ast.walk(tree) for name in names_of(node))
    return [
        f"{path.relative_to(root)}:{text.lineno}: {name}"
        for path in paths
        for text in texts[path].values()
        for name in NAMED.findall(text.value)
        if name not in shared and name not in beside[path.parent]
    ]


def test_docstrings_name_what_is_there() -> None:
    assert unknown_names(ROOT) == []


def test_a_name_that_is_gone_is_seen(tmp_path: Path) -> None:
    for folder in ("megaopt", "kernels"):
        (tmp_path / folder).mkdir()
    (tmp_path / "kernels" / "table.py").write_text("def to_device():\n    pass\n")
    code = 'def f(here):\n    """`here`, and what `to_device` makes of `gone()`."""\n'
    (tmp_path / "megaopt" / "groups.py").write_text(code)
    found = ["megaopt/groups.py:2: to_device", "megaopt/groups.py:2: gone"]
    assert unknown_names(tmp_path) == found
