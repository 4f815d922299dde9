"""Checks of files before anybody reads them: each value is of its kind, or refused in words.

Recordings and golden values come from anywhere. A wrong value raises RecordingError, which names
the place, the key, what it must be and what it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megaopt.recording.printable import printable

DEEPEST = 8
"""The depth to which lists and dicts may be nested: a group's value in a golden step is deepest."""
LARGEST = 2**63 - 1
"""The largest count, and the most elements of a tensor."""
MOST_RANKS = 2**20
SHOWN = 80
"""Characters of a value in a message."""


class RecordingError(ValueError):
    """A folder that holds no recording, or recordings that cannot be compared.

    The message is one line of printable characters, whatever the names in it are.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class ValueKind(NamedTuple):
    """A kind of value, in words and as a function."""

    allowed: str
    holds: Callable[[Any], bool]

    def or_none(self) -> ValueKind:
        """Returns the kind of these values and null."""
        return ValueKind(
            f"{self.allowed} or null", lambda value: value is None or self.holds(value)
        )


def is_whole(value: Any, least: int = 0, most: int = LARGEST) -> bool:
    """Returns whether a value is a whole number in a range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_float(value: Any) -> bool:
    """Returns whether a value is a float in hexadecimal."""
    if not isinstance(value, str):
        return False
    try:
        float.fromhex(value)
    except (ValueError, OverflowError):
        return False
    return True


def list_of(kind: ValueKind) -> ValueKind:
    """Returns the kind of a list, whose values are of one kind."""
    allowed = f"a list, each {kind.allowed}"
    return ValueKind(allowed, lambda value: isinstance(value, list) and all(map(kind.holds, value)))


def dict_of(kind: ValueKind) -> ValueKind:
    """Returns the kind of a dict, whose values are of one kind; JSON makes its names texts."""
    allowed = f"an object, each value {kind.allowed}"
    return ValueKind(
        allowed, lambda value: isinstance(value, dict) and all(map(kind.holds, value.values()))
    )


ANYTHING = ValueKind("anything", lambda value: True)
TEXT = ValueKind("a text", lambda value: isinstance(value, str))
WHOLE = ValueKind("a whole number >= 0", is_whole)
COUNT = ValueKind("a whole number >= 1", lambda value: is_whole(value, 1))
RANKS = ValueKind(
    f"a whole number from 1 to {MOST_RANKS}", lambda value: is_whole(value, 1, MOST_RANKS)
)
FLAG = ValueKind("true or false", lambda value: isinstance(value, bool))
FLOAT = ValueKind("a float in hexadecimal", is_float)
DIGEST = ValueKind(
    "a digest of 32 hex digits",
    lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None,
)
SHAPE = ValueKind(
    "the sizes of a tensor",
    lambda value: list_of(WHOLE).holds(value)
    and math.prod(max(size, 1) for size in value) <= LARGEST,
)
"""The sizes of a tensor of at most `LARGEST` elements."""
PLACE = ValueKind(
    "four whole numbers >= 0, the second >= 1 where the third is",
    lambda value: list_of(WHOLE).holds(value)
    and len(value) == 4
    and (value[1] > 0 or not value[2]),
)
OFFSETS = ValueKind(
    "two whole numbers >= 0", lambda value: list_of(WHOLE).holds(value) and len(value) == 2
)
OBJECT = dict_of(ANYTHING)
GROUP = ValueKind(
    "an object with a whole number or null as its step",
    lambda value: isinstance(value, dict) and WHOLE.or_none().holds(value.get("step")),
)

Kinds = Mapping[str, ValueKind]
RUN: Kinds = {
    "rank": WHOLE,
    "world": RANKS.or_none(),
    "every": COUNT.or_none(),
    "level": TEXT.or_none(),
    "argv": list_of(TEXT).or_none(),
    "environment": OBJECT.or_none(),
    "layout": OBJECT.or_none(),
}
"""Keys of a manifest's first line; nobody reads others, or any value of them will do."""
OPTIMIZER: Kinds = {
    "class": TEXT,
    "options": OBJECT.or_none(),
    "groups": list_of(list_of(TEXT)),
    "order": list_of(TEXT).or_none(),
    "steps_as": list_of(TEXT).or_none(),
    "source": WHOLE.or_none(),
}
LINE: Kinds = {
    "is": ValueKind("run, optimizer or value", lambda value: value in ("run", "optimizer", "value"))
}
"""Keys of each line of a manifest."""
VALUE: Kinds = {
    "name": TEXT,
    "quantity": TEXT,
    "dtype": TEXT,
    "shape": SHAPE,
    "place": PLACE.or_none(),
}
TENSOR: Kinds = {"data_offsets": OFFSETS, "shape": SHAPE}
"""Keys that safetensors has of a tensor."""
STEP: Kinds = {"step": COUNT, "source": WHOLE, "rows": WHOLE, "samples": WHOLE}
SCALARS: Kinds = {
    "losses": list_of(FLOAT).or_none(),
    **dict.fromkeys(
        ("grad_norm", "clip_norm", "clip_coefficient", "grad_scale", "loss_scale"), FLOAT.or_none()
    ),
    "skipped": FLAG.or_none(),
    "groups": list_of(GROUP).or_none(),
    "rng": dict_of(TEXT).or_none(),
    "batch": list_of(DIGEST).or_none(),
}
"""Keys of a step's line beside its place."""


def require(condition: bool, name: str, allowed: str, value: Any) -> None:
    """Raises RecordingError, which says what a value must be and what it is, unless it is so."""
    if not condition:
        raise RecordingError(f"{name} must be {allowed}, got {shown(value)}")


def shown(value: Any) -> str:
    """Returns a value as a message shows it: short."""
    begins = value[:SHOWN] if isinstance(value, (str, bytes)) else value
    text = repr(begins)[:SHOWN]
    return text if text == repr(value) else f"{text}..."


def check(content: Mapping[str, Any], kinds: Kinds, where: str) -> None:
    """Raises RecordingError for the first key whose value is of another kind.

    where: the dict's place, as messages have it.
    """
    for name, kind in kinds.items():
        require(
            kind.holds(content.get(name)), f"{name} in {where}", kind.allowed, content.get(name)
        )


def read_json(text: str | bytes, where: str) -> Any:
    """Reads a JSON text; raises RecordingError for one that is none, or nested too deeply.

    where: the text's place, as messages have it.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RecordingError(f"{where} must be JSON: {reason}, got {shown(text)}") from None
    # how deeply lists and dicts are nested, without recursion
    depth, level = 0, [content]
    while level and depth <= DEEPEST:
        nested = [value for value in level if isinstance(value, (dict, list))]
        depth += bool(nested)
        values = (value.values() if isinstance(value, dict) else value for value in nested)
        level = [element for elements in values for element in elements]
    require(depth <= DEEPEST, where, f"nested {DEEPEST} times at most", "deeper lists")
    return content
