"""An optimizer's law, held against every sampled step of a recording, without a reference run.

Of each parameter the recording has up to 64 elements: weight and state before and after a step, and
the gradient. The law makes the new values of the old ones; what rounding explains is derived
(megaopt.recording.rounded), nothing more is allowed. A step that does not obey is explained by
recomputing it as a wrong optimizer would have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy

from megaopt.recording.files import Rank, Recording, places_of_samples
from megaopt.recording.laws import (
    LAWS,
    PARAM,
    Law,
    Others,
    Sample,
    Update,
    explanations,
)
from megaopt.recording.rounded import PRECISIONS, Precision, Rounded, exact
from megaopt.recording.samples import (
    CODES,
    DECODERS,
    OLD,
    Given,
    Mask,
    Stepped,
    Tensor,
    Tensors,
    Unknown,
    decoded,
    is_cast,
    number,
    of_codes,
    scaling,
    stepped_in,
)

OUTSIDE, SKIPPED, STALE = "outside write", "skipped", "stale master"
NOT_SKIPPED = "not skipped"
NOT_CAST = "the weight is not its master's cast"
OTHER_BITS = "other bits, within rounding"
STATE_RESET = "state reset"
UNEXPLAINED = "unexplained"
DOUBLE = "two tensors are recorded by one name"
NOT_OWNED = "the recording does not say which group of which optimizer it was in"
NO_GRADIENT = "it was stepped without a gradient that is recorded, as where gradients are released"
APART = "elements of 8 bytes and shorter ones are sampled at other places"
WEIGHTS = ("weight", "codes", "scale_inv")
"""Quantities that are no optimizer's own."""
UNFIT = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a law makes of options and samples that do not belong together."""
TAKES_ALL = "the update of a matrix takes its whole gradient"


class Finding(NamedTuple):
    """One quantity of one tensor that a step did not make as the law says."""

    step: int
    name: str
    quantity: str
    explanation: str
    """The best one there is, or "unexplained"."""
    ratio: float | None = None
    """The update in units of the law's; None where that is no more than rounding."""
    off: float | None = None
    """The largest difference from the law, in bounds of its rounding; None: bits differ."""

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"the update is {self.ratio:.3f} of the law's"
        off = "" if self.off is None else f"{self.off:.3g} times what rounding explains"
        rest = ", ".join(part for part in (ratio, off) if part)
        return f"{self.quantity} of {self.name}: {self.explanation}" + (f" ({rest})" * bool(rest))


@dataclass
class Report:
    """What an audit has found."""

    findings: list[Finding] = field(default_factory=list)
    """All there are, by step."""
    checked: int = 0
    """Tensors of steps that the law was held against."""
    equal_bits: int = 0
    """Those of them that have the very bits of the law."""
    not_checked: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """For each reason the names of tensors."""
    moved: dict[str, float] = field(default_factory=dict)
    """The last update of tensors whose optimizer's law is not known, in units of the weights: root
    mean squares of the samples."""
    steps: int = 0

    @property
    def obeys(self) -> bool | None:
        """Whether every step is the law's; None where nothing could be checked."""
        return False if self.findings else (True if self.checked else None)


def law(optimizer: type | str, **options: Any) -> Callable[[Update], Update]:
    """Registers the law of an optimizer of one's own: `@audit.law(MyOptimizer)` over a function.

    The function gets a `megaopt.recording.laws.Sample`, and returns, by name, what the step makes
    of each quantity that it knows: "param", and moments by their names in the state. It computes
    with the sample's numbers (`sample.old["param"]`, `sample.new["exp_avg"]`, `sample.grad`,
    `sample.number("lr")`, `sample.count`), whose +, -, *, / and `root`, `power`, `sign`, `maximum`
    carry the bound of rounding along: the code of a step, as it is written. For what an optimizer
    does in a longer way than the function, `again(n)` adds n roundings.

    Args:
        optimizer: the class, or its full name, as "package.module.MyOptimizer".
        **options: other fields of `megaopt.recording.laws.Law`.
    """
    own = optimizer
    name = own if isinstance(own, str) else f"{own.__module__}.{own.__qualname__}"

    def register(update: Update) -> Update:
        LAWS[name] = Law(update, **options)
        return update

    return register


