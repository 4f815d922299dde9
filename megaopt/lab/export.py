"""`megaopt export`: a recording as a table, for programs that draw and reckon."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from megaopt.kernels.files import replacing
from megaopt.lab.exits import DONE
from megaopt.lab.toml_tables import ConfigError
from megaopt.recording.files import Recording
from megaopt.recording.pair import flat, shown
from megaopt.recording.printable import printable

FORMULAS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Beginnings of what programs that open tables take for formulas, which may run commands; the
last four are the same signs in full width."""
COLUMNS = ("step", "rank", "optimizer", "name", "quantity", "value", "digest")
Row = dict[str, Any]


def export(run: Path, to: Path, /) -> int:
    """Write a recording as a table: step, rank, optimizer, name, quantity, value, digest.

    Args:
        run: Folder of the recording.
        to: File to write, named .csv or .jsonl (an object a line).

    Raises:
        ConfigError: for another ending.
        RecordingError: where there is no recording.
    """
    if to.suffix not in (".csv", ".jsonl"):
        raise ConfigError(f"to must be a file named .csv or .jsonl, got {str(to)!r}")
    recording = Recording(run)
    rows = (row for step in recording.steps for row in rows_of(recording, step))
    with replacing(to) as file:
        text = TextIOWrapper(file, "utf-8", newline="")
        if to.suffix == ".jsonl":
            text.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(text, COLUMNS)
            writer.writeheader()
            writer.writerows({name: cell(value) for name, value in row.items()} for row in rows)
        text.detach()  # not closed: the file is put in its place first
    return DONE


def cell(value: Any) -> str:
    """A value as a cell of a table: printable, and no formula to programs that reckon."""
    text = printable(str(value))
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.startswith(FORMULAS) else text
    return text


def rows_of(recording: Recording, step: int) -> Iterator[Row]:
    """The rows of a step: numbers of each rank, its own digests, those of all ranks together."""
    for rank, lines in zip(recording.ranks, recording.scalars(step), strict=True):
        for source, line in lines.items():
            shared: Row = {"step": step, "rank": rank.number, "optimizer": source}
            losses, batches, rng = (line.get(key, ()) for key in ("losses", "batch", "rng"))
            rows: list[Row] = [{"quantity": "loss", "value": shown(loss)} for loss in losses]
            rows += [{"quantity": "batch", "digest": digest} for digest in batches]
            rows += [{"quantity": "rng", "name": name, "digest": rng[name]} for name in rng]
            for number, group in enumerate(line.get("groups", ())):
                for option, value in flat(group).items():
                    name = f"group {number}"
                    rows.append({"name": name, "quantity": option, "value": shown(value)})
            left = ("losses", "batch", "rng", "groups", "step", "source", "has_all_old")
            for quantity in (key for key in line if key not in left and line[key] is not None):
                rows.append({"quantity": quantity, "value": shown(line[quantity])})
            yield from ({**shared, **row} for row in rows)
    for (number, name, quantity), digests in recording.own(step).items():
        shared = {"step": step, "rank": number, "name": name, "quantity": quantity}
        yield from ({**shared, "digest": str(digest)} for digest in digests)
    for (name, quantity), summed in recording.digests(step).items():
        yield {"step": step, "name": name, "quantity": quantity, "digest": str(summed.digest)}
