"""The comparison of two recorded runs: what differs first, who is to blame, and how it grows.

numpy alone is needed. docs/diff.md explains the answers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, combinations, zip_longest
from statistics import median
from typing import Any, NamedTuple

import numpy

from megaopt.recording.blame import BEGIN, Blame, first_blame
from megaopt.recording.checks import RecordingError
from megaopt.recording.files import hexadecimal
from megaopt.recording.measure import NEAR, as_numbers, farthest
from megaopt.recording.pair import (
    Difference,
    Pair,
    Run,
    Side,
    differences,
    family,
    flat,
    floats,
    is_new,
    layout_of,
)

SCHEMA = 1
CURVE = 64
"""Steps of which growth is looked at, beside the first ones after runs part."""
FIRST = 16
OWN = ("forward", "backward", "local grad")
"""Quantities of which each rank has rows of its own."""
BY_NATURE = ("forward", "backward", "reduction", "gradient")
"""Kinds of blame that another layout or another card alone explains."""
MAP = '{"model.layers.*": "decoder.layers.*"}'
"""A map of names, for a message."""
LOOSE = re.compile(r"(?:optimizer\d+\.)?param_groups\.(\d+)\.(\d+)")
"""Names of parameters that no model knows."""
TOLERABLE = (*BY_NATURE, "optimizer")
"""Kinds of blame that a tolerance excuses: other numbers of the same data and weights."""


class Growth(NamedTuple):
    """How much of one quantity differs at a step."""

    step: int
    quantity: str
    differ: int
    """Tensors, or calls, or ranks."""
    of: int
    relative: float | None
    """Norm of the difference over the norm, of sampled elements; None without samples."""
    ulp: int | None
    """The largest difference of a sampled element, in units in the last place."""


class Farthest(NamedTuple):
    """Where two runs lie farthest apart."""

    relative: float
    """Norm of the difference over the norm, of sampled elements; of a number its own."""
    quantity: str
    step: int


class Elements(NamedTuple):
    """The elements that differ in the tensor that is blamed, where both runs kept it."""

    name: str
    quantity: str
    """"old weight": before the step."""
    first: tuple[int, ...]
    """The index of the first one in the whole tensor."""
    a: str
    """Its value, in hexadecimal."""
    b: str
    differ: int
    of: int
    apart: float
    """The largest difference of two."""
    ulp: int
    """The same in units in the last place."""

    def __str__(self) -> str:
        return (
            f"{self.quantity} of {self.name}: {self.differ} of {self.of} elements differ, first "
            f"{list(self.first)}: {self.a}, and {self.b}; largest distance {self.apart:.3g}, or "
            f"{self.ulp} units in the last place"
        )


class Repeats(NamedTuple):
    """A quantity's difference beside that of repeats, at one step."""

    step: int
    quantity: str
    change: float
    """The least relative norm of the difference of B from A and its repeats."""
    repeats: float
    """The largest of those of A and its repeats from each other."""


