"""Trains all variants side by side on the same batches and compares them after every step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from megaopt.commands.bits import Snapshot, loss_bits
from megaopt.commands.config import FusedVariant, GaLoreVariant, RunConfig, Variant
from megaopt.commands.regression.compare import (
    Difference,
    Mismatch,
    earliest,
    find_mismatch,
    hash_snapshot,
)
from megaopt.commands.regression.fused import FusedWeights
from megaopt.commands.regression.resume import save_trainer
from megaopt.commands.regression.single import FreshRun
from megaopt.commands.regression.variants import build_trainer
from megaopt.commands.regression.workers import WorkerGroup, WorkerTrainer, variants_with_ranks
from megaopt.commands.toml_tables import ConfigError, require
from megaopt.commands.training.text import Batches
from megaopt.commands.training.trainer import Trainer

PROCESSES = 2
"""How many resumed variants continue at a time."""


class Trial:
    """One variant under way: its trainer, its losses, and its first difference, if any."""

    def __init__(
        self, variant: Variant, trainer: Trainer | WorkerTrainer, baseline: Trial | None
    ) -> None:
        self.variant = variant
        self.trainer: Trainer | WorkerTrainer | None = trainer
        self.baseline = baseline
        self.losses: list[float] = []
        self.difference: Difference | None = None
        self.final: Snapshot = {}
        self.sha256: dict[str, str] = {}

    @property
    def short_name(self) -> str:
        """The variant's name in the config, without its recipe."""
        return self.variant.name.removeprefix(f"{self.variant.recipe}.")

    @property
    def recipe(self) -> str | None:
        """Under [float8]: the variant's."""
        return self.variant.recipe

    @property
    def is_compared(self) -> bool:
        """Whether the trial has a baseline and has not differed from it yet."""
        return self.baseline is not None and self.difference is None

    def compare_losses(self, first_step: int) -> None:
        """Looks for the first differing loss from a step on."""
        if self.baseline is None or self.difference is not None:
            return
        pairs = list(zip(self.losses, self.baseline.losses, strict=False))
        for step, (loss, expected) in enumerate(pairs[first_step - 1 :], start=first_step):
            if loss_bits(loss) != loss_bits(expected):
                self._note(step, Mismatch("loss", 0, loss_bits(loss), loss_bits(expected)))
                return

    def compare_tensors(self, step: int, snapshot: Snapshot, expected: Snapshot) -> None:
        """Looks for the first differing weight or state element after a step's update."""
        if self.is_compared:
            self._note(step, find_mismatch(snapshot, expected))

    def _note(self, step: int, mismatch: Mismatch | None) -> None:
        if mismatch is None or self.baseline is None:
            return
        self.difference = Difference(
            step=step,
            variant=self.variant.name,
            baseline=self.baseline.variant.name,
            tensor=mismatch.tensor,
            index=mismatch.index,
            bits=mismatch.bits,
            baseline_bits=mismatch.baseline_bits,
        )


