"""`megaopt regress`: runs a regression, shows its tables, writes its record and its pictures."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from megaopt.kernels.files import write_json
from megaopt.lab import exits
from megaopt.lab.config import read_config
from megaopt.lab.configs import DEFAULT, Config, find_config
from megaopt.lab.console import coloured, make_console, make_table, print_table, step_progress
from megaopt.lab.regression.megatron.config import read_megatron_run
from megaopt.lab.regression.outcome import TrialOutcome
from megaopt.lab.regression.picture import draw_losses, draw_times
from megaopt.lab.regression.plan import AnyRun
from megaopt.lab.regression.record import TIMES, build_record, describe_losses, measured, times_of
from megaopt.lab.regression.regression import Regression
from megaopt.lab.source import describe_source, make_folder
from megaopt.lab.toml_tables import read_toml
from megaopt.lab.training.machine import choose_device
from megaopt.lab.training.text import batches_of, load_corpus

UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))


def read_run(path: Path) -> AnyRun:
    """A config: of Megatron-Core's GPT where it has a table [megatron]."""
    return read_megatron_run(path) if "megatron" in read_toml(path) else read_config(path)


def regress(
    config: Config = DEFAULT, /, *, perturb: int | None = None, out: Path = Path("out")
) -> int:
    """Train the variants that a config names on the same data; compare them bit for bit.

    Args:
        config: TOML file of the run, or the name of one that comes with megaopt; --help has them.
        perturb: Flip the lowest bit of one master after this step, to see a difference caught.
        out: Folder for the record and the pictures; the run gets a folder of its name in it, where
            it writes over those of an earlier one.

    Returns:
        0 where every variant equals its baseline, 1 where one differs, 2 where one failed.

    Raises:
        ConfigError: the config or perturb is wrong, or the run cannot be made here.
        SourceError: MEGAOPT_COMMIT is not 40 hex digits, or not the commit of the checkout.
        OSError: the record or a picture cannot be written.
    """
    config_path = find_config(config)
    run, source = read_run(config_path), describe_source()
    console, corpus = make_console(), load_corpus()
    with tempfile.TemporaryDirectory() as scratch:
        regression = Regression(run, choose_device(run).type, Path(scratch), perturb)
        batches_of(run, corpus)  # refused here, not in every process
        folder = make_folder(out / run.name)
        record = folder / "record.json"
        with step_progress(console) as progress:
            began, steps = time.monotonic(), regression.total_steps
            task = progress.add_task("training", total=steps)

            def tell(outcome: TrialOutcome) -> None:
                # a line for each trial that ended, which a log can hold
                line = f"{time.monotonic() - began:5.0f} s  {outcome.trial.name}: {_told(outcome)}"
                console.print(line, soft_wrap=True, highlight=False)
                write_json(record, build_record(regression, corpus, source))

            regression.train(tell, lambda count: progress.update(task, completed=count))
        timed = [outcome for outcome in regression.outcomes if outcome.is_timed]
        if drawn := [outcome for outcome in regression.outcomes if outcome.ran]:
            ranks = max(job.ranks for trial in regression.trials for job in trial.jobs)
            several = f", up to {ranks} ranks" if ranks > 1 else ""
            title = f"{run.name}: {run.steps} steps on {regression.device}{several}"
            draw_losses(folder / "losses.png", title, drawn)
            if timed:
                draw_times(folder / "times.png", title, timed)
    console.print(_compared(regression))
    if timed:
        print_table(console, _measured(regression, timed))
    if any(trial.number > 1 for trial in regression.trials):
        print_table(console, _times(regression))
    lines: list[str | Text] = [f"record and pictures: {folder}"]
    status = exits.DONE
    if (difference := regression.first_difference()) is not None:
        lines.append(coloured("red", "different", f": {difference}"))
        status = exits.DIFFERENT
    elif regression.failed:
        failures = (f"{outcome.trial.name}: {outcome.failure}" for outcome in regression.failed)
        lines += [coloured("red", "failed", f": {failure}") for failure in failures]
        status = exits.REFUSED
    else:
        final = {outcome.trial.name: outcome.losses[-1] for outcome in regression.outcomes}
        words = (
            ": every loss, weight and state, and the norm that clips, bit for bit, to the "
            "baselines trained here; `megaopt verify` compares steps with the golden record"
        )
        lines += [describe_losses(config_path, final), coloured("green", "identical", words)]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    return status


