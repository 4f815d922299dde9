"""An optimizer's law, held against every sampled step of a recording, without a reference run.

Of each parameter the recording has up to 64 elements: weight and state before and after a step, and
the gradient. The law makes the new values of the old ones; what rounding explains is derived
(megaopt.recording.rounded), nothing more is allowed. A step that does not obey is explained by
recomputing it as a wrong optimizer would have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy

from megaopt.recording.files import Recording, Value
from megaopt.recording.laws import (
    LAWS,
    PARAM,
    Law,
    Others,
    Sample,
    Update,
    explanations,
)
from megaopt.recording.rounded import PRECISIONS, Array, Rounded, exact

Bits = numpy.ndarray[Any, Any]
Mask = numpy.ndarray[Any, numpy.dtype[numpy.bool_]]

OLD = "old "
OUTSIDE, SKIPPED, STALE = "outside write", "skipped", "stale master"
NOT_CAST = "the weight is not its master's cast"
UNEXPLAINED = "unexplained"


class Finding(NamedTuple):
    """One quantity of one tensor that a step did not make as the law says."""

    step: int
    name: str
    quantity: str
    explanation: str
    """The best one there is, or "unexplained"."""
    ratio: float | None = None
    """Of the update to the law's; None where that is no more than rounding."""
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
    """By step, in the order of the recording."""
    checked: int = 0
    """Tensors of steps that the law was held against."""
    equal_bits: int = 0
    """Of these, tensors of which the law's bits are known, and are the step's."""
    not_checked: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """For each reason the names of tensors."""
    moved: dict[str, float] = field(default_factory=dict)
    """Of tensors whose optimizer's law is not known: the last update's size, in weights' (root mean
    squares of the samples)."""
    steps: int = 0

    @property
    def obeys(self) -> bool | None:
        """Whether every step is the law's; None where nothing could be checked."""
        return False if self.findings else (True if self.checked else None)


