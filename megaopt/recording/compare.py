"""The comparison of two recorded runs: what differs first, and who is to blame.

numpy alone is needed. docs/diff.md explains the answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import combinations, zip_longest
from statistics import median
from typing import Any, NamedTuple, Protocol

from megaopt.recording.files import LANES, Key, Recording, Summed, Value
from megaopt.recording.measure import NEAR, Array, Distance, distance

SCHEMA = 1
CURVE = 64
"""Steps of which growth is looked at, beside the first ones after runs part."""
FIRST = 16
ANYWHERE = ("torch", "cuda", "cublas", "nccl", "card", "TransformerEngine")
WITHOUT_CARD = ("torch", "processor", "threads")
"""What of the environment decides the bits of products and sums: with a card, and without."""
BY_NATURE = ("forward", "backward", "reduction", "gradient")
"""Kinds of blame that another layout or another card alone explains."""
BEGIN = ("start", "outside write", "between")
"""Kinds of blame that precede a step."""
WHOLE = ("grad", "weight", "codes")
"""Quantities of the parameter's own shape, one of which each recording of tensors has."""
NOT_NUMBERS = ("foreach", "fused", "capturable", "differentiable", "backend")
"""Options that say how a step is made, not which."""


class Run(Protocol):
    """What is compared: a `Recording`, or what a file of golden values holds of one."""

    @property
    def run(self) -> Mapping[str, Any]:
        """What is to be known of the run."""

    @property
    def absent(self) -> Sequence[int]:
        """The ranks that are missing."""

    @property
    def optimizers(self) -> Sequence[Mapping[str, Any]]:
        """What is to be known of the optimizers."""

    @property
    def steps(self) -> Sequence[int]:
        """The steps, ascending."""

    @property
    def sampled(self) -> Sequence[int]:
        """Those of which there are samples."""

    @property
    def values(self) -> Mapping[Key, Value]:
        """What ranks hold together, by name and quantity."""

    def scalars(self, step: int) -> list[dict[int, dict[str, Any]]]:
        """For each rank, by source, the numbers of a step."""

    def digests(self, step: int) -> dict[Key, Summed]:
        """What all ranks together say of each tensor."""

    def own(self, step: int) -> dict[tuple[int, str, str], list[Any]]:
        """What each rank alone says."""

    def samples(self, step: int) -> dict[Key, tuple[int, Array]]:
        """The sampled elements of each tensor."""


class Difference(NamedTuple):
    """What the two runs say of one thing; None where one says nothing."""

    name: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.name}: {shown(self.a)}, and {shown(self.b)}"


