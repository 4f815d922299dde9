"""TOML files read into pydantic's dataclasses, which refuse what they do not know in words.

A field's type says what it may hold, in the types below; a dataclass's `__post_init__` checks the
rest with `require`. Every refusal is a `ConfigError` of the form "steps must be a whole number from
1 to 2**31-1, got '10'".
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import reprlib
import sys
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

# the standard library has it since Python 3.11; before, the extra `cli` brings it along
TOML_MODULE = "tomllib" if sys.version_info >= (3, 11) else "tomli"
tomllib: Any = importlib.import_module(TOML_MODULE)

T = TypeVar("T")

DERIVED = {"derived": True}
"""Metadata of a field that no file sets."""


class ConfigError(ValueError):
    """A config, or an argument that goes with one, is wrong: the message says what it must be."""


MOST = 2**31 - 1
"""The largest size or count: what an int32 holds."""
MOST_SEED = 2**63 - 1
LARGEST = 3.4028234663852886e38
"""fp32's largest number, in which all hyper-parameters are rounded."""
MOST_BYTES = 2**16
"""The largest file of a config: the parser needs minutes for a megabyte of nested keys."""
MOST_THREADS = 1024
"""More than any machine has; so many threads start, far more make OpenMP end the process."""
MOST_RANKS = 64
"""Processes on one machine, each with a torch of its own."""


class ShortRepr(reprlib.Repr):
    """A repr of any value of a TOML file, for a message: cut where it is long or deep."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlong, self.maxother = 3, 100, 60, 100

    def repr_int(self, x: int, level: int) -> str:
        """The number, or its size: Python refuses to write out thousands of digits."""
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


# --- types of fields


def only(words: str) -> WrapValidator:
    """Makes every error of a field's value one that says what is allowed."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise PydanticCustomError("allowed", "{allowed}", {"allowed": words}) from None

    return WrapValidator(check)


WHOLE = "a whole number from"
Count = Annotated[int, Strict(), Field(ge=1, le=MOST), only(f"{WHOLE} 1 to 2**31-1")]
Steps = Annotated[int, Strict(), Field(ge=0, le=MOST), only(f"{WHOLE} 0 to 2**31-1")]
Seed = Annotated[int, Strict(), Field(ge=0, le=MOST_SEED), only(f"{WHOLE} 0 to 2**63-1")]
Rows = Annotated[int, Strict(), Field(ge=256, le=MOST), only(f"{WHOLE} 256 to 2**31-1")]
Ranks = Annotated[int, Strict(), Field(ge=1, le=MOST_RANKS), only(f"{WHOLE} 1 to {MOST_RANKS}")]
Threads = Annotated[
    int, Strict(), Field(ge=1, le=MOST_THREADS), only(f"{WHOLE} 1 to {MOST_THREADS}")
]
Number = Annotated[
    float,
    Strict(),
    Field(ge=0, le=LARGEST, allow_inf_nan=False),
    only("a number from 0 to 3.4e38"),
]
Decay = Annotated[float, Strict(), Field(ge=0, lt=1), only("a number in [0, 1)")]
Flag = Annotated[bool, Strict(), only("true or false")]


def _check_kind(table: Any) -> Any:
    # pydantic would write out a number of thousands of digits, which Python refuses
    if isinstance(table, dict) and "kind" in table:
        require(isinstance(table["kind"], str), "kind", table["kind"], "a text")
    return table


ByKind = Annotated[T, Field(discriminator="kind"), BeforeValidator(_check_kind)]
"""A union of dataclasses, whose key `kind` says which one a table is."""


class Table:
    """A dataclass that a TOML table is read into."""

    __slots__ = ()

    @model_validator(mode="before")
    @classmethod
    def _know_keys(cls, given: Any) -> Any:
        if isinstance(given, dict):
            fields = dataclasses.fields(cls)  # type: ignore[arg-type]
            known = sorted(field.name for field in fields if field.metadata != DERIVED)
            for key in (each for each in given if each not in known):
                raise PydanticCustomError("key", "{key}", {"key": key, "known": known})
        return given


# --- files


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
        words = "left out: the file's own name is the run's"
        require("name" not in table, "name", table.get("name"), words)
        # out / ".." would be another folder than --out
        require(path.stem not in (".", ".."), "the file's name", path.name, "more than dots")
        return TypeAdapter(cls).validate_python({**table, "name": path.stem})
    except ValidationError as error:
        # a key that nobody knows comes first: what is missing may be what it was meant to be
        errors = sorted(error.errors(include_url=False), key=lambda each: each["type"] != "key")
        raise ConfigError(f"{path}: {_told(errors[0])}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


KINDS = {
    "string_type": "a text",
    "tuple_type": "a list",
    "dataclass_type": "a table",
    "model_attributes_type": "a table",
}
"""What a value is to be, by pydantic's name of the error."""


def _told(error: ErrorDetails) -> str:
    """An error of pydantic's in our words."""
    kind, key, about = error["type"], _key_of(error["loc"]), error.get("ctx", {})
    if kind == "key":
        return _unknown(key, about["key"], about["known"])
    if kind == "value_error":
        return f"{key}.{about['error']}".removeprefix(".")
    if kind == "missing":
        return f"{key} must be given, got nothing"
    if kind == "union_tag_not_found":
        return f"{key}.kind must be given, got nothing"
    if kind == "union_tag_invalid":
        kinds, given = about["expected_tags"], error["input"]["kind"]
        return f"{key}.kind must be one of {kinds}, got {shown(given)}"
    if kind == "literal_error":
        about = {"allowed": f"one of {about['expected'].replace(' or ', ', ')}"}
    words = about.get("allowed") or KINDS.get(kind, error["msg"])
    return f"{key} must be {words}, got {shown(error['input'])}"


def _key_of(place: tuple[int | str, ...]) -> str:
    """A key as in "variant[0].baseline"; behind a variant's number pydantic names its kind."""
    key = ""
    for before, each in zip((None, *place), place, strict=False):
        if isinstance(each, int):
            key += f"[{each}]"
        elif not isinstance(before, int):
            key += f".{each}" if key else each
    return key


def _unknown(table: str, key: str, known: list[str]) -> str:
    """That a table has no such key; with the one that was meant, where one is near."""
    where = f"the keys of {table}" if table else "the keys"
    names = [name for name in known if table or name != "name"]
    near = difflib.get_close_matches(key, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{where} must be among {', '.join(names)}, got {shown(key)}{hint}"
