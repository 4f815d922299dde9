"""What is run for a config: jobs, each of which trains some steps of a variant."""

from __future__ import annotations

from dataclasses import dataclass

from megaopt.commands.regression.megatron.config import MegatronRun, MegatronVariant, StockVariant


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Steps of a variant that one group of fresh processes trains."""

    name: str
    """Name of the run, by which the processes' files are named."""
    variant: MegatronVariant
    ranks: int
    first: int
    """First step, counted from 1."""
    last: int
    save_after: tuple[int, ...] = ()
    """Steps after which a checkpoint is saved."""
    load: str | None = None
    """Name of the checkpoint that it continues; None: it starts from the seed."""

    def checkpoint(self, step: int) -> str:
        """Name of the checkpoint after a step."""
        return f"{self.name}-after-{step}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of a variant: its jobs joined, to be compared with another's."""

    name: str
    """The variant's; "name.2" where it is the second run of it."""
    variant: MegatronVariant
    baseline: str | None
    """Name of another trial."""
    jobs: tuple[Job, ...]
    """In order; the first may be that of another trial, of which it then is a beginning."""

    @property
    def number(self) -> int:
        """Which run of its variant it is, from 1."""
        return int(self.name.removeprefix(self.variant.name).lstrip(".") or 1)


def settings(variant: MegatronVariant) -> MegatronVariant:
    """The variant without what does not change its arithmetic in an unbroken run."""
    if isinstance(variant, StockVariant):
        variant = variant.model_copy(update={"cast_after_load": False})
    own = {"name": "", "baseline": None, "runs": 1, "resume_after": None, "resume_ranks": None}
    return variant.model_copy(update=own)


def runs_of(variant: MegatronVariant) -> list[tuple[str, str | None]]:
    """Name and baseline of each run of a variant: the first's own, the others' the first."""
    more = [(f"{variant.name}.{number}", variant.name) for number in range(2, variant.runs + 1)]
    return [(variant.name, variant.baseline), *more]


def straight_trials(run: MegatronRun) -> list[Trial]:
    """The trials that are not resumed; they save where a resumed one needs their checkpoint."""
    trials = []
    for variant in (each for each in run.variant if each.resume_after is None):
        saves = {v.resume_after for v in run.variant if settings(v) == settings(variant)}
        wanted = tuple(sorted(step for step in saves if step is not None))
        for name, baseline in runs_of(variant):
            job = Job(
                name=name, variant=variant, ranks=run.megatron.ranks, first=1, last=run.steps,
                save_after=wanted if name == variant.name else (),
            )  # fmt: skip
            trials.append(Trial(name=name, variant=variant, baseline=baseline, jobs=(job,)))
    return trials


def resumed_trials(run: MegatronRun, straight: list[Trial]) -> list[Trial]:
    """The resumed trials; each continues a straight one of equal settings, where there is one."""
    trials = []
    trunks = {settings(trial.variant): trial.jobs[0] for trial in reversed(straight)}
    for variant in (each for each in run.variant if each.resume_after is not None):
        step, ranks = variant.resume_after or 0, run.megatron.ranks
        trunk = trunks.get(settings(variant))
        for name, baseline in runs_of(variant):
            beginning = trunk or Job(
                name=f"{name}-begun", variant=variant, ranks=ranks, first=1, last=step,
                save_after=(step,),
            )  # fmt: skip
            rest = Job(
                name=name, variant=variant, ranks=variant.resume_ranks or ranks, first=step + 1,
                last=run.steps, load=beginning.checkpoint(step),
            )  # fmt: skip
            jobs = (beginning, rest)
            trials.append(Trial(name=name, variant=variant, baseline=baseline, jobs=jobs))
    return trials


def plan_trials(run: MegatronRun) -> list[Trial]:
    """All trials in the order in which they are run: each after what it is compared with."""
    straight = straight_trials(run)
    trials = [*straight, *resumed_trials(run, straight)]
    order = {variant.name: number for number, variant in enumerate(run.variant)}
    # a trial that another starts from comes before it, hence straight ones first
    return sorted(
        trials,
        key=lambda trial: (
            len(trial.jobs),
            trial.number,  # interleaved: what a machine does meanwhile meets all variants
            trial.variant.baseline is not None,
            order[trial.variant.name],
        ),
    )