# --- a run


class Owner(NamedTuple):
    """Whose parameter it is in a step."""

    rank: int
    source: int
    group: int
    number: int
    """The parameter's, in the optimizer."""
    optimizer: Mapping[str, Any]
    """What the recording says of it."""

    @property
    def key(self) -> tuple[int, int]:
        """The optimizer's, on its rank."""
        return self.rank, self.source


def owner_of(recording: Recording, step: int, name: str, stepped: Stepped) -> Owner | None:
    """The optimizer and group of a parameter in a step; None where the recording does not say."""
    found: list[Owner] = []
    described = recording.ranks[stepped.rank].described(stepped.source, step)
    for line in described:
        numbered = ((g, each) for g, names in enumerate(line["groups"]) for each in names)
        places = [(g, place) for place, (g, each) in enumerate(numbered) if each == name]
        found += [Owner(stepped.rank, stepped.source, *places[0], line)] if places else []
        if found and "step" in line:
            break
    # older versions did not say from which step on a line holds
    return found[0] if len({own[:4] for own in found}) == 1 else None


def sources_together(rank: Rank) -> dict[int, set[int]]:
    """The optimizers of a rank that count steps together with each, as they share parameters."""
    found, having = {source: {source} for source in rank.descriptions}, dict[str, set[int]]()
    for source, lines in rank.descriptions.items():
        for name in (name for line in lines for group in line["groups"] for name in group):
            having.setdefault(name, set()).add(source)
    for sources in having.values():
        joined = set[int]().union(*(found[source] for source in sources))
        found |= dict.fromkeys(joined, joined)
    return found


class Counted(NamedTuple):
    """How often a parameter had been stepped after a step."""

    step: int
    updates: int


class Last(NamedTuple):
    """What the last step left of a parameter."""

    owner: Owner
    tensors: Tensors


