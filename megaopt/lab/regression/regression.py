"""The trials of a config: runs their jobs, side by side where cores allow, and compares them."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megaopt.lab.config import RunConfig
from megaopt.lab.regression.megatron.config import StockVariant
from megaopt.lab.regression.outcome import TrialDifference, TrialOutcome, earliest
from megaopt.lab.regression.plan import AnyRun, TrainingJob, in_order, job_to_perturb, plan_trials
from megaopt.lab.regression.processes import Group, RankError, RankTask
from megaopt.lab.source import cores
from megaopt.lab.toml_tables import ConfigError, require
from megaopt.lab.training.machine import count_parameters, require_memory, require_room

PAUSE = 0.1
"""Seconds between two looks at the processes."""


class Regression:
    """The trials of a config.

    Args:
        run: the config.
        device: "cpu" or "cuda".
        folder: an existing folder for the processes' files.
        perturb: step after whose update one bit of one master is flipped; None: never.

    Raises:
        ConfigError: perturb is no step of the run, or there is no variant to perturb, or the run
            cannot be made here: a package is missing, or GPUs are, or memory is.
    """

    def __init__(self, run: AnyRun, device: str, folder: Path, perturb: int | None = None) -> None:
        self.run, self.device, self.folder, self.perturb = run, device, folder, perturb
        self.trials = plan_trials(run)
        self.perturbed = None if perturb is None else job_to_perturb(run, self.trials, perturb)
        self._waiting = in_order(self.trials)
        self.total_steps = sum(job.steps for job in self._waiting)
        self._running: list[Group] = []
        self._ended: dict[TrainingJob, str | None] = {}
        self._outcomes: dict[str, TrialOutcome] = {}
        if isinstance(run, RunConfig):
            for variant in run.runs:
                require_room(run, variant, torch.device(device))
            return
        # Megatron's: the packages, the memory and the GPUs
        needed, graphs = {"megatron.core": "megatron-core"}, False
        has_engine = run.megatron.fp8_recipe is not None
        for member in run.variant:
            if member.resume_after is not None:
                needed["psutil"] = "psutil"
            inner = member.inner if isinstance(member, StockVariant) else ""
            graphs |= member.cuda_graph
            has_engine |= inner == "transformer_engine" or member.cuda_graph
        if has_engine:
            needed["transformer_engine"] = "transformer_engine[pytorch]"
        require(device == "cuda" or not graphs, "cuda_graph", True, "false on the CPU")
        if missing := [package for name, package in needed.items() if not is_installed(name)]:
            names = ", ".join(missing)
            raise ConfigError(f"{run.name} needs {names}: pip install {' '.join(missing)}")
        most = max(run.megatron.ranks, *(member.resume_ranks or 1 for member in run.variant))
        # at least the bf16 weights, which every tensor-parallel group has
        weights = 2 * count_parameters(run.model) // run.megatron.shares
        require_memory(weights * (1 if device == "cuda" else most), torch.device(device))
        if device == "cuda":
            seen = torch.cuda.device_count()
            require(most <= seen, "ranks", most, f"at most {seen}, as many as GPUs")

    def train(
        self, on_trial: Callable[[TrialOutcome], None], on_step: Callable[[int], None]
    ) -> None:
        """Runs and compares all trials; a failed one does not keep the others from running.

        Args:
            on_trial: called with each trial that ended, well or not.
            on_step: called with how many of total_steps are made.
        """
        try:
            while self._waiting or self._running:
                self._start_some()
                for group in self._running[:]:
                    failure = None
                    try:
                        if not group.look():
                            continue
                    except RankError as error:
                        failure = str(error)
                        # what would continue it cannot be run
                        follow = [job for job in self._waiting if job.continues == group.job.name]
                        self._waiting = [job for job in self._waiting if job not in follow]
                        self._ended |= dict.fromkeys(follow, failure)
                    group.end()
                    self._running.remove(group)
                    self._ended[group.job] = failure
                ended_steps = sum(job.steps for job in self._ended)
                on_step(ended_steps + sum(group.steps for group in self._running))
                # the trials that have ended since the last time, baselines first
                for trial in sorted(self.trials, key=lambda trial: trial.baseline is not None):
                    jobs = [job for job in trial.jobs if job in self._ended]
                    is_ready = trial.baseline is None or trial.baseline in self._outcomes
                    if trial.name in self._outcomes or not is_ready or len(jobs) < len(trial.jobs):
                        continue
                    failures = [self._ended[job] for job in jobs if self._ended[job] is not None]
                    baseline = None if trial.baseline is None else self._outcomes[trial.baseline]
                    outcome = TrialOutcome(trial, self.folder, baseline, *failures[:1])
                    self._outcomes[trial.name] = outcome
                    on_trial(outcome)
                time.sleep(PAUSE)
        finally:
            for group in self._running:
                group.end()

    def _start_some(self) -> None:
        """Starts the jobs for which there is a core for each rank; on GPUs one at a time.

        What a job continues must be there. One that needs more has all cores to itself.
        """
        for job in self._waiting[:]:
            names = {ended.name for ended in self._ended}
            taken = sum(group.job.ranks for group in self._running)
            has_room = self.device == "cpu" and taken + job.ranks <= cores()
            if (job.continues is None or job.continues in names) and (not taken or has_room):
                self._waiting.remove(job)
                # noted before it starts: an interrupt would leave its processes
                self._running.append(Group(self._tasks(job)))
                self._running[-1].start()

    def _tasks(self, job: TrainingJob) -> list[RankTask]:
        perturbs = [self.perturb if job == self.perturbed else None, *[None] * (job.ranks - 1)]
        arguments = self.run, job, self.device, self.folder
        return [RankTask(*arguments, rank, perturb) for rank, perturb in enumerate(perturbs)]

    @property
    def outcomes(self) -> list[TrialOutcome]:
        """The trials that have ended, in the config's order."""
        return [self._outcomes[t.name] for t in self.trials if t.name in self._outcomes]

    def first_difference(self) -> TrialDifference | None:
        """The earliest difference of all trials."""
        return earliest(outcome.difference for outcome in self.outcomes)

    @property
    def failed(self) -> list[TrialOutcome]:
        """The trials that could not be run or compared."""
        return [outcome for outcome in self.outcomes if outcome.failure is not None]


def is_installed(name: str) -> bool:
    """Returns whether a module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
