"""The lanes of a Megatron-Core regression, run one after another and compared."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megaopt.commands.config import ConfigError
from megaopt.commands.regression.compare import Difference, earliest
from megaopt.commands.regression.megatron.config import MegatronRun, StockVariant
from megaopt.commands.regression.megatron.group import run_group
from megaopt.commands.regression.megatron.plan import Lane, Stretch, plan_lanes
from megaopt.commands.regression.megatron.rank import Task
from megaopt.commands.regression.megatron.result import (
    Result,
    find_difference,
    read_result,
)
from megaopt.commands.regression.processes import RankError
from megaopt.commands.toml_tables import require
from megaopt.commands.training.limits import count_parameters, require_memory
from megaopt.commands.training.text import Corpus


class Outcome:
    """A lane that was run: its result and its first difference, or why it has none."""

    def __init__(self, lane: Lane, baseline: Outcome | None) -> None:
        self.lane, self.baseline = lane, baseline
        self.result: Result | None = None
        self.difference: Difference | None = None
        self.failure: str | None = None

    @property
    def short_name(self) -> str:
        """The lane's name."""
        return self.lane.name

    @property
    def recipe(self) -> None:
        """One picture has all lanes."""
        return None

    @property
    def losses(self) -> list[float]:
        """The mean loss of each step; none where it failed."""
        return [] if self.result is None else self.result.losses


class Regression:
    """The lanes of a config.

    Args:
        run: the config.
        device: "cpu" or "cuda".
        folder: an existing folder for the processes' files.
        corpus: the text.
        perturb: step after whose update one bit of one master is flipped; None: never.

    Raises:
        ConfigError: perturb is no step of the run, or there is no variant to perturb, or the run
            cannot be made here: a package is missing, or GPUs are.
    """

    def __init__(
        self,
        run: MegatronRun,
        device: str,
        *,
        folder: Path,
        corpus: Corpus,
        perturb: int | None = None,
    ) -> None:
        self.run, self.device, self.folder, self.perturb = run, device, folder, perturb
        self.lanes = plan_lanes(run)
        self.perturbed = None if perturb is None else stretch_to_perturb(run, self.lanes, perturb)
        self.outcomes: dict[str, Outcome] = {}
        self._trained: dict[str, str | None] = {}
        require_parts(run, device)
        np.save(folder / "tokens.npy", corpus.tokens.numpy())

    def train(
        self, on_lane: Callable[[Outcome], None], on_step: Callable[[Lane, int], None]
    ) -> None:
        """Runs and compares all lanes; a failed one does not keep the others from running.

        Args:
            on_lane: called with each lane that ended, well or not.
            on_step: called with a lane and the step that it finished.
        """
        for lane in self.lanes:
            baseline = None if lane.baseline is None else self.outcomes[lane.baseline]
            outcome = self.outcomes[lane.name] = Outcome(lane, baseline)
            outcome.failure = self._train_lane(lane, on_step)
            if outcome.failure is None:
                self._compare(outcome)
            on_lane(outcome)

    def _train_lane(self, lane: Lane, on_step: Callable[[Lane, int], None]) -> str | None:
        """Trains the stretches that were not trained yet; why a process failed, or None."""
        for stretch in lane.stretches:
            if stretch.name not in self._trained:
                self._trained[stretch.name] = self._train_stretch(lane, stretch, on_step)
            if (failure := self._trained[stretch.name]) is not None:
                return failure
        return None

    def _train_stretch(
        self, lane: Lane, stretch: Stretch, on_step: Callable[[Lane, int], None]
    ) -> str | None:
        tasks = [
            Task(
                run=self.run,
                stretch=stretch,
                rank=rank,
                device=self.device,
                folder=self.folder,
                perturb=self.perturb if stretch == self.perturbed and rank == 0 else None,
            )
            for rank in range(stretch.ranks)
        ]
        try:
            run_group(tasks, lambda step: on_step(lane, step))
        except RankError as error:
            return str(error)
        return None

    def _compare(self, outcome: Outcome) -> None:
        outcome.result = read_result(outcome.lane, self.folder)
        if outcome.baseline is None:
            return
        if outcome.baseline.result is None:
            outcome.failure = f"its baseline {outcome.baseline.lane.name} failed"
            return
        try:
            outcome.difference = find_difference(outcome.result, outcome.baseline.result)
        except RuntimeError as error:
            outcome.failure = str(error)

    def first_difference(self) -> Difference | None:
        """The earliest difference of all lanes."""
        return earliest(each.difference for each in self.outcomes.values())

    @property
    def failed(self) -> list[Outcome]:
        """The lanes that could not be run or compared."""
        return [each for each in self.outcomes.values() if each.failure is not None]


def require_parts(run: MegatronRun, device: str) -> None:
    """Raises a `ConfigError` where the packages, the memory or the GPUs of a run are not here."""
    needed = {"megatron.core": "megatron-core"}
    if any(each.resume_after is not None for each in run.variant):
        needed["psutil"] = "psutil"
    stock = [each for each in run.variant if isinstance(each, StockVariant)]
    inner = any(each.inner == "transformer_engine" for each in stock)
    if inner or run.megatron.fp8_recipe is not None:
        needed["transformer_engine"] = "transformer_engine[pytorch]"
    missing = [package for name, package in needed.items() if not is_installed(name)]
    if missing:
        raise ConfigError(f"{run.name} needs {', '.join(missing)}: pip install {' '.join(missing)}")
    # at least the bf16 weights, which every tensor-parallel group has
    weights = 2 * count_parameters(run.model) // run.megatron.tensor_parallel
    require_memory(weights * (1 if device == "cuda" else run.most_ranks), torch.device(device))
    if device == "cuda":
        seen = torch.cuda.device_count()
        require(run.most_ranks <= seen, "ranks", run.most_ranks, f"at most {seen}, as many as GPUs")


def is_installed(name: str) -> bool:
    """Whether a module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def stretch_to_perturb(run: MegatronRun, lanes: list[Lane], step: int) -> Stretch:
    """The stretch of the first compared lane with fp32 masters of Megatron's that trains a step.

    Raises:
        ConfigError: there is none.
    """
    allowed = f"a step of the run, from 1 to {run.steps}"
    require(1 <= step <= run.steps, "perturb", step, allowed)
    for lane in lanes:
        stretch = lane.stretches[-1]
        compared = lane.baseline is not None and lane.variant.mode == "main_shards"
        if compared and stretch.first <= step <= stretch.last:
            return stretch
    raise ConfigError(
        f"perturb must be a step at which a variant of {run.name} that has a baseline and "
        f"mode = 'main_shards' trains, got {step}"
    )