@dataclass
class Comparison:
    """What `compare` found."""

    a: str
    b: str
    tier: str = "bits"
    """"bits", or "close" where products differ by nature."""
    reasons: list[str] = field(default_factory=list)
    """Why not bits."""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """What keeps the runs from being compared, by side."""
    environment: list[Difference] = field(default_factory=list)
    options: list[Difference] = field(default_factory=list)
    """Options of groups that differ at the first step that both have."""
    steps: tuple[int, ...] = ()
    """The first and the last step that were compared, and how many."""
    tensors: int = 0
    """How many were compared."""
    quantities: list[str] = field(default_factory=list)
    """Those of tensors, and of modules, that were compared."""
    blame: Blame | None = None
    elements: Elements | None = None
    growth: list[Growth] = field(default_factory=list)
    histogram: dict[str, dict[int, int]] = field(default_factory=dict)
    """How many sampled elements differ by 0 units in the last place (0), by 1 (1), 2-3 (2), 4-7
    (3) ..., by quantity, at the last step with samples."""
    noise: list[Repeats] = field(default_factory=list)
    repeats_part: int | None = None
    """The first step at which a repeat differs from A."""
    notes: list[str] = field(default_factory=list)
    tolerance: float | None = None
    """How far apart runs may lie."""
    farthest: Farthest | None = None
    """How far they do, where a tolerance was given."""

    @property
    def verdict(self) -> str:
        """One of "same", "differ", "not comparable"; of what passes, how two runs differ."""
        if self.missing:
            return "not comparable"
        if self.blame is None:
            return "same"
        if self._is_tolerated:
            return "within tolerance"
        excused = self.noise and self.tier == "close" and not self.exceeds_noise
        return "as two repeats differ" if excused else "differ"

    @property
    def _is_tolerated(self) -> bool:
        if self.blame is None or self.farthest is None or self.tolerance is None:
            return False
        return self.blame.kind in TOLERABLE and 0 < self.farthest.relative <= self.tolerance

    @property
    def exceeds_noise(self) -> bool:
        """Whether B parts from A before repeats do, or lies farther off in more than half of all.

        Were B a repeat too, of four runs alike it would be the farthest once in four.
        """
        if self.blame and (self.repeats_part is None or self.blame.step < self.repeats_part):
            return True
        return 2 * sum(each.change > each.repeats for each in self.noise) > len(self.noise)

    @property
    def line(self) -> str:
        """The verdict in a line."""
        if self.missing:
            return f"not comparable: {'; '.join(_missing_lines(self.missing))}"
        if self.blame is None:
            first, last, count = self.steps
            what = f"{self.tensors} tensors ({', '.join(self.quantities) or 'no digests'})"
            return f"same: {count} steps from {first} to {last}, {what}, bit for bit"
        return f"{self._sentence}: step {self.blame.step}: {self.blame.text}"

    @property
    def _sentence(self) -> str:
        if self.verdict in ("as two repeats differ", "within tolerance"):
            return self.verdict
        if self.noise:
            return "differ more than repeats do" if self.exceeds_noise else "differ"
        return "differ" if self.tier == "bits" else "differ, as may be by nature"

    def remarks(self) -> list[str]:
        """What is to be known beside the verdict, a line each."""
        lines = [] if self.elements is None else [str(self.elements)]
        if self.blame is not None and self.blame.unrecorded:
            found = self.blame.unrecorded
            more = "; --level blocks records blocks" if "outputs of blocks" in found else ""
            lines.append(f"not recorded in both runs: {', '.join(found)}{more}")
        if self.farthest is not None:
            far, quantity, step = self.farthest
            words = f"farthest apart is {quantity} of step {step}, by {far:.2g} of its norm"
            words = words if far else "what was sampled is equal: no tolerance excuses the rest"
            lines.append(f"{words}; the tolerance is {self.tolerance:g}")
        lines += [f"bits need not be equal: {reason}" for reason in self.reasons]
        return [*lines, *self.notes, *self._about_names()]

    def _about_names(self) -> Iterator[str]:
        """How tensors get names that meet."""
        if {"A lacks", "B lacks"} <= self.missing.keys():
            yield f"if only names differ: --map FILE says what those in B are in A, as {MAP}"
        names = [*chain(*self.missing.values()), self.blame.where if self.blame else ""]
        found = ((name, LOOSE.match(name)) for name in names)
        unnamed, match = next((each for each in found if each[1]), ("", None))
        if match is not None:
            group, place = match.groups()
            which = f"parameter {place} of group {group}, of no module whose forward ran"
            yield f"{unnamed} is {which}: --map FILE, also of megaopt record, gives it a name"

    def report(self) -> list[str]:
        """The verdict and what belongs to it, a line each."""
        return [self.line, *self.remarks(), *map(str, (*self.environment, *self.options))]

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON holds it; docs/diff.md has the schema."""
        content = {"schema": SCHEMA, "verdict": self.verdict, "line": self.line, **asdict(self)}
        content["blame"] = None if self.blame is None else self.blame._asdict()
        for name in ("elements", "farthest"):
            found = getattr(self, name)
            content[name] = None if found is None else _finite(found._asdict())
        for name in ("environment", "options", "growth", "noise"):
            content[name] = [_finite(each._asdict()) for each in getattr(self, name)]
        return content


def _finite(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: its word."""
    return {name: "inf" if value == math.inf else value for name, value in content.items()}


