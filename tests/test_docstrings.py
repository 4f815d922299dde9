"""Docstrings name what is there, and begin with what it is; messages say what a value must be."""

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
INVERTED = re.compile(r"(Of|By|As|None|Nothing|Where|In|What|Those|That|Which|How|So)\b")
"""How a docstring begins that leaves out what it is about."""
REFUSAL = re.compile(r"\bnot\s+allowed\b")
"""The words of a message that names no value that would do: "must be ..., got ..." does."""


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


def sources(root: Path) -> Iterator[tuple[str, ast.AST]]:
    """The library's files by name, parsed."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            yield str(path.relative_to(root)), ast.parse(path.read_text(encoding="utf-8"))


def strings_of(tree: ast.AST) -> Iterator[ast.Constant]:
    """All strings, docstrings too; those that stand one behind another are one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node


def inverted_docstrings(root: Path) -> list[str]:
    """'file:line: first line' of each docstring that does not begin with what a thing is."""
    return [
        f"{name}:{text.lineno}: {text.value.splitlines()[0]}"
        for name, tree in sources(root)
        for text in texts_of(tree).values()
        if INVERTED.match(text.value)
    ]


def bare_refusals(root: Path) -> list[str]:
    """'file:line' of each string that says that something is refused, and not what would do."""
    return [
        f"{name}:{text.lineno}"
        for name, tree in sources(root)
        for text in strings_of(tree)
        if REFUSAL.search(text.value)
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


def test_docstrings_begin_with_what_a_thing_is() -> None:
    assert inverted_docstrings(ROOT) == []


def test_messages_say_what_a_value_must_be() -> None:
    assert bare_refusals(ROOT) == []


def test_an_inverted_docstring_and_a_bare_refusal_are_seen(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    code = '''def views():
    """Of all parameters."""
    ONE = 1
    """By name."""
    TWO = 2
    """Asked for; Offset and Nonefinite are other words, and 'not allowed' is a refusal."""
    raise ValueError(f"lr={ONE} is not "
                     f"allowed: {TWO}")
'''
    (tmp_path / "kernels" / "plan.py").write_text(code)
    found = ["kernels/plan.py:2: Of all parameters.", "kernels/plan.py:4: By name."]
    assert sorted(inverted_docstrings(tmp_path)) == found
    assert sorted(bare_refusals(tmp_path)) == ["kernels/plan.py:6", "kernels/plan.py:7"]
