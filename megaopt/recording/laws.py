"""The laws of optimizers: what a step makes of old values, gradient and options, with its rounding.

A law is a function of a `Sample`. Where implementations of one law compute in different orders, it
says so with `either`, or adds the roundings that the longest of them makes with `again`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy

from megaopt.recording.rounded import PRECISIONS, Precision, Rounded, either, exact
from megaopt.recording.samples import Unknown

PARAM = "param"
"""The tensor that a step updates: the master where there is one, else the weight."""


@dataclass(frozen=True)
class Sample:
    """The sampled elements of one parameter in one step."""

    old: Mapping[str, Rounded]
    """Before the step: "param" and the state by its names; moments that start as zeros are there
    from the first step on, what is made in it is not. Those that were not recorded are not."""
    new: Mapping[str, Rounded]
    """After the step, likewise; within their format's rounding of what the step computed."""
    grad: Rounded
    """The gradient that the optimizer reads, without a loss scale, and clipped."""
    options: Mapping[str, Any]
    """The group's options in Python numbers, over the optimizer's, over the law's."""
    step: int | None
    """The number of this update, from 1; None where it is not known."""
    precision: Precision
    """The arithmetic's."""

    def number(self, name: str, place: int | None = None) -> Rounded:
        """Returns an option, 0 where there is none, as the step has it: rounded once.

        place: of a number in a pair, as of betas.
        """
        value: Any = self.options.get(name, 0.0) or 0.0
        return self.constant(value if place is None else value[place])

    def constant(self, value: float) -> Rounded:
        """Returns a number as `number` does: in fp32 or wider; in fp32 where a device has it.

        The device has a count or an option in an fp32 tensor, which makes fp32 of numbers beside
        it.
        """
        single = PRECISIONS["float32"]
        is_on_device = self.options.get("capturable") or self.options.get("single")
        is_single = self.precision.unit > single.unit or is_on_device
        return exact(float(value), single if is_single else self.precision).again(1)

    def beside(self, number: Rounded) -> Rounded:
        """Returns a number that the step computed, as an operation with a tensor takes it.

        A capturable step has it on the device, in a tensor of no dimension, and rounds it to the
        tensors' dtype.
        """
        return number.stored(self.precision) if self.options.get("capturable") else number

    def factor(self, name: str) -> Rounded:
        """Returns an option that torch's `add` takes as alpha, which a CPU rounds to the dtype."""
        return self.number(name).stored(self.precision)

    @cached_property
    def count(self) -> int:
        """The step; raises Unknown where it is not known."""
        if self.step is None:
            raise Unknown("the step count is not recorded")
        return self.step

    @cached_property
    def descent(self) -> Rounded:
        """The gradient, with the other sign under maximize."""
        return -self.grad if self.options.get("maximize") else self.grad


NewValues = dict[str, Rounded]
Update = Callable[[Sample], NewValues]


def mixed(average: Rounded, value: Rounded, beta: Rounded) -> Rounded:
    """Computes the exponential average, beta * average + (1 - beta) * value, in all its ways.

    The ways are this formula; torch's lerp, on both sides of a weight of 0.5; two fused
    multiply-adds, as nvcc makes torch's kernels; and the square's factors in any order, which is
    one rounding more.
    """
    rest = -(beta - 1.0)
    return either(
        (average * beta + value * rest).again(1),
        average + (value - average) * rest,
        value - (value - average) * beta,
        average * beta + (value - value * beta),
    )


def decayed(sample: Sample, param: Rounded) -> Rounded:
    """Returns the parameter after decoupled weight decay.

    torch multiplies by a rounded 1 - lr * weight_decay, which is one rounding more than the
    subtraction; it is rounded to fp32 where lr is a tensor.
    """
    if not sample.options.get("weight_decay"):
        return param
    share = sample.number("lr") * sample.number("weight_decay")
    less = (param - param * share).again(1)
    return either(less, param * -(share - 1.0)) if sample.options.get("single") else less