class Audit:
    """Goes through a recording once, step by step.

    Args:
        recording: of a run, with samples (level "step" or more).
    """

    def __init__(self, recording: Recording) -> None:
        self.recording, self.report = recording, Report()
        self._owners: dict[str, Owner] = {}
        """Those of the step that is looked at."""
        self._last: dict[str, Last] = {}
        self._last_step = 0
        self._counts: dict[tuple[Any, ...], Counted] = {}
        self._explained: dict[str, str] = {}
        self._together = [sources_together(rank) for rank in recording.ranks]
        self._first: dict[tuple[int, int], int] = {}
        self._fresh: dict[tuple[int, int], bool] = {}

    def run(self) -> Report:
        """What all steps show."""
        for step in self.recording.steps:
            tensors = self._owned(step)
            self._begin(step, tensors)
            for name, own in tensors.items():
                try:
                    before = self._before(step, name, own)
                    self._outside(step, name, own, before)
                    has_all_old = self._line(step, self._owners[name]).get("has_all_old")
                    self._tensor(step, name, with_old(own, {} if has_all_old else before))
                except UNFIT as error:
                    self._skip(f"its law cannot take what is recorded ({error})", name)
            if tensors:
                self._last_step = step
                self._last = {n: Last(self._owners[n], own) for n, own in tensors.items()}
            self.report.steps += 1
        return self.report

    def _owned(self, step: int) -> dict[str, Tensors]:
        """The samples of a step's parameters, by name; notes whose they are."""
        tensors, self._owners = dict[str, Tensors](), {}
        for name, stepped in stepped_in(self.recording, step).items():
            owner = owner_of(self.recording, step, name, stepped)
            if stepped.is_double:
                self._skip(DOUBLE, name)
            elif owner is not None:
                self._owners[name], tensors[name] = owner, stepped.tensors
            elif "grad" in stepped.tensors:
                self._skip(NOT_OWNED, name)
        return tensors

    # --- how an optimizer begins

    def _begin(self, step: int, tensors: dict[str, Tensors]) -> None:
        """Notes of each optimizer its first step, and whether it had stepped before.

        It had not where all its moments are zeros, or not there: updates are counted from there,
        whatever the optimizer says. Nor is a first step without gradients and with lr = 0 an
        update, which is to make states: where it counts, what follows is wrong
        (Megatron-LM#5974), and what is loaded after it is no outside write.
        """
        sources: dict[tuple[int, int], list[str]] = defaultdict(list)
        for name in tensors:
            sources[self._owners[name].key].append(name)
        for source, names in sources.items():
            if source in self._first:
                continue
            if all(self._makes_states(step, name, tensors[name]) for name in names):
                for name in names:
                    del tensors[name]
            else:
                self._first[source] = step
                self._fresh[source] = all(self._is_fresh(name, tensors[name]) for name in names)

    def _makes_states(self, step: int, name: str, found: Tensors) -> bool:
        rate = number(self._group(step, self._owners[name]).get("lr"))
        return rate == 0 and "grad" in found and not decoded(found["grad"]).any()

    def _is_fresh(self, name: str, found: Tensors) -> bool:
        law = self._law(self._owners[name])
        starts = () if law is None else tuple(law.moments())
        old = [found[OLD + each] for each in starts if OLD + each in found]
        return not any(tensor.bits[tensor.held].any() for tensor in old)

    def _before(self, step: int, name: str, found: Tensors) -> Tensors:
        """What the last step left of a parameter, as far as it may be what this step found.

        Another optimizer's state is not, nor are tensors of another shape or dtype, as where a
        weight was pruned, or the model cast.
        """
        last, owner = self._last.get(name), self._owners[name]
        if last is None or self._last_step != step - 1 or self._came_anew(step, name):
            return {}
        is_same = last.owner.key == owner.key
        kept = {
            quantity: each
            for quantity, each in last.tensors.items()
            if (is_same and not quantity.startswith(OLD) and quantity != "grad")
            or quantity in WEIGHTS
        }
        now = {q: found.get(OLD + q, found.get(q, each)).value for q, each in kept.items()}
        if any(now[q].shape != kept[q].value.shape for q in ("weight", "master") if q in kept):
            return {}  # and its state is another, too
        alike = {q: (each.value.shape, each.value.dtype) for q, each in kept.items()}
        return {q: kept[q] for q in kept if alike[q] == (now[q].shape, now[q].dtype)}

    def _came_anew(self, step: int, name: str) -> bool:
        """Whether another parameter has the name from this step on."""
        optimizer = self._owners[name].optimizer
        return optimizer.get("step") == step and name in optimizer.get("anew", ())

    # --- the recording's words

    def _class(self, own: Owner) -> str:
        """The optimizer's class; where its law is not known, one whose step it has inherited."""
        classes = own.optimizer["class"], *own.optimizer.get("steps_as", ())
        return next((each for each in classes if each in LAWS), str(classes[0]))

    def _law(self, own: Owner) -> Law | None:
        return LAWS.get(self._class(own))

    def _line(self, step: int, own: Owner) -> dict[str, Any]:
        return self.recording.ranks[own.rank].scalars.get(step, {}).get(own.source, {})

    def _is_left_out(self, step: int, own: Owner) -> bool:
        """Whether a scaler left the step out, or the optimizer itself, for what is not finite."""
        line, options = self._line(step, own), own.optimizer["options"]
        norm = number(line.get("grad_norm"))
        is_finite = norm is None or math.isfinite(norm)
        return bool(line.get("skipped")) or (options.get("nonfinite") == "skip" and not is_finite)

    def _group(self, step: int, own: Owner) -> dict[str, Any]:
        groups = self._line(step, own).get("groups", ())
        return groups[own.group] if own.group < len(groups) else {}

    def _recorded(self, step: int, own: Owner) -> int | None:
        count = self._group(step, own).get("step")
        return count if isinstance(count, int) else None

    def _given(self, step: int, name: str, found: Tensors, law: Law) -> tuple[Given, bool]:
        """What the step was given, and whether its count is sure."""
        own = self._owners[name]
        merged = {**law.options, **own.optimizer["options"], **self._group(step, own)}
        options = {key: number(option) for key, option in merged.items()}
        has_all_old = self._line(step, own).get("has_all_old")
        is_new = not any(OLD + each in found for each in law.moments()) and (
            has_all_old or self._last_step == step - 1 or step == self._first[own.key]
        )
        makes_state = has_all_old and is_new and any(each in found for each in law.moments())
        count, is_sure = self._count(step, name, law, is_new)
        if makes_state and not law.counts_groups:
            count, is_sure = 1, True
        numel = int(numpy.prod(found["grad"].value.shape))
        places = places_of_samples(name, numel, 8 if len(found["grad"].bits) < 64 else 4)
        place = (options.get("param_numbers") or range(own.number + 1))[own.number]
        scale, coefficient = scaling(self._line(step, own))
        return Given({**options, "step": count}, is_new, places, place, scale, coefficient), is_sure

    def _count(self, step: int, name: str, law: Law, is_new: bool) -> tuple[int | None, bool]:
        """The number of this update of a parameter, and whether that is sure."""
        own, before = self._owners[name], self._counts.get(self._counted(name, law))
        if before is not None:
            passed = self._updates(before.step, step, name, law)
            if passed is not None:
                return before.updates + passed, True
        is_first = step == self._first[own.key] and self._fresh[own.key]
        if before is None and (is_first or (is_new and not law.counts_groups)):
            return 1, True
        return self._recorded(step, own), law.counts_groups and before is None

    def _counted(self, name: str, law: Law) -> tuple[Any, ...]:
        """What has one count of updates: a parameter in an optimizer, or in a group of it."""
        own = self._owners[name]
        return (name, *own.key, own.group) if law.counts_groups else (name, *own.key)

    def _updates(self, first: int, last: int, name: str, law: Law) -> int | None:
        """Updates of a parameter after one step, up to another; None: some are not recorded."""
        own = self._owners[name]
        if last - first > len(self.recording.steps):
            return None
        lines, together = self.recording.ranks[own.rank].scalars, self._together[own.rank]
        between = range(first + 1, last + 1)
        if any(together[own.source].isdisjoint(lines.get(step, ())) for step in between):
            return None
        mine = [step for step in between if self._line(step, own)]
        taken = [step for step in mine if not self._is_left_out(step, own)]
        if law.counts_groups:
            return len(taken)
        return sum(step == last or (name, "grad") in self.recording.digests(step) for step in taken)

    def _rates(self, step: int, own: Owner) -> Iterator[tuple[str, float]]:
        """Other learning rates than the group's own, and whose they are."""
        mine = number(self._group(step, own).get("lr"))
        groups = self._line(step, own).get("groups", ())
        found = [(f"group {index}", group) for index, group in enumerate(groups)]
        found += [("the next step", self._group(step + 1, own))]
        found += [("the step before", self._group(step - 1, own))]
        for whose, group in found:
            rate = number(group.get("lr"))
            if isinstance(rate, float) and rate != mine:
                yield whose, rate

    # --- one tensor of a step

    def _tensor(self, step: int, name: str, found: Tensors) -> None:
        own = self._owners[name]
        law = self._law(own)
        if law is None:
            self._skip(f"the law of {own.optimizer['class']} is not known", name)
            self._note_moved(name, found)
        elif not found:
            self._skip(APART, name)
        elif "grad" not in found:
            if any(moved(found)):
                self._skip(NO_GRADIENT, name)
        elif self._line(step, own):
            try:
                self._judge(step, name, found, law)
            except KeyError as missing:
                self._skip(f"{missing.args[0]} is not recorded", name)
            except Unknown as unknown:
                self._skip(str(unknown), name)

    def _skip(self, reason: str, name: str) -> None:
        self.report.not_checked[reason].add(name)

    def _find(self, step: int, name: str, quantity: str, explanation: str, *more: Any) -> None:
        self.report.findings.append(Finding(step, name, quantity, explanation, *more))

    def _note_moved(self, name: str, found: Tensors) -> None:
        old, new = found.get(OLD + "weight"), found.get("weight")
        if old is not None and new is not None and new.value.dtype in DECODERS:
            before = decoded(old)
            with numpy.errstate(all="ignore"):
                ratio = ((decoded(new) - before) ** 2).mean() / (before**2).mean()
                self.report.moved[name] = float(numpy.sqrt(ratio))

    def _outside(self, step: int, name: str, found: Tensors, before: Tensors) -> None:
        """Whether somebody wrote a tensor after the last step, or took it away."""
        has_all_old = self._line(step, self._owners[name]).get("has_all_old")
        for quantity, left in before.items():
            old = found.get(OLD + quantity)
            if old is not None:
                both = old.held & left.held
                if (old.bits[both] != left.bits[both]).any():
                    self._find(step, name, quantity, OUTSIDE)
            elif has_all_old and quantity in found and quantity not in WEIGHTS:
                self._find(step, name, quantity, STATE_RESET)

    def _judge(self, step: int, name: str, found: Tensors, law: Law) -> None:
        own = self._owners[name]
        if self._is_left_out(step, own):
            for quantity in moved(found):
                self._find(step, name, quantity, NOT_SKIPPED)
            return
        given, is_sure = self._given(step, name, found, law)
        if law.of_whole in found:
            self._skip(TAKES_ALL, name)
        unlike = self._unlike(own, found, given) if law.has_twin else None
        if unlike is not None and not unlike:
            self.report.equal_bits += 1
            self._check(step, name, given, law)
            if law.of_whole in found:
                self._master(step, name, found)
            return
        sample = sample_of(found, law, given, self._kind(own))
        judged = judge(sample, law)
        bad = {quantity: each for quantity, each in judged.items() if each.is_bad.any()}
        if set(bad) == {PARAM} and not is_sure:
            self._skip("its step count is not recorded", name)
            return
        self._check(step, name, given, law)
        self._master(step, name, found)
        if bad:
            before = self._explained.get(name, "")
            explanation = explain(sample, law, judged, self._others(step, own), before)
            self._explained[name] = explanation
            if explanation == STATE_RESET and not law.counts_groups:
                self._counts[self._counted(name, law)] = Counted(step, 1)
            for quantity, each in bad.items():
                called = quantity if quantity != PARAM else param_of(found)
                self._find(step, name, called, explanation, each.ratio, each.off)
        elif given.options.get("contract") == "ieee":
            for quantity in unlike or ():
                self._find(step, name, quantity, OTHER_BITS)

    def _check(self, step: int, name: str, given: Given, law: Law) -> None:
        """Notes that a tensor was checked, with a step count that is known now."""
        self.report.checked += 1
        if given.options["step"]:
            self._counts[self._counted(name, law)] = Counted(step, given.options["step"])

    def _kind(self, own: Owner) -> str:
        return self._class(own).rpartition(".")[2]

    def _unlike(self, own: Owner, found: Tensors, given: Given) -> list[str] | None:
        """The quantities whose bits are not those of megaopt's twin; None: they are not known."""
        from megaopt.recording import twins  # the kernels, and torch

        try:
            equal = twins.equal_bits(found, given, self._kind(own))
        except Unknown:
            return None
        return [quantity for quantity, each in equal.items() if not each.all()]

    def _others(self, step: int, own: Owner) -> Others:
        return Others(tuple(self._rates(step, own)), self._recorded(step, own))

    def _master(self, step: int, name: str, found: Tensors) -> None:
        """Whether the weight is its master's cast."""
        weight, master = found.get("weight"), found.get("master")
        if weight is None or master is None or master.value.dtype != "float32":
            return
        if weight.value.dtype not in ("bfloat16", "float16") or is_cast(weight, master):
            return
        old = found.get(OLD + "master")
        stale = old is not None and is_cast(weight, old)
        self._find(step, name, "weight", STALE if stale else NOT_CAST)


