"""`megaopt diff`, `golden` and `replay`: recorded runs beside each other."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from megaopt.kernels.files import replacing, write_json
from megaopt.lab.console import coloured, make_console, make_table
from megaopt.lab.exits import DIFFERENT, DONE, REFUSED, how_to_install
from megaopt.lab.toml_tables import ConfigError
from megaopt.recording import golden as values
from megaopt.recording.checks import RecordingError, read_json
from megaopt.recording.compare import Comparison, Growth, Repeats, compare
from megaopt.recording.files import Rank, Recording
from megaopt.recording.pair import NamesError, shown
from megaopt.recording.printable import short

PASSES = ("same", "as two repeats differ", "within tolerance")
STATUS = {**dict.fromkeys(PASSES, DONE), "differ": DIFFERENT, "not comparable": REFUSED}
COLOURS = {**dict.fromkeys(PASSES, "green"), "not comparable": "yellow"}
MOST = 12
"""Tensors that are listed."""


def diff(
    a: Path,
    b: Path,
    /,
    *,
    map: Path | None = None,
    json: Path | None = None,
    html: Path | None = None,
    github: bool = False,
    noise: tuple[Path, ...] = (),
    tolerance: float | None = None,
) -> int:
    """Compare two recorded runs: what differs first, and who is to blame. 0 same, 1 differ.

    Args:
        a: Folder of the recording that counts as right.
        b: Folder of the other.
        map: JSON file of names of tensors in B and what they are called in A; a "*" is any text.
        json: Write the comparison to this file.
        html: Write a page with pictures to this file.
        github: Print an annotation for GitHub's pull requests too.
        noise: Folders of repeats of A: how far a run lies from itself.
        tolerance: How far numbers may lie apart and pass, of their norm, as 1e-5; it excuses no
            other data, weights at the start or writes from outside.

    Returns:
        0 where they are the same, or differ as repeats do or within the tolerance; 1 where they
        differ; 2 where they cannot be compared.
    """
    names = None if map is None else read_names(map)
    repeats = [Recording(folder) for folder in noise]
    try:
        comparison = compare(Recording(a), Recording(b), names, repeats, tolerance)
    except NamesError as error:
        raise RecordingError(f"{error}, in {str(map)!r}") from None
    tell(comparison, make_console())
    for path in filter(None, (json, html)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if json is not None:
        write_json(json, comparison.as_json())
    if html is not None:
        # its pictures are matplotlib's, which takes a second to import
        from megaopt.lab.page import page

        tables = [GROWTH, *growth_rows(comparison.growth)], [NOISE, *noise_rows(comparison.noise)]
        with replacing(html) as file:
            file.write(page(comparison, *tables).encode())
    if github:
        print(annotation("diff", comparison.line, STATUS[comparison.verdict]))
    return STATUS[comparison.verdict]


def golden(
    action: Literal["make", "check", "update"],
    file: Path,
    run: Path,
    /,
    *,
    because: str = "",
    megatron: bool = False,
    github: bool = False,
) -> int:
    """Keep what a recorded run gave in a small file, and hold other runs to it.

    Args:
        action: make the file, check a run against it, or update the entry of this environment.
        file: JSON file of golden values.
        run: Folder of the recording.
        because: Why the values may change; update asks for it.
        megatron: The file is one of Megatron-LM's functional tests.
        github: Print an annotation for GitHub's pull requests too.

    Returns:
        0 where it is written, or the run is the same; 1 where it differs; 2 where there is no entry
        for the run's environment and it differs from the nearest.
    """
    recording = Recording(run)
    if action == "check" and megatron:
        lines = values.check_megatron(file, recording)
        return _tell_lines(lines, "all metrics that both have")
    if action == "check":
        outcome, console = values.check(file, recording), make_console()
        status = STATUS[outcome.comparison.verdict]
        if outcome.is_own or not status:
            tell(outcome.comparison, console)
        else:
            # beside another environment's entry, how far norms of samples drifted
            status = REFUSED
            console.print(outcome.line, highlight=False)
            rows = []
            for quantity, step, expected, value in outcome.drift:
                relative = f"{abs(value - expected) / (abs(expected) or 1):.2g}"
                rows.append((quantity, str(step), repr(expected), repr(value), relative))
            columns = ("norm of samples", "step", "golden", "now", "relative")
            print_table(console, "beside another environment", columns, rows)
        if github:
            print(annotation("golden", outcome.line, status))
        return status
    if megatron:
        write_json(file, values.megatron_values(recording))
    elif action == "make":
        values.make(file, recording)
    else:
        values.refuse_changes(file, recording)
        values.update(file, recording, because)
    print(f"written: {file}")
    return DONE


BACKENDS = {"cpu": "reference", "triton": "triton", "torch": None}
"""The backends of megaopt's own optimizers, by the command's names."""


def replay(
    run: Path,
    /,
    *,
    step: int,
    rank: int = 0,
    backend: Literal["triton", "cpu", "torch"] = "torch",
    optimizer: tuple[str, ...] = (),
) -> int:
    """Take a step that a recording kept again, here, and compare the bits.

    Args:
        run: Folder of the recording.
        step: Which step; --keep of `megaopt record` chose those that are kept.
        rank: Whose tensors.
        backend: torch: the recorded optimizer, on the CPU; cpu, triton: megaopt's own, by that
            backend.
        optimizer: Full names of optimizers' classes of your own, as my.module.Adam: their code
            runs. Others are taken from installed packages alone.

    Raises:
        ConfigError: safetensors, which reads what was kept, is not installed.
        RecordingError: the step was not kept, or its optimizer cannot be made here.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise ConfigError(f"replay needs safetensors: {how_to_install('record')}")
    from megaopt.recording.replay import replay as take  # which needs torch

    lines = take(Rank(run / f"rank-{rank}"), step, BACKENDS[backend], optimizer)
    return _tell_lines(lines, f"step {step} of rank {rank}, bit for bit")


