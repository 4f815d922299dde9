"""`megaopt regress` of a config with a table [megatron]."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megaopt.commands.console import make_console
from megaopt.commands.regression.megatron.config import MegatronRun, read_megatron_run
from megaopt.commands.regression.megatron.picture import draw_times
from megaopt.commands.regression.megatron.plan import Trial
from megaopt.commands.regression.megatron.record import build_record, measured, times_of
from megaopt.commands.regression.megatron.regression import Outcome, Regression
from megaopt.commands.regression.outputs import make_folder
from megaopt.commands.regression.picture import draw_losses
from megaopt.commands.source import Source, describe_source
from megaopt.commands.training.determinism import choose_device
from megaopt.commands.training.text import Corpus, load_corpus
from megaopt.saving.files import write_json

FAILED = 2
UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))


def regress_megatron(config_path: Path, out: Path, perturb: int | None = None) -> int:
    """Trains the variants of a config in fresh processes and compares them bit for bit.

    Record and pictures are written anew whenever a variant has ended.

    Args:
        config_path: the TOML file.
        out: folder in which the folder of this run, named like the config, is made.
        perturb: step after whose update one bit of one master is flipped; None: never.

    Returns:
        0 where every variant equals its baseline, 1 where one differs, 2 where one failed.

    Raises:
        ConfigError: the config or perturb is wrong, or the run cannot be made here.
        SourceError: MEGAOPT_COMMIT is not 40 hex digits, or not the commit of the checkout.
        OSError: the record or a picture cannot be written.
    """
    run, source = read_megatron_run(config_path), describe_source()
    console = make_console()
    corpus = load_corpus()
    with tempfile.TemporaryDirectory() as scratch:
        regression = Regression(
            run, choose_device(run).type, folder=Path(scratch), corpus=corpus, perturb=perturb
        )
        folder = make_folder(out / run.name)
        teller = Teller(run, console)

        def on_trial(outcome: Outcome) -> None:
            teller.trial(outcome)
            _write(regression, folder, corpus, source)

        regression.train(on_trial, teller.step)
    return _report(regression, folder, console)


class Teller:
    """Prints how a regression goes on, in lines that a log can hold.

    Args:
        run: the config.
        console: where to.
    """

    def __init__(self, run: MegatronRun, console: Console) -> None:
        self.run, self.console = run, console
        self.began = time.monotonic()

    def step(self, trial: Trial, step: int) -> None:
        """The first step of a group of processes, and some on the way."""
        every = max(1, self.run.steps // 4)
        if step % every == 0 or step in {job.first for job in trial.jobs}:
            self._print(f"{trial.name}: step {step} of {self.run.steps}")

    def trial(self, outcome: Outcome) -> None:
        """What came of a trial."""
        text = "done"
        if outcome.failure is not None:
            text = f"failed: {outcome.failure}"
        elif outcome.baseline is not None:
            different = outcome.difference
            same = f"identical to {outcome.baseline.trial.name}"
            text = same if different is None else f"different: {different}"
        self._print(f"{outcome.trial.name}: {text}")

    def _print(self, text: str) -> None:
        seconds = f"{time.monotonic() - self.began:5.0f} s  "
        self.console.print(seconds + escape(text), soft_wrap=True, highlight=False)


def _write(regression: Regression, folder: Path, corpus: Corpus, source: Source) -> None:
    write_json(folder / "record.json", build_record(regression, corpus, source))
    outcomes = [each for each in regression.outcomes.values() if each.result is not None]
    if outcomes:
        run, count = regression.run, regression.run.megatron.ranks
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        title = f"{run.name}: {run.steps} steps, {ranks}, {regression.device}"
        draw_losses(folder / "losses.png", title, outcomes)
        draw_times(folder / "times.png", title, outcomes)


# --- the table


def _size(value: int | None) -> str:
    if value is None:
        return ""
    power, unit = next((p, u) for p, u in UNITS if value >= 1 << p or p == 0)
    return f"{value / (1 << power):.4g} {unit}"


def _compared(regression: Regression) -> Table:
    """A row for each trial: whether it is identical."""
    run = regression.run
    table = Table(title=f"{run.name}: {run.steps} steps, {regression.device}")
    for name in ("variant", "baseline", "ranks", "final loss", "identical"):
        table.add_column(name, no_wrap=True)
    for outcome in regression.outcomes.values():
        trial, identical = outcome.trial, ""
        if trial.baseline is not None:
            identical = "[green]yes[/]" if outcome.difference is None else "[red]no[/]"
        ranks = " then ".join(str(job.ranks) for job in trial.jobs)
        loss = f"{outcome.losses[-1]:.9g}" if outcome.losses else ""
        state = identical if outcome.failure is None else "[red]failed[/]"
        table.add_row(trial.name, trial.baseline or "", ranks, loss, state)
    return table


def _measured(regression: Regression) -> Table:
    """A row for each trial: time, memory and bytes."""
    table = Table(title="a rank's optimizer step, norm and clip included")
    table.add_column("variant", no_wrap=True)
    for name in ("ranks", "ms", "iteration ms", "state", "step's extra", "peak", "B/parameter"):
        table.add_column(name, justify="right")
    for outcome in regression.outcomes.values():
        if outcome.result is None:
            continue
        found = measured(regression, outcome.result)
        sizes = [found[key] for key in ("state_bytes", "optimizer_extra_bytes", "peak_bytes")]
        passes = found["bytes_per_parameter"]
        table.add_row(
            outcome.trial.name,
            str(found["ranks"]),
            f"{found['optimizer_milliseconds']:.2f}",
            f"{found['step_milliseconds']:.2f}",
            *(_size(size) for size in sizes),
            "" if passes is None else str(sum(passes.values())),
        )
    return table


def _times(regression: Regression) -> Table:
    """A row for each variant: medians over its runs, least and most, and over the baseline's."""
    table = Table(title="over all runs: medians, (least to most), times the baseline's")
    table.add_column("variant", no_wrap=True)
    for name in ("runs", "step ms", "", "iteration ms", ""):
        table.add_column(name, justify="right")
    for variant, times in times_of(regression).items():
        cells = [str(times["runs"])]
        for key in ("optimizer_milliseconds", "step_milliseconds"):
            spread, ratio = times[key], times[key]["of_baseline"]
            cells.append(f"{spread['median']:.2f} ({spread['least']:.2f} to {spread['most']:.2f})")
            cells.append("" if ratio is None else f"{ratio:.3f}")
        table.add_row(variant, *cells)
    return table


def _report(regression: Regression, folder: Path, console: Console) -> int:
    console.print(_compared(regression))
    console.print(_measured(regression))
    if any(variant.runs > 1 for variant in regression.run.variant):
        console.print(_times(regression))
    console.print(f"record and pictures: {folder}", soft_wrap=True, highlight=False)
    difference = regression.first_difference()
    if difference is not None:
        console.print(f"[red]different[/]: {escape(str(difference))}", soft_wrap=True)
        return 1
    if regression.failed:
        names = ", ".join(outcome.trial.name for outcome in regression.failed)
        console.print(f"[red]failed[/]: {names}", soft_wrap=True, highlight=False)
        return FAILED
    console.print("[green]identical[/]: every loss, gradient norm, weight and state, bit for bit")
    return 0