def audit(recording: Recording) -> Report:
    """Holds the law of each optimizer against all sampled steps of a recording."""
    return Audit(recording).run()


# --- one sample


def with_old(found: Tensors, before: Tensors) -> Tensors:
    """A step's samples with what the last one left as old values, cut to the samples of all."""
    merged = {**{OLD + quantity: each for quantity, each in before.items()}, **found}
    like = merged.get("weight", merged.get("master"))
    if like is None:
        return merged
    own = {q for q, each in merged.items() if each.value.shape == like.value.shape}
    if any(len(merged[q].bits) != len(like.bits) for q in own):
        return {}  # of 8 bytes beside shorter ones
    held: Mask = numpy.all([merged[q].held for q in own], axis=0)
    return {q: each._replace(held=held) if q in own else each for q, each in merged.items()}


def moved(found: Tensors) -> Iterator[str]:
    """Quantities that are not what they were before the step."""
    for quantity, new in found.items():
        old = found.get(OLD + quantity)
        if old is not None and (old.bits[old.held] != new.bits[new.held]).any():
            yield quantity


def param_of(found: Mapping[str, Tensor]) -> str:
    """The quantity that the step updates."""
    return "master" if "master" in found else "weight"


def sample_of(found: Tensors, law: Law, given: Given, kind: str) -> Sample:
    """What a law is given; raises Unknown for what was not recorded.

    kind: the optimizer's class.
    """
    param = param_of(found)
    if param not in found:
        raise Unknown(f"{param} is not recorded at the gradient's places")
    options = {**given.options, "is_new": given.is_new}
    single = law.computes or ("float32" if options.get("fused") else found[param].value.dtype)
    if single not in PRECISIONS or found[param].value.dtype == "float64":
        single = "float64"
    precision = PRECISIONS[single]
    old, new = (_twins if law.has_twin else _plain)(found, law, given, precision, kind)
    if PARAM not in old:
        raise Unknown(f"{OLD}{param} is not recorded")
    grad = exact(decoded(found["grad"]), precision)
    for factor in (None if given.scale is None else 1 / given.scale, given.coefficient):
        grad = grad if factor in (None, 1.0) else grad * exact(factor, precision).again(1)
    return Sample(old, new, grad, options, given.options["step"], precision)


