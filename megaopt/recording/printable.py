"""Text of files as terminals, pages and tables may show it: names are anybody's."""

from __future__ import annotations

LONGEST = 4000
"""Characters of a line that is shown; of a longer one the beginning and the end."""


def printable(text: str) -> str:
    r"""A text in which nothing moves a cursor, turns a line around, ends it or hides.

    Control characters, line ends, marks of direction, characters of no width and lone surrogates
    become escapes, as "\x1b" and "\u202e"; spaces stay.
    """
    if text.isprintable():
        return text
    escapes = (character.encode("unicode_escape").decode("ascii") for character in text)
    pairs = zip(text, escapes, strict=True)
    return "".join(escape if not c.isprintable() else c for c, escape in pairs)


def short(text: str) -> str:
    """A printable line of at most some `LONGEST` characters, which says what it leaves out."""
    line = printable(text)
    if len(line) <= LONGEST:
        return line
    left = len(line) - LONGEST
    return f"{line[: LONGEST - 500]} [{left} characters left out] {line[-500:]}"