def _tell_lines(different: Sequence[str], same: str) -> int:
    """Prints what differs, a line each."""
    for line in different or [same]:
        print(short(f"{'different' if different else 'same'}: {line}"))
    return DIFFERENT if different else DONE


def read_names(path: Path) -> dict[str, str]:
    """A map of names: a JSON file of one dict of texts; RecordingError for another."""
    names = read_json(path.read_bytes(), f"map {str(path)!r}")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise RecordingError(f"map must be a dict of texts, as {{'b': 'a'}}, got {str(path)!r}")
    return names


def annotation(command: str, line: str, status: int) -> str:
    """A line that GitHub shows beside a pull request."""
    kind = {DONE: "notice", DIFFERENT: "error", REFUSED: "warning"}[status]
    return f"::{kind} title=megaopt {command}::{short(line).replace('%', '%25')}"


def tell(comparison: Comparison, console: Console) -> None:
    """Prints the verdict, then what belongs to it."""
    colour = COLOURS.get(comparison.verdict, "red")
    verdict, colon, rest = comparison.line.partition(":")
    console.print(coloured(colour, verdict, colon + rest), highlight=False, soft_wrap=True)
    for line in comparison.remarks():
        console.print(line, highlight=False, soft_wrap=True)
    environment, options = comparison.environment, comparison.options
    for title, differences in (("environment", environment), ("options", options)):
        rows = [(d.name, shown(d.a), shown(d.b)) for d in differences]
        print_table(console, title, ("", "A", "B"), rows)
    blame = comparison.blame
    if blame is not None and blame.tensors:
        several = len({quantity for _, quantity in blame.tensors}) > 1
        names = [f"{quantity} of {name}" if several else name for name, quantity in blame.tensors]
        more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
        line = f"step {blame.step}: {len(names)} differ: {', '.join(names[:MOST])}{more}"
        console.print(line, highlight=False)
    print_table(console, "how it grows", GROWTH, growth_rows(comparison.growth))
    print_table(console, "B against repeats of A", NOISE, noise_rows(comparison.noise))


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """Prints a table; nothing where it has no rows."""
    table = make_table(title, columns, rows)
    if table.row_count:
        console.print(table, highlight=False)


GROWTH = ("quantity", "parts at step", "differ then", "at the last", "relative norm", "largest ulp")


def growth_rows(growth: Sequence[Growth]) -> list[tuple[str, ...]]:
    """A row for each quantity that differs: when, how many, and how far apart."""
    rows = []
    for quantity in dict.fromkeys(entry.quantity for entry in growth):
        entries = [entry for entry in growth if entry.quantity == quantity]
        first, last = next((entry for entry in entries if entry.differ), None), entries[-1]
        if first is not None:
            counts = (f"{entry.differ} of {entry.of}" for entry in (first, last))
            relative = [_number(entry.relative) for entry in (first, last)]
            far = "-" if relative == ["-", "-"] else " to ".join(relative)
            rows.append((quantity, str(first.step), *counts, far, _number(last.ulp)))
    return rows


NOISE = ("quantity", "B is farther off", "B at the last step", "repeats at the last step")


def noise_rows(noise: Sequence[Repeats]) -> list[tuple[str, ...]]:
    """A row for each quantity: how often B lies farther off than repeats, and how far at last."""
    rows: list[tuple[str, ...]] = []
    for quantity in dict.fromkeys(entry.quantity for entry in noise):
        entries = [entry for entry in noise if entry.quantity == quantity]
        farther, last = sum(entry.change > entry.repeats for entry in entries), entries[-1]
        words = f"{farther} of {len(entries)} steps"
        rows.append((quantity, words, f"{last.change:.2g}", f"{last.repeats:.2g}"))
    return rows


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.2g}" if isinstance(value, float) else str(value)
