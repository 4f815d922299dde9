"""Two recorded runs side by side, under the names of the first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy

from megaopt.recording.checks import RecordingError, is_float
from megaopt.recording.files import Key, Recording, Summed, Value
from megaopt.recording.measure import NEAR, Array, Distance, distance

if TYPE_CHECKING:
    from megaopt.recording.golden import Summary

ANYWHERE = ("torch", "cuda", "cublas", "nccl", "card", "TransformerEngine")
WITHOUT_CARD = ("torch", "processor", "threads")
"""Keys of the environment that decide the bits of products and sums: with a card, and without."""
UNREAD = ("initial_lr",)
"""Keys that torch's schedulers keep in groups for themselves: no step reads them."""
WHOLE = ("grad", "weight", "codes")
"""Quantities of the parameter's own shape, one of which each recording of tensors has."""


ComparedRun = Union[Recording, "Summary"]
"""A run that is compared: a recording, or what a file of golden values holds of one."""


class ValueDifference(NamedTuple):
    """The values of one thing in the two runs; None where a run has none."""

    name: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.name}: {shown(self.a)}, and {shown(self.b)}"


def shown(value: Any) -> str:
    """A value of a recording in words: floats, which it holds in hexadecimal, in decimal."""
    if value is None:
        return "unset"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, str) and value.lstrip("-").startswith("0x") and is_float(value):
        return repr(float.fromhex(value))
    return str(value)