def _told(outcome: TrialOutcome) -> str:
    """Describes the outcome of a trial."""
    if outcome.failure is not None:
        return f"failed: {outcome.failure}"
    if outcome.baseline is None:
        return "done"
    if outcome.difference is not None:
        return f"different: {outcome.difference}"
    return f"identical to {outcome.baseline.trial.name}"


# --- the tables


def _size(value: int | None) -> str:
    if value is None:
        return ""
    power, unit = next((p, u) for p, u in UNITS if value >= 1 << p or p == 0)
    return f"{value / (1 << power):.4g} {unit}"


MEASURED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "ranks": ("ranks", str),
    "ms": ("optimizer_milliseconds", "{:.2f}".format),
    "iteration ms": ("step_milliseconds", "{:.2f}".format),
    "state": ("state_bytes", _size),
    "step's extra": ("optimizer_extra_bytes", _size),
    "peak": ("peak_bytes", _size),
    "B/parameter": ("bytes_per_parameter", lambda n: "" if n is None else str(sum(n.values()))),
}
"""Columns of what was measured: the key in the record, and how it is shown."""


def _compared(regression: Regression) -> Table:
    """A row for each trial: whether it is identical; under [float8] a section for each recipe.

    Ranks and recipes are shown where there are several.
    """
    rows: list[dict[str, str | Text]] = []
    for outcome in regression.outcomes:
        trial, difference, identical, where = outcome.trial, outcome.difference, Text(), ""
        if outcome.failure is not None:
            identical = coloured("red", "failed")
        elif trial.baseline is not None:
            identical = coloured("red", "no") if difference else coloured("green", "yes")
        if difference is not None:
            where = f"step {difference.step}: {difference.tensor}"
        row: dict[str, str | Text] = {
            "recipe": trial.recipe or "",
            "variant": trial.short_name,
            "baseline": (trial.baseline or "").removeprefix(f"{trial.recipe}."),
            "ranks": " then ".join(dict.fromkeys(str(job.ranks) for job in trial.jobs)),
            "final loss": f"{outcome.losses[-1]:.9g}" if outcome.losses else "",
            "identical": identical,
            "first difference": where,
        }
        rows.append(row)
    table = Table(title=f"{regression.run.name}: {regression.run.steps} steps, {regression.device}")
    several = [n for n in ("recipe", "ranks") if {row[n] for row in rows} - {"", "1"}]
    shown = [name for name in rows[0] if name not in ("recipe", "ranks") or name in several]
    for name in shown:
        fold = name == "first difference"
        table.add_column(name, no_wrap=not fold, overflow="fold")
    for row, following in zip_longest(rows, rows[1:], fillvalue=rows[0]):
        section = row["recipe"] != following["recipe"]
        table.add_row(*(row[name] for name in shown), end_section=section)
    return table


def _measured(regression: Regression, timed: Iterable[TrialOutcome]) -> Table:
    """A row for each trial: time, memory and bytes."""
    title, headings = "a rank's optimizer step, norm and clip included", [f">{n}" for n in MEASURED]
    table = make_table(title, ("variant", *headings))
    for outcome in timed:
        figures = measured(regression, outcome)
        cells = (show(figures[key]) for key, show in MEASURED.values())
        table.add_row(outcome.trial.name, *cells)
    return table


def _times(regression: Regression) -> Table:
    """A row for each variant: medians over its runs, least and most, and over the baseline's."""
    title = "over all runs: medians, (least to most), times the baseline's"
    table = make_table(title, ("variant", ">runs", ">step ms", ">", ">iteration ms", ">"))
    for variant, times in times_of(regression).items():
        cells = []
        for spread in (times[key] for key in TIMES):
            cells.append("{median:.2f} ({least:.2f} to {most:.2f})".format(**spread))
            ratio = spread["of_baseline"]
            cells.append("" if ratio is None else f"{ratio:.3f}")
        table.add_row(variant, str(times["runs"]), *cells)
    return table
