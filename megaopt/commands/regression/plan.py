"""The plan of a config's run: jobs, each of which trains some steps of a variant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaopt.commands.config import FusedVariant, MatrixVariant, RunConfig, Variant
from megaopt.commands.regression.megatron.config import MegatronRun, MegatronVariant, SharedKeys
from megaopt.commands.toml_tables import ConfigError, require

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

    def checkpoint(self, step: int) -> str:
        """Name of the checkpoint after a step."""
        return f"{self.name}-after-{step}"


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


def ranks_of(run: AnyRun, variant: AnyVariant) -> int:
    """Processes of a variant's first job."""
    if isinstance(run, MegatronRun):
        return run.megatron.ranks
    return getattr(variant, "ranks", None) or 1


def settings(variant: AnyVariant) -> tuple[tuple[str, Any], ...]:
    """Returns the keys and values on which a variant's bits depend in an unbroken run."""
    return tuple(variant.model_dump(exclude=WITHOUT_BITS).items())


def runs_of(variant: AnyVariant) -> list[tuple[str, str | None]]:
    """Name and baseline of each run of a variant: the first's own, the others' the first."""
    count = getattr(variant, "runs", 1)
    more = [(f"{variant.name}.{number}", variant.name) for number in range(2, count + 1)]
    return [(variant.name, variant.baseline), *more]


def straight_job(run: AnyRun, variant: AnyVariant, name: str) -> TrainingJob:
    """The one job of a trial; it saves where a resumed one needs its checkpoint."""
    alike = [v for v in run.runs if settings(v) == settings(variant)]
    saves = {v.resume_after for v in alike if v.resume_after is not None}
    steps = tuple(sorted(saves)) if name == variant.name else ()
    return TrainingJob(name, variant, ranks_of(run, variant), 1, run.steps, steps)


def resumed_jobs(
    run: AnyRun, variant: AnyVariant, name: str, trunk: TrainingJob | None
) -> tuple[TrainingJob, ...]:
    """A beginning, which is that of a straight trial of equal settings where there is one."""
    step, ranks = variant.resume_after or 0, ranks_of(run, variant)
    begin = trunk or TrainingJob(f"{name}-begun", variant, ranks, 1, step, (step,))
    ranks = getattr(variant, "resume_ranks", None) or ranks
    return begin, TrainingJob(name, variant, ranks, step + 1, run.steps, continues=begin.name)


def plan_trials(run: AnyRun) -> list[Trial]:
    """All trials: by the config's variants, and the runs of each."""
    trunks: dict[Any, TrainingJob] = {}
    trials = [Trial(*names, v, ()) for v in run.runs for names in runs_of(v)]
    for trial in (trial for trial in trials if trial.variant.resume_after is None):
        trial.jobs = (straight_job(run, trial.variant, trial.name),)
        trunks.setdefault(settings(trial.variant), trial.jobs[0])
    for trial in (trial for trial in trials if trial.variant.resume_after is not None):
        trunk = trunks.get(settings(trial.variant))
        trial.jobs = resumed_jobs(run, trial.variant, trial.name, trunk)
    return trials


def in_order(trials: list[Trial]) -> list[TrainingJob]:
    """All jobs in the order in which they begin.

    Those that others start from come first, and the runs of a variant between those of others: what
    a machine does meanwhile meets all variants.
    """
    order = sorted(trials, key=lambda t: (len(t.jobs), t.number, t.baseline is not None))
    return list(dict.fromkeys(job for trial in order for job in trial.jobs))


def holds_masters(variant: AnyVariant) -> bool:
    """Returns whether a compared variant keeps fp32 masters, of which a bit can be flipped."""
    if isinstance(variant, SharedKeys):
        return variant.mode == "main_shards"
    fused = isinstance(variant, FusedVariant) and variant.masters != "remainders"
    return fused or isinstance(variant, MatrixVariant)


def job_to_perturb(run: AnyRun, trials: list[Trial], step: int) -> TrainingJob:
    """The job of the first compared trial with fp32 masters that trains a step.

    Raises:
        ConfigError: there is none.
    """
    allowed = f"a step of the run, from 1 to {run.steps}"
    require(1 <= step <= run.steps, "perturb", step, allowed)
    for trial in trials:
        job = trial.jobs[-1]
        compared = trial.baseline is not None and holds_masters(trial.variant)
        if compared and job.first <= step <= job.last:
            return job
    raise ConfigError(
        f"perturb must be a step at which a variant of {run.name} that has a baseline and holds "
        f"fp32 masters trains, got {step}"
    )