def flat(content: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, by their path with dots; lists are leaves."""
    if not isinstance(content, Mapping):
        return {path: content}
    leaves: dict[str, Any] = {}
    for name, value in content.items():
        leaves |= flat(value, f"{path}.{name}" if path else str(name))
    return leaves


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ValueDifference]:
    """Returns the entries in which two dicts differ, in their order."""
    pairs = ((name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b]))
    return [ValueDifference(name, x, y) for name, x, y in pairs if x != y]


def family(run: ComparedRun) -> dict[str, Any]:
    """Returns the parts of a run's environment that decide the bits of its products."""
    environment = run.run.get("environment", {})
    names = ANYWHERE if environment.get("card") else WITHOUT_CARD
    return {name: environment.get(name) for name in names}


def layout_of(run: ComparedRun) -> dict[str, Any]:
    """Returns the number of a run's ranks, and their layout."""
    return {"ranks": run.run.get("world"), **(run.run.get("layout") or {})}


class NamesError(RecordingError):
    """Names that make one tensor of two, or one module."""


class Side:
    """A run with its names as the other has them.

    Raises NamesError for names that make one tensor of two, or one module.
    """

    def __init__(self, run: ComparedRun, names: Mapping[str, str] | None = None) -> None:
        self.run, self._names = run, names or {}
        self.name = name_of = lru_cache(None)(self._name)
        # what the run has of a step, under the other's names
        self.digests: Callable[[int], dict[Key, Summed]] = lru_cache(4)(
            lambda step: {(name_of(n), q): s for (n, q), s in run.digests(step).items()}
        )
        self.own: Callable[[int], dict[tuple[int, str, str], list[Any]]] = lru_cache(4)(
            lambda step: {(r, name_of(n), q): d for (r, n, q), d in run.own(step).items()}
        )
        self.values_at: Callable[[int], dict[Key, Value]] = lru_cache(4)(
            lambda step: {(name_of(n), q): v for (n, q), v in run.values_at(step).items()}
        )
        self.values: dict[Key, Value] = {
            (self.name(name), quantity): value for (name, quantity), value in run.values.items()
        }
        self.shapes = {name: v.shape for (name, q), v in self.values.items() if q in WHOLE}
        listed = [name for line in run.optimizers for group in line["groups"] for name in group]
        self.parameters = {self.name(name) for name in listed} | set(self.shapes)
        order = [name for line in run.optimizers for name in line.get("order") or ()]
        every = dict.fromkeys(self.name(name) for name in [*order, *listed, *self.shapes])
        self.order = {name: i for i, name in enumerate(every)}
        # a map must not make one tensor of two, or one module
        keys: list[Key] = [*run.values, *((name, "") for name in listed)]
        if isinstance(run, Recording):
            values = (value for rank in run.ranks for value in rank.values)
            keys = [*keys, *((value.name, value.quantity) for value in values)]
        whose: dict[Key, str] = {}
        for name, quantity in keys if self._names else ():
            first = whose.setdefault((self.name(name), quantity), name)
            if first != name:
                words = "map must leave each tensor a name of its own"
                raise NamesError(f"{words}, got {self.name(name)!r} for {first} and {name}")

    def _name(self, name: str) -> str:
        if name in self._names:
            return self._names[name]
        for pattern, replacement in self._names.items():
            before, star, after = pattern.partition("*")
            fits = name.startswith(before) and name.endswith(after)
            if star and fits and len(name) >= len(before) + len(after):
                return replacement.replace("*", name[len(before) : len(name) - len(after)], 1)
        return name

    def samples(self, step: int) -> dict[Key, tuple[int, Array]]:
        """Returns the run's samples, under the names that the other run has."""
        return {(self.name(n), q): sample for (n, q), sample in self.run.samples(step).items()}

    def kept(self, step: int, key: Key) -> tuple[Array, Array] | None:
        """Returns a kept whole tensor's bits, and which are there; None: the run kept none."""
        name = next((name for name, _ in self.run.values if self.name(name) == key[0]), None)
        if name is None or not isinstance(self.run, Recording):
            return None
        return self.run.kept(step, (name, key[1]))

    def after(self, step: int) -> dict[Key, Summed]:
        """Weights and state as a step leaves them; nothing where it is not recorded."""
        rows = self.digests(step) if step in self.run.steps else {}
        return {(n, q): rows[n, q] for n, q in rows if q != "grad" and not is_old(q)}

    def before(self, step: int) -> dict[Key, Summed]:
        """Weights and state as a step finds them, as far as they are known."""
        rows = self.digests(step)
        if not rows:  # whether anything was written since is not known
            return {}
        old = {(n, q[4:]): summed for (n, q), summed in rows.items() if q.startswith("old ")}
        return self.after(step - 1) | old

    def old_samples(self, step: int) -> dict[Key, Any]:
        """The bits of sampled weights as a step finds them."""
        samples = self.samples(step).items()
        return {(n, q[4:]): (h, b.tobytes()) for (n, q), (h, b) in samples if q.startswith("old ")}

    def scalars(self, step: int, name: str) -> list[Any]:
        """Returns one of the numbers of a step, of each rank and source."""
        ranks = self.run.scalars(step)
        return [line.get(name) for rank in ranks for _, line in sorted(rank.items())]


class Pair:
    """Two runs side by side."""

    def __init__(self, a: Side, b: Side) -> None:
        self.a, self.b = a, b
        self.both = (a, b)
        self.steps = sorted(set(a.run.steps) & set(b.run.steps))
        self.has_ranks = (a.run.run.get("world") or 1) > 1
        self.alike_layout = layout_of(a.run) == layout_of(b.run)
        self.in_both = [key for key in a.values if key in b.values and not is_old(key[1])]
        """The tensors that both have recorded, and the quantities."""

    def missing(self) -> dict[str, list[str]]:
        """Returns what one run has and the other lacks, by side; empty: they can be compared."""
        a, b = self.both
        gaps: dict[str, list[str]] = {}
        if a.parameters and b.parameters:
            gaps["A lacks"] = sorted(b.parameters - a.parameters)
            gaps["B lacks"] = sorted(a.parameters - b.parameters)
        shapes = ((name, a.shapes[name], b.shapes[name]) for name in a.shapes if name in b.shapes)
        gaps["other shapes:"] = [f"{name} {x} and {y}" for name, x, y in shapes if x != y]
        for side, run, peer in (("A lacks", a.run, b.run), ("B lacks", b.run, a.run)):
            lost = [f"rank {rank}" for rank in run.absent if rank not in peer.absent]
            gaps.setdefault(side, []).extend(lost)
        if not self.steps:
            spans = [f"A has {span(a.run.steps)}", f"B has {span(b.run.steps)}"]
            gaps["no step in both:"] = spans
        return {side: names for side, names in gaps.items() if names}

    def dtypes(self, step: int) -> list[str]:
        """The first tensor that has another dtype in the other run at a step, in words."""
        both = ((key, *self.dtypes_of(step, key)) for key in self.in_both)
        lines = [f"dtype of {q} of {n}: {a}, and {b}" for (n, q), a, b in both if a != b and a]
        more = f"; and of {len(lines) - 1} more" if len(lines) > 1 else ""
        return [lines[0] + more] if lines else []

    def notes(self, is_same: bool) -> list[str]:
        """Returns lines that say what was not compared.

        is_same: no tensor differs. Then the first step behind the first one with other options is
        told, too.
        """
        quantities = [dict.fromkeys(quantity for _, quantity in side.values) for side in self.both]
        lines = []
        for letter, side_names, peer_names in (("A", *quantities), ("B", *quantities[::-1])):
            alone = [name for name in side_names if name not in peer_names and not is_old(name)]
            if alone:
                lines.append(f"only {letter} has recorded: {', '.join(alone)}")
        apart = next((step for step in self.steps if self.generators_apart(step)), None)
        if apart is not None:
            names = dict.fromkeys(name for _, name in self.generators_apart(apart))
            drawn = any(names.keys() & self.drawn(step) for step in self.steps)
            unread = "" if drawn else "; no step draws from them"
            lines.append(f"random states differ from step {apart} on: {', '.join(names)}{unread}")
        first, last = self.steps[0], self.steps[-1]
        for letter, side in zip("AB", self.both, strict=True):
            rest = [step for step in side.run.steps if step not in set(self.steps)]
            if rest:
                lines.append(f"only {letter} has {span(rest)}; compared: {first} to {last}")
        # options that differ all the same, and did not at the first step
        usual = {difference.name for difference in self.options(first)} if is_same else set()
        for step in self.steps[1:] if is_same else ():
            apart_here = [] if self.is_alike(step) else self.options(step)
            words = [str(option) for option in apart_here if option.name not in usual]
            if words:
                what = f"which show in no tensor: {'; '.join(words)}"
                return [*lines, f"step {step} has other options, {what}"]
        return lines

    def options(self, step: int) -> list[ValueDifference]:
        """Options of groups, and the loss scale, that differ at a step."""
        options: list[dict[str, Any]] = [{}, {}]
        for entries, side in zip(options, self.both, strict=True):
            ranks = side.run.scalars(step)
            for rank, sources in enumerate(ranks if self.alike_layout else ranks[:1]):
                for source, line in sorted(sources.items()):
                    whose = f" of optimizer {source}" if source else ""
                    whose += f" on rank {rank}" if rank else ""
                    for i, group in enumerate(line.get("groups") or ()):
                        read = [name for name in group if name not in UNREAD]
                        entries |= {f"{name} of group {i}{whose}": group[name] for name in read}
                    entries[f"loss scale{whose}"] = line.get("loss_scale")
                    entries[f"skipped{whose}"] = line.get("skipped")
        return differences(*options)

    def is_alike(self, step: int) -> bool:
        """Whether a step is quickly seen to be the same."""
        a, b = self.a.run, self.b.run
        return isinstance(a, Recording) and isinstance(b, Recording) and a.alike(b, step)

    def differing(self, a: Mapping[Any, Any], b: Mapping[Any, Any]) -> list[Any]:
        """The keys whose values differ, of those that both have."""
        return [key for key in a if key in b and bits_of(a[key]) != bits_of(b[key])]

    def ordered(self, keys: Iterable[Key], backward: bool = False) -> list[Key]:
        """Keys of parameters in the order of the forward pass, or the backward."""
        order, last = self.a.order, len(self.a.order)
        place = {key: order.get(key[0], last) for key in keys}
        return sorted(place, key=lambda key: -place[key] if backward else place[key])

    def generators_apart(self, step: int) -> list[tuple[int, str]]:
        """The generators of random numbers whose states differ, by rank and name."""
        pairs = zip(*(side.scalars(step, "rng") for side in self.both), strict=False)
        ranked_pairs = enumerate(pairs if self.alike_layout else ())
        return [
            (i, n) for i, (a, b) in ranked_pairs for n in a or () if a[n] != (b or a).get(n, a[n])
        ]

    def drawn(self, step: int) -> set[str]:
        """The generators that either run draws from, in a step or, where it is the last, before."""
        places = self.steps[max(self.steps.index(step) - 1, 0) :][:3]
        states = [side.scalars(place, "rng") for side in self.both for place in places]
        names = {name for ranks in states for rank in ranks for name in rank or ()}
        runs = [states[: len(places)], states[len(places) :]]
        return {
            name
            for name in names
            for run in runs
            if len({str([(rank or {}).get(name) for rank in ranks]) for ranks in run}) > 1
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
        numbers = (side.scalars(step, name) for side in self.both)
        return all(any(n not in (None, []) for n in side_numbers) for side_numbers in numbers)

    def rows(self, step: int, quantity: str) -> list[dict[tuple[int, str], list[Any]]]:
        """The rows of ranks alone, of one quantity, by rank and name, for both runs."""
        tables: list[dict[tuple[int, str], list[Any]]] = [{}, {}]
        for table, side in zip(tables, self.both if self.alike_layout else (), strict=False):
            for (rank, name, row_quantity), digests in side.own(step).items():
                if row_quantity == quantity:
                    table[rank, name] = [(digest.low, digest.high) for digest in digests]
        return tables

    def modules(self, step: int) -> dict[str, int]:
        """The places of modules in the order of the forward pass; earlier ranks' first."""
        names = [name for _, name, quantity in self.a.own(step) if quantity == "forward"]
        return {name: i for i, name in enumerate(dict.fromkeys(names))}

    def tensors(self, step: int, quantities: Callable[[str], bool]) -> list[Key]:
        """The keys of digests that differ; also those that one run lacks of a quantity it has."""
        a, b = ({k: v for k, v in s.digests(step).items() if quantities(k[1])} for s in self.both)
        common = {q for _, q in a} & {q for _, q in b}
        keys = dict.fromkeys(key for key in [*a, *b] if key[1] in common)
        return [key for key in keys if bits_of(a.get(key)) != bits_of(b.get(key))]

    def distances(self, step: int) -> dict[str, Distance]:
        """The distances of sampled elements, by quantity."""
        a, b = (side.samples(step) for side in self.both)
        alike: dict[tuple[str, ...], list[tuple[Array, Array]]] = {}
        for key in (key for key in a if key in b and not is_old(key[1])):
            alike.setdefault((key[1], *self.dtypes_of(step, key)), []).append(_held(a[key], b[key]))
        lengths: dict[str, Distance] = {}
        for (quantity, *dtypes), pairs in alike.items():  # all tensors of a kind in one go
            elements_a, elements_b = map(numpy.concatenate, zip(*pairs, strict=True))
            length = distance(elements_a, elements_b, *dtypes)
            lengths[quantity] = lengths.get(quantity, NEAR).plus(length)
        return lengths

    def farthest(self, step: int, keys: Iterable[Key]) -> str:
        """Says which of some tensors lies farthest apart in its samples, where there are."""
        a, b = (side.samples(step) for side in self.both)
        apart = dict[Key, float]()
        for key in (key for key in keys if key in a and key in b):
            length = distance(*_held(a[key], b[key]), *self.dtypes_of(step, key))
            apart[key] = length.relative
        if len(apart) < 2:
            return ""
        name, quantity = max(apart, key=lambda key: apart[key])
        if not apart[name, quantity]:
            return "; all sampled elements are equal"
        return f"; farthest apart is that of {name}, by {apart[name, quantity]:.2g} of its norm"

    def values_of(self, step: int, key: Key) -> list[Value]:
        """Returns a tensor's values at a step in both runs; where it is not there, the first."""
        return [side.values_at(step).get(key, side.values[key]) for side in self.both]

    def dtypes_of(self, step: int, key: Key) -> tuple[str, str]:
        """A tensor's dtypes in both runs at a step, as `values_of` has them."""
        a, b = (value.dtype for value in self.values_of(step, key))
        return a, b


def _held(a: tuple[int, Array], b: tuple[int, Array]) -> tuple[Array, Array]:
    """The sampled elements that both have."""
    held = a[0] & b[0]
    chosen = [i for i in range(held.bit_length()) if held >> i & 1]
    return a[1][chosen], b[1][chosen]


def is_old(quantity: str) -> bool:
    """Returns whether a quantity is of what a step finds, not of the step itself."""
    return quantity.startswith("old ")


def bits_of(summed: Any) -> Any:
    """Returns the compared parts of anything that rows or samples hold.

    Of a digest one run may lack the count of elements that are not finite.
    """
    if not isinstance(summed, Summed):
        return summed
    digests = [(digest.low, digest.high) for digest in summed.group_digests]
    return (summed.digest.low, summed.digest.high, summed.missing, summed.replicas, digests)


def span(steps: Sequence[int]) -> str:
    """The first and the last step, in words."""
    if not steps:
        return "no steps"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def floats(content: Any) -> Iterator[float]:
    """The floats in nested lists of them in hexadecimal."""
    if isinstance(content, list):
        for element in content:
            yield from floats(element)
    elif content is not None:
        yield float.fromhex(content)
