"""The outcome of a trial: its recordings joined, and the first place where they differ."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megaopt.lab.regression.megatron.config import SharedKeys
from megaopt.lab.regression.plan import Trial
from megaopt.recording.files import Recording
from megaopt.recording.pair import differences

WARM_UP = 3
"""Steps of a group of processes whose times are not counted: the first compile and allocate."""


@dataclass(frozen=True, slots=True)
class TrialDifference:
    """The first place where a trial differs from its baseline."""

    step: int
    """The step, counted from 1, after whose update the tensor differs, or whose loss differs."""
    variant: str
    baseline: str
    tensor: str
    """The quantity: a loss, a norm, or the parameter's name and the kind: "norm.weight exp_avg"."""
    bits: str
    """The variant's, of a tensor its digest, in hexadecimal."""
    baseline_bits: str
    """The baseline's."""

    def __str__(self) -> str:
        return (
            f"step {self.step}, variant {self.variant}, {self.tensor}: {self.bits}, but "
            f"{self.baseline_bits} in {self.baseline}"
        )


def earliest(differences: Iterable[TrialDifference | None]) -> TrialDifference | None:
    """The one of the lowest step; the first of these where several share it."""
    candidates = [difference for difference in differences if difference is not None]
    return min(candidates, key=lambda difference: difference.step, default=None)


class TrialOutcome:
    """A trial that has ended: what its ranks recorded, or why it failed.

    Args:
        trial: what was run.
        folder: of the jobs' recordings.
        baseline: what it is compared with; None: nothing.
        failure: why it could not be run; None: it was run.
    """

    def __init__(
        self, trial: Trial, folder: Path, baseline: TrialOutcome | None, failure: str | None = None
    ) -> None:
        self.trial, self.baseline, self.failure = trial, baseline, failure
        self.difference: TrialDifference | None = None
        if failure is not None:
            return
        self.recordings = [Recording(folder / job.name) for job in trial.jobs]
        if baseline is None:
            return
        if baseline.failure is not None:
            self.failure = f"its baseline {baseline.trial.name} failed"
            return
        # the first difference, by step and then in the order in which a step makes it
        for step in range(1, trial.jobs[-1].last + 1):
            mismatches = differences(self.quantities(step), baseline.quantities(step))
            if odd := [difference.name for difference in mismatches if None in difference]:
                self.failure = f"step {step}: only one of the two has {odd[:4]}"
            elif mismatches:
                names = trial.name, baseline.trial.name
                self.difference = TrialDifference(step, *names, *mismatches[0])
            if mismatches:
                return

    def recording_at(self, step: int) -> Recording:
        """The recording that has a step; the first job's may have later ones, of another trial."""
        begun = [job.first <= step for job in self.trial.jobs]
        return self.recordings[sum(begun) - 1]

    def lines(self, step: int) -> list[dict[str, Any]]:
        """Each rank's scalars of a step."""
        return [sources[0] for sources in self.recording_at(step).scalars(step)]

    def quantities(self, step: int) -> dict[str, str]:
        """Returns all that is compared of a step, with the bits."""
        bits, lines = {}, self.lines(step)
        if isinstance(self.trial.variant, SharedKeys):
            for rank, line in enumerate(lines):
                for batch, loss in enumerate(line["losses"]):
                    bits[f"loss of rank {rank}, micro batch {batch}"] = loss
        else:  # every rank has the whole batch
            alike = dict.fromkeys(loss for line in lines for loss in line["losses"])
            bits["loss"] = " and ".join(alike)
        for rank, line in enumerate(lines):
            if line["grad_norm"] is not None:
                bits[f"gradient norm on rank {rank}"] = line["grad_norm"]
        return bits | self.digests(step)

    def digests(self, step: int) -> dict[str, str]:
        """The digest of each tensor after a step, by "name quantity"."""
        digests: dict[str, str] = {}
        for (name, quantity), summed in self.recording_at(step).digests(step).items():
            # where replicas differ, the ranks that have others are named
            apart = " and ".join(", ".join(map(str, ranks)) for ranks in summed.replicas)
            digest = f"{summed.digest} (ranks {apart} differ)" if apart else str(summed.digest)
            digests[f"{name} {quantity}"] = digest
        return digests

    @cached_property
    def losses(self) -> list[float]:
        """The mean loss of each step, over ranks and micro batches, in fp64; none if it failed."""
        steps = range(1, self.trial.jobs[-1].last + 1) if self.ran else ()
        of_steps = ([loss for line in self.lines(s) for loss in line["losses"]] for s in steps)
        return [statistics.fmean(map(float.fromhex, step_losses)) for step_losses in of_steps]

    @property
    def ran(self) -> bool:
        """Returns whether there is a recording of every step."""
        return hasattr(self, "recordings")

    # --- times and memory

    @property
    def measured(self) -> list[int]:
        """The steps of the last job without its first ones."""
        job = self.trial.jobs[-1]
        steps = range(job.first, job.last + 1)
        return list(steps[WARM_UP:] or steps)

    def each(self, key: str) -> list[list[Any]]:
        """Returns for each measured step what the ranks say under a key, those that do."""
        lines = (self.lines(step) for step in self.measured)
        return [[line[key] for line in ranks if key in line] for ranks in lines]

    @property
    def is_timed(self) -> bool:
        """Returns whether the optimizer's steps were timed."""
        return self.ran and any(self.each("optimizer_seconds"))

    def median(self, key: str) -> float:
        """Returns the median over the measured steps of the slowest rank's seconds."""
        return statistics.median(float(max(ranks)) for ranks in self.each(key))

    def largest(self, key: str) -> int | None:
        """Returns the most bytes over the measured steps and ranks; None where unmeasured."""
        return max((value for ranks in self.each(key) for value in ranks), default=None)
