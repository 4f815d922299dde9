"""What came out of a run, and how ours compares with the peers in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from megaopt.commands.bench.cases import Case
from megaopt.commands.bench.equality import Check
from megaopt.commands.bench.measure import Figures
from megaopt.commands.bench.modes import Mode

__all__ = ["Ratio", "Result", "ratios"]


@dataclass(frozen=True)
class Result:
    """One case: figures where its bits are those promised, otherwise why there are none."""

    case: Case
    figures: Figures | None
    problem: str | None = None
    check: Check | None = None
    """What the bits were compared with; None for a peer."""

    @property
    def bytes_per_parameter(self) -> float:
        """The bytes counted on the tensors where the case was measured, else the declared ones."""
        if self.figures is None:
            return self.case.subject.bytes_per_parameter
        return self.figures.bytes / self.figures.elements


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A peer's times over ours, of the same set in the same run: above 1, ours is faster."""

    peer: str
    step: float
    wall: float
    wall_moved: float


def ratios(result: Result, results: Sequence[Result]) -> list[Ratio]:
    """Return a mode's ratios to the peers that it is against, as far as both were measured."""
    ours, subject = result.figures, result.case.subject
    if ours is None or not isinstance(subject, Mode):
        return []
    measured = {
        other.case.subject.name: other.figures
        for other in results
        if other.case.tensors == result.case.tensors and other.figures
    }
    return [
        Ratio(
            peer=name,
            step=theirs.step_ms / ours.step_ms,
            wall=theirs.wall_ms / ours.wall_ms,
            wall_moved=theirs.wall_moved_ms / ours.wall_moved_ms,
        )
        for name in subject.against
        if (theirs := measured.get(name)) is not None
    ]