def compare(
    a: Run,
    b: Run,
    names: Mapping[str, str] | None = None,
    noise: Sequence[Run] = (),
    tolerance: float | None = None,
) -> Comparison:
    """Compares two recorded runs.

    Args:
        a: the run that counts as right.
        b: the other.
        names: what a tensor or module of b is called in a, by its name in b; a "*" in both stands
            for any text. Other names are the same in both.
        noise: repeats of a, to see how far a run lies from itself.
        tolerance: how far the runs may lie apart and pass: of all quantities' samples the norm of
            the difference over the norm, of losses and norms of gradients the difference over the
            number. It excuses no other data, weights at the start or writes. None: not at all.

    Raises RecordingError for a tolerance below 0 or NaN, and for names that make one tensor of two.
    Runs that have no step or not the same tensors in common are not comparable; the answer says so.
    """
    if tolerance is not None and not tolerance >= 0:
        raise RecordingError(f"tolerance must be a number >= 0, got {tolerance}")
    pair = Pair(Side(a), Side(b, names))
    found = Comparison(_title(a), _title(b), environment=_environment(a, b))
    found.reasons = [*_reasons(a, b), *(pair.dtypes(pair.steps[0]) if pair.steps else ())]
    found.missing = pair.missing()
    if found.missing:
        return found
    steps = pair.steps
    found.steps = (steps[0], steps[-1], len(steps))
    own = [quantity for quantity in OWN if all(pair.rows(steps[0], quantity))]
    found.tensors = len({name for name, _ in pair.in_both})
    found.quantities = list(dict.fromkeys([*(quantity for _, quantity in pair.in_both), *own]))
    found.options = pair.options(steps[0])
    found.blame = first_blame(pair)
    found.notes = pair.notes()
    if found.blame is None:
        found.notes += pair.quiet_options()
    else:
        known = pair.dtypes(found.blame.step)
        found.reasons += [reason for reason in known if reason not in found.reasons]
        try:
            found.elements = _elements(pair, found.blame)
        except RecordingError as error:  # which is no reason to keep the verdict back
            found.notes.append(str(error))
        found.growth = list(_growth(pair, found.blame.step))
        found.histogram = _histogram(pair)
        _look_at_repeats(found, a, b, names, noise)
        if tolerance is not None:
            found.tolerance = tolerance
            found.farthest = max(_apart(pair, found.blame.step), default=None)
    found.tier = _tier(found)
    return found


def _tier(found: Comparison) -> str:
    if found.blame is None or not found.reasons:
        return "bits"
    by_nature = found.blame.kind in BY_NATURE or "the gradient" in found.blame.unrecorded
    return "close" if by_nature else "bits"


def _elements(pair: Pair, blame: Blame) -> Elements | None:
    """What differs within the tensor that is blamed; None where not both have kept it."""
    key = blame.where, blame.quantity
    if any(key not in side.values for side in pair.both):
        return None
    name, quantity = key[0], f"old {key[1]}" if blame.kind in BEGIN else key[1]
    kept = [side.kept(blame.step, (name, quantity)) for side in pair.both]
    (dtype, other), (mine, theirs) = pair.dtypes_of(blame.step, key), kept
    shape, other_shape = (value.shape for value in pair.values_of(blame.step, key))
    if mine is None or theirs is None or (dtype, shape) != (other, other_shape):
        return None
    held = mine[1] & theirs[1]
    unlike = numpy.flatnonzero(held & (mine[0] != theirs[0]))
    if not len(unlike):
        return None
    a, b = mine[0][unlike], theirs[0][unlike]
    first = tuple(map(int, numpy.unravel_index(unlike[0], shape)))
    x, y = (hexadecimal(as_numbers(bits[:1], dtype)[0]) for bits in (a, b))
    apart, ulp = farthest(a, b, dtype)
    return Elements(name, quantity, first, x, y, len(unlike), int(held.sum()), apart, ulp)


def _against_repeats(
    a: Run, b: Run, names: Mapping[str, str] | None, noise: Sequence[Run]
) -> Iterator[Repeats]:
    """Each quantity's difference beside that of repeats, at the steps of which all have samples."""
    repeats, change = [Side(run) for run in (a, *noise)], Side(b, names)
    runs = [*repeats, change]
    common = set.intersection(*(set(side.run.sampled) & set(side.run.steps) for side in runs))
    own = [Pair(x, y) for x, y in combinations(repeats, 2)]
    others = [Pair(each, change) for each in repeats]
    for step in sorted(common) if noise else ():
        apart = [pair.distances(step) for pair in own]
        moved = [pair.distances(step) for pair in others]
        for quantity in moved[0]:
            largest = max(each.get(quantity, NEAR).relative for each in apart)
            least = min(each.get(quantity, NEAR).relative for each in moved)
            if largest or least:
                yield Repeats(step, quantity, least, largest)


def _look_at_repeats(
    found: Comparison, a: Run, b: Run, names: Mapping[str, str] | None, noise: Sequence[Run]
) -> None:
    """Adds what repeats of a say: how far they lie from each other, and where they part."""
    found.noise = list(_against_repeats(a, b, names, noise))
    if noise and not found.noise:
        found.notes.append("repeats say nothing: there is no step of which all runs have samples")
    for i, each in enumerate(noise):
        blame = compare(a, each).blame
        if blame is not None:
            found.repeats_part = min(blame.step, found.repeats_part or blame.step)
            words = f"repeat {i + 1} of A differs from it: step {blame.step}: {blame.text}"
            found.reasons.append(words)


def _title(run: Run) -> str:
    return str(getattr(run, "folder", "golden values"))