Read = tuple[dict[str, Rounded], dict[str, Rounded]]


def _twins(found: Tensors, law: Law, given: Given, precision: Precision, kind: str) -> Read:
    """Old and new numbers of megaopt's formats."""
    from megaopt.recording import twins

    old, new = dict[str, Rounded](), dict[str, Rounded]()
    for name, (value, error) in twins.numbers(found, given, kind).items():
        into = old if name.startswith(OLD) else new
        into[name.removeprefix(OLD)] = Rounded(value, error, precision)
    return old, new


def _plain(found: Tensors, law: Law, given: Given, precision: Precision, kind: str) -> Read:
    """Old and new numbers of plain formats; new ones with what rounding may have taken."""
    param = param_of(found)
    if given.is_new and OLD + "master" not in found and OLD + "weight" in found:
        # masters that a step makes are its weights
        found = {**found, OLD + "master": found[OLD + "weight"]}
    names = {**law.names, param: PARAM}
    old, new = dict[str, Rounded](), dict[str, Rounded]()
    for quantity, tensor in found.items():
        name = names.get(quantity, quantity)
        if quantity.startswith(OLD) or quantity == "grad" or not _fits(tensor, found[param]):
            continue
        new[name] = _read(found, quantity, precision)
        if OLD + quantity in found:
            old[name] = _read(found, OLD + quantity, precision)
        elif given.is_new and name in law.starts_as_zeros:
            old[name] = exact(numpy.zeros_like(new[name].value), precision)
    return old, new


