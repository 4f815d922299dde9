"""An optimizer's law, held against every sampled step of a recording, without a reference run.

The recording has up to 64 elements of each parameter: weight and state before and after a step, and
the gradient. The law makes the new values of the old ones; the errors that rounding explains are
derived (megaopt.recording.rounded), and nothing more is allowed. A step that does not obey is
explained by recomputing it as a wrong optimizer would have.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy

from megaopt.recording.files import Recording, places_of_samples
from megaopt.recording.laws import LAWS, PARAM, Evidence, Law, Sample, Update, explanations
from megaopt.recording.measure import FLOATS
from megaopt.recording.rounded import PRECISIONS, Precision, Rounded, exact
from megaopt.recording.samples import (
    CODES,
    OLD,
    Given,
    Mask,
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
"""Quantities that are not an optimizer's state."""
UNFIT = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that a law raises for options and samples that do not belong together."""
TAKES_ALL = "the update of a matrix takes its whole gradient"


class AuditFinding(NamedTuple):
    """One quantity of one tensor that a step did not make as the law says."""

    step: int
    name: str
    quantity: str
    explanation: str
    """The best explanation, or "unexplained"."""
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
    """The findings of an audit."""

    findings: list[AuditFinding] = field(default_factory=list)
    """All findings, by step."""
    checked: int = 0
    """Tensors of steps that the law was held against."""
    equal_bits: int = 0
    """Checked tensors whose bits are exactly the law's."""
    not_checked: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The names of tensors, for each reason."""
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
    carry the bound of rounding along: the code of a step, as it is written. `again(n)` adds n
    roundings, where the optimizer takes more operations than the function.

    Args:
        optimizer: the class, or its full name, as "package.module.MyOptimizer".
        **options: other fields of `megaopt.recording.laws.Law`.
    """
    kind = optimizer
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"

    def register(update: Update) -> Update:
        LAWS[name] = Law(update, **options)
        return update

    return register


# --- a run


class ParameterOwner(NamedTuple):
    """The optimizer and group that have a parameter in a step."""

    rank: int
    source: int
    group: int
    number: int
    """The parameter's number in the optimizer."""
    optimizer: Mapping[str, Any]
    """The recording's description of the optimizer."""

    @property
    def key(self) -> tuple[int, int]:
        """The optimizer's key: its rank, and its number there."""
        return self.rank, self.source