class Blame(NamedTuple):
    """Who is to blame for what differs first."""

    step: int
    kind: str
    """"start", "outside write", "data", "random state", "forward", "backward", "reduction",
    "gradient", "optimizer", "length"; "between" where it lies between recorded steps."""
    where: str
    """The tensor or the module, first in the order in which they are computed; or "loss"."""
    quantity: str
    text: str
    """A sentence."""
    tensors: tuple[Key, ...] = ()
    """All of the step's that differ in what is to blame, in that order."""
    unrecorded: tuple[str, ...] = ()
    """What could be to blame instead, and is not in both recordings."""


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
    blame: Blame | None = None
    growth: list[Growth] = field(default_factory=list)
    histogram: dict[str, dict[int, int]] = field(default_factory=dict)
    """How many sampled elements differ by 0 units in the last place (0), by 1 (1), 2-3 (2), 4-7
    (3) ..., by quantity, at the last step with samples."""
    noise: list[Repeats] = field(default_factory=list)
    repeats_part: int | None = None
    """The first step at which a repeat differs from A."""
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """One of "same", "differ", "as two repeats differ", "not comparable"."""
        if self.missing:
            return "not comparable"
        if self.blame is None:
            return "same"
        excused = self.noise and self.tier == "close" and not self.exceeds_noise
        return "as two repeats differ" if excused else "differ"

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
            return (
                f"same: {count} steps from {first} to {last}, all that both recorded, bit for bit"
            )
        return f"{self._sentence}: step {self.blame.step}: {self.blame.text}"

    @property
    def _sentence(self) -> str:
        if self.verdict == "as two repeats differ":
            return self.verdict
        if self.noise:
            return "differ more than repeats do" if self.exceeds_noise else "differ"
        return "differ" if self.tier == "bits" else "differ, as may be by nature"

    def remarks(self) -> list[str]:
        """What is to be known beside the verdict, a line each."""
        lines = []
        if self.blame is not None and self.blame.unrecorded:
            lines.append(f"not recorded in both runs: {', '.join(self.blame.unrecorded)}")
        lines += [f"bits are not to be equal: {reason}" for reason in self.reasons]
        return [*lines, *self.notes]

    def report(self) -> list[str]:
        """The verdict and what belongs to it, a line each."""
        return [self.line, *self.remarks(), *map(str, (*self.environment, *self.options))]

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON holds it; docs/diff.md has the schema."""
        content = {"schema": SCHEMA, "verdict": self.verdict, "line": self.line, **asdict(self)}
        content["blame"] = None if self.blame is None else self.blame._asdict()
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
) -> Comparison:
    """Compares two recorded runs.

    Args:
        a: the run that counts as right.
        b: the other.
        names: what a tensor or module of b is called in a, by its name in b; a "*" in both stands
            for any text. Other names are the same in both.
        noise: repeats of a, to see how far a run lies from itself.

    Runs that have no step or not the same tensors in common are not comparable; the answer says so.
    """
    pair = _Pair(_Side(a), _Side(b, names))
    found = Comparison(_title(a), _title(b), environment=_environment(a, b))
    found.reasons = _reasons(a, b)
    found.missing = pair.missing()
    if found.missing:
        return found
    steps = pair.steps
    found.steps = (steps[0], steps[-1], len(steps))
    found.options = pair.options(steps[0])
    found.blame = pair.blame()
    found.notes = pair.notes()
    if found.blame is not None:
        found.growth = list(pair.growth(found.blame.step))
        found.histogram = pair.histogram()
        _look_at_repeats(found, a, b, names, noise)
    found.tier = _tier(found)
    return found


def _tier(found: Comparison) -> str:
    if found.blame is None or not found.reasons:
        return "bits"
    by_nature = found.blame.kind in BY_NATURE or "the gradient" in found.blame.unrecorded
    return "close" if by_nature else "bits"


def _against_repeats(
    a: Run, b: Run, names: Mapping[str, str] | None, noise: Sequence[Run]
) -> Iterator[Repeats]:
    """Each quantity's difference beside that of repeats, at the steps of which all have samples."""
    repeats, change = [_Side(run) for run in (a, *noise)], _Side(b, names)
    runs = [*repeats, change]
    common = set.intersection(*(set(side.run.sampled) & set(side.run.steps) for side in runs))
    own = [_Pair(x, y) for x, y in combinations(repeats, 2)]
    others = [_Pair(each, change) for each in repeats]
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


def shown(value: Any) -> str:
    """A value of a recording in words: floats, which it holds in hexadecimal, in decimal."""
    if value is None:
        return "unset"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, str) and value.lstrip("-").startswith("0x") and "p" in value:
        return repr(float.fromhex(value))
    return str(value)


