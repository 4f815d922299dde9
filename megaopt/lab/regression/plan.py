"""The plan of a config's run: jobs, each of which trains some steps of a variant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaopt.lab.config import FusedVariant, MatrixVariant, RunConfig, Variant
from megaopt.lab.regression.megatron.config import MegatronRun, MegatronVariant, SharedKeys
from megaopt.lab.toml_tables import ConfigError, require

AnyRun = RunConfig | MegatronRun
AnyVariant = Variant | MegatronVariant

WITHOUT_BITS = {"name", "baseline", "runs", "resume_after", "resume_ranks", "cast_after_load"}
"""The keys of a variant that change nothing of its arithmetic in an unbroken run."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Steps of a variant that one group of fresh processes trains."""

    name: str
    """Name of the run, by which the processes' files are named."""
    variant: AnyVariant
    ranks: int
    first: int
    """First step, counted from 1."""
    last: int
    save_after: tuple[int, ...] = ()
    """Steps after which a checkpoint is saved."""
    continues: str | None = None
    """Name of the job whose checkpoint it loads; None: it starts from the seed."""

    @property
    def steps(self) -> int:
        """Returns the number of steps that it trains."""
        return self.last - self.first + 1

    @property
    def load(self) -> str | None:
        """Name of the checkpoint that it continues."""
        return None if self.continues is None else f"{self.continues}-after-{self.first - 1}"


@dataclass(slots=True)
class Trial:
    """One run of a variant: its jobs joined, to be compared with another's."""

    name: str
    """The variant's; "name.2" where it is the second run of it."""
    baseline: str | None
    """Name of another trial."""
    variant: AnyVariant
    jobs: tuple[TrainingJob, ...]
    """The jobs in order; the first may be another trial's, of which it then is a beginning."""

    @property
    def recipe(self) -> str | None:
        """Returns the variant's recipe, under [float8]."""
        return getattr(self.variant, "recipe", None)

    @property
    def short_name(self) -> str:
        """The name without its recipe."""
        return self.name.removeprefix(f"{self.recipe}.")

    @property
    def number(self) -> int:
        """Returns the number of this run among its variant's, from 1."""
        return int(self.name.removeprefix(self.variant.name).lstrip(".") or 1)


def settings(variant: AnyVariant) -> tuple[tuple[str, Any], ...]:
    """Returns the keys and values on which a variant's bits depend in an unbroken run."""
    return tuple(variant.model_dump(exclude=WITHOUT_BITS).items())


def plan_trials(run: AnyRun) -> list[Trial]:
    """All trials: by the config's variants, and the runs of each."""
    trials, trunks = [], dict[Any, TrainingJob]()
    for variant in run.runs:
        # all its runs must equal the first
        trials.append(Trial(variant.name, variant.baseline, variant, ()))
        for number in range(2, getattr(variant, "runs", 1) + 1):
            trials.append(Trial(f"{variant.name}.{number}", variant.name, variant, ()))
    # straight trials before resumed ones, whose beginning is a straight one of equal settings
    for trial in sorted(trials, key=lambda trial: trial.variant.resume_after is not None):
        variant, key, step = trial.variant, settings(trial.variant), trial.variant.resume_after
        ranks = getattr(variant, "ranks", None) or 1
        if isinstance(run, MegatronRun):
            ranks = run.megatron.ranks
        if step is None:
            # the first run saves where those that begin with it need a checkpoint
            alike = [v.resume_after for v in run.runs if settings(v) == key]
            saves = {after for after in alike if after is not None}
            steps = tuple(sorted(saves)) if trial.name == variant.name else ()
            trial.jobs = (TrainingJob(trial.name, variant, ranks, 1, run.steps, steps),)
            trunks.setdefault(key, trial.jobs[0])
            continue
        begin = trunks.get(key)
        begin = begin or TrainingJob(f"{trial.name}-begun", variant, ranks, 1, step, (step,))
        ranks = getattr(variant, "resume_ranks", None) or ranks
        last = (step + 1, run.steps)
        job = TrainingJob(trial.name, variant, ranks, *last, continues=begin.name)
        trial.jobs = begin, job
    return trials


def in_order(trials: list[Trial]) -> list[TrainingJob]:
    """All jobs in the order in which they begin.

    Those that others start from come first, and the runs of a variant between those of others: what
    a machine does meanwhile meets all variants.
    """
    order = sorted(trials, key=lambda t: (len(t.jobs), t.number, t.baseline is not None))
    return list(dict.fromkeys(job for trial in order for job in trial.jobs))


def job_to_perturb(run: AnyRun, trials: list[Trial], step: int) -> TrainingJob:
    """The job of the first compared trial with fp32 masters that trains a step.

    Raises:
        ConfigError: there is none.
    """
    allowed = f"a step of the run, from 1 to {run.steps}"
    require(1 <= step <= run.steps, "perturb", step, allowed)
    for trial in trials:
        job, variant = trial.jobs[-1], trial.variant
        if isinstance(variant, SharedKeys):
            holds_masters = variant.mode == "main_shards"
        elif isinstance(variant, FusedVariant):
            holds_masters = variant.masters != "remainders"
        else:
            holds_masters = isinstance(variant, MatrixVariant)
        if trial.baseline is not None and holds_masters and job.first <= step <= job.last:
            return job
    raise ConfigError(
        f"perturb must be a step at which a variant of {run.name} that has a baseline and holds "
        f"fp32 masters trains, got {step}"
    )
