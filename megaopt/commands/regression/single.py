"""`megaopt train`: trains one variant alone; the fresh process of a resumed variant too."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megaopt.commands import exits
from megaopt.commands.bits import Snapshot
from megaopt.commands.config import FusedVariant, GaLoreVariant, RunConfig, Variant, read_config
from megaopt.commands.console import make_console, step_progress
from megaopt.commands.regression.outputs import require_place
from megaopt.commands.regression.processes import Processes, print_into, printed
from megaopt.commands.regression.resume import (
    load_result,
    load_trainer,
    save_result,
    save_trainer,
)
from megaopt.commands.regression.variants import build_trainer
from megaopt.commands.toml_tables import MOST, ConfigError, require
from megaopt.commands.training.determinism import choose_device, deterministic
from megaopt.commands.training.limits import require_room
from megaopt.commands.training.text import Batches, batches_of, load_corpus
from megaopt.commands.training.trainer import Trainer

POLL = 0.2
"""Seconds between two looks at how far a fresh process is."""


def _choose_variant(config: RunConfig, name: str | None) -> Variant:
    """The named variant, or else the first that an optimizer of this package trains."""
    if name is not None:
        return config.find_variant(name)
    for variant in config.runs:
        if isinstance(variant, (FusedVariant, GaLoreVariant)):
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
    on_step: Callable[[], None] = lambda: None,
) -> int:
    """Trains one variant of a config.

    Args:
        config_path: the TOML file.
        variant: its name; the first fused variant by default.
        steps: the last step, counted from the run's beginning; the config's by default.
        save: where to write a checkpoint at the end.
        resume: a checkpoint of the same run to continue from.
        result: where to write the losses trained here, the final weights and the state.
        on_step: called after each step.

    Returns:
        0.

    Raises:
        ConfigError: the config, variant, steps, save or result is wrong, or the checkpoint is of
            another run.
        CheckpointError: the checkpoint cannot be read.
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
        require_room(config, [chosen], device)
        batches = batches_of(config, load_corpus())
        trainer = build_trainer(config, chosen, device)
        if resume is not None:
            load_trainer(resume, config, chosen, trainer)
        done = trainer.steps_done
        require(last > done, "steps", last, f"more than the {done} steps of the checkpoint")
        losses = _train_steps(batches, trainer, chosen.name, last, on_step)
    if save is not None:
        save_trainer(save, config, chosen, trainer)
    if result is not None:
        save_result(result, losses, trainer.owner.snapshot())
    return 0


def _train_steps(
    batches: Batches, trainer: Trainer, name: str, last: int, on_step: Callable[[], None]
) -> list[float]:
    """Trains to a step; the losses of the steps trained."""
    console = make_console()
    losses: list[float] = []
    with step_progress(console) as progress:
        task = progress.add_task(name, total=last, completed=trainer.steps_done)
        for step in range(trainer.steps_done + 1, last + 1):
            losses.append(trainer.train_step(batches.at(step)))
            progress.update(task, completed=step, description=f"{name}, loss {losses[-1]:.4f}")
            on_step()
    console.print(f"{name}: loss {losses[-1]:.9g} at step {last}", highlight=False)
    return losses


# --- the fresh process


class ResumeError(RuntimeError):
    """The fresh process failed."""


def _serve(said: Path, done: Any, config_path: Path, options: dict[str, Any]) -> None:
    def count() -> None:
        done.value += 1

    print_into(said)
    sys.exit(exits.run(lambda: train(config_path, **options, on_step=count)))


class FreshRun:
    """A variant is continued to the config's last step; leaving the context ends its process.

    Args:
        config_path: of the run.
        variant: its name.
        path: the checkpoint to continue; the process's files are made beside it.
    """

    def __init__(self, config_path: Path, variant: str, path: Path) -> None:
        self.variant, self.config_path, self.path = variant, config_path, path
        self._said, self._result = path.with_suffix(".said"), path.with_suffix(".result")
        context = multiprocessing.get_context("spawn")
        self._processes = Processes(context, daemon=True)
        self._done = context.Value("i", 0, lock=False)

    def __enter__(self) -> FreshRun:
        options = {"variant": self.variant, "resume": self.path, "result": self._result}
        files = (self._said, self._done, self.config_path)
        self._processes.start(self.variant, _serve, *files, options)
        return self

    def __exit__(self, *error: Any) -> None:
        self._processes.__exit__(*error)

    @property
    def steps_done(self) -> int:
        """How many steps it has trained."""
        return int(self._done.value)

    def wait(
        self, device: torch.device, tell: Callable[[], None] = lambda: None
    ) -> tuple[list[float], Snapshot]:
        """The losses of the continued steps, and the final weights and state on device.

        tell is called a few times a second until then, and at the end.

        Raises:
            ResumeError: the process failed; the message ends with what it said.
        """
        while any(process.is_alive() for process in self._processes.all):
            self._processes.join(POLL)
            tell()
        if any(process.exitcode for process in self._processes.all):
            end = printed(self._said).strip()[-2000:]
            raise ResumeError(f"variant {self.variant!r}: the fresh process failed: {end}")
        return load_result(self._result, device)
