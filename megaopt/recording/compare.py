"""The comparison of two recorded runs: what differs first, who is to blame, and how it grows.

numpy alone is needed. docs/diff.md explains the answers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    ComparedRun,
    Pair,
    Side,
    ValueDifference,
    differences,
    family,
    flat,
    floats,
    is_old,
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
    """The part of one quantity that differs at a step."""

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
    """The place where two runs lie farthest apart."""

    relative: float
    """Norm of the difference over the norm, of sampled elements or of a number."""
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
    """The result of `compare`."""

    a: str
    b: str
    tier: str = "bits"
    """"bits", or "close" where products differ by nature."""
    reasons: list[str] = field(default_factory=list)
    """Reasons for a tier other than bits."""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """Tensors, ranks and steps whose lack keeps the runs from being compared, by side."""
    environment: list[ValueDifference] = field(default_factory=list)
    options: list[ValueDifference] = field(default_factory=list)
    """Options of groups that differ at the first step that both have."""
    steps: tuple[int, ...] = ()
    """The first and the last step that were compared, and how many."""
    tensors: int = 0
    """The number of tensors that were compared."""
    quantities: list[str] = field(default_factory=list)
    """Quantities of tensors and of modules that were compared."""
    blame: Blame | None = None
    elements: Elements | None = None
    growth: list[Growth] = field(default_factory=list)
    histogram: dict[str, dict[int, int]] = field(default_factory=dict)
    """The number of sampled elements that differ by 0 units in the last place (0), by 1 (1), 2-3
    (2), 4-7 (3) ..., by quantity, at the last step with samples."""
    noise: list[Repeats] = field(default_factory=list)
    repeats_part: int | None = None
    """The first step at which a repeat differs from A."""
    notes: list[str] = field(default_factory=list)
    tolerance: float | None = None
    """The distance that runs may lie apart."""
    farthest: Farthest | None = None
    """The largest distance of the runs, where a tolerance was given."""

    @property
    def verdict(self) -> str:
        """One of "same", "differ", "not comparable"; where a difference passes, its kind."""
        if self.missing:
            return "not comparable"
        if self.blame is None:
            return "same"
        far = math.inf if self.farthest is None else self.farthest.relative
        allowed = -math.inf if self.tolerance is None else self.tolerance
        if self.blame.kind in TOLERABLE and self.farthest is not None and 0 < far <= allowed:
            return "within tolerance"
        excused = self.noise and self.tier == "close" and not self.exceeds_noise
        return "as two repeats differ" if excused else "differ"

    @property
    def exceeds_noise(self) -> bool:
        """Whether B parts from A before repeats do, or lies farther off in more than half of all.

        If B were a repeat too, it would be the farthest of four runs alike once in four.
        """
        # B parts before any repeat does
        if self.blame and (self.repeats_part is None or self.blame.step < self.repeats_part):
            return True

        # or B is farther from all of A's runs than they are from each other, in most rows
        return 2 * sum(row.change > row.repeats for row in self.noise) > len(self.noise)

    @property
    def line(self) -> str:
        """The verdict in a line."""
        if self.missing:
            # of each side the first names
            lists = []
            for side, names in self.missing.items():
                more = f" and {len(names) - 8} more" if len(names) > 8 else ""
                lists.append(f"{side} {', '.join(names[:8])}{more}")
            return f"not comparable: {'; '.join(lists)}"
        if self.blame is None:
            first, last, count = self.steps
            what = f"{self.tensors} tensors ({', '.join(self.quantities) or 'no digests'})"
            return f"same: {count} steps from {first} to {last}, {what}, bit for bit"
        sentence = "differ" if self.tier == "bits" or self.noise else "differ, as may be by nature"
        if self.verdict in ("as two repeats differ", "within tolerance"):
            sentence = self.verdict
        elif self.noise and self.exceeds_noise:
            sentence = "differ more than repeats do"
        return f"{sentence}: step {self.blame.step}: {self.blame.text}"

    def remarks(self) -> list[str]:
        """Returns what is to be known beside the verdict, a line each."""
        # the elements of the blamed tensor, where both runs kept it whole
        lines = [] if self.elements is None else [str(self.elements)]
        # what stands before the blame in its order, and nobody recorded: the cause may lie there
        if self.blame is not None and self.blame.unrecorded:
            unrecorded = self.blame.unrecorded
            more = "; --level blocks records blocks" if "outputs of blocks" in unrecorded else ""
            lines.append(f"not recorded in both runs: {', '.join(unrecorded)}{more}")
        if self.farthest is not None:
            far, quantity, step = self.farthest
            words = f"farthest apart is {quantity} of step {step}, by {far:.2g} of its norm"
            words = words if far else "what was sampled is equal: no tolerance excuses the rest"
            lines.append(f"{words}; the tolerance is {self.tolerance:g}")
        lines += [f"bits need not be equal: {reason}" for reason in self.reasons]
        lines += self.notes
        # each side has tensors that the other has not: other names of the same, maybe
        if {"A lacks", "B lacks"} <= self.missing.keys():
            words = "--map FILE says what those in B are in A"
            lines.append(f"if only names differ: {words}, as {MAP}")
        # a parameter that no module knows has a name of its place in the optimizer
        names = [*chain(*self.missing.values()), self.blame.where if self.blame else ""]
        matches = ((name, LOOSE.match(name)) for name in names)
        unnamed, match = next((pair for pair in matches if pair[1]), ("", None))
        if match is not None:
            which = "parameter {1} of group {0}, of no module whose forward ran"
            advice = "--map FILE, also of megaopt record, gives it a name"
            lines.append(f"{unnamed} is {which.format(*match.groups())}: {advice}")
        return lines

    def report(self) -> list[str]:
        """Returns the verdict and what belongs to it, a line each."""
        return [self.line, *self.remarks(), *map(str, (*self.environment, *self.options))]

    def as_json(self) -> dict[str, Any]:
        """Returns the comparison as JSON holds it; docs/diff.md has the schema."""
        content = {"schema": SCHEMA, "verdict": self.verdict, "line": self.line, **asdict(self)}
        # JSON writes NamedTuples as lists: their fields get names here
        content["blame"] = None if self.blame is None else self.blame._asdict()
        for name in ("elements", "farthest"):
            value = getattr(self, name)
            content[name] = None if value is None else _finite(value._asdict())
        for name in ("environment", "options", "growth", "noise"):
            content[name] = [_finite(entry._asdict()) for entry in getattr(self, name)]
        return content


def _finite(content: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces infinity, which JSON lacks, by a word."""
    return {name: "inf" if value == math.inf else value for name, value in content.items()}


