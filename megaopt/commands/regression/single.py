"""`megaopt train`: trains one variant alone; the fresh process of a resumed variant too."""

from __future__ import annotations

from pathlib import Path

from megaopt.commands.config import ConfigError, FusedVariant, RunConfig, Variant, read_config
from megaopt.commands.console import make_console
from megaopt.commands.regression.command import batches_of, step_progress
from megaopt.commands.regression.outputs import require_place
from megaopt.commands.regression.resume import load_trainer, save_result, save_trainer
from megaopt.commands.regression.variants import build_trainer
from megaopt.commands.toml_tables import MOST, require
from megaopt.commands.training.determinism import choose_device, deterministic
from megaopt.commands.training.limits import require_room
from megaopt.commands.training.text import Batches, load_corpus
from megaopt.commands.training.trainer import Trainer


def _choose_variant(config: RunConfig, name: str | None) -> Variant:
    """The named variant, or else the first that FusedAdam trains."""
    if name is not None:
        return config.find_variant(name)
    for variant in config.runs:
        if isinstance(variant, FusedVariant):
            return variant
    names = ", ".join(each.name for each in config.runs)
    raise ConfigError(f"variant must be one of {names}, as none is fused, got nothing")


def train(
    config_path: Path,
    *,
    variant: str | None = None,
    steps: int | None = None,
    save: Path | None = None,
    resume: Path | None = None,
    result: Path | None = None,
) -> int:
    """Trains one variant of a config.

    Args:
        config_path: the TOML file.
        variant: its name; the first fused variant by default.
        steps: the last step, counted from the run's beginning; the config's by default.
        save: where to write a checkpoint at the end.
        resume: a checkpoint of the same run to continue from.
        result: where to write the losses trained here, the final weights and the state.

    Returns:
        0.

    Raises:
        ConfigError: an argument is not allowed, or the checkpoint is of another run.
        CheckpointError: the checkpoint cannot be read.
        CorpusError: the text is too short for the config's context.
        OSError: a file cannot be written.
    """
    config = read_config(config_path)
    chosen = _choose_variant(config, variant)
    last = config.steps if steps is None else steps
    require(1 <= last <= MOST, "steps", last, "a whole number from 1 to 2**31-1")
    require_place("save", save)
    require_place("result", result)
    with deterministic(config.cpu_threads):
        device = choose_device(config)
        require_room(config, 1, device)
        batches = batches_of(config, load_corpus())
        trainer = build_trainer(config, chosen, device)
        if resume is not None:
            load_trainer(resume, config, chosen, trainer)
        done = trainer.steps_done
        require(last > done, "steps", last, f"more than the {done} steps of the checkpoint")
        losses = _train_steps(batches, trainer, chosen.name, last)
    if save is not None:
        save_trainer(save, config, chosen, trainer)
    if result is not None:
        save_result(result, losses, trainer.owner.snapshot())
    return 0


def _train_steps(batches: Batches, trainer: Trainer, name: str, last: int) -> list[float]:
    """Trains to a step; the losses of the steps trained."""
    console = make_console()
    losses: list[float] = []
    with step_progress(console) as progress:
        task = progress.add_task(name, total=last, completed=trainer.steps_done)
        for step in range(trainer.steps_done + 1, last + 1):
            losses.append(trainer.train_step(batches.at(step)))
            progress.update(task, completed=step, description=f"{name}, loss {losses[-1]:.4f}")
    console.print(f"{name}: loss {losses[-1]:.9g} at step {last}", highlight=False)
    return losses
