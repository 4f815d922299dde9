"""`megaopt regress`: runs a regression, shows its table, writes its record and its picture."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megaopt.commands.config import read_config
from megaopt.commands.console import make_console, step_progress
from megaopt.commands.regression.lockstep import Regression, Trial
from megaopt.commands.regression.outputs import make_folder
from megaopt.commands.regression.picture import draw_losses
from megaopt.commands.regression.record import build_record
from megaopt.commands.regression.recorded import describe_losses
from megaopt.commands.source import describe_source
from megaopt.commands.toml_tables import read_toml
from megaopt.commands.training.determinism import choose_device, deterministic
from megaopt.commands.training.limits import require_room
from megaopt.commands.training.text import batches_of, load_corpus
from megaopt.saving.files import write_json


def regress(config_path: Path, out: Path, perturb: int | None = None) -> int:
    """Trains the variants of a config and compares them bit for bit.

    A config with a table [megatron] is trained by Megatron-Core, in processes of its own.

    Args:
        config_path: the TOML file.
        out: folder in which the folder of this run, named like the config, is made.
        perturb: step after whose update one bit of one master is flipped; None: never.

    Returns:
        0 where every variant equals its baseline, 1 where one differs; with [megatron] 2 where one
        failed.

    Raises:
        ConfigError: the config or perturb is wrong, or a variant cannot run here.
        SourceError: MEGAOPT_COMMIT is not 40 hex digits, or not the commit of the checkout.
        RankError, ResumeError: a process of a variant failed.
        OSError: the record or the picture cannot be written.
    """
    if "megatron" in read_toml(config_path):
        from megaopt.commands.regression.megatron.command import regress_megatron

        return regress_megatron(config_path, out, perturb)
    config, source = read_config(config_path), describe_source()
    console = make_console()
    with deterministic(config.cpu_threads), tempfile.TemporaryDirectory() as scratch:
        device = choose_device(config)
        require_room(config, config.runs, device)
        corpus = load_corpus()
        regression = Regression(
            config,
            batches_of(config, corpus),
            device,
            config_path=config_path,
            folder=Path(scratch),
            perturb=perturb,
        )
        folder = make_folder(out / config.name)
        _run(regression, console)
    # before the files are written, which may fail
    console.print(_table(regression))
    write_json(folder / "record.json", build_record(regression, corpus, source))
    title = f"{config.name}: {config.steps} steps on {device.type}"
    draw_losses(folder / "losses.png", title, regression.trials)
    return _report(regression, folder, console)


def _run(regression: Regression, console: Console) -> None:
    with step_progress(console) as progress:
        names = len(regression.trials)
        task = progress.add_task(f"training {names} variants", total=regression.total_steps)
        regression.run(lambda done: progress.update(task, completed=done))


def _row(trial: Trial) -> tuple[str, ...]:
    """Variant, baseline, final loss, whether they are identical, the first difference."""
    loss = f"{trial.losses[-1]:.9g}"
    if trial.baseline is None:
        return trial.short_name, "", loss, "", ""
    found = trial.difference
    where = "" if found is None else f"step {found.step}: {found.tensor}[{found.index}]"
    identical = "[green]yes[/]" if found is None else "[red]no[/]"
    return trial.short_name, trial.baseline.short_name, loss, identical, where


def _table(regression: Regression) -> Table:
    """A row for each trial; under [float8] a section for each recipe."""
    table = Table(title=f"{regression.config.name}: {regression.config.steps} steps")
    recipes = [trial.variant.recipe for trial in regression.trials]
    with_recipes = regression.config.float8 is not None
    names = ("recipe", "variant", "baseline", "final loss", "identical")
    for name in names if with_recipes else names[1:]:
        table.add_column(name, no_wrap=True)
    table.add_column("first difference", overflow="fold")
    for trial, recipe, following in zip(
        regression.trials, recipes, [*recipes[1:], None], strict=True
    ):
        leading = (recipe or "",) if with_recipes else ()
        table.add_row(*leading, *_row(trial), end_section=recipe != following)
    return table


def _report(regression: Regression, folder: Path, console: Console) -> int:
    console.print(f"record and picture: {folder}", soft_wrap=True, highlight=False)
    difference = regression.first_difference()
    if difference is None:
        losses = {trial.short_name: trial.losses[-1] for trial in regression.trials}
        if regression.config.float8 is None:
            about = describe_losses(regression.config_path, losses)
            console.print(about, soft_wrap=True, highlight=False)
        console.print(
            "[green]identical[/]: every loss, weight and state, bit for bit, to the baselines "
            "trained here; `megaopt verify` compares steps with the golden record",
            soft_wrap=True,
            highlight=False,
        )
        return 0
    console.print(f"[red]different[/]: {difference}", soft_wrap=True, highlight=False)
    return 1