def compare(
    a: ComparedRun,
    b: ComparedRun,
    names: Mapping[str, str] | None = None,
    noise: Sequence[ComparedRun] = (),
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
    # a's names for b's tensors; only steps and tensors that both have are compared
    pair = Pair(Side(a), Side(b, names))

    # differences of card, library and layout, which alone may explain other products
    title, title_b = (str(getattr(run, "folder", "golden values")) for run in (a, b))
    comparison = Comparison(title, title_b, environment=_environment(a, b))
    # why products need not be equal in bits: another card, library, layout or dtype
    entries = differences(family(a), family(b))
    entries += differences(*(flat({"layout": layout_of(run)}) for run in (a, b)))
    dtypes = pair.dtypes(pair.steps[0]) if pair.steps else []
    comparison.reasons = [*map(str, entries), *dtypes]

    # nothing in common: no verdict but this
    comparison.missing = pair.missing()
    if comparison.missing:
        return comparison

    # what the comparison covers
    steps = pair.steps
    comparison.steps = (steps[0], steps[-1], len(steps))
    # quantities that each rank has of its own, where both runs recorded them
    rank_quantities = [quantity for quantity in OWN if all(pair.rows(steps[0], quantity))]
    comparison.tensors = len({name for name, _ in pair.in_both})
    quantities = [quantity for _, quantity in pair.in_both]
    comparison.quantities = list(dict.fromkeys([*quantities, *rank_quantities]))

    # the first thing that differs, in the order of blame
    comparison.options = pair.options(steps[0])
    comparison.blame = first_blame(pair)
    comparison.notes = pair.notes(is_same=comparison.blame is None)
    if comparison.blame is not None:
        # dtypes at the blamed step may be others than at the first
        dtypes = pair.dtypes(comparison.blame.step)
        comparison.reasons += [line for line in dtypes if line not in comparison.reasons]
        # the blamed tensor's elements, from whole tensors
        try:
            comparison.elements = _elements(pair, comparison.blame)
        except RecordingError as error:  # which is no reason to keep the verdict back
            comparison.notes.append(str(error))
        # from the blamed step on: how much differs, and how far
        comparison.growth = list(_growth(pair, comparison.blame.step))
        # units in the last place, at the last step that both have sampled
        sampled = set(a.sampled) & set(b.sampled) & set(steps)
        for quantity, distance in pair.distances(max(sampled)).items() if sampled else ():
            comparison.histogram[quantity] = dict(sorted(distance.ulps.items()))
        # A's repeats, and the caller's tolerance, may excuse the difference
        _look_at_repeats(comparison, a, b, names, noise)
        if tolerance is not None:
            comparison.tolerance = tolerance
            comparison.farthest = max(_apart(pair, comparison.blame.step), default=None)
        # on another card, library or layout products of the passes may differ, unless the optimizer
        # had an equal gradient; else only equal bits will do
        kind, unrecorded = comparison.blame.kind, comparison.blame.unrecorded
        if comparison.reasons and (kind in BY_NATURE or "the gradient" in unrecorded):
            comparison.tier = "close"
    return comparison


def _elements(pair: Pair, blame: Blame) -> Elements | None:
    """Returns what differs within the blamed tensor; None where not both runs have kept it."""
    # the blamed tensor, in the quantity as it was before the step where that differs
    key = blame.where, blame.quantity
    if any(key not in side.values for side in pair.both):
        return None
    name, quantity = key[0], f"old {key[1]}" if blame.kind in BEGIN else key[1]
    # (bits, mask) of each side: flat unsigned integers of the dtype's width, and bool
    tensors = [side.kept(blame.step, (name, quantity)) for side in pair.both]
    (dtype, other_dtype), (tensor_a, tensor_b) = pair.dtypes_of(blame.step, key), tensors
    shape, other_shape = (value.shape for value in pair.values_of(blame.step, key))
    if tensor_a is None or tensor_b is None or (dtype, shape) != (other_dtype, other_shape):
        return None

    # elements that both sides have, and of which the bits differ
    held = tensor_a[1] & tensor_b[1]
    unlike = numpy.flatnonzero(held & (tensor_a[0] != tensor_b[0]))
    if not len(unlike):
        return None
    a, b = tensor_a[0][unlike], tensor_b[0][unlike]
    first = tuple(map(int, numpy.unravel_index(unlike[0], shape)))
    x, y = (hexadecimal(as_numbers(bits[:1], dtype)[0]) for bits in (a, b))
    apart, ulp = farthest(a, b, dtype)
    return Elements(name, quantity, first, x, y, len(unlike), int(held.sum()), apart, ulp)


def _look_at_repeats(
    comparison: Comparison,
    a: ComparedRun,
    b: ComparedRun,
    names: Mapping[str, str] | None,
    noise: Sequence[ComparedRun],
) -> None:
    """Adds what repeats of a say: how far they lie from each other, and where they part."""
    # steps that every run has, with samples
    repeats, change = [Side(run) for run in (a, *noise)], Side(b, names)
    runs = [*repeats, change]
    common = set.intersection(*(set(side.run.sampled) & set(side.run.steps) for side in runs))
    # distances among A and its repeats, and of B from each of them
    repeat_pairs = [Pair(x, y) for x, y in combinations(repeats, 2)]
    change_pairs = [Pair(side, change) for side in repeats]
    for step in sorted(common) if noise else ():
        apart = [pair.distances(step) for pair in repeat_pairs]
        moved = [pair.distances(step) for pair in change_pairs]
        for quantity in moved[0]:
            # the largest among repeats against B's least: B has to be off from all
            largest = max(distances.get(quantity, NEAR).relative for distances in apart)
            least = min(distances.get(quantity, NEAR).relative for distances in moved)
            if largest or least:
                comparison.noise.append(Repeats(step, quantity, least, largest))
    if noise and not comparison.noise:
        words = "repeats say nothing: there is no step of which all runs have samples"
        comparison.notes.append(words)
    # each repeat against A by the same comparison: where it parts
    for i, repeat in enumerate(noise):
        blame = compare(a, repeat).blame
        if blame is not None:
            comparison.repeats_part = min(blame.step, comparison.repeats_part or blame.step)
            words = f"repeat {i + 1} of A differs from it: step {blame.step}: {blame.text}"
            comparison.reasons.append(words)


def _environment(a: ComparedRun, b: ComparedRun) -> list[ValueDifference]:
    chosen = ("environment", "layout", "world", "level", "every")
    # the settings of the first rank, option by option, the commands' words and the classes
    settings_a, settings_b = ({name: run.run.get(name) for name in chosen} for run in (a, b))
    entries = differences(flat(settings_a) | _words(a), flat(settings_b) | _words(b))
    classes: list[dict[str, Any]] = [{}, {}]
    for numbered, run in zip(classes, (a, b), strict=True):
        for i, name in enumerate(dict.fromkeys(line.get("class") for line in run.optimizers)):
            numbered[f"optimizer {i}" if i else "optimizer"] = name
    entries += differences(*classes)
    short = re.compile(r"^environment\.(variables\.)?")
    return [entry._replace(name=short.sub("", entry.name, count=1)) for entry in entries]


def _words(run: ComparedRun) -> dict[str, str]:
    """Returns the words of a run's command: behind each option, and before the first."""
    words, name = dict[str, str](), "argv"
    for word in run.run.get("argv") or ():
        # "-5" is a value, "-x" an option
        if word.startswith("-") and word.lstrip("-")[:1].isalpha():
            option, _, word = word.partition("=")
            name = f"argv {option}"
        words[name] = f"{words.get(name, '')} {word}".strip()
    return words


def _growth(pair: Pair, first: int) -> Iterator[Growth]:
    """Yields what differs of each quantity, at steps from the first that differs."""
    # from the step before the first difference: the first 16, then at most about 64 sampled ones
    after = pair.steps[max(pair.steps.index(first) - 1, 0) :]
    sampled = sorted(set(pair.a.run.sampled) & set(pair.b.run.sampled) & set(after[FIRST:]))
    for step in after[:FIRST] + sampled[:: -(-len(sampled) // CURVE) or 1]:
        # generators that the run draws from, batches and losses
        drawn = pair.drawn(step)
        count = sum(name in drawn for _, name in pair.generators_apart(step))
        yield Growth(step, "random state", count, len(drawn), None, None)
        for quantity, name in (("data", "batch"), ("loss", "losses")):
            if not (pair.alike_layout and pair.says(name, step)):  # a rank's own have no partner
                continue
            a, b = (side.scalars(step, name) for side in pair.both)
            far = list(_each_apart(a, b)) if name == "losses" else []
            count = sum(x != y for x, y in zip_longest(a, b))
            yield Growth(step, quantity, count, len(a), median(far) if far else None, None)
        # quantities of single ranks are counted by rank and name
        for quantity in OWN:
            rows, rows_b = pair.rows(step, quantity)
            if rows and rows_b:
                unlike = pair.differing(rows, rows_b)
                yield Growth(step, quantity, len(unlike), len(rows), None, None)
        # how many tensors differ of each quantity, of how many
        apart = Counter(quantity for _, quantity in pair.tensors(step, lambda q: not is_old(q)))
        of = Counter(q for key in pair.a.digests(step) if not is_old(q := key[1]))
        lengths = pair.distances(step)
        for quantity in dict.fromkeys([*of, *lengths]):
            length = lengths.get(quantity)
            relative, ulp = (length.relative, length.largest) if length else (None, None)
            yield Growth(step, quantity, apart[quantity], of[quantity], relative, ulp)


def _apart(pair: Pair, first: int) -> Iterator[Farthest]:
    """Yields how far the runs lie apart from a step on, in everything that has a distance."""
    for step in (step for step in pair.steps if step >= first):
        for quantity, length in pair.distances(step).items():
            yield Farthest(length.relative, quantity, step)
        for name in ("losses", "grad_norm") if pair.alike_layout else ():
            for far in _each_apart(*(side.scalars(step, name) for side in pair.both)):
                yield Farthest(far, name, step)


def _each_apart(a: Any, b: Any) -> Iterator[float]:
    """Yields how far numbers lie apart, over the first; inf for NaN or without a partner."""
    for x, y in zip_longest(floats(a), floats(b), fillvalue=math.nan):
        # equal and both NaN: 0; of 0, to NaN, or without a partner: infinity
        far = 0.0 if x == y or (x != x and y != y) else abs(y - x) / abs(x) if x else math.inf
        yield far if far == far else math.inf