def _environment(a: Run, b: Run) -> list[Difference]:
    chosen = ("environment", "layout", "world", "level", "every")
    mine, theirs = ({name: run.run.get(name) for name in chosen} for run in (a, b))
    found = differences(flat(mine) | _words(a), flat(theirs) | _words(b))
    found += differences(*(_classes(run) for run in (a, b)))
    short = ("environment.variables.", "environment.")
    return [each._replace(name=_without(each.name, short)) for each in found]


def _without(name: str, beginnings: Iterable[str]) -> str:
    return next((name[len(each) :] for each in beginnings if name.startswith(each)), name)


def _words(run: Run) -> dict[str, str]:
    """The words of a run's command: those behind each option, and those before the first."""
    found, name = dict[str, str](), "argv"
    for word in run.run.get("argv") or ():
        if word.startswith("-") and word.lstrip("-")[:1].isalpha():
            option, _, word = word.partition("=")
            name = f"argv {option}"
        found[name] = f"{found.get(name, '')} {word}".strip()
    return found


def _classes(run: Run) -> dict[str, Any]:
    lines = list({line.get("class"): None for line in run.optimizers})
    return {"optimizer" if i == 0 else f"optimizer {i}": each for i, each in enumerate(lines)}


def _reasons(a: Run, b: Run) -> list[str]:
    """Why products are not to be equal in bits: another card, library or layout."""
    found = differences(family(a), family(b))
    found += differences(*(flat({"layout": layout_of(run)}) for run in (a, b)))
    return [str(each) for each in found]


def _missing_lines(missing: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for side, names in missing.items():
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        yield f"{side} {', '.join(names[:8])}{more}"


def _growth(pair: Pair, first: int) -> Iterator[Growth]:
    """What differs of each quantity, at steps from the first that differs."""
    for step in _curve(pair, first):
        yield from _scalars_apart(pair, step)
        for quantity in OWN:
            a, b = pair.rows(step, quantity)
            if a and b:
                yield Growth(step, quantity, len(pair.differing(a, b)), len(a), None, None)
        apart = Counter(quantity for _, quantity in pair.tensors(step, is_new))
        of = Counter(q for key in pair.a.digests(step) if is_new(q := key[1]))
        lengths = pair.distances(step)
        for quantity in dict.fromkeys([*of, *lengths]):
            length = lengths.get(quantity)
            yield Growth(
                step,
                quantity,
                apart[quantity],
                of[quantity],
                length.relative if length else None,
                length.largest if length else None,
            )


def _scalars_apart(pair: Pair, step: int) -> Iterator[Growth]:
    drawn = pair.drawn(step)
    apart = sum(name in drawn for _, name in pair.generators_apart(step))
    yield Growth(step, "random state", apart, len(drawn), None, None)
    for quantity, name in (("data", "batch"), ("loss", "losses")):
        if not (pair.alike_layout and pair.says(name, step)):  # a rank's own have no partner
            continue
        a, b = (side.scalars(step, name) for side in pair.both)
        count = sum(x != y for x, y in zip_longest(a, b))
        relative = _relative(a, b) if name == "losses" else None
        yield Growth(step, quantity, count, len(a), relative, None)


def _apart(pair: Pair, first: int) -> Iterator[Farthest]:
    """How far the runs lie apart from a step on, in everything that has a distance."""
    for step in (step for step in pair.steps if step >= first):
        for quantity, length in pair.distances(step).items():
            yield Farthest(length.relative, quantity, step)
        for name in ("losses", "grad_norm") if pair.alike_layout else ():
            for far in _each_apart(*(side.scalars(step, name) for side in pair.both)):
                yield Farthest(far, name, step)


def _each_apart(a: Any, b: Any) -> Iterator[float]:
    """How far numbers lie apart, of themselves; infinitely what is none, or has no partner."""
    for x, y in zip_longest(floats(a), floats(b), fillvalue=math.nan):
        far = 0.0 if x == y or (x != x and y != y) else abs(y - x) / abs(x) if x else math.inf
        yield far if far == far else math.inf


def _curve(pair: Pair, first: int) -> list[int]:
    after = pair.steps[max(pair.steps.index(first) - 1, 0) :]
    sampled = sorted(set(pair.a.run.sampled) & set(pair.b.run.sampled) & set(after[FIRST:]))
    every = -(-len(sampled) // CURVE) or 1
    return after[:FIRST] + sampled[::every]


def _histogram(pair: Pair) -> dict[str, dict[int, int]]:
    """Units in the last place at the last step of which both have samples."""
    both = set(pair.a.run.sampled) & set(pair.b.run.sampled) & set(pair.steps)
    if not both:
        return {}
    found = pair.distances(max(both))
    return {quantity: dict(sorted(each.ulps.items())) for quantity, each in found.items()}


def _relative(a: Any, b: Any) -> float | None:
    return median(found) if (found := list(_each_apart(a, b))) else None