def _fits(tensor: Tensor, like: Tensor) -> bool:
    """Whether its samples are numbers of the parameter's elements, or one number."""
    value, is_coded = tensor.value, tensor.value.quantity in CODES
    return (value.dtype in DECODERS or is_coded) and value.shape in (like.value.shape, (), (1,))


def _read(found: Tensors, quantity: str, precision: Precision) -> Rounded:
    if quantity.removeprefix(OLD) in CODES and found[quantity].value.dtype == "uint8":
        value, width = of_codes(found, quantity)
        is_new = not quantity.startswith(OLD)
        return Rounded(value, width if is_new else numpy.zeros_like(value), precision)
    value, own = decoded(found[quantity]), PRECISIONS[found[quantity].value.dtype]
    if own.unit > precision.unit and not quantity.startswith(OLD):
        return Rounded(value, own.unit * numpy.abs(value) + own.least, precision)
    return exact(value, precision)


class Judged(NamedTuple):
    """One quantity beside the law's."""

    is_bad: Mask
    off: float
    ratio: float | None


def judge(sample: Sample, law: Law, wrong: Sample | None = None) -> dict[str, Judged]:
    """What each element is beside the law's, as far as that says something: by quantity.

    wrong: what the step may have been given in the place of the sample.
    """
    made = law.update(wrong or sample)
    return {q: _beside(sample, q, made[q]) for q in made if q in sample.new}


