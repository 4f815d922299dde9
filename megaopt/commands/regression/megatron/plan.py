"""What is run for a config: groups of processes, each for a stretch of a variant's steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megaopt.commands.regression.megatron.config import MegatronRun, MegatronVariant, StockVariant


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Steps of a variant that one group of fresh processes trains."""

    name: str
    """Of the run; the processes' files are named by it."""
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
class Lane:
    """One run of a variant: its stretches joined, to be compared with another's."""

    name: str
    """The variant's; "name.2" where it is the second run of it."""
    variant: MegatronVariant
    baseline: str | None
    """Name of another lane."""
    stretches: tuple[Stretch, ...]
    """In order; the first may be that of another lane, of which it then is a beginning."""


def settings(variant: MegatronVariant) -> MegatronVariant:
    """The variant without what does not change its arithmetic in an unbroken run."""
    if isinstance(variant, StockVariant):
        variant = dataclasses.replace(variant, cast_after_load=False)
    return dataclasses.replace(
        variant, name="", baseline=None, runs=1, resume_after=None, resume_ranks=None
    )


def runs_of(variant: MegatronVariant) -> list[tuple[str, str | None]]:
    """Name and baseline of each run of a variant: the first's own, the others' the first."""
    more = [(f"{variant.name}.{number}", variant.name) for number in range(2, variant.runs + 1)]
    return [(variant.name, variant.baseline), *more]


def straight_lanes(run: MegatronRun) -> list[Lane]:
    """The lanes that are not resumed; they save where a resumed one needs their checkpoint."""
    lanes = []
    for variant in (each for each in run.variant if each.resume_after is None):
        saves = {v.resume_after for v in run.variant if settings(v) == settings(variant)}
        wanted = tuple(sorted(step for step in saves if step is not None))
        for name, baseline in runs_of(variant):
            stretch = Stretch(
                name=name, variant=variant, ranks=run.megatron.ranks, first=1, last=run.steps,
                save_after=wanted if name == variant.name else (),
            )  # fmt: skip
            lanes.append(Lane(name=name, variant=variant, baseline=baseline, stretches=(stretch,)))
    return lanes


def resumed_lanes(run: MegatronRun, straight: list[Lane]) -> list[Lane]:
    """The resumed lanes; each continues a straight one of equal settings, where there is one."""
    lanes = []
    trunks = {settings(lane.variant): lane.stretches[0] for lane in reversed(straight)}
    for variant in (each for each in run.variant if each.resume_after is not None):
        step, ranks = variant.resume_after or 0, run.megatron.ranks
        trunk = trunks.get(settings(variant))
        for name, baseline in runs_of(variant):
            beginning = trunk or Stretch(
                name=f"{name}-begun", variant=variant, ranks=ranks, first=1, last=step,
                save_after=(step,),
            )  # fmt: skip
            rest = Stretch(
                name=name, variant=variant, ranks=variant.resume_ranks or ranks, first=step + 1,
                last=run.steps, load=beginning.checkpoint(step),
            )  # fmt: skip
            stretches = (beginning, rest)
            lanes.append(Lane(name=name, variant=variant, baseline=baseline, stretches=stretches))
    return lanes


def plan_lanes(run: MegatronRun) -> list[Lane]:
    """All lanes in the order in which they are run: each after what it is compared with."""
    straight = straight_lanes(run)
    lanes = [*straight, *resumed_lanes(run, straight)]
    order = {variant.name: number for number, variant in enumerate(run.variant)}
    # a lane that another starts from comes before it, hence straight ones first
    return sorted(
        lanes,
        key=lambda lane: (
            len(lane.stretches),
            lane.variant.baseline is not None,
            order[lane.variant.name],
            lane.name != lane.variant.name,
        ),
    )