def law(optimizer: type | str, **options: Any) -> Callable[[Update], Update]:
    """Registers the law of an optimizer of one's own: `@audit.law(MyOptimizer)` over a function.

    The function gets a `megaopt.recording.laws.Sample`, and returns for each quantity that it knows,
    by name, what the step makes of it: "param", and moments by their names in the state. It
    computes with the sample's numbers (`sample.old["param"]`, `sample.new["exp_avg"]`,
    `sample.grad`, `sample.number("lr")`, `sample.count`), whose +, -, *, / and `root`, `power`,
    `sign`, `maximum` carry the bound of rounding along: the code of a step, as it is written. What
    an optimizer does in another order than the function is `again(n)`, n roundings more.

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


# --- the recording's values


class Tensor(NamedTuple):
    """The samples of one quantity."""

    value: Value
    bits: Bits
    held: Mask


DECODERS: dict[str, Callable[[Bits], Bits]] = {
    "float64": lambda bits: bits.astype("<u8").view("<f8"),
    "float32": lambda bits: bits.astype("<u4").view("<f4"),
    "bfloat16": lambda bits: (bits.astype("<u4") << 16).view("<f4"),
    "float16": lambda bits: bits.astype("<u2").view("<f2"),
}
"""By dtype: the numbers of bits."""


def number(option: Any) -> Any:
    """An option as Python has it, of what a recording has."""
    if isinstance(option, list):
        return tuple(map(number, option))
    if isinstance(option, str) and option.lstrip("-").startswith(("0x", "inf", "nan")):
        return float.fromhex(option)
    return option


class Owner(NamedTuple):
    """Whose parameter it is."""

    rank: int
    source: int
    group: int


def owners(recording: Recording) -> dict[str, Owner]:
    """The optimizer and group of each parameter."""
    return {
        name: Owner(index, source, group)
        for index, rank in reversed(list(enumerate(recording.ranks)))
        for source, optimizer in enumerate(rank.optimizers)
        for group, names in enumerate(optimizer["groups"])
        for name in names
    }


class Counted(NamedTuple):
    """How often a parameter was stepped, and when it was looked at last."""

    step: int
    count: int


class Audit:
    """Goes through a recording once, step by step; `report` has what was found."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.report = recording, Report()
        self._owners = owners(recording)
        self._last: dict[str, dict[str, Tensor]] = {}
        self._last_step = 0
        self._counts: dict[str, Counted] = {}
        self._first: dict[int, int] = {}
        self._fresh: dict[int, bool] = {}

    def run(self) -> Report:
        """All steps."""
        for step in self.recording.steps:
            tensors = self._tensors(step)
            self._begin(step, tensors)
            for name, found in tensors.items():
                if name in self._owners:
                    self._outside(step, name, found)
                    self._tensor(step, name, self._with_old(step, name, found))
            if tensors:
                self._last, self._last_step = tensors, step
            self.report.steps += 1
        return self.report

    def _tensors(self, step: int) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for (name, quantity), (held, bits) in self.recording.samples(step).items():
            mask = numpy.array([held >> i & 1 for i in range(len(bits))], bool)
            value = self.recording.values[name, quantity]
            found[name][quantity] = Tensor(value, bits, mask)
        return found

    def _begin(self, step: int, tensors: dict[str, dict[str, Tensor]]) -> None:
        """Notes of each optimizer its first step, and whether it had stepped before.

        It had not where all its moments are zeros, or not there: the count of updates starts there,
        whatever the optimizer says. Nor is a first step without gradients and with lr = 0 one, whose
        purpose is to make states: where it counts, updates are wrong from then on (Megatron-LM#5974),
        and what is loaded after it is no outside write.
        """
        sources: dict[int, list[str]] = defaultdict(list)
        for name in tensors:
            if name in self._owners:
                sources[self._owners[name].source].append(name)
        for source, names in sources.items():
            if source in self._fresh:
                continue
            if all(self._makes_states(step, name, tensors[name]) for name in names):
                for name in names:
                    del tensors[name]
            else:
                self._first[source] = step
                self._fresh[source] = all(self._is_fresh(n, tensors[n]) for n in names)

    def _makes_states(self, step: int, name: str, found: Mapping[str, Tensor]) -> bool:
        own = self._owners[name]
        rate = number(self._line(step, own)["groups"][own.group].get("lr"))
        return rate == 0 and "grad" in found and not decoded(found["grad"]).any()

    def _is_fresh(self, name: str, found: Mapping[str, Tensor]) -> bool:
        law = self._law(self._owners[name])
        starts = () if law is None else tuple(law.moments())
        old = [found[OLD + each] for each in starts if OLD + each in found]
        return not any(tensor.bits[tensor.held].any() for tensor in old)

    def _law(self, own: Owner) -> Law | None:
        return LAWS.get(self.recording.ranks[own.rank].optimizers[own.source]["class"])

    def _line(self, step: int, own: Owner) -> dict[str, Any]:
        return self.recording.ranks[own.rank].scalars.get(step, {}).get(own.source, {})

    def _options(self, step: int, own: Owner, law: Law) -> dict[str, Any]:
        optimizer = self.recording.ranks[own.rank].optimizers[own.source]
        group = self._line(step, own)["groups"][own.group]
        merged = {**law.options, **optimizer["options"], **group}
        return {name: number(option) for name, option in merged.items()}

    # --- one tensor of a step

    def _tensor(self, step: int, name: str, found: dict[str, Tensor]) -> None:
        own = self._owners[name]
        law = self._law(own)
        if law is None:
            kind = self.recording.ranks[own.rank].optimizers[own.source]["class"]
            self._skip(f"the law of {kind} is not known", name)
            self._note_moved(name, found)
        elif "grad" in found and self._line(step, own):
            try:
                self._judge(step, name, found, law)
            except LookupError as missing:
                self._skip(str(missing.args[0]), name)

    def _with_old(self, step: int, name: str, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """With what a step left behind as the next one's old values; nobody has written these."""
        if self._last_step != step - 1:
            return found
        before = self._last.get(name, {})
        kept = {OLD + q: before[q] for q in before if not q.startswith(OLD) and q != "grad"}
        return {**kept, **found}

    def _has_new_state(self, step: int, name: str, found: Mapping[str, Tensor], law: Law) -> bool:
        """Whether the step has made the parameter's state: nothing was there before."""
        if any(OLD + each in found for each in law.moments()):
            return False
        return self._last_step == step - 1 or step == self._first[self._owners[name].source]

    def _skip(self, reason: str, name: str) -> None:
        self.report.not_checked[reason].add(name)

    def _note_moved(self, name: str, found: Mapping[str, Tensor]) -> None:
        pair = [found.get(quantity) for quantity in (OLD + "weight", "weight")]
        if all(tensor is not None and tensor.value.dtype in DECODERS for tensor in pair):
            old, new = (decoded(tensor) for tensor in pair if tensor is not None)
            with numpy.errstate(all="ignore"):
                self.report.moved[name] = float(
                    numpy.sqrt(((new - old) ** 2).mean() / (old**2).mean())
                )

    def _outside(self, step: int, name: str, found: Mapping[str, Tensor]) -> None:
        """Whether somebody wrote a tensor after the last step."""
        if self._last_step != step - 1:
            return
        for quantity, before in self._last.get(name, {}).items():
            old = found.get(OLD + quantity)
            if old is None or old.value.dtype != before.value.dtype:
                continue
            both = old.held & before.held
            if (old.bits[both] != before.bits[both]).any():
                self.report.findings.append(Finding(step, name, quantity, OUTSIDE))

    def _judge(self, step: int, name: str, found: dict[str, Tensor], law: Law) -> None:
        own = self._owners[name]
        options = self._options(step, own, law)
        is_new = self._has_new_state(step, name, found, law)
        count, is_sure = self._count(step, name, law, is_new)
        sample = sample_of(found, law, options, count, is_new)
        judged = judge(sample, law)
        self.report.checked += 1
        self._master(step, name, found)
        bad = {q: each for q, each in judged.items() if each.is_bad.any()}
        if not bad:
            return
        if not is_sure and set(bad) == {PARAM}:
            self.report.checked -= 1
            self._skip("the step count is not recorded of each parameter", name)
            return
        if self._line(step, own).get("skipped") and all(unmoved(sample).values()):
            return
        others = Others(tuple(self._rates(step, own)), self._recorded(step, own))
        explanation = explain(sample, law, judged, others)
        for quantity, each in bad.items():
            called = quantity if quantity != PARAM else param_of(found)
            self.report.findings.append(
                Finding(step, name, called, explanation, each.ratio, each.off)
            )

    def _recorded(self, step: int, own: Owner) -> int | None:
        count = self._line(step, own)["groups"][own.group].get("step")
        return count if isinstance(count, int) else None

    def _count(self, step: int, name: str, law: Law, is_new: bool) -> tuple[int | None, bool]:
        """The number of this update of a parameter, and whether that is sure."""
        own = self._owners[name]
        recorded, before = self._recorded(step, own), self._counts.get(name)
        if before is not None:
            passed = self._steps_with_gradient(before.step, step, name, law)
            count, is_sure = before.count + (passed or 0), passed is not None
            if not is_sure:
                count = recorded if recorded is not None else 0
        elif step == self._first[own.source]:
            is_sure = self._fresh.get(own.source, False) or law.counts_groups
            count = 1 if self._fresh.get(own.source) else recorded or 0
        else:
            count = 1 if is_new and not law.counts_groups else recorded or 0
            is_sure = is_new or law.counts_groups
        if not count:
            return None, False
        if is_sure:
            self._counts[name] = Counted(step, count)
        return count, is_sure

    def _steps_with_gradient(self, first: int, last: int, name: str, law: Law) -> int | None:
        """Updates of a parameter after one step, up to another; None: not every one is recorded."""
        between = [step for step in self.recording.steps if first < step <= last]
        if len(between) != last - first:
            return None
        if law.counts_groups or last == first + 1:
            return len(between)
        return sum((name, "grad") in self.recording.digests(step) for step in between)

    def _rates(self, step: int, own: Owner) -> Iterator[tuple[str, float]]:
        """Other learning rates than the group's own."""
        groups = self._line(step, own)["groups"]
        mine = number(groups[own.group].get("lr"))
        found = [(f"group {i}", number(g.get("lr"))) for i, g in enumerate(groups)]
        for other, whose in ((step + 1, "the next step"), (step - 1, "the step before")):
            line = self._line(other, own)
            if line:
                found.append((whose, number(line["groups"][own.group].get("lr"))))
        for whose, rate in found:
            if isinstance(rate, float) and rate != mine:
                yield whose, rate

    def _master(self, step: int, name: str, found: Mapping[str, Tensor]) -> None:
        """Whether the weight is its master's cast."""
        weight, master = found.get("weight"), found.get("master")
        if weight is None or master is None or master.value.dtype != "float32":
            return
        if weight.value.dtype not in ("bfloat16", "float16") or is_cast(weight, master):
            return
        old = found.get(OLD + "master")
        stale = old is not None and is_cast(weight, old)
        self.report.findings.append(Finding(step, name, "weight", STALE if stale else NOT_CAST))


def audit(recording: Recording) -> Report:
    """Holds the law of each optimizer against all sampled steps of a recording."""
    return Audit(recording).run()


# --- one sample


def decoded(tensor: Tensor) -> Array:
    """The numbers of a tensor's samples, fp64."""
    if tensor.value.dtype not in DECODERS:
        raise LookupError(f"{tensor.value.quantity} is of {tensor.value.dtype}")
    with numpy.errstate(all="ignore"):
        return DECODERS[tensor.value.dtype](tensor.bits[tensor.held]).astype(numpy.float64)


def is_cast(weight: Tensor, master: Tensor) -> bool:
    """Whether 16-bit weights are the nearest to fp32 masters; ties may go away from zero too."""
    both = weight.held & master.held
    own, fp32 = weight.bits[both], master.bits[both].astype("<u4")
    if weight.value.dtype == "float16":
        with numpy.errstate(all="ignore"):
            casts = [fp32.view("<f4").astype("<f2").view("<u2")]
    else:
        lower = fp32 & 0xFFFF
        casts = [((fp32 >> 16) + up) & 0xFFFF for up in (lower > 0x8000, lower >= 0x8000)]
    nan = (fp32 & 0x7FFFFFFF) > 0x7F800000
    return bool((nan | numpy.any([own == cast for cast in casts], axis=0)).all())


def param_of(found: Mapping[str, Tensor]) -> str:
    """The quantity that the step updates."""
    return "master" if "master" in found else "weight"


def sample_of(
    found: Mapping[str, Tensor],
    law: Law,
    options: Mapping[str, Any],
    count: int | None,
    is_new: bool,
) -> Sample:
    """What a law is given; raises LookupError for what was not recorded.

    is_new: the step made the parameter's state.
    """
    param = param_of(found)
    if is_new and OLD + "master" not in found and OLD + "weight" in found:
        # masters that a step makes are its weights
        found = {**found, OLD + "master": found[OLD + "weight"]}
    for quantity in (param, OLD + param):
        if quantity not in found:
            raise LookupError(f"{quantity} is not recorded")
    like = found[param]
    single = law.computes or ("float32" if options.get("fused") else like.value.dtype)
    if single not in PRECISIONS or (law.computes and like.value.dtype == "float64"):
        single = "float64"
    names = {**law.names, param: PARAM}
    new, old = {}, {}
    for quantity, tensor in found.items():
        if quantity.startswith(OLD) or quantity == "grad" or not _fits(tensor, like):
            continue
        new[names.get(quantity, quantity)] = _read(tensor, single, True)
        if OLD + quantity in found:
            old[names.get(quantity, quantity)] = _read(found[OLD + quantity], single)
    grad = _read(found["grad"], single)
    for name in law.starts_as_zeros if is_new else ():
        if name in new:
            old[name] = exact(numpy.zeros_like(new[name].value), PRECISIONS[single])
    return Sample(old, new, grad, {**options, "is_new": is_new}, count, PRECISIONS[single])


def _fits(tensor: Tensor, like: Tensor) -> bool:
    """Whether its samples are of the parameter's elements, or one number."""
    if tensor.value.dtype not in DECODERS:
        return False
    if len(tensor.bits) != len(like.bits) and tensor.value.shape == like.value.shape:
        raise LookupError(f"{tensor.value.quantity} is sampled at other places than the weight")
    return tensor.value.shape in (like.value.shape, (), (1,))


def _read(tensor: Tensor, single: str, is_new: bool = False) -> Rounded:
    """Numbers; new ones of a narrow format with what its rounding may have taken from them."""
    value, own = decoded(tensor), PRECISIONS[tensor.value.dtype]
    found = exact(value, PRECISIONS[single])
    if is_new and own.unit > PRECISIONS[single].unit:
        return replace(found, error=own.unit * numpy.abs(value) + own.least)
    return found


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
    sample: Sample, law: Law, judged: Mapping[str, Judged], others: Others
) -> str:
    """The first explanation under which the whole sample obeys."""
    still = unmoved(sample)
    if all(still.values()):
        return SKIPPED
    for name, found in explanations(sample, others):
        if obeys(sample, law, found):
            return name
    for quantity, each in judged.items():
        if each.is_bad.any() and still.get(quantity) and quantity != PARAM:
            if obeys(sample, law, sample, quantity):
                return f"{quantity} not updated"
    return _scaled(sample, law, judged) or UNEXPLAINED


def obeys(sample: Sample, law: Law, wrong: Sample, but: str = "") -> bool:
    """Whether a step that was given `wrong` makes the sample; but: all of it but this quantity."""
    judged = judge(sample, law, wrong)
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