def _beside(sample: Sample, quantity: str, law: Rounded) -> Judged:
    new = sample.new[quantity]
    with numpy.errstate(all="ignore"):
        # a stored number may be a last place of its format off: half from each side of a binade
        bound = law.error + new.error
        difference = numpy.abs(new.value - law.value)
        known = numpy.isfinite(law.value) & numpy.isfinite(bound)
        is_bad = known & ~(difference <= bound)
        off = numpy.where(is_bad, difference / bound, 0.0).max(initial=0.0)
        old = sample.old.get(quantity)
        ratio = None
        if quantity == PARAM and old is not None:
            due, done = law.value - old.value, new.value - old.value
            clear = known & numpy.isfinite(done) & (numpy.abs(due) > 4 * bound)
            if clear.any():
                ratio = float((due * done)[clear].sum() / (due * due)[clear].sum())
    return Judged(is_bad, float(off), ratio)


def unmoved(sample: Sample) -> dict[str, bool]:
    """For each quantity whether the step left all its elements as they were."""
    return {
        name: bool(((old.value == new.value) | (old.value != old.value)).all())
        for name, old in sample.old.items()
        if (new := sample.new.get(name)) is not None
    }


def explain(
    sample: Sample, law: Law, judged: Mapping[str, Judged], others: Others, before: str
) -> str:
    """The first explanation under which the whole sample obeys.

    before: the tensor's last one, which is tried first; what had none is not explained again.
    """
    still = unmoved(sample)
    if all(still.values()):
        return SKIPPED
    if before == UNEXPLAINED:
        return UNEXPLAINED
    for name, found in sorted(explanations(sample, others), key=lambda each: each[0] != before):
        if obeys(sample, law, found):
            return name
    if obeys(sample, law, reset(sample, law)):
        return STATE_RESET
    for quantity, each in judged.items():
        stayed = each.is_bad.any() and still.get(quantity) and quantity != PARAM
        if stayed and obeys(sample, law, sample, quantity):
            return f"{quantity} not updated"
    return _scaled(sample, law, judged) or UNEXPLAINED


def reset(sample: Sample, law: Law) -> Sample:
    """The sample of a state that begins anew in the step."""
    zeros = {
        name: old if name == PARAM else exact(numpy.zeros_like(old.value), sample.precision)
        for name, old in sample.old.items()
    }
    step = sample.step if law.counts_groups else 1
    return replace(sample, old=zeros, step=step, options={**sample.options, "is_new": True})


def obeys(sample: Sample, law: Law, wrong: Sample, but: str = "") -> bool:
    """Whether a step that was given `wrong` makes the sample; but: all of it but this quantity."""
    try:
        judged = judge(sample, law, wrong)
    except (Unknown, KeyError):  # the wrong law asks for what there is not
        return False
    return not any(each.is_bad.any() for quantity, each in judged.items() if quantity != but)


def _scaled(sample: Sample, law: Law, judged: Mapping[str, Judged]) -> str | None:
    """Whether the law holds for the gradient times one number."""
    zero = replace(sample, grad=exact(numpy.zeros_like(sample.grad.value), sample.precision))
    full, none = law.update(sample), law.update(zero)
    for quantity, each in judged.items():
        if not each.is_bad.any() or quantity not in full:
            continue
        factor = _factor(sample.new[quantity], full[quantity], none[quantity])
        if factor is None:
            continue
        scaled = replace(sample, grad=sample.grad * factor)
        if obeys(sample, law, scaled):
            return called(float(factor.value))
    return None


def _factor(new: Rounded, full: Rounded, none: Rounded) -> Rounded | None:
    """The number that the gradient was multiplied by, of a quantity that is linear in it."""
    with numpy.errstate(all="ignore"):
        span = full.value - none.value
        error = (full.error + none.error + new.error) / numpy.abs(span)
        value = (new.value - none.value) / span
    error = numpy.where(numpy.isfinite(error) & numpy.isfinite(value), error, numpy.inf)
    best = int(error.argmin())
    if not error.size or not numpy.isfinite(error[best]):
        return None
    return Rounded(value[best], error[best] * (1 + numpy.abs(value[best])), new.precision)


def called(factor: float) -> str:
    """What a factor of the gradient may be."""
    if 0 < factor < 1:
        return f"clipped twice, or averaged twice: the gradient times {factor:.4g}"
    return f"the gradient times {factor:.4g}"
