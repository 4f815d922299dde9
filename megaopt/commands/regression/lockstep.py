"""Trains all variants side by side on the same batches and compares them after every step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from megaopt.commands.bits import Snapshot, loss_bits
from megaopt.commands.config import ConfigError, FusedVariant, RunConfig, Variant
from megaopt.commands.regression.compare import (
    Difference,
    Mismatch,
    earliest,
    find_mismatch,
    hash_snapshot,
)
from megaopt.commands.regression.crew import Crew, CrewTrainer, variants_with_ranks
from megaopt.commands.regression.fused import FusedWeights
from megaopt.commands.regression.resume import save_trainer
from megaopt.commands.regression.single import FreshRun
from megaopt.commands.regression.variants import build_trainer
from megaopt.commands.toml_tables import require
from megaopt.commands.training.text import Batches
from megaopt.commands.training.trainer import Trainer

PROCESSES = 2
"""How many resumed variants continue at a time."""


class Lane:
    """One variant under way: its trainer, its losses, and its first difference, if any."""

    def __init__(
        self, variant: Variant, trainer: Trainer | CrewTrainer, baseline: Lane | None
    ) -> None:
        self.variant = variant
        self.trainer: Trainer | CrewTrainer | None = trainer
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
        """Whether the lane has a baseline and has not differed from it yet."""
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
    """The lanes of a config, advanced together.

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
        self.crew = Crew(config, device, folder) if variants_with_ranks(config) else None
        self.lanes = self._build_lanes()

    def _build_lanes(self) -> list[Lane]:
        # baselines first: whoever is compared with one needs to know it
        variants = sorted(self.config.runs, key=lambda variant: variant.baseline is not None)
        lanes: dict[str, Lane] = {}
        for variant in variants:
            baseline = None if variant.baseline is None else lanes[variant.baseline]
            lanes[variant.name] = Lane(variant, self._build_trainer(variant), baseline)
        return [lanes[variant.name] for variant in self.config.runs]

    def _build_trainer(self, variant: Variant) -> Trainer | CrewTrainer:
        if self.crew is not None and isinstance(variant, FusedVariant) and variant.ranks:
            return CrewTrainer(variant.name, self.crew)
        return build_trainer(self.config, variant, self.device)

    def run(self, on_step: Callable[[int], None]) -> None:
        """Trains and compares all lanes; calls on_step with the number of each finished step.

        Raises:
            RankError: a process of a variant with ranks failed.
            ResumeError: the fresh process of a resumed variant failed.
        """
        with self.crew or nullcontext():
            for step in range(1, self.config.steps + 1):
                self._train_step(step)
                self._compare_step(step)
                self._stop_lanes_to_resume(step)
                on_step(step)
        self._finish_lanes()
        resumed = [lane for lane in self.lanes if lane.variant.resume_after is not None]
        for first in range(0, len(resumed), PROCESSES):
            self._resume(resumed[first : first + PROCESSES])
        for lane in self.lanes:
            lane.sha256 = hash_snapshot(lane.final)

    def _train_step(self, step: int) -> None:
        batch = self.batches.at(step)
        if self.crew is not None:
            self.crew.begin(batch)
        # the crew's last: until then its processes train beside this one
        for lane in sorted(self.lanes, key=lambda lane: isinstance(lane.trainer, CrewTrainer)):
            if lane.trainer is None:
                continue
            lane.losses.append(lane.trainer.train_step(batch))
            if step == self.perturb and lane.variant == self.perturbed:
                flip_master_bit(lane.trainer)

    def _compare_step(self, step: int) -> None:
        snapshots: dict[str, Snapshot] = {}
        for lane in self.lanes:
            if lane.trainer is None or lane.baseline is None or not lane.is_compared:
                continue
            lane.compare_losses(step)
            baseline = lane.baseline
            if baseline.variant.name not in snapshots and baseline.trainer is not None:
                snapshots[baseline.variant.name] = baseline.trainer.owner.snapshot()
            snapshot = lane.trainer.owner.snapshot()
            lane.compare_tensors(step, snapshot, snapshots[baseline.variant.name])

    def _stop_lanes_to_resume(self, step: int) -> None:
        for lane in self.lanes:
            if lane.trainer is not None and lane.variant.resume_after == step:
                assert isinstance(lane.trainer, Trainer)
                save_trainer(self._checkpoint(lane), self.config, lane.variant, lane.trainer)
                lane.trainer = None

    def _checkpoint(self, lane: Lane) -> Path:
        return self.folder / f"{lane.variant.name}.checkpoint"

    def _finish_lanes(self) -> None:
        for lane in self.lanes:
            if lane.trainer is not None:
                lane.final = lane.trainer.owner.snapshot()

    def _resume(self, lanes: list[Lane]) -> None:
        """Continues lanes side by side."""
        with ExitStack() as stack:
            runs = [
                stack.enter_context(
                    FreshRun(self.config_path, lane.variant.name, self._checkpoint(lane))
                )
                for lane in lanes
            ]
            for lane, run in zip(lanes, runs, strict=True):
                self._join(lane, *run.wait(self.device))

    def _join(self, lane: Lane, losses: list[float], final: Snapshot) -> None:
        """Adds what a fresh process trained to a lane, and compares it."""
        stopped = len(lane.losses)
        lane.losses += losses
        lane.final = final
        lane.compare_losses(stopped + 1)
        if lane.baseline is not None:
            lane.compare_tensors(self.config.steps, lane.final, lane.baseline.final)

    def first_difference(self) -> Difference | None:
        """The earliest difference of all lanes."""
        return earliest(lane.difference for lane in self.lanes)


def _variant_to_perturb(config: RunConfig, step: int) -> FusedVariant:
    allowed = f"a step of the run, from 1 to {config.steps}"
    require(1 <= step <= config.steps, "perturb", step, allowed)
    for variant in config.runs:
        stops = variant.resume_after is not None and variant.resume_after < step
        if not isinstance(variant, FusedVariant) or variant.ranks is not None or stops:
            continue
        if variant.masters != "remainders":
            return variant
    raise ConfigError(
        f"perturb must be a step at which a fused variant of {config.name} that holds fp32 masters "
        f"trains, got {step}"
    )


def flip_master_bit(trainer: Trainer | CrewTrainer) -> None:
    """Flips one bit of one master, so that a user sees the difference caught."""
    if not isinstance(trainer.owner, FusedWeights):
        raise TypeError(f"trainer.owner = {trainer.owner!r}: only FusedAdam is perturbed")
    trainer.owner.flip_master_bit()