class Audit:
    """Goes through a recording once, step by step.

    Args:
        recording: of a run, with samples (level "step" or more).
    """

    def __init__(self, recording: Recording) -> None:
        self.recording, self.report = recording, Report()
        self._owners: dict[str, ParameterOwner] = {}
        """The owners of parameters in the current step, by name."""
        self._last: dict[str, tuple[ParameterOwner, Tensors]] = {}
        """Parameters' samples after the last step, and their owners then."""
        self._last_step = 0
        self._counts: dict[tuple[Any, ...], tuple[int, int]] = {}
        """A step, and the updates that a parameter or a group has had after it."""
        self._explained: dict[str, str] = {}
        # by rank: for each optimizer those that share parameters, and so steps, with it
        self._together: list[dict[int, set[int]]] = []
        for rank in recording.ranks:
            partners = {source: {source} for source in rank.descriptions}
            having = defaultdict[str, set[int]](set)  # by parameter the optimizers that list it
            for source, lines in rank.descriptions.items():
                for name in (n for line in lines for group in line["groups"] for n in group):
                    having[name].add(source)
            # whoever shares a parameter with one of them shares steps with all
            for sources in having.values():
                joined = set[int]().union(*(partners[source] for source in sources))
                partners |= dict.fromkeys(joined, joined)
            self._together.append(partners)
        self._first: dict[tuple[int, int], int] = {}
        self._fresh: dict[tuple[int, int], bool] = {}

    def run(self) -> Report:
        """Audits all steps, and returns the report."""
        for step in self.recording.steps:
            # samples of each parameter, by quantity: old and new weight and state, and the gradient
            tensors = self._owned(step)
            # first steps that only make states are taken out here
            self._begin(step, tensors)
            for name, samples in tensors.items():
                try:
                    # what the last step left, held against what this one found
                    before = self._before(step, name, samples)
                    self._outside(step, name, samples, before)
                    # where old values were not all recorded, the last step's new ones stand in
                    has_all_old = self._line(step, self._owners[name]).get("has_all_old")
                    self._tensor(step, name, samples, {} if has_all_old else before)
                except UNFIT as error:
                    self._skip(f"its law cannot take what is recorded ({error})", name)
            # what the next step is compared with
            if tensors:
                self._last_step = step
                self._last = {n: (self._owners[n], samples) for n, samples in tensors.items()}
            self.report.steps += 1
        return self.report

    def _owned(self, step: int) -> dict[str, Tensors]:
        """Returns the samples of a step's parameters, by name, and notes their owners."""
        tensors, self._owners = dict[str, Tensors](), {}
        for name, stepped in stepped_in(self.recording, step).items():
            # by descriptions of the optimizer at this step, the last first
            owners: list[ParameterOwner] = []
            for line in self.recording.ranks[stepped.rank].described(stepped.source, step):
                # (group, place in the optimizer) of the parameter, by the names in groups
                numbered = ((g, param) for g, names in enumerate(line["groups"]) for param in names)
                places = [(g, place) for place, (g, param) in enumerate(numbered) if param == name]
                if places:
                    owners.append(ParameterOwner(stepped.rank, stepped.source, *places[0], line))
                # a description that says its first step is the one that holds
                if owners and "step" in line:
                    break
            # older versions did not say from which step on a line holds
            if stepped.is_double:
                self._skip(DOUBLE, name)
            elif len({owner[:4] for owner in owners}) == 1:
                self._owners[name], tensors[name] = owners[0], stepped.tensors
            elif "grad" in stepped.tensors:
                self._skip(NOT_OWNED, name)
        return tensors

    # --- how an optimizer begins

    def _begin(self, step: int, tensors: dict[str, Tensors]) -> None:
        """Notes the first step of each optimizer, and whether it had stepped before.

        It had not if all its moments are zeros, or are not there: updates are counted from there,
        whatever the optimizer says. A first step without gradients and with lr = 0 is no update
        either: it only makes states. An optimizer that counts it takes wrong steps after it
        (Megatron-LM#5974), and values that are loaded after it are no outside write.
        """
        # parameters by their optimizer (rank, source)
        sources: dict[tuple[int, int], list[str]] = defaultdict(list)
        for name in tensors:
            sources[self._owners[name].key].append(name)
        for source, names in sources.items():
            if source in self._first:
                continue
            # gradients of zeros and lr = 0: no update of anyone's
            rates = [number(self._group(step, self._owners[name]).get("lr")) for name in names]
            stays = all(rate == 0 for rate in rates)
            grads = [tensors[name].get("grad") for name in names] if stays else [None]
            if not any(grad is None or decoded(grad).any() for grad in grads):
                for name in names:
                    del tensors[name]
                continue
            # fresh: moments from before the step are zeros, or not there
            self._first[source], self._fresh[source] = step, True
            for name in names:
                law = self._law(self._owners[name])
                starts = () if law is None else law.moments()
                old = [tensors[name].get(OLD + moment) for moment in starts]
                if any(t is not None and t.bits[t.held].any() for t in old):
                    self._fresh[source] = False

    def _before(self, step: int, name: str, samples: Tensors) -> Tensors:
        """Returns the tensors that the last step left, as far as this step may start from them.

        Another optimizer's state is left out, and so are tensors of another shape or dtype, as
        after a weight was pruned, or the model cast.
        """
        # the step before is not known, or another parameter has the name now
        last, owner = self._last.get(name), self._owners[name]
        is_anew = owner.optimizer.get("step") == step and name in owner.optimizer.get("anew", ())
        if last is None or self._last_step != step - 1 or is_anew:
            return {}

        # another optimizer may go on with the weight, but has a state of its own
        last_owner, last_tensors = last
        is_same = last_owner.key == owner.key
        lasting = [q for q in last_tensors if is_same and not q.startswith(OLD) and q != "grad"]
        candidates = {q: last_tensors[q] for q in last_tensors if q in lasting or q in WEIGHTS}

        # the values that this step says it found, or else made: of their shapes and dtypes
        same = dict[str, Tensor]()
        for quantity, tensor in candidates.items():
            now = samples.get(OLD + quantity, samples.get(quantity, tensor)).value
            if quantity in ("weight", "master") and now.shape != tensor.value.shape:
                return {}  # and its state is another, too
            if (now.shape, now.dtype) == (tensor.value.shape, tensor.value.dtype):
                same[quantity] = tensor
        return same

    # --- the recording's lines

    def _class(self, owner: ParameterOwner) -> str:
        """Returns the optimizer's class; where its law is not known, one whose step it inherits."""
        classes = owner.optimizer["class"], *owner.optimizer.get("steps_as", ())
        return next((name for name in classes if name in LAWS), str(classes[0]))

    def _law(self, owner: ParameterOwner) -> Law | None:
        return LAWS.get(self._class(owner))

    def _line(self, step: int, owner: ParameterOwner) -> dict[str, Any]:
        return self.recording.ranks[owner.rank].scalars.get(step, {}).get(owner.source, {})

    def _is_left_out(self, step: int, owner: ParameterOwner) -> bool:
        """Returns whether a scaler or the optimizer skipped the step for values not finite."""
        line, options = self._line(step, owner), owner.optimizer["options"]
        norm = number(line.get("grad_norm"))
        is_finite = norm is None or math.isfinite(norm)
        return bool(line.get("skipped")) or (options.get("nonfinite") == "skip" and not is_finite)

    def _group(self, step: int, owner: ParameterOwner) -> dict[str, Any]:
        groups = self._line(step, owner).get("groups", ())
        return groups[owner.group] if owner.group < len(groups) else {}

    def _recorded(self, step: int, owner: ParameterOwner) -> int | None:
        count = self._group(step, owner).get("step")
        return count if isinstance(count, int) else None

    def _context(self, step: int, name: str, samples: Tensors, law: Law) -> tuple[Given, bool]:
        """Returns what the step takes beside tensors, and whether its count is sure."""
        # options of the law, of the optimizer and of the group: the last one counts
        owner = self._owners[name]
        merged = {**law.options, **owner.optimizer["options"], **self._group(step, owner)}
        options = {key: number(option) for key, option in merged.items()}
        has_all_old = self._line(step, owner).get("has_all_old")
        # no old moments where they would be known: the state is made in this step
        is_new = not any(OLD + moment in samples for moment in law.moments()) and (
            has_all_old or self._last_step == step - 1 or step == self._first[owner.key]
        )
        makes_state = has_all_old and is_new and any(moment in samples for moment in law.moments())

        # a state that is made in this step counts its first update, but for counts of groups
        count, is_sure = self._count(step, name, law, is_new)
        if makes_state and not law.counts_groups:
            count, is_sure = 1, True

        # the flat indices of sampled elements, and the parameter's number: random bits are of both
        numel = int(numpy.prod(samples["grad"].value.shape))
        places = places_of_samples(name, numel, 8 if len(samples["grad"].bits) < 64 else 4)
        place = (options.get("param_numbers") or range(owner.number + 1))[owner.number]
        scale, coefficient = scaling(self._line(step, owner))
        return Given({**options, "step": count}, is_new, places, place, scale, coefficient), is_sure

    def _count(self, step: int, name: str, law: Law, is_new: bool) -> tuple[int | None, bool]:
        """Returns the number of this update of a parameter, and whether that is sure."""
        # updates since the last one whose number was sure, unless some of these steps are missing:
        # more of them than are recorded in all, or one without a line of this optimizer or of one
        # that shares parameters with it
        owner, before = self._owners[name], self._counts.get(self._counted(name, law))
        lines, together = self.recording.ranks[owner.rank].scalars, self._together[owner.rank]
        if before is not None and step - before[0] <= len(self.recording.steps):
            between, sources = range(before[0] + 1, step + 1), together[owner.source]
            if not any(sources.isdisjoint(lines.get(s, ())) for s in between):
                # steps that the optimizer took, but for those that an overflow left out
                taken = [s for s in between if self._line(s, owner)]
                taken = [s for s in taken if not self._is_left_out(s, owner)]
                # a parameter counts the steps in which it had a gradient
                if not law.counts_groups:
                    digests = self.recording.digests
                    taken = [s for s in taken if s == step or (name, "grad") in digests(s)]
                return before[1] + len(taken), True

        # the first step of an optimizer whose moments were zeros before, or a new state
        is_first = step == self._first[owner.key] and self._fresh[owner.key]
        if before is None and (is_first or (is_new and not law.counts_groups)):
            return 1, True
        # what the optimizer says; not sure where the parameter may have missed steps
        return self._recorded(step, owner), law.counts_groups and before is None

    def _counted(self, name: str, law: Law) -> tuple[Any, ...]:
        """Returns the key of a count of updates: of a parameter in an optimizer, or in a group."""
        owner = self._owners[name]
        return (name, *owner.key, owner.group) if law.counts_groups else (name, *owner.key)

    # --- one tensor of a step

    def _tensor(self, step: int, name: str, samples: Tensors, before: Tensors) -> None:
        """Holds a tensor to its law; before: what the last step left, which is old in this one."""
        # the weight decides where elements lie; quantities of its shape are sampled at the same
        # places, of which all ranks' samples have some: bool [samples]
        samples = {**{OLD + quantity: tensor for quantity, tensor in before.items()}, **samples}
        like = samples.get("weight", samples.get("master"))
        if like is not None:
            shape = like.value.shape
            alike = {q: tensor for q, tensor in samples.items() if tensor.value.shape == shape}
            if any(len(tensor.bits) != len(like.bits) for tensor in alike.values()):
                samples = {}  # elements of 8 bytes have 32 samples, shorter ones 64
            else:
                held: Mask = numpy.all([tensor.held for tensor in alike.values()], axis=0)
                samples |= {q: tensor._replace(held=held) for q, tensor in alike.items()}

        owner = self._owners[name]
        law = self._law(owner)
        if law is None:
            self._skip(f"the law of {owner.optimizer['class']} is not known", name)
            old, new = samples.get(OLD + "weight"), samples.get("weight")
            if old is not None and new is not None and new.value.dtype in FLOATS:
                numbers = decoded(old)
                with numpy.errstate(all="ignore"):
                    ratio = ((decoded(new) - numbers) ** 2).mean() / (numbers**2).mean()
                    self.report.moved[name] = float(numpy.sqrt(ratio))
        elif not samples:
            self._skip(APART, name)
        elif "grad" not in samples:
            if any(moved(samples)):
                self._skip(NO_GRADIENT, name)
        elif self._line(step, owner):
            try:
                self._judge(step, name, samples, law)
            except KeyError as missing:
                self._skip(f"{missing.args[0]} is not recorded", name)
            except Unknown as unknown:
                self._skip(str(unknown), name)

    def _skip(self, reason: str, name: str) -> None:
        self.report.not_checked[reason].add(name)

    def _find(self, step: int, name: str, quantity: str, explanation: str, *more: Any) -> None:
        self.report.findings.append(AuditFinding(step, name, quantity, explanation, *more))

    def _outside(self, step: int, name: str, samples: Tensors, before: Tensors) -> None:
        """Notes tensors that were written or taken away after the last step."""
        has_all_old = self._line(step, self._owners[name]).get("has_all_old")
        for quantity, left in before.items():
            old = samples.get(OLD + quantity)
            # elements that both have, bit for bit
            if old is not None:
                both = old.held & left.held
                if (old.bits[both] != left.bits[both]).any():
                    self._find(step, name, quantity, OUTSIDE)
            # all old values were recorded, and this one was not there: the state was taken away
            elif has_all_old and quantity in samples and quantity not in WEIGHTS:
                self._find(step, name, quantity, STATE_RESET)

    def _judge(self, step: int, name: str, samples: Tensors, law: Law) -> None:
        # a skipped step may change nothing
        owner = self._owners[name]
        if self._is_left_out(step, owner):
            for quantity in moved(samples):
                self._find(step, name, quantity, NOT_SKIPPED)
            return

        # lr, betas and so on, the count, places: what the law takes beside the tensors
        context, is_sure = self._context(step, name, samples, law)
        # Muon's matrices: samples show the momentum and the master's cast, not the update
        if law.of_whole in samples:
            self._skip(TAKES_ALL, name)

        # the twin is megaopt's own reference kernel: equal bits need no bounds
        kind = self._class(owner).rpartition(".")[2]
        unlike: list[str] | None = None  # the quantities of other bits; None: it has no bits
        if law.has_twin:
            from megaopt.recording import twins  # the kernels, and torch

            with contextlib.suppress(Unknown):
                equal = twins.equal_bits(samples, context, kind)
                unlike = [quantity for quantity, mask in equal.items() if not mask.all()]
        if unlike is not None and not unlike:
            self.report.equal_bits += 1
            self._check(step, name, context, law)
            if law.of_whole in samples:
                self._master(step, name, samples)
            return

        # numbers with bounds of rounding, held against the law's element by element
        sample = sample_of(samples, law, context, kind)
        judged = judge(sample, law)
        bad = {quantity: verdict for quantity, verdict in judged.items() if verdict.is_bad.any()}
        # a wrong count would spoil the update alone, as in Adam's bias corrections
        if set(bad) == {PARAM} and not is_sure:
            self._skip("its step count is not recorded", name)
            return
        self._check(step, name, context, law)
        self._master(step, name, samples)

        # how a wrong optimizer would have made these numbers
        if bad:
            # the optimizer's own count, and learning rates other than the group's
            group_rate = number(self._group(step, owner).get("lr"))
            groups = self._line(step, owner).get("groups", ())
            labelled = [(f"group {index}", group) for index, group in enumerate(groups)]
            labelled += [("the next step", self._group(step + 1, owner))]
            labelled += [("the step before", self._group(step - 1, owner))]
            rates = [(label, number(group.get("lr"))) for label, group in labelled]
            unlike_rates = [(n, r) for n, r in rates if isinstance(r, float) and r != group_rate]
            evidence = Evidence(tuple(unlike_rates), self._recorded(step, owner))
            before = self._explained.get(name, "")
            explanation = explain(sample, law, judged, evidence, before)
            self._explained[name] = explanation
            # the state began anew: so do the updates that are counted
            if explanation == STATE_RESET and not law.counts_groups:
                self._counts[self._counted(name, law)] = step, 1
            for quantity, verdict in bad.items():
                label = quantity if quantity != PARAM else param_of(samples)
                self._find(step, name, label, explanation, verdict.ratio, verdict.off)
        # within rounding, but contract ieee promises the bits
        elif context.options.get("contract") == "ieee":
            for quantity in unlike or ():
                self._find(step, name, quantity, OTHER_BITS)

    def _check(self, step: int, name: str, context: Given, law: Law) -> None:
        """Notes that a tensor was checked, with a step count that is known now."""
        self.report.checked += 1
        if context.options["step"]:
            self._counts[self._counted(name, law)] = step, context.options["step"]

    def _master(self, step: int, name: str, samples: Tensors) -> None:
        """Notes a weight that is not its master's cast."""
        weight, master = samples.get("weight"), samples.get("master")
        if weight is None or master is None or master.value.dtype != "float32":
            return
        if weight.value.dtype not in ("bfloat16", "float16") or is_cast(weight, master):
            return
        # a stale weight is the cast of the old master: the step did not write it
        old = samples.get(OLD + "master")
        stale = old is not None and is_cast(weight, old)
        self._find(step, name, "weight", STALE if stale else NOT_CAST)


