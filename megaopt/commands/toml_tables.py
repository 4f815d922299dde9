"""TOML files read into frozen dataclasses, which refuse what they do not know in words.

A field's type hint says what it may hold; a dataclass's `__post_init__` checks the rest with
`require`. Every refusal is a `ConfigError` of the form "steps must be a whole number, got '10'".
"""

from __future__ import annotations

import dataclasses
import importlib
import reprlib
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

# the standard library has it since Python 3.11; before, the extra `cli` brings it along
TOML_MODULE = "tomllib" if sys.version_info >= (3, 11) else "tomli"
tomllib: Any = importlib.import_module(TOML_MODULE)

T = TypeVar("T")

DERIVED = {"derived": True}
"""Metadata of a field that no file sets."""


class ConfigError(ValueError):
    """A config, or an argument that goes with one, is not allowed."""


MOST = 2**31 - 1
"""The largest size or count: what an int32 holds."""
MOST_SEED = 2**63 - 1
LARGEST = 3.4028234663852886e38
"""fp32's largest number, in which all hyper-parameters are rounded."""
MOST_BYTES = 2**16
"""Of a config's file: the parser needs minutes for a megabyte of nested keys."""
POWERS = {MOST: "2**31-1", MOST_SEED: "2**63-1"}
"""How bounds are written in messages."""


class ShortRepr(reprlib.Repr):
    """A repr of any value of a TOML file, for a message: cut where it is long or deep."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlong, self.maxother = 3, 100, 60, 100

    def repr_int(self, x: int, level: int) -> str:
        """As it is, or its size: Python refuses to write out thousands of digits."""
        if x.bit_length() > 200:
            return f"a whole number of {x.bit_length()} bits"
        return repr(x)


shown = ShortRepr().repr
"""A value as messages show it."""


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raises a `ConfigError` that names key, value and what is allowed unless condition holds.

    The message reads "{key} must be {allowed}, got {value}".
    """
    if not condition:
        raise ConfigError(f"{key} must be {allowed}, got {shown(value)}")


def require_whole(owner: object, lowest: int, highest: int, *keys: str) -> None:
    """Raises a `ConfigError` unless each of the owner's integers is within these bounds."""
    for key in keys:
        value = getattr(owner, key)
        allowed = f"a whole number from {lowest} to {POWERS.get(highest, highest)}"
        require(lowest <= value <= highest, key, value, allowed)


def require_number(owner: object, *keys: str) -> None:
    """Raises a `ConfigError` unless each of the owner's floats is >= 0 and one that fp32 holds."""
    for key in keys:
        value = getattr(owner, key)
        require(0 <= value <= LARGEST, key, value, "a number from 0 to 3.4e38")


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as it is.

    Raises:
        ConfigError: it cannot be read, is no TOML, or is larger than 64 KiB.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        table: dict[str, Any] = tomllib.loads(content.decode())
    except RecursionError:
        raise ConfigError(f"{path}: cannot be read as TOML: nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {_reason(error)}") from error
    return table


def _reason(error: OSError | ValueError) -> str:
    """Why a file cannot be read, without its name, and short."""
    text = str(getattr(error, "strerror", None) or error)
    return text if len(text) <= 300 else f"{text[:300]}..."


def build_run(cls: type[T], path: Path, table: dict[str, Any]) -> T:
    """A dataclass with a name, from the table of a file, whose stem is that name.

    Raises:
        ConfigError: as `read_config`.
    """
    try:
        allowed = "left out: the file's own name is the run's"
        require("name" not in table, "name", table.get("name"), allowed)
        return _read_table(cls, {**table, "name": path.stem}, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read_table(cls: type[T], table: dict[str, Any], prefix: str) -> T:
    """Builds a dataclass from a TOML table; prefix is the table's own key with a trailing dot."""
    everything = dataclasses.fields(cls)  # type: ignore[arg-type]
    fields = {each.name: each for each in everything if not each.metadata.get("derived")}
    allowed = ", ".join(sorted(fields.keys() - {"name"} if not prefix else fields))
    for key in table:
        where = f"the keys of {prefix[:-1]}" if prefix else "the keys"
        require(key in fields, where, key, f"among {allowed}")
    hints = get_type_hints(cls)
    for key, each in fields.items():
        if each.default is dataclasses.MISSING and key not in table:
            raise ConfigError(f"{prefix}{key} must be {_wanted(hints[key])}, got nothing")
    values = {key: _read_value(hints[key], value, prefix + key) for key, value in table.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from error


TYPES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
"""What a value of a type is called in messages."""


def _wanted(hint: Any) -> str:
    """What a field of this type holds, for a message."""
    if get_origin(hint) in (Union, types.UnionType):
        # an optional type is one type or None, and TOML has no None
        return _wanted(next(each for each in get_args(hint) if each is not type(None)))
    if get_origin(hint) is tuple:
        of_texts = get_origin(get_args(hint)[0]) is Literal
        return "a list of texts" if of_texts else "a list of tables"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    return TYPES.get(hint, "a table")


def _read_value(hint: Any, value: Any, key: str) -> Any:
    """Checks one value against its field's type; an integer may stand for a float."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is tuple:
        element = get_args(hint)[0]
        if get_origin(element) is Literal:
            return _read_list(element, value, key)
        return _read_variants(element, value, key)
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, dict), key, value, _wanted(hint))
        return _read_table(typing.cast("type[Any]", hint), value, f"{key}.")
    if get_origin(hint) is Literal:
        require(value in get_args(hint), key, value, _wanted(hint))
        return value
    if hint is float and type(value) is int:
        require(abs(value) <= LARGEST, key, value, "a number that fp32 holds")
        return float(value)
    # `type is` and not isinstance: in Python, True is an int
    require(type(value) is hint, key, value, _wanted(hint))
    return value


def _read_list(hint: Any, value: Any, key: str) -> tuple[Any, ...]:
    """Reads a list of values of one type."""
    require(isinstance(value, list), key, value, _wanted(tuple[hint, ...]))
    return tuple(_read_value(hint, each, f"{key}[{index}]") for index, each in enumerate(value))


def _read_variants(hint: Any, value: Any, key: str) -> tuple[Any, ...]:
    """Reads the [[variant]] tables; the key `kind` decides which class of the union hint it is."""
    tables = isinstance(value, list) and all(isinstance(table, dict) for table in value)
    require(tables, key, value, f"tables, [[{key}]]")
    classes = {each.__dataclass_fields__["kind"].default: each for each in get_args(hint)}
    variants = []
    for number, table in enumerate(value):
        where = f"{key}[{number}]"
        kind = table.get("kind")
        kinds = ", ".join(map(repr, classes))
        known = isinstance(kind, str) and kind in classes
        require(known or kind is None, f"{where}.kind", kind, f"one of {kinds}")
        if kind is None:
            raise ConfigError(f"{where}.kind must be one of {kinds}, got nothing")
        variants.append(_read_table(classes[kind], table, f"{where}."))
    return tuple(variants)