def is_decoupled(options: Mapping[str, Any]) -> bool:
    """Returns whether decay leaves the gradient alone, by torch's or TransformerEngine's option."""
    return bool(options.get("decoupled_weight_decay", options.get("adam_w_mode")))


def is_coupled(sample: Sample) -> bool:
    """Returns whether weight decay is added to the gradient."""
    return bool(sample.options.get("weight_decay")) and not is_decoupled(sample.options)


def with_decay(sample: Sample) -> Rounded:
    """Returns the gradient, with L2 decay where that is the law."""
    if not is_coupled(sample):
        return sample.descent
    return sample.descent + sample.old[PARAM] * sample.factor("weight_decay")


def base(sample: Sample) -> Rounded:
    """Returns the parameter that a step is taken from."""
    param = sample.old[PARAM]
    return param if is_coupled(sample) else decayed(sample, param)


def moments(sample: Sample, grad: Rounded, *names: str) -> NewValues:
    """Averages the gradient, its square ..., as far as the old averages are known."""
    averages = NewValues()
    for index, (name, value) in enumerate(zip(names, (grad, grad * grad), strict=False)):
        if name in sample.old:
            averages[name] = mixed(sample.old[name], value, sample.number("betas", index))
    return averages


def correction(sample: Sample, index: int) -> Rounded:
    """Computes 1 - beta ** step."""
    if not sample.options.get("bias_correction", True):
        return sample.constant(1.0)
    return -(sample.number("betas", index).power(sample.count) - 1.0)


def denominator(sample: Sample, square: Rounded) -> Rounded:
    """Computes Adam's denominator: the root of the corrected square, and eps."""
    eps, over = sample.number("eps"), correction(sample, 1)
    where = sample.options.get("eps_is", "")
    if where == "inside":
        return (square / over + eps).root()
    if where == "uncorrected":
        return (square.root() + eps) / over.root()
    return square.root() / over.root() + eps


def adam(sample: Sample, unrounded: bool = False) -> NewValues:
    """Steps as Adam, AdamW and AMSGrad: torch's, TransformerEngine's, apex's, bitsandbytes'.

    unrounded: the weight is computed from the new moments before these are made codes.
    """
    values = moments(sample, with_decay(sample), "exp_avg", "exp_avg_sq")
    state = {**sample.new, **values} if unrounded else sample.new
    average, square = state["exp_avg"], state["exp_avg_sq"]
    if sample.options.get("amsgrad"):
        if "max_exp_avg_sq" in sample.old:
            values["max_exp_avg_sq"] = sample.old["max_exp_avg_sq"].maximum(square)
        square = state["max_exp_avg_sq"]
    # the step without weight decay; if capturable, with torch's ways to fold sizes
    lr, over1, over2 = sample.number("lr"), correction(sample, 0), correction(sample, 1).root()
    size = lr / over1
    step = average * size / denominator(sample, square)
    if sample.options.get("capturable") and "eps_is" not in sample.options:
        eps, root = sample.number("eps"), square.root()
        inverse = exact(1.0, size.precision) / (over1 / lr)
        one_by_one = root / sample.beside(over2 * size) + sample.beside(eps / size)
        foreach = (root / sample.beside(over2) + eps) / sample.beside(inverse)
        step = either(average / one_by_one, average / foreach, step)
    return {**values, PARAM: base(sample) - step}


MOMENTUM = "momentum_buffer"


def muon(sample: Sample) -> NewValues:
    """Steps as FusedMuon: AdamW, and the momentum of the parameters that Muon steps."""
    if MOMENTUM not in sample.new:
        return adam(replace(sample, options=as_adamw(sample.options)))
    momentum = sample.number("momentum")
    return {MOMENTUM: mixed(sample.old[MOMENTUM], sample.descent, momentum)}


