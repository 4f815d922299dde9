"""Variables are named for what they hold."""

import ast
from pathlib import Path

import pytest
from modules import loaded

ROOT = Path(__file__).parents[1]
FILES = [
    path for top in ("megaopt", "kernels", "integration") for path in (ROOT / top).rglob("*.py")
]
WORDS = loaded("tools/house.py").PRONOUNS
PUBLIC = {
    ("kernels/rules/base.py", "other"),
    ("kernels/rules/base.py", "others"),
    ("kernels/rules/matrix.py", "kept"),
}
"""Fields and parameters of rules, which other people's rules have too."""


def bound_words(text):
    """The words among the names that a source binds: variables, arguments, fields."""
    nodes = list(ast.walk(ast.parse(text)))
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return (names | {n.arg for n in nodes if isinstance(n, ast.arg)}) & WORDS


def test_no_variable_is_a_pronoun():
    names = {
        (str(path.relative_to(ROOT)), name)
        for path in FILES
        for name in bound_words(path.read_text(encoding="utf-8"))
    }
    assert names == PUBLIC


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("own = 1", "own"),
        ("for each in ():\n    pass", "each"),
        ("lambda found: 0", "found"),
        ("def f(*, given): ...", "given"),
        ("class A:\n    kept: int", "kept"),
        ("(a := [other for other in ()])", "other"),
    ],
)
def test_every_binding_is_seen(text, name):
    assert bound_words(text) == {name}
