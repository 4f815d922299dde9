"""TOML files read into pydantic's models, whose messages say what a file must have.

A field's type says what it may hold; what depends on several fields a model's own validator checks
with `require`. Every refusal is a `ConfigError` with a line "file: path.to.key: message, got value"
for each key.
"""

from __future__ import annotations

import importlib
import sys
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

# the standard library has it since Python 3.11; before, the extra `cli` brings it along
tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class ConfigError(ValueError):
    """A config, or an argument that goes with one, is wrong: the message says what it must be."""


MOST = 2**31 - 1
"""The largest size or count: what an int32 holds."""
MOST_BYTES = 2**16
"""The largest file of a config: the parser needs minutes for a megabyte of nested keys."""
MOST_LINES = 10
"""Keys that a refusal names."""

Count = Annotated[int, Field(ge=1, le=MOST)]
# processes on one machine, each with a torch of its own
Ranks = Annotated[int, Field(ge=1, le=64)]
# more than any machine has; so many threads start, far more make OpenMP end the process
Threads = Annotated[int, Field(ge=1, le=1024)]
# up to fp32's largest number, in which all hyper-parameters are rounded
Number = Annotated[float, Field(ge=0, le=3.4028234663852886e38, allow_inf_nan=False)]
# a TOML file has a list
Several = Annotated[tuple[T, ...], Field(strict=False, min_length=1)]


def shown(value: object) -> str:
    """A value as a message shows it."""
    # imports torch, for which `megaopt record` does not wait
    from megaopt.kernels.refusals import shown as shown_by_options

    return shown_by_options(value)


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raises a `ConfigError` that names key, value and what is allowed unless condition holds.

    The message reads "{key} must be {allowed}, got {value}".
    """
    if not condition:
        raise ConfigError(f"{key} must be {allowed}, got {shown(value)}")


def _check_kind(table: Any) -> Any:
    # pydantic would write out a number of thousands of digits, which Python refuses
    if isinstance(table, dict) and "kind" in table:
        require(isinstance(table["kind"], str), "kind", table["kind"], "a text")
    return table


ByKind = Annotated[T, Field(discriminator="kind"), BeforeValidator(_check_kind)]
"""A union of tables, whose key `kind` says which one a table is."""


class Table(BaseModel):
    """A TOML table: of these keys alone, of these types alone."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    def model_post_init(self, _context: object, /) -> None:
        """Raises a `ConfigError` where fields do not go together."""
        self._check()

    def _check(self) -> None:
        """Checks several fields together; most tables have no such check."""

    def need(self, holds: bool, key: str, allowed: str) -> None:
        """`require` of a key of this table, or of one within it."""
        if not holds:
            require(False, key, attrgetter(key)(self), allowed)


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
        reason = str(getattr(error, "strerror", None) or error)
        raise ConfigError(f"{path}: cannot be read as TOML: {reason[:300]}") from error
    return table


def read_run(model: type[M], path: Path) -> M:
    """A model with a name, from a file whose stem is that name.

    Raises:
        ConfigError: as `read_toml`; or the file has an unknown key, lacks one, or holds a value of
            another type or outside its range.
    """
    table = read_toml(path)
    try:
        require("name" not in table, "name", table.get("name"), "left out: it is the file's name")
        return model.model_validate({**table, "name": path.stem})
    except ValidationError as error:
        lines = []
        for detail in error.errors(include_url=False)[:MOST_LINES]:
            # the key, what it should be, and what it is
            kind, value, message = detail["type"], detail["input"], detail["msg"]
            parts = (key if str(key).isidentifier() else shown(key) for key in detail["loc"])
            place = "".join(f"{part}." for part in parts)
            if kind == "union_tag_invalid":
                tags = detail["ctx"]["expected_tags"]
                value, message = value["kind"], f"kind should be one of {tags}"
            if kind == "value_error":
                lines.append(f"{path}: {place}{detail['ctx']['error']}")
            else:
                got = "nothing" if kind == "missing" else shown(value)
                lines.append(f"{path}: {place[:-1]}: {message}, got {got}")
        raise ConfigError("\n".join(lines)) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