def audit(recording: Recording) -> Report:
    """Holds the law of each optimizer against all sampled steps of a recording."""
    return Audit(recording).run()


# --- one sample


def moved(samples: Tensors) -> Iterator[str]:
    """Yields the quantities that the step changed."""
    for quantity, new in samples.items():
        old = samples.get(OLD + quantity)
        if old is not None and (old.bits[old.held] != new.bits[new.held]).any():
            yield quantity


def param_of(samples: Mapping[str, Tensor]) -> str:
    """Returns the quantity that the step updates."""
    return "master" if "master" in samples else "weight"


def sample_of(samples: Tensors, law: Law, context: Given, kind: str) -> Sample:
    """Makes the sample that a law takes; raises Unknown for quantities that are not recorded.

    kind: the optimizer's class.
    """
    param = param_of(samples)
    if param not in samples:
        raise Unknown(f"{param} is not recorded at the gradient's places")
    # the precision in which the law computes: its own, or that of the parameter's dtype
    options = {**context.options, "is_new": context.is_new}
    single = law.computes or ("float32" if options.get("fused") else samples[param].value.dtype)
    if single not in PRECISIONS or samples[param].value.dtype == "float64":
        single = "float64"
    precision = PRECISIONS[single]

    # numbers before and after the step, by their names in the law
    old, new = dict[str, Rounded](), dict[str, Rounded]()
    if law.has_twin:
        from megaopt.recording import twins

        for name, (value, error) in twins.numbers(samples, context, kind).items():
            into = old if name.startswith(OLD) else new
            into[name.removeprefix(OLD)] = Rounded(value, error, precision)
    elif context.is_new and OLD + "master" not in samples and OLD + "weight" in samples:
        # masters that a step makes are its weights
        samples = {**samples, OLD + "master": samples[OLD + "weight"]}
    names, like = {**law.names, param: PARAM}, samples[param].value.shape
    for quantity, tensor in samples.items() if not law.has_twin else ():
        # numbers of the parameter's elements, or one number
        name, is_number = names.get(quantity, quantity), tensor.value.dtype in FLOATS
        fits = (is_number or quantity in CODES) and tensor.value.shape in (like, (), (1,))
        if quantity.startswith(OLD) or quantity == "grad" or not fits:
            continue
        # new ones have the error of being stored, old ones are exact
        new[name] = _read(samples, quantity, precision)
        if OLD + quantity in samples:
            old[name] = _read(samples, OLD + quantity, precision)
        # a state that is made in this step begins with zeros
        elif context.is_new and name in law.starts_as_zeros:
            old[name] = exact(numpy.zeros_like(new[name].value), precision)
    if PARAM not in old:
        raise Unknown(f"{OLD}{param} is not recorded")

    # the gradient as the law takes it: unscaled, then clipped, each one rounding more
    grad = exact(decoded(samples["grad"]), precision)
    for factor in (None if context.scale is None else 1 / context.scale, context.coefficient):
        grad = grad if factor in (None, 1.0) else grad * exact(factor, precision).again(1)
    return Sample(old, new, grad, options, context.options["step"], precision)


