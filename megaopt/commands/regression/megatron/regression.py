"""The trials of a Megatron-Core regression, run one after another and compared."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megaopt.commands.regression.compare import Difference, earliest
from megaopt.commands.regression.megatron.config import MegatronRun, StockVariant
from megaopt.commands.regression.megatron.group import run_group
from megaopt.commands.regression.megatron.plan import Job, Trial, plan_trials
from megaopt.commands.regression.megatron.rank import Task
from megaopt.commands.regression.megatron.result import (
    Result,
    find_difference,
    read_result,
)
from megaopt.commands.regression.processes import RankError
from megaopt.commands.toml_tables import ConfigError, require
from megaopt.commands.training.limits import count_parameters, require_memory
from megaopt.commands.training.text import Corpus


class Outcome:
    """A trial that was run: its result and its first difference, or why it has none."""

    def __init__(self, trial: Trial, baseline: Outcome | None) -> None:
        self.trial, self.baseline = trial, baseline
        self.result: Result | None = None
        self.difference: Difference | None = None
        self.failure: str | None = None

    @property
    def short_name(self) -> str:
        """The trial's name."""
        return self.trial.name

    @property
    def recipe(self) -> None:
        """One picture has all trials."""
        return None

    @property
    def losses(self) -> list[float]:
        """The mean loss of each step; none where it failed."""
        return [] if self.result is None else self.result.losses


class Regression:
    """The trials of a config.

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
        self.trials = plan_trials(run)
        self.perturbed = None if perturb is None else job_to_perturb(run, self.trials, perturb)
        self.outcomes: dict[str, Outcome] = {}
        self._trained: dict[str, str | None] = {}
        require_parts(run, device)
        np.save(folder / "tokens.npy", corpus.tokens.numpy())

    def train(
        self, on_trial: Callable[[Outcome], None], on_step: Callable[[Trial, int], None]
    ) -> None:
        """Runs and compares all trials; a failed one does not keep the others from running.

        Args:
            on_trial: called with each trial that ended, well or not.
            on_step: called with a trial and the step that it finished.
        """
        for trial in self.trials:
            baseline = None if trial.baseline is None else self.outcomes[trial.baseline]
            outcome = self.outcomes[trial.name] = Outcome(trial, baseline)
            outcome.failure = self._train_trial(trial, on_step)
            if outcome.failure is None:
                self._compare(outcome)
            on_trial(outcome)

    def _train_trial(self, trial: Trial, on_step: Callable[[Trial, int], None]) -> str | None:
        """Trains the jobs that were not trained yet; why a process failed, or None."""
        for job in trial.jobs:
            if job.name not in self._trained:
                self._trained[job.name] = self._train_job(trial, job, on_step)
            if (failure := self._trained[job.name]) is not None:
                return failure
        return None

    def _train_job(
        self, trial: Trial, job: Job, on_step: Callable[[Trial, int], None]
    ) -> str | None:
        tasks = [
            Task(
                run=self.run,
                job=job,
                rank=rank,
                device=self.device,
                folder=self.folder,
                perturb=self.perturb if job == self.perturbed and rank == 0 else None,
            )
            for rank in range(job.ranks)
        ]
        try:
            run_group(tasks, lambda step: on_step(trial, step))
        except RankError as error:
            return str(error)
        return None

    def _compare(self, outcome: Outcome) -> None:
        outcome.result = read_result(outcome.trial, self.folder)
        if outcome.baseline is None:
            return
        if outcome.baseline.result is None:
            outcome.failure = f"its baseline {outcome.baseline.trial.name} failed"
            return
        try:
            outcome.difference = find_difference(outcome.result, outcome.baseline.result)
        except RuntimeError as error:
            outcome.failure = str(error)

    def first_difference(self) -> Difference | None:
        """The earliest difference of all trials."""
        return earliest(each.difference for each in self.outcomes.values())

    @property
    def failed(self) -> list[Outcome]:
        """The trials that could not be run or compared."""
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
    if any(each.cuda_graph for each in run.variant):
        needed["transformer_engine"] = "transformer_engine[pytorch]"
        require(device == "cuda", "cuda_graph", True, "false on the CPU")
    missing = [package for name, package in needed.items() if not is_installed(name)]
    if missing:
        raise ConfigError(f"{run.name} needs {', '.join(missing)}: pip install {' '.join(missing)}")
    # at least the bf16 weights, which every tensor-parallel group has
    weights = 2 * count_parameters(run.model) // run.megatron.shares
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


def job_to_perturb(run: MegatronRun, trials: list[Trial], step: int) -> Job:
    """The job of the first compared trial with fp32 masters of Megatron's that trains a step.

    Raises:
        ConfigError: there is none.
    """
    allowed = f"a step of the run, from 1 to {run.steps}"
    require(1 <= step <= run.steps, "perturb", step, allowed)
    for trial in trials:
        job = trial.jobs[-1]
        compared = trial.baseline is not None and trial.variant.mode == "main_shards"
        if compared and job.first <= step <= job.last:
            return job
    raise ConfigError(
        f"perturb must be a step at which a variant of {run.name} that has a baseline and "
        f"mode = 'main_shards' trains, got {step}"
    )