def as_adamw(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns FusedMuon's options as AdamW reads them."""
    eps = options["eps" if options["use_muon"] is False else "adam_eps"]
    contract = "ieee" if options["contract"] == "eo" else options["contract"]
    changes = {"eps": eps, "contract": contract, "adam_w_mode": True, "amsgrad": False}
    return {**options, **changes, "bias_correction": True}


def nadam(sample: Sample) -> NewValues:
    """Steps as torch's NAdam (Dozat 2016), with its product of momenta."""
    grad = with_decay(sample)
    values = moments(sample, grad, "exp_avg", "exp_avg_sq")
    lr, beta1 = sample.number("lr"), sample.number("betas", 0)
    mu, following = (_momentum(sample, beta1, sample.count + more) for more in (0, 1))
    if "mu_product" in sample.old:
        values["mu_product"] = sample.old["mu_product"] * mu
    product = sample.new.get("mu_product")
    if product is None:  # not recorded: as if beta1 had never changed; fp32, also beside fp64
        product = exact(1.0, PRECISIONS["float32"])
        for step in range(1, sample.count + 1):
            product = product * _momentum(sample, beta1, step)
    square, over = sample.new["exp_avg_sq"], correction(sample, 1)
    root = either((square / sample.beside(over)).root(), square.root() / sample.beside(over.root()))
    below = root + sample.number("eps")
    grad_size = sample.beside(lr * -(mu - 1.0) / -(product - 1.0))
    average_size = sample.beside(lr * following / -(product * following - 1.0))
    # the weight is rounded after each; a capturable loop multiplies by the numbers first
    first = (grad * grad_size / below).again(1)
    second = (sample.new["exp_avg"] * average_size / below).again(1)
    return {**values, PARAM: base(sample) - first - second}


def _momentum(sample: Sample, beta1: Rounded, step: int) -> Rounded:
    power = sample.constant(0.96).power(step * float(sample.options["momentum_decay"]))
    return beta1 * -(power * 0.5 - 1.0)


def sgd(sample: Sample) -> NewValues:
    """Steps as torch's SGD with momentum, dampening, Nesterov; the buffer starts as gradient."""
    grad, values = with_decay(sample), NewValues()
    if sample.options.get("momentum"):
        momentum, old = sample.number("momentum"), sample.old.get("momentum_buffer")
        if sample.options.get("is_new") and (old is None or sample.step == 1):
            values = {"momentum_buffer": grad}
        elif old is not None:
            share = -(sample.number("dampening") - 1.0).stored(sample.precision)
            is_narrow = sample.precision.unit > PRECISIONS["float32"].unit
            if is_narrow and sample.options.get("foreach"):  # a CPU rounds it to the buffers' dtype
                momentum = momentum.stored(sample.precision)
            values = {MOMENTUM: old * momentum + grad * share}
        buffer = sample.new[MOMENTUM]
        is_nesterov = sample.options.get("nesterov")
        grad = grad + buffer * sample.factor("momentum") if is_nesterov else buffer
    return {**values, PARAM: base(sample) - grad * sample.factor("lr")}


def lion(sample: Sample) -> NewValues:
    """Steps as Lion (Chen et al. 2023): each element moves by lr, by the sign of an average."""
    old = sample.old["exp_avg"]
    direction = mixed(old, sample.descent, sample.number("betas", 0)).sign()
    average = mixed(old, sample.descent, sample.number("betas", 1))
    step = direction * sample.factor("lr")
    return {"exp_avg": average, PARAM: decayed(sample, sample.old[PARAM]) - step}


def adafactor(sample: Sample) -> NewValues:
    """Steps as torch's Adafactor (Shazeer & Stern 2018), as far as samples say.

    Norms of the whole tensor scale its update. So a vector's update is checked up to one positive
    factor; a matrix's statistics are of rows and columns, and its update is checked for its sign
    alone. The size of the step is the one >= 0 that explains the new parameter best, an interval
    for each element of a matrix; where these have none in common the error says nothing, and the
    difference shows.
    """
    values, grad = NewValues(), sample.descent
    param, new = decayed(sample, sample.old[PARAM]), sample.new[PARAM]
    is_vector = "variance" in sample.new
    if is_vector:
        if "variance" in sample.old:
            rest = sample.constant(1.0).power(0) * sample.count ** sample.options["beta2_decay"]
            values["variance"] = mixed(sample.old["variance"], grad * grad, -(rest - 1.0))
        eps1 = sample.options["eps"][0]
        least = sample.constant((2 * sample.precision.unit if eps1 is None else float(eps1)) ** 2)
        grad = grad / sample.new["variance"].maximum(least).root()
    with numpy.errstate(all="ignore"):
        moved = param.value - new.value
        # rounding of the size, of its product with the direction, and of the difference
        rounded = param.precision.unit * (2 * numpy.abs(moved) + numpy.abs(new.value))
        room = rounded + param.precision.least + param.error + new.error
        size = moved / grad.value
        width = (room + numpy.abs(size) * grad.error) / numpy.abs(grad.value)
        low, high = numpy.maximum(size - width, 0.0), numpy.maximum(size + width, 0.0)
    is_finite = numpy.isfinite(low) & numpy.isfinite(high)
    if is_vector and is_finite.any():
        low, high = low[is_finite].max(), high[is_finite].min()
    is_known = numpy.isfinite(low + high)
    middle = numpy.where(is_known, (low + high) / 2, 0.0)
    error = numpy.maximum(numpy.where(is_known, (high - low) / 2, 0.0), 0.0)
    # an element that is not finite makes the whole tensor's size so
    error = numpy.where(numpy.isfinite(new.value), error, numpy.inf)
    return {**values, PARAM: param - grad * Rounded(middle, error, param.precision)}


@dataclass(frozen=True)
class Law:
    """One optimizer's law: a row of LAWS."""

    update: Update
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that neither groups nor the optimizer name."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The law's name by the state's, where the two differ."""
    starts_as_zeros: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    starts_as_grad: tuple[str, ...] = ()
    computes: str | None = "float32"
    """The dtype of the arithmetic; None: the parameter's, unless the group says fused=True."""
    counts_groups: bool = False
    """One count of steps is a whole group's; otherwise each parameter has its own."""
    has_twin: bool = False
    """megaopt.recording.twins knows the bits."""
    of_whole: str = ""
    """The moment of parameters whose update takes the whole gradient: samples do not show it."""

    def moments(self) -> Iterator[str]:
        """Returns the moments by the state's own names."""
        state_names = {law_name: name for name, law_name in self.names.items()}
        names = (*self.starts_as_zeros, *self.starts_as_grad)
        return (state_names.get(name, name) for name in names)


DECOUPLED = {"decoupled_weight_decay": True}
TORCH = partial(Law, computes=None)
OURS = partial(Law, counts_groups=True, has_twin=True)
STATES = {"state1": "exp_avg", "state2": "exp_avg_sq"}
BITSANDBYTES = Law(partial(adam, unrounded=True), DECOUPLED, STATES)
ADAM = Law(adam, {"adam_w_mode": True}, counts_groups=True)
OF_MUON = (MOMENTUM, "exp_avg", "exp_avg_sq")
ADAM_NAMES = ("Adam", "Adam8bit", "Adam32bit", "PagedAdam", "PagedAdam8bit", "PagedAdam32bit")
ADAMW_NAMES = [name.replace("Adam", "AdamW") for name in ADAM_NAMES]
LION_NAMES = [name.replace("Adam", "Lion") for name in ADAM_NAMES]

LAWS: dict[str, Law] = {
    "torch.optim.adam.Adam": TORCH(adam),
    "torch.optim.adamw.AdamW": TORCH(adam, DECOUPLED),
    "torch.optim.nadam.NAdam": TORCH(nadam),
    "torch.optim.sgd.SGD": TORCH(sgd, starts_as_zeros=(), starts_as_grad=(MOMENTUM,)),
    "torch.optim.Adafactor": TORCH(adafactor, starts_as_zeros=("variance",)),
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam": ADAM,
    "apex.optimizers.fused_adam.FusedAdam": ADAM,
    "lion_pytorch.lion_pytorch.Lion": TORCH(lion),
    "megaopt.adam.FusedAdam": OURS(adam, {"adam_w_mode": True}),
    "megaopt.lion.FusedLion": OURS(lion),
    "megaopt.muon.FusedMuon": OURS(muon, starts_as_zeros=OF_MUON, of_whole=MOMENTUM),
    "megaopt.sgd.FusedSGD": OURS(sgd, starts_as_zeros=(MOMENTUM,)),
    **{f"bitsandbytes.optim.adam.{name}": BITSANDBYTES for name in ADAM_NAMES},
    **{f"bitsandbytes.optim.adamw.{name}": BITSANDBYTES for name in ADAMW_NAMES},
    **{f"bitsandbytes.optim.lion.{name}": Law(lion, names=STATES) for name in LION_NAMES},
}
"""Laws by the class's full name."""


# --- steps that may have been taken instead of the law's


@dataclass(frozen=True)
class Evidence:
    """The recording's numbers beside a sample, for explanations."""

    rates: tuple[tuple[str, float], ...] = ()
    """Learning rates other than the group's, each behind a label of its origin."""
    count: int | None = None
    """The step count that the optimizer itself says it has."""


def explanations(sample: Sample, evidence: Evidence) -> Iterator[tuple[str, Sample]]:
    """Yields samples for which the law makes what wrong steps would, by name; likely ones first."""
    options, step = sample.options, sample.step
    if step is not None:
        if evidence.count is not None and abs(evidence.count - step) > 1:
            yield f"step count {evidence.count}", replace(sample, step=evidence.count)
        yield "step count + 1", replace(sample, step=step + 1)
        if step > 1:
            yield "step count - 1", replace(sample, step=step - 1)

    # other options
    corrects = options.get("bias_correction", True)
    word = "no bias correction" if corrects else "bias correction"
    switches: list[tuple[str, dict[str, Any]]] = [(word, {"bias_correction": not corrects})]
    decay, lr = options.get("weight_decay"), options.get("lr") or 0.0
    if decay:
        is_apart = is_decoupled(options)
        # (1 - lr * decay)**2 as one decay
        twice = {"weight_decay": decay * (2 - lr * decay if is_apart else 2)}
        word = "L2 decay for decoupled" if is_apart else "decoupled decay for L2"
        switches += [
            ("weight decay twice", twice),
            ("no weight decay", {"weight_decay": 0.0}),
            (word, {"decoupled_weight_decay": not is_apart, "adam_w_mode": not is_apart}),
        ]
    switches += [("eps inside the root", {"eps_is": "inside"})]
    switches += [("eps beside the uncorrected root", {"eps_is": "uncorrected"})]
    if "betas" in options:
        switches += [("betas swapped", {"betas": tuple(options["betas"])[::-1]})]
    switches += [("sign of the gradient", {"maximize": not options.get("maximize")})]
    turned = {name: -(options.get(name) or 0.0) for name in ("lr", "weight_decay")}
    switches += [("sign of the update", turned)]
    for name in (name for name in ("nesterov", "amsgrad") if name in options):
        word = "off" if options[name] else "on"
        switches += [(f"{name} {word}", {name: not options[name]})]
    if options.get("dampening"):
        switches += [("no dampening", {"dampening": 0.0})]
    for name, changes in switches:
        yield name, replace(sample, options={**options, **changes})

    # numbers of other steps
    for whose, rate in evidence.rates:
        yield f"lr of {whose}", replace(sample, options={**options, "lr": rate})
    before = {**sample.new, **{name: sample.old[name] for name in sample.old if name != PARAM}}
    yield "moments of the step before", replace(sample, new=before)
