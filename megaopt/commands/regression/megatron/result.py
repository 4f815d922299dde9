"""What a trial's ranks wrote down, joined, and the first place where two trials differ."""

from __future__ import annotations

import json
import statistics
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaopt.commands.regression.compare import Difference
from megaopt.commands.regression.megatron.plan import Job, Trial

WARM_UP = 3
"""Steps of a group of processes whose times are not counted: the first compile and allocate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step of a trial, of all ranks."""

    number: int
    ranks: tuple[dict[str, Any], ...]
    """The lines of the ranks."""

    @property
    def loss(self) -> float:
        """The mean over ranks and micro batches, in fp64; tensor-parallel ranks have the same."""
        bits = [int(each, 16) for rank in self.ranks for each in rank["losses"]]
        return statistics.fmean(struct.unpack("<f", struct.pack("<I", each))[0] for each in bits)

    def quantities(self) -> Iterator[tuple[str, str]]:
        """All that is compared, in the order in which a step makes it, with the bits."""
        for number, rank in enumerate(self.ranks):
            for batch, bits in enumerate(rank["losses"]):
                yield f"loss of rank {number}, micro batch {batch}", bits
        for number, rank in enumerate(self.ranks):
            yield f"gradient norm on rank {number}", rank["grad_norm"]
        for rank in self.ranks:
            yield from rank["fingerprints"].items()


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished trial."""

    trial: Trial
    steps: tuple[Step, ...]
    summaries: tuple[dict[str, Any], ...]
    """The summaries of the last job's ranks."""

    @property
    def losses(self) -> list[float]:
        """The mean loss of each step."""
        return [step.loss for step in self.steps]

    @property
    def measured(self) -> tuple[Step, ...]:
        """The steps of the last job without its first ones."""
        own = [step for step in self.steps if step.number >= self.trial.jobs[-1].first]
        return tuple(own[WARM_UP:] or own)

    def median(self, key: str) -> float:
        """Over the measured steps, of the slowest rank's seconds."""
        return statistics.median(
            max(float(rank[key]) for rank in step.ranks) for step in self.measured
        )

    def largest(self, key: str) -> int | None:
        """Over the measured steps and ranks, of bytes; None where they were not measured."""
        found = [int(rank[key]) for step in self.measured for rank in step.ranks if key in rank]
        return max(found, default=None)

    @property
    def state_bytes(self) -> int:
        """Bytes of masters and moments on the rank that has most."""
        return max(int(each["state_bytes"]) for each in self.summaries)


def read_lines(job: Job, folder: Path) -> list[list[dict[str, Any]]]:
    """The lines of each rank of a job."""
    files = [folder / f"{job.name}-rank{rank}.jsonl" for rank in range(job.ranks)]
    return [
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in files
    ]


def read_result(trial: Trial, folder: Path) -> Result:
    """Joins the files of a trial's ranks."""
    steps: list[Step] = []
    begins = [job.first for job in trial.jobs[1:]]
    for job, until in zip(trial.jobs, [*begins, None], strict=True):
        ranks = read_lines(job, folder)
        rows = zip(*([line for line in rank if "step" in line] for rank in ranks), strict=True)
        for row in rows:
            number = row[0]["step"]
            # a beginning that another trial trained goes on in that one
            if until is None or number < until:
                steps.append(Step(number=number, ranks=row))
    summaries = tuple(rank[-1]["summary"] for rank in ranks)
    return Result(trial=trial, steps=tuple(steps), summaries=summaries)


def find_difference(result: Result, baseline: Result) -> Difference | None:
    """The first difference, by step and then in the order in which a step makes its quantities.

    Raises:
        RuntimeError: the two did not write down the same quantities: nothing to compare.
    """
    for own, other in zip(result.steps, baseline.steps, strict=True):
        bits: Mapping[str, str] = dict(own.quantities())
        expected: Mapping[str, str] = dict(other.quantities())
        odd = bits.keys() ^ expected.keys()
        if odd:
            raise RuntimeError(f"step {own.number}: only one of the two has {sorted(odd)[:4]}")
        for name, value in bits.items():
            if value != expected[name]:
                return Difference(
                    step=own.number, variant=result.trial.name, baseline=baseline.trial.name,
                    tensor=name, bits=value, baseline_bits=expected[name],
                )  # fmt: skip
    return None