def _read(samples: Tensors, quantity: str, precision: Precision) -> Rounded:
    # codes of 8 bits: values, and the width of the code's step as their error
    if quantity.removeprefix(OLD) in CODES and samples[quantity].value.dtype == "uint8":
        value, width = of_codes(samples, quantity)
        is_new = not quantity.startswith(OLD)
        return Rounded(value, width if is_new else numpy.zeros_like(value), precision)
    # a dtype shorter than the law computes in: half of its last place is lost in storing
    value, storage = decoded(samples[quantity]), PRECISIONS[samples[quantity].value.dtype]
    if storage.unit > precision.unit and not quantity.startswith(OLD):
        return Rounded(value, storage.unit * numpy.abs(value) + storage.least, precision)
    return exact(value, precision)


class Judged(NamedTuple):
    """The comparison of one quantity with the law's."""

    is_bad: Mask
    off: float
    ratio: float | None


def judge(sample: Sample, law: Law, wrong: Sample | None = None) -> dict[str, Judged]:
    """Compares each quantity that law and sample have, element by element.

    wrong: a sample that the step may have taken instead.
    """
    judged = dict[str, Judged]()
    for quantity, value in law.update(wrong or sample).items():
        if quantity not in sample.new:
            continue
        # fp64 arrays over the samples
        new, old, ratio = sample.new[quantity], sample.old.get(quantity), None
        with numpy.errstate(all="ignore"):
            # a stored number may be a last place of its format off: half from each side of a binade
            bound = value.error + new.error
            difference = numpy.abs(new.value - value.value)
            # NaN and infinity of the law have no bound: nothing is said of them
            is_finite = numpy.isfinite(value.value) & numpy.isfinite(bound)
            is_bad = is_finite & ~(difference <= bound)
            off = numpy.where(is_bad, difference / bound, 0.0).max(initial=0.0)
            # done over due, least squares, of elements whose update is well above rounding
            if quantity == PARAM and old is not None:
                due, done = value.value - old.value, new.value - old.value
                clear = is_finite & numpy.isfinite(done) & (numpy.abs(due) > 4 * bound)
                if clear.any():
                    ratio = float((due * done)[clear].sum() / (due * due)[clear].sum())
        judged[quantity] = Judged(is_bad, float(off), ratio)
    return judged