class Regression:
    """The trials of a config, advanced together.

    Args:
        config: the run.
        batches: its batches.
        device: where to train.
        config_path: the config's file, for the fresh process of a resumed variant.
        folder: an existing folder for that process's checkpoint and result.
        perturb: step after whose update one bit of one master is flipped; None: never.

    Raises:
        ConfigError: perturb is no step of the run, or there is no variant to perturb, or a variant
            cannot run here.
    """

    def __init__(
        self,
        config: RunConfig,
        batches: Batches,
        device: torch.device,
        *,
        config_path: Path,
        folder: Path,
        perturb: int | None = None,
    ) -> None:
        self.config = config
        self.batches = batches
        self.config_path = config_path
        self.folder = folder
        self.device = device
        self.perturb = perturb
        self.perturbed = None if perturb is None else _variant_to_perturb(config, perturb)
        self.workers = WorkerGroup(config, device, folder) if variants_with_ranks(config) else None
        self.trials = self._build_trials()
        self.done = 0

    def _build_trials(self) -> list[Trial]:
        # baselines first: whoever is compared with one needs to know it
        variants = sorted(self.config.runs, key=lambda variant: variant.baseline is not None)
        trials: dict[str, Trial] = {}
        for variant in variants:
            baseline = None if variant.baseline is None else trials[variant.baseline]
            trials[variant.name] = Trial(variant, self._build_trainer(variant), baseline)
        return [trials[variant.name] for variant in self.config.runs]

    def _build_trainer(self, variant: Variant) -> Trainer | WorkerTrainer:
        if self.workers is not None and isinstance(variant, FusedVariant) and variant.ranks:
            return WorkerTrainer(variant.name, self.workers)
        return build_trainer(self.config, variant, self.device)

    @property
    def total_steps(self) -> int:
        """Those of the run, and those that resumed variants train after it."""
        return self.config.steps + sum(self._steps_after(trial) for trial in self.trials)

    def _steps_after(self, trial: Trial) -> int:
        stop = trial.variant.resume_after
        return 0 if stop is None else self.config.steps - stop

    def run(self, on_step: Callable[[int], None]) -> None:
        """Trains and compares all trials; calls on_step with how many of total_steps are done.

        Raises:
            RankError: a process of a variant with ranks failed.
            ResumeError: the fresh process of a resumed variant failed.
        """
        with self.workers or nullcontext():
            for step in range(1, self.config.steps + 1):
                self._train_step(step)
                self._compare_step(step)
                self._stop_trials_to_resume(step)
                self.done = step
                on_step(step)
        self._finish_trials()
        resumed = [trial for trial in self.trials if trial.variant.resume_after is not None]
        for first in range(0, len(resumed), PROCESSES):
            self._resume(resumed[first : first + PROCESSES], on_step)
        for trial in self.trials:
            trial.sha256 = hash_snapshot(trial.final)

    def _train_step(self, step: int) -> None:
        batch = self.batches.at(step)
        if self.workers is not None:
            self.workers.begin(batch)
        # the workers' last: until then its processes train beside this one
        for trial in sorted(
            self.trials, key=lambda trial: isinstance(trial.trainer, WorkerTrainer)
        ):
            if trial.trainer is None:
                continue
            trial.losses.append(trial.trainer.train_step(batch))
            if step == self.perturb and trial.variant == self.perturbed:
                flip_master_bit(trial.trainer)

    def _compare_step(self, step: int) -> None:
        snapshots: dict[str, Snapshot] = {}
        for trial in self.trials:
            if trial.trainer is None or trial.baseline is None or not trial.is_compared:
                continue
            trial.compare_losses(step)
            baseline = trial.baseline
            if baseline.variant.name not in snapshots and baseline.trainer is not None:
                snapshots[baseline.variant.name] = baseline.trainer.owner.snapshot()
            snapshot = trial.trainer.owner.snapshot()
            trial.compare_tensors(step, snapshot, snapshots[baseline.variant.name])

    def _stop_trials_to_resume(self, step: int) -> None:
        for trial in self.trials:
            if trial.trainer is not None and trial.variant.resume_after == step:
                assert isinstance(trial.trainer, Trainer)
                save_trainer(self._checkpoint(trial), self.config, trial.variant, trial.trainer)
                trial.trainer = None

    def _checkpoint(self, trial: Trial) -> Path:
        return self.folder / f"{trial.variant.name}.checkpoint"

    def _finish_trials(self) -> None:
        for trial in self.trials:
            if trial.trainer is not None:
                trial.final = trial.trainer.owner.snapshot()

    def _resume(self, trials: list[Trial], on_step: Callable[[int], None]) -> None:
        """Continues trials side by side."""
        before = self.done
        with ExitStack() as stack:
            runs = [
                stack.enter_context(
                    FreshRun(self.config_path, trial.variant.name, self._checkpoint(trial))
                )
                for trial in trials
            ]

            def tell() -> None:
                self.done = before + sum(run.steps_done for run in runs)
                on_step(self.done)

            for trial, run in zip(trials, runs, strict=True):
                self._join(trial, *run.wait(self.device, tell))

    def _join(self, trial: Trial, losses: list[float], final: Snapshot) -> None:
        """Adds what a fresh process trained to a trial, and compares it."""
        stopped = len(trial.losses)
        trial.losses += losses
        trial.final = final
        trial.compare_losses(stopped + 1)
        if trial.baseline is not None:
            trial.compare_tensors(self.config.steps, trial.final, trial.baseline.final)

    def first_difference(self) -> Difference | None:
        """The earliest difference of all trials."""
        return earliest(trial.difference for trial in self.trials)


def _variant_to_perturb(config: RunConfig, step: int) -> FusedVariant | GaLoreVariant:
    allowed = f"a step of the run, from 1 to {config.steps}"
    require(1 <= step <= config.steps, "perturb", step, allowed)
    for variant in config.runs:
        stops = variant.resume_after is not None and variant.resume_after < step
        if stops or variant.baseline is None:
            continue
        if isinstance(variant, GaLoreVariant):
            return variant
        if isinstance(variant, FusedVariant) and _holds_masters(variant):
            return variant
    raise ConfigError(
        f"perturb must be a step at which a fused variant of {config.name} that holds fp32 masters "
        f"trains, got {step}"
    )


def _holds_masters(variant: FusedVariant) -> bool:
    return variant.ranks is None and variant.masters != "remainders"


def flip_master_bit(trainer: Trainer | WorkerTrainer) -> None:
    """Flips one bit of one master, so that a user sees the difference caught."""
    if not isinstance(trainer.owner, FusedWeights):
        raise TypeError(f"trainer.owner = {trainer.owner!r}: only FusedAdam is perturbed")
    trainer.owner.flip_master_bit()