def flat(content: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, by their path with dots; lists are leaves."""
    if not isinstance(content, Mapping):
        return {path: content}
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= flat(value, f"{path}.{name}" if path else str(name))
    return found


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    names = dict.fromkeys([*a, *b])
    return [
        Difference(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)
    ]


def _environment(a: Run, b: Run) -> list[Difference]:
    chosen = ("environment", "layout", "world", "level", "every", "argv")
    mine, theirs = ({name: run.run.get(name) for name in chosen} for run in (a, b))
    found = _differences(flat(mine), flat(theirs))
    found += _differences(*(_classes(run) for run in (a, b)))
    short = ("environment.variables.", "environment.")
    return [each._replace(name=_without(each.name, short)) for each in found]


def _without(name: str, beginnings: Iterable[str]) -> str:
    return next((name[len(each) :] for each in beginnings if name.startswith(each)), name)


def _classes(run: Run) -> dict[str, Any]:
    lines = list({line.get("class"): None for line in run.optimizers})
    return {"optimizer" if i == 0 else f"optimizer {i}": each for i, each in enumerate(lines)}


def family(run: Run) -> dict[str, Any]:
    """What of a run's environment decides the bits of its products."""
    environment = run.run.get("environment", {})
    names = ANYWHERE if environment.get("card") else WITHOUT_CARD
    return {name: environment.get(name) for name in names}


def _reasons(a: Run, b: Run) -> list[str]:
    """Why products are not to be equal in bits: another card, library or layout."""
    found = _differences(family(a), family(b))
    found += _differences(*(flat({"layout": _layout(run)}) for run in (a, b)))
    return [str(each) for each in found]


def _layout(run: Run) -> dict[str, Any]:
    return {"ranks": run.run.get("world"), **(run.run.get("layout") or {})}


def _missing_lines(missing: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for side, names in missing.items():
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        yield f"{side} {', '.join(names[:8])}{more}"


class _Side:
    """A run with its names as the other has them."""

    def __init__(self, run: Run, names: Mapping[str, str] | None = None) -> None:
        self.run, self._names = run, names or {}
        self.name = lru_cache(None)(self._name)
        self.digests = lru_cache(4)(self._digests)
        self.own = lru_cache(4)(self._own)
        self.values: dict[Key, Value] = {
            (self.name(name), quantity): value for (name, quantity), value in run.values.items()
        }
        self.shapes = {name: v.shape for (name, q), v in self.values.items() if q in WHOLE}
        listed = [name for line in run.optimizers for group in line["groups"] for name in group]
        self.parameters = {self.name(name) for name in listed} | set(self.shapes)
        order = [name for line in run.optimizers for name in line.get("order") or ()]
        every = dict.fromkeys(self.name(name) for name in [*order, *listed, *self.shapes])
        self.order = {name: i for i, name in enumerate(every)}

    def _name(self, name: str) -> str:
        if name in self._names:
            return self._names[name]
        for theirs, ours in self._names.items():
            before, star, after = theirs.partition("*")
            fits = name.startswith(before) and name.endswith(after)
            if star and fits and len(name) >= len(before) + len(after):
                return ours.replace("*", name[len(before) : len(name) - len(after)], 1)
        return name

    def _digests(self, step: int) -> dict[Key, Summed]:
        return {(self.name(n), q): each for (n, q), each in self.run.digests(step).items()}

    def _own(self, step: int) -> dict[tuple[int, str, str], list[Any]]:
        return {(r, self.name(n), q): each for (r, n, q), each in self.run.own(step).items()}

    def samples(self, step: int) -> dict[Key, tuple[int, Array]]:
        return {(self.name(n), q): each for (n, q), each in self.run.samples(step).items()}

    def after(self, step: int) -> dict[Key, Summed]:
        """Weights and state as a step leaves them; nothing where it is not recorded."""
        if step not in self.run.steps:
            return {}
        return {key: each for key, each in self.digests(step).items() if _is_after(key[1])}

    def before(self, step: int) -> dict[Key, Summed]:
        """Weights and state as a step finds them, as far as they are known."""
        rows = self.digests(step)
        if not rows:  # whether anything was written since is not known
            return {}
        old = {(n, q[4:]): each for (n, q), each in rows.items() if q.startswith("old ")}
        return self.after(step - 1) | old

    def old_samples(self, step: int) -> dict[Key, Any]:
        """The bits of sampled weights as a step finds them."""
        found = self.samples(step).items()
        return {(n, q[4:]): (h, b.tobytes()) for (n, q), (h, b) in found if q.startswith("old ")}

    def new_samples(self, step: int) -> dict[Key, Any]:
        """The bits of what is sampled as a step leaves it."""
        return {key: (h, b.tobytes()) for key, (h, b) in self.samples(step).items()}

    def scalars(self, step: int, name: str) -> list[Any]:
        """One thing of the numbers of a step, of each rank and source."""
        ranks = self.run.scalars(step)
        return [line.get(name) for rank in ranks for _, line in sorted(rank.items())]


def _is_after(quantity: str) -> bool:
    return quantity != "grad" and not quantity.startswith("old ")


def _bits(summed: Summed | None) -> Any:
    """What is compared of a digest; the count of non-finite elements may lack in one run."""
    if summed is None:
        return None
    others = [(each.low, each.high) for each in summed.others]
    return (summed.digest.low, summed.digest.high, summed.missing, summed.replicas, others)


class _Pair:
    """Two runs side by side."""

    def __init__(self, a: _Side, b: _Side) -> None:
        self.a, self.b = a, b
        self.both = (a, b)
        self.steps = sorted(set(a.run.steps) & set(b.run.steps))
        self.has_ranks = (a.run.run.get("world") or 1) > 1
        self.alike_layout = _layout(a.run) == _layout(b.run)

    # ---- whether they can be compared

    def missing(self) -> dict[str, list[str]]:
        """What one run has and the other lacks, by side; empty where they can be compared."""
        a, b = self.both
        found: dict[str, list[str]] = {}
        if a.parameters and b.parameters:
            found["A lacks"] = sorted(b.parameters - a.parameters)
            found["B lacks"] = sorted(a.parameters - b.parameters)
        common = [name for name in a.shapes if name in b.shapes]
        found["other shapes:"] = [
            f"{name} {a.shapes[name]} and {b.shapes[name]}"
            for name in common
            if a.shapes[name] != b.shapes[name]
        ]
        for side, run, other in (("A lacks", a.run, b.run), ("B lacks", b.run, a.run)):
            lost = [f"rank {each}" for each in run.absent if each not in other.absent]
            found.setdefault(side, []).extend(lost)
        if not self.steps:
            found["no step in both:"] = [
                f"{letter} has {_span(side.run.steps)}"
                for letter, side in zip("AB", self.both, strict=True)
            ]
        return {side: names for side, names in found.items() if names}

    def notes(self) -> list[str]:
        """What was not compared."""
        quantities = [dict.fromkeys(quantity for _, quantity in side.values) for side in self.both]
        found = []
        for letter, mine, theirs in (("A", *quantities), ("B", *quantities[::-1])):
            alone = [each for each in mine if each not in theirs and not each.startswith("old ")]
            if alone:
                found.append(f"only {letter} has recorded: {', '.join(alone)}")
        apart = next((step for step in self.steps if self.generators_apart(step)), None)
        if apart is not None:
            names = dict.fromkeys(name for _, name in self.generators_apart(apart))
            found.append(f"random states differ from step {apart} on: {', '.join(names)}")
        first, last = self.steps[0], self.steps[-1]
        for letter, side in zip("AB", self.both, strict=True):
            rest = [step for step in side.run.steps if step not in set(self.steps)]
            if rest:
                found.append(f"only {letter} has {_span(rest)}; compared: {first} to {last}")
        return found

    # ---- what differs first

    def options(self, step: int) -> list[Difference]:
        """Options of groups, and the loss scale, that differ at a step."""
        mine, theirs = (self._options(side, step) for side in self.both)
        return _differences(mine, theirs)

    def _options(self, side: _Side, step: int) -> dict[str, Any]:
        ranks = side.run.scalars(step)
        found: dict[str, Any] = {}
        for rank, sources in enumerate(ranks if self.alike_layout else ranks[:1]):
            for source, line in sorted(sources.items()):
                whose = (f" of optimizer {source}" if source else "") + (
                    f" on rank {rank}" if rank else ""
                )
                for i, group in enumerate(line.get("groups") or ()):
                    found |= {f"{name} of group {i}{whose}": group[name] for name in group}
                found[f"loss scale{whose}"] = line.get("loss_scale")
                found[f"skipped{whose}"] = line.get("skipped")
        return found

    def blame(self) -> Blame | None:
        """Who is to blame for the first step that differs; None where none does."""
        for step in self.steps:
            if self._is_alike(step):
                continue
            for check in CHECKS:
                found = check(self, step)
                if found is not None:
                    return found._replace(unrecorded=tuple(self._unrecorded(found)))
        return self._length()

    def _is_alike(self, step: int) -> bool:
        a, b = self.a.run, self.b.run
        return isinstance(a, Recording) and isinstance(b, Recording) and a.alike(b, step)

    def _unrecorded(self, found: Blame) -> Iterator[str]:
        """What precedes in the order of blame, and is not in both recordings."""
        step = found.step
        if step - 1 not in self.steps and step != self.steps[0]:
            yield f"steps {max(s for s in self.steps if s < step) + 1} to {step - 1}"
        elif found.kind == "between":
            yield f"what step {step - 1} left"
        inputs = self.records("grad", step) and _knows_before(self, step)
        if found.kind in BEGIN or (found.kind == "optimizer" and inputs):
            return
        for quantity, name, known in PRECEDING:
            if quantity == found.quantity:
                return
            if not known(self, step):
                yield name

    def _length(self) -> Blame | None:
        last = [side.run.steps[-1] for side in self.both]
        every = max(side.run.run.get("every") or 1 for side in self.both)
        if abs(last[0] - last[1]) < every:
            return None
        text = f"A ends after step {last[0]}, B after step {last[1]}; until then both are equal"
        return Blame(min(last), "length", "", "", text)

    def differing(self, a: Mapping[Any, Any], b: Mapping[Any, Any]) -> list[Any]:
        """The keys whose values differ, of those that both have."""
        return [key for key in a if key in b and _value(a[key]) != _value(b[key])]

    def ordered(self, keys: Iterable[Key], backward: bool = False) -> list[Key]:
        """Keys of parameters in the order of the forward pass, or the backward."""
        order, last = self.a.order, len(self.a.order)
        place = {key: order.get(key[0], last) for key in keys}
        return sorted(place, key=lambda key: -place[key] if backward else place[key])

    def generators_apart(self, step: int) -> list[tuple[int, str]]:
        """The generators of random numbers whose states differ, by rank and name."""
        pairs = zip(*(side.scalars(step, "rng") for side in self.both), strict=False)
        found = enumerate(pairs if self.alike_layout else ())
        return [(i, n) for i, (a, b) in found for n in a or () if a[n] != (b or a).get(n, a[n])]

    def drawn(self, step: int) -> set[str]:
        """The generators that either run draws from, in a step or, where it is the last, before."""
        places = self.steps[max(self.steps.index(step) - 1, 0) :][:3]
        states = [side.scalars(each, "rng") for side in self.both for each in places]
        names = {name for each in states for rank in each for name in rank or ()}
        runs = [states[: len(places)], states[len(places) :]]
        return {
            name
            for name in names
            for run in runs
            if len({str([(rank or {}).get(name) for rank in each]) for each in run}) > 1
        }

    def records(self, quantity: str, step: int) -> bool:
        """Whether both have rows of a quantity at a step."""
        return all(
            any(q == quantity for _, q in side.digests(step))
            or any(q == quantity for *_, q in side.own(step))
            for side in self.both
        )

    def says(self, name: str, step: int) -> bool:
        """Whether both have a number of a step."""
        return all(any(each not in (None, []) for each in s.scalars(step, name)) for s in self.both)

    def rows(self, step: int, quantity: str) -> list[dict[tuple[int, str], list[Any]]]:
        """The rows of ranks alone, of one quantity, by rank and name, for both runs."""
        found = [
            {
                (r, n): [(d.low, d.high) for d in rows]
                for (r, n, q), rows in own.items()
                if q == quantity
            }
            for own in (side.own(step) for side in self.both)
        ]
        return found if self.alike_layout else [{}, {}]

    def modules(self, step: int) -> dict[str, int]:
        """The places of modules in the order of the forward pass; earlier ranks' first."""
        names = [name for _, name, quantity in self.a.own(step) if quantity == "forward"]
        return {name: i for i, name in enumerate(dict.fromkeys(names))}

    def tensors(self, step: int, quantities: Callable[[str], bool]) -> list[Key]:
        """The keys of digests that differ; also those that one run lacks of a quantity it has."""
        a, b = ({k: v for k, v in s.digests(step).items() if quantities(k[1])} for s in self.both)
        common = {q for _, q in a} & {q for _, q in b}
        keys = dict.fromkeys(key for key in [*a, *b] if key[1] in common)
        return [key for key in keys if _bits(a.get(key)) != _bits(b.get(key))]

    # ---- how it grows

    def growth(self, first: int) -> Iterator[Growth]:
        """What differs of each quantity, at steps from the first that differs."""
        for step in self._curve(first):
            yield from self._scalars_apart(step)
            for quantity in ("forward", "backward", "local grad"):
                a, b = self.rows(step, quantity)
                if a and b:
                    yield Growth(step, quantity, len(self.differing(a, b)), len(a), None, None)
            apart = Counter(quantity for _, quantity in self.tensors(step, _is_new))
            of = Counter(q for key in self.a.digests(step) if _is_new(q := key[1]))
            lengths = self.distances(step)
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

    def _scalars_apart(self, step: int) -> Iterator[Growth]:
        drawn = self.drawn(step)
        apart = sum(name in drawn for _, name in self.generators_apart(step))
        yield Growth(step, "random state", apart, len(drawn), None, None)
        for quantity, name in (("data", "batch"), ("loss", "losses")):
            if not self.says(name, step):
                continue
            a, b = (side.scalars(step, name) for side in self.both)
            count = sum(x != y for x, y in zip_longest(a, b))
            relative = _relative(a, b) if name == "losses" else None
            yield Growth(step, quantity, count, len(a), relative, None)

    def _curve(self, first: int) -> list[int]:
        after = self.steps[max(self.steps.index(first) - 1, 0) :]
        sampled = sorted(set(self.a.run.sampled) & set(self.b.run.sampled) & set(after[FIRST:]))
        every = -(-len(sampled) // CURVE) or 1
        return after[:FIRST] + sampled[::every]

    def distances(self, step: int) -> dict[str, Distance]:
        """The distances of sampled elements, by quantity."""
        a, b = (side.samples(step) for side in self.both)
        found: dict[str, Distance] = {}
        for key in a:
            if key not in b or not _is_new(key[1]):
                continue
            length = self._distance(key, a[key], b[key])
            found[key[1]] = found.get(key[1], NEAR).plus(length)
        return found

    def farthest(self, step: int, keys: Iterable[Key]) -> str:
        """In words, which of some tensors lies farthest apart in its samples, where there are."""
        a, b = (side.samples(step) for side in self.both)
        known = [key for key in keys if key in a and key in b]
        apart = {key: self._distance(key, a[key], b[key]).relative for key in known}
        if len(apart) < 2:
            return ""
        name, quantity = max(apart, key=lambda key: apart[key])
        return f"; farthest apart is that of {name}, by {apart[name, quantity]:.2g} of its norm"

    def _distance(self, key: Key, a: tuple[int, Array], b: tuple[int, Array]) -> Distance:
        held = a[0] & b[0]
        chosen = [i for i in range(held.bit_length()) if held >> i & 1]
        dtypes = (side.values[key].dtype for side in self.both)
        return distance(a[1][chosen], b[1][chosen], *dtypes)

    def histogram(self) -> dict[str, dict[int, int]]:
        """Units in the last place at the last step of which both have samples."""
        both = set(self.a.run.sampled) & set(self.b.run.sampled) & set(self.steps)
        if not both:
            return {}
        found = self.distances(max(both))
        return {quantity: dict(sorted(each.ulps.items())) for quantity, each in found.items()}


def _is_new(quantity: str) -> bool:
    return not quantity.startswith("old ")


def _value(value: Any) -> Any:
    return _bits(value) if isinstance(value, Summed) else value


def _span(steps: Sequence[int]) -> str:
    if not steps:
        return "no steps"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _floats(content: Any) -> Iterator[float]:
    if isinstance(content, list):
        for each in content:
            yield from _floats(each)
    elif content is not None:
        yield float.fromhex(content)


def _relative(a: Any, b: Any) -> float | None:
    pairs = list(zip(_floats(a), _floats(b), strict=False))
    return median(abs(y - x) / abs(x) if x else abs(y) for x, y in pairs) if pairs else None


def _and_options(pair: _Pair, step: int) -> str:
    found = [str(each) for each in pair.options(step)]
    return f"; {'; '.join(found)}" if found else ""


# ---- the order of blame: each looks at one step


def _begin(pair: _Pair, step: int) -> Blame | None:
    """What changed before the step: by digests, else by the samples of old weights."""
    for before, after in ((_Side.before, _Side.after), (_Side.old_samples, _Side.new_samples)):
        found = [before(side, step) for side in pair.both]
        keys = pair.ordered(pair.differing(*found))
        if keys:
            left = [after(side, step - 1) for side in pair.both]
            return _begin_with(pair, step, keys, found, left)
    return None


def _begin_with(
    pair: _Pair,
    step: int,
    keys: Sequence[Key],
    before: Sequence[Mapping[Key, Any]],
    left: Sequence[Mapping[Key, Any]],
) -> Blame:
    """Blame for what differs before a step, beside what the step before left."""
    key, (name, quantity) = keys[0], keys[0]
    written = [
        letter
        for letter, old, now in zip("AB", left, before, strict=True)
        if key in old and _value(old[key]) != _value(now[key])
    ]
    if step == pair.steps[0]:
        kind, text = "start", f"the runs begin with another {quantity} of {name}"
    elif written:
        kind = "outside write"
        text = (
            f"{quantity} of {name} was written in {' and '.join(written)} after step {step - 1}, "
            "by something else than the optimizer"
        )
    else:
        kind, text = "between", f"seen first in the old {quantity} of {name}"
    return Blame(step, kind, name, quantity, text, tuple(keys))


def _data(pair: _Pair, step: int) -> Blame | None:
    if not pair.says("batch", step):
        return None
    a, b = (side.scalars(step, "batch") for side in pair.both)
    if not pair.alike_layout:
        return _global_data(step, a, b)
    if a == b:
        return None
    rank = next(i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y)
    where = f" on rank {rank}" if len(a) > 1 else ""
    mine, theirs = (len(each[rank] or ()) if len(each) > rank else 0 for each in (a, b))
    calls = f" ({mine} calls of the model, and {theirs})" if mine != theirs else ""
    return Blame(step, "data", "batch", "batch", f"the batch differs{where}{calls}")


def _global_data(step: int, a: Sequence[Any], b: Sequence[Any]) -> Blame | None:
    """The batches of all ranks together; those of one model's ranks may count once or each."""
    wholes = [{_sum_of(each), _sum_of({tuple(batch or ()) for batch in each})} for each in (a, b)]
    if wholes[0] & wholes[1]:
        return None
    return Blame(step, "data", "batch", "batch", "the batch of all ranks together differs")


def _sum_of(batches: Iterable[Sequence[str] | None]) -> tuple[int, int]:
    """The digest of a whole global batch, whatever its parts."""
    digests = [int(each, 16) for batch in batches for each in batch or ()]
    low, high = sum(each % LANES for each in digests), sum(each // LANES for each in digests)
    return low % LANES, high % LANES


def _random_state(pair: _Pair, step: int) -> Blame | None:
    """Generators that differ and are drawn from: one that nobody reads has no part in a run."""
    drawn = pair.drawn(step)
    for rank, name in pair.generators_apart(step):
        if name in drawn:
            where = f" on rank {rank}" if rank else ""
            text = f"the random state of {name} differs{where} before the forward pass"
            return Blame(step, "random state", name, "rng", text)
    return None


def _forward(pair: _Pair, step: int) -> Blame | None:
    """What the model computed; where a random state explains it, that."""
    found = _outputs(pair, step)
    return found and (_random_state(pair, step) or found)


def _outputs(pair: _Pair, step: int) -> Blame | None:
    found = _first_rows(pair, step, "forward", pair.modules(step))
    if found:
        (call, name), keys = found
        before = "; what went into it is equal" if len(pair.modules(step)) > 1 else ""
        text = f"the output of {name} is the first that differs{_call(call)}{before}"
        return Blame(step, "forward", name, "forward", text, keys)
    if not pair.says("losses", step):
        return None
    a, b = (list(_floats(side.scalars(step, "losses"))) for side in pair.both)
    if not pair.alike_layout:
        a, b = sorted(set(a)), sorted(set(b))  # ranks that share a model have one loss
        if len(a) != len(b):  # of other parts of the batch
            return None
    unlike = next(((x, y) for x, y in zip_longest(a, b) if x != y), None)
    if unlike is None:
        return None
    seen = "after the last block" if pair.records("forward", step) else "seen first in the loss"
    text = f"{seen}: loss {unlike[0]!r}, and {unlike[1]!r}"
    return Blame(step, "forward", "loss", "loss", text)


def _call(call: int) -> str:
    return f" (call {call + 1} of the step)" if call else ""


def _first_rows(
    pair: _Pair, step: int, quantity: str, order: Mapping[str, int], backward: bool = False
) -> tuple[tuple[int, str], tuple[Key, ...]] | None:
    """The first call that differs and its module, and all modules that do, in order."""
    a, b = pair.rows(step, quantity)
    first: dict[str, int] = {}
    for rank, name in pair.differing(a, b):
        calls = zip_longest(a[rank, name], b[rank, name])
        call = next(i for i, (x, y) in enumerate(calls) if x != y)
        first[name] = min(call, first.get(name, call))
    sign = -1 if backward else 1
    names = sorted(first, key=lambda name: (first[name], sign * order.get(name, 0)))
    if not names:
        return None
    return (first[names[0]], names[0]), tuple((name, quantity) for name in names)


def _backward(pair: _Pair, step: int) -> Blame | None:
    order = pair.modules(step)
    found = _first_rows(pair, step, "backward", order, backward=True)
    if found:
        (call, name), keys = found
        behind = [each for each in order if order[each] > order.get(name, 0)]
        where = behind[0] if behind else "loss"
        which = f"the backward of {where}" if behind else f"what follows {name}"
        text = (
            f"{which}: the gradient of the output of {name} is the first that differs{_call(call)}"
        )
        return Blame(step, "backward", where, "backward", text, keys)
    found = _first_rows(pair, step, "local grad", pair.a.order, backward=True)
    if not found:
        return None
    (_, name), keys = found
    text = f"the gradient of {name} differs before any reduction"
    return Blame(step, "backward", name, "local grad", text, keys)


def _gradient(pair: _Pair, step: int) -> Blame | None:
    keys = pair.ordered(pair.tensors(step, lambda quantity: quantity == "grad"), backward=True)
    norms = [side.scalars(step, "grad_norm") for side in pair.both]
    if not pair.alike_layout:
        norms = [list(dict.fromkeys(each)) for each in norms]
    same_norm = norms[0] == norms[1]
    if not keys:
        if same_norm or not pair.says("grad_norm", step):
            return None
        text = f"seen first in the norm of the gradient: {_pairs_of(*norms)}"
        return Blame(step, "gradient", "grad_norm", "grad_norm", text)
    name = keys[0][0]
    a, b = (side.digests(step).get(keys[0]) for side in pair.both)
    apart = [
        f"{letter}'s ranks {_groups(each)}"
        for letter, each in (("A", a), ("B", b))
        if each and each.replicas
    ]
    recorded = pair.records("local grad", step) and pair.alike_layout
    norm_is_known = same_norm and pair.says("grad_norm", step)
    if apart or (recorded and pair.has_ranks and not norm_is_known):
        equal = "the ranks' own gradients are equal, " if recorded else ""
        unlike = f"; {' and '.join(apart)} hold different ones" if apart else ""
        text = f"{equal}the reduced gradient of {name} differs{unlike}"
        return Blame(step, "reduction", name, "grad", text, tuple(keys))
    lacking = " (one run has none)" if a is None or b is None else ""
    changed = (
        "changed between the backward and the step"
        if recorded or norm_is_known
        else "seen first in it"
    )
    norm = "; its norm before clipping is equal" if norm_is_known else ""
    if not same_norm:
        norm = f"; its norm before clipping: {_pairs_of(*norms)}"
    more = pair.farthest(step, keys) + _and_options(pair, step)
    text = f"the gradient of {name} differs{lacking}, {changed}{norm}{more}"
    return Blame(step, "gradient", name, "grad", text, tuple(keys))


def _pairs_of(a: Any, b: Any) -> str:
    x, y = next((x, y) for x, y in zip_longest(a, b) if x != y)
    return f"{shown(x)}, and {shown(y)}"


def _groups(summed: Summed) -> str:
    return " and ".join(",".join(map(str, group)) for group in summed.replicas)


def _optimizer(pair: _Pair, step: int) -> Blame | None:
    keys = pair.ordered(pair.tensors(step, _is_after))
    options = pair.options(step)
    if not keys:
        # a number of the law that differs shows in no tensor where none is recorded
        unlike = [each for each in options if not each.name.startswith(NOT_NUMBERS)]
        if pair.records("weight", step) or not unlike:
            return None
        return Blame(step, "optimizer", str(unlike[0].name), "options", "; ".join(map(str, unlike)))
    name, quantity = keys[0]
    a, b = (side.digests(step).get(keys[0]) for side in pair.both)
    apart = [each for each in (a, b) if each and each.replicas]
    if apart:
        text = f"{quantity} of {name} is different on ranks {_groups(apart[0])} of one run"
    else:
        equal = _equal_inputs(pair, step, keys[0])
        text = f"{quantity} of {name} differs; equal: {', '.join(equal) or 'not known'}"
    return Blame(step, "optimizer", name, quantity, text + _and_options(pair, step), tuple(keys))


def _equal_inputs(pair: _Pair, step: int, key: Key) -> list[str]:
    """What of a tensor's step is known to be equal."""
    name = key[0]
    known = [q for n, q in pair.a.before(step) if n == name and (n, q) in pair.b.before(step)]
    gradient = ["gradient"] if pair.records("grad", step) else []
    return gradient + [f"old {quantity}" for quantity in known]


CHECKS = (_begin, _data, _forward, _backward, _gradient, _optimizer)
"""The order of blame."""


def _knows_before(pair: _Pair, step: int) -> bool:
    return bool(pair.a.before(step).keys() & pair.b.before(step).keys())


def _knows_own_gradients(pair: _Pair, step: int) -> bool:
    return not pair.has_ranks or pair.records("local grad", step)


PRECEDING: tuple[tuple[str, str, Callable[[_Pair, int], bool]], ...] = (
    ("old", "weights before the step", _knows_before),
    ("batch", "the batch", lambda pair, step: pair.says("batch", step)),
    ("rng", "the random state", lambda pair, step: pair.says("rng", step)),
    ("forward", "outputs of blocks", lambda pair, step: pair.records("forward", step)),
    ("loss", "the loss", lambda pair, step: pair.says("losses", step)),
    ("backward", "gradients of blocks", lambda pair, step: pair.records("backward", step)),
    ("local grad", "the ranks' own gradients", _knows_own_gradients),
    ("grad", "the gradient", lambda pair, step: pair.records("grad", step)),
)
"""What precedes in the order of blame, in words, and whether both have recorded it."""