def explain(
    sample: Sample, law: Law, judged: Mapping[str, Judged], evidence: Evidence, before: str
) -> str:
    """Returns the first explanation under which the whole sample obeys.

    before: the tensor's last explanation, which is tried first; "unexplained" stays so.
    """
    # by quantity whether the step left all its elements as they were
    still = dict[str, bool]()
    for name in (name for name in sample.old if name in sample.new):
        old, new = sample.old[name].value, sample.new[name].value
        still[name] = bool(((old == new) | (old != old)).all())
    if all(still.values()):
        return SKIPPED
    if before == UNEXPLAINED:
        return UNEXPLAINED
    # wrong samples, by name, the last explanation of this tensor first
    for name, wrong in sorted(explanations(sample, evidence), key=lambda pair: pair[0] != before):
        if obeys(sample, law, wrong):
            return name
    # then a state that began anew in the step, and single quantities that stayed
    zeros = {
        name: old if name == PARAM else exact(numpy.zeros_like(old.value), sample.precision)
        for name, old in sample.old.items()
    }
    step, anew = sample.step if law.counts_groups else 1, {**sample.options, "is_new": True}
    if obeys(sample, law, replace(sample, old=zeros, step=step, options=anew)):
        return STATE_RESET
    for quantity, verdict in judged.items():
        stayed = verdict.is_bad.any() and still.get(quantity) and quantity != PARAM
        if stayed and obeys(sample, law, sample, quantity):
            return f"{quantity} not updated"
    # last: a gradient that was multiplied by something
    return _scaled(sample, law, judged) or UNEXPLAINED


def obeys(sample: Sample, law: Law, wrong: Sample, but: str = "") -> bool:
    """Returns whether a step that takes `wrong` makes the sample; but: a quantity left out."""
    try:
        judged = judge(sample, law, wrong)
    except (Unknown, KeyError):  # the wrong law asks for what there is not
        return False
    return not any(verdict.is_bad.any() for quantity, verdict in judged.items() if quantity != but)


def _scaled(sample: Sample, law: Law, judged: Mapping[str, Judged]) -> str | None:
    """Returns the gradient's factor under which the law holds, in words; None without one."""
    # the law with the gradient, and with zeros in its place: what is linear in it lies on a line
    zero = replace(sample, grad=exact(numpy.zeros_like(sample.grad.value), sample.precision))
    full, none = law.update(sample), law.update(zero)
    for quantity, verdict in judged.items():
        if not verdict.is_bad.any() or quantity not in full:
            continue
        # of each sample of this quantity the factor and its bound; the sharpest one is taken
        new, without = sample.new[quantity], none[quantity]
        with numpy.errstate(all="ignore"):
            span = full[quantity].value - without.value
            error = (full[quantity].error + without.error + new.error) / numpy.abs(span)
            value = (new.value - without.value) / span
        error = numpy.where(numpy.isfinite(error) & numpy.isfinite(value), error, numpy.inf)
        best = int(error.argmin())
        if not error.size or not numpy.isfinite(error[best]):
            continue
        # it has to explain all other quantities, too
        bound = error[best] * (1 + numpy.abs(value[best]))
        factor = Rounded(value[best], bound, new.precision)
        if obeys(sample, law, replace(sample, grad=sample.grad * factor)):
            words = f"the gradient times {float(factor.value):.4g}"
            is_less = 0 < float(factor.value) < 1
            return f"clipped twice, or averaged twice: {words}" if is_less else words
    return None
