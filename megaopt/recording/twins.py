"""megaopt's own steps, to the bit: their torch twins step the sampled elements once more.

What a step asks of a whole tensor is taken as recorded: the scale of scaled formats. Formats in
blocks need all of a block, and contract te an NVIDIA GPU: they are held to the law alone. Of Muon's
matrices it is the momentum that is stepped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.chunks.draws import moment_bits_reference, words_at
from megaopt.kernels.formats import (
    BESIDE,
    GRADS,
    MASTERS,
    MOMENTS,
    NONE,
    STOCHASTIC_WEIGHTS,
    WEIGHTS,
    Format,
)
from megaopt.kernels.formats.float32 import FLOAT32
from megaopt.kernels.rules import RULES, Rule
from megaopt.kernels.rules.base import draw_numbers
from megaopt.kernels.rules.muon import MUON_DIRECTION, PEER_DIRECTION
from megaopt.kernels.step.reference import decoded, param_of, step_with_words
from megaopt.recording.laws import MOMENTUM, as_adamw
from megaopt.recording.rounded import Array
from megaopt.recording.samples import OLD, Given, Mask, Tensor, Unknown, held_of

UNITS = {
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3": 2.0**-4,
    "remainder8": 2.0**-16,
    "kahan": 2.0**-16,
    "kahan_float16": 2.0**-16,
}
"""Half of the last place of formats narrower than fp32, relative; of masters with their weights."""
LEAST = {"float16": 2.0**-25, "float8_e4m3": 2.0**-10}
"""Half of the smallest number, where that is a normal one of fp32, in units of the scale."""

MASTER_SCALE = "master_param_scale"


@dataclass(frozen=True)
class Twin:
    """One parameter's step in one optimizer of megaopt's."""

    tensors: Mapping[str, Tensor]
    settings: Given
    kind: str
    """The optimizer's class."""

    @property
    def steps_matrix(self) -> bool:
        """Whether a matrix was stepped by Muon, of which samples show the momentum alone."""
        return self.kind == "FusedMuon" and MOMENTUM in self.tensors

    @property
    def options(self) -> Mapping[str, Any]:
        """The step's options, as its elementwise rule reads them."""
        values = self.settings.options
        return as_adamw(values) if self.kind == "FusedMuon" and not self.steps_matrix else values

    @property
    def rule(self) -> Rule:
        """The update rule, as the optimizer chooses it."""
        options = self.options
        if self.kind == "FusedLion":
            name = "lion"
        elif self.steps_matrix:
            return MUON_DIRECTION if options["contract"] == "ieee" else PEER_DIRECTION
        elif self.kind == "FusedSGD":
            kind = "_nesterov" if options["nesterov"] else "_momentum" * options["has_momentum"]
            name = ("sgdw" if options["decoupled_weight_decay"] else "sgd") + kind
        else:
            name = ("adamw" if options["adam_w_mode"] else "adam") + "_amsgrad" * options["amsgrad"]
        return RULES[name, options["contract"]]

    @property
    def names(self) -> dict[str, str]:
        """The names of the formats of moments and masters."""
        return dict(part.split("=") for part in self.settings.options["state_formats"].split(", "))

    def form(self, moment: str) -> Format:
        """Returns a moment's format; raises Unknown for one in blocks."""
        # AMSGrad's maximum has the format of what it is the maximum of
        name = self.names.get(moment) or self.names[moment.removeprefix("max_")]
        dtype = self.tensor(moment).dtype
        form = FLOAT32 if dtype == torch.float32 else (MOMENTS.get(name) or WEIGHTS[name])
        if form.block:
            raise Unknown(f"the blocks of {moment} are not sampled")
        return form

    @property
    def master(self) -> Format:
        """The master's format."""
        if "master" not in self.tensors:
            return NONE
        name = self.names["master"]
        return BESIDE.get(self.tensor("weight").dtype, {}).get(name) or MASTERS[name]

    @property
    def weight(self) -> Format:
        """The weight's format."""
        dtype = self.tensor("weight").dtype
        drawn = (
            self.settings.options.get("weight_rounding") == "stochastic" and not self.master.present
        )
        tables = (STOCHASTIC_WEIGHTS, WEIGHTS) if drawn else (WEIGHTS,)
        return next(table[dtype] for table in tables if dtype in table)

    def tensor(self, quantity: str) -> torch.Tensor:
        """A quantity's samples; raises Unknown for one that is not recorded."""
        if quantity not in self.tensors:
            raise Unknown(f"{quantity} is not recorded")
        samples = self.tensors[quantity]
        dtype = getattr(torch, samples.value.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise Unknown(f"{quantity} is of {samples.value.dtype}")
        bits = samples.bits[samples.held].astype(f"<u{dtype.itemsize}")
        return torch.from_numpy(bits).view(dtype)

    def value(self, when: str, moment: str) -> torch.Tensor:
        """A moment in fp32; before the first step 0."""
        if when and when + moment not in self.tensors and self.settings.is_new:
            return torch.zeros_like(self.tensor("grad"), dtype=torch.float32)
        form = self.form(moment)
        scale = self.tensor(f"{when}{moment}_scale") if form.scaled else None
        return decoded(form, self.tensor(when + moment), scale)

    @property
    def has_old_master(self) -> bool:
        """Whether there was a master before the step; else the step makes it of the weight."""
        return OLD + "master" in self.tensors or not self.settings.is_new

    def param(self, when: str) -> torch.Tensor:
        """The fp32 numbers that the step updates."""
        master, names = self.master, {"weight": when + "weight"}
        is_made = master.present and when and not self.has_old_master
        if is_made and self.settings.options.get("are_masters_given"):
            raise Unknown(
                "masters that an optimizer is given are not recorded before its first step"
            )
        if master.scaled and when and not self.has_old_master:
            raise Unknown("the scale of the master that the first step made is not recorded")
        if master.present and (not when or self.has_old_master):
            names["master"] = when + "master"
            if master.scaled:
                names["master_scale"] = when + MASTER_SCALE
        tensors = {slot: self.tensor(name) for slot, name in names.items()}
        master_form = master if "master" in tensors else NONE
        return param_of(tensors, self._formats(master_form))

    def _formats(self, master: Format) -> Formats:
        moments = self.rule.moments
        grad, options = GRADS[self.tensor("grad").dtype], self.settings.options
        return Formats(
            *(grad, self.weight, master, (FLOAT32,) * len(moments), moments),
            rounds_grad=bool(options.get("round_scaled_grads")),
            maximize=bool(options.get("maximize")),
        )

    def step(self, *lanes: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The codes of weight, master and moments that the twin makes, by quantity."""
        rule, options, master = self.rule, self.options, self.master
        tensors = {"grad": self.tensor("grad").clone()}
        form = master if master.joined or not master.present else FLOAT32
        if self.steps_matrix:  # a step that leaves a direction in the weight's place
            tensors["weight"] = torch.zeros_like(tensors["grad"], dtype=torch.float32)
            formats = replace(self._formats(NONE), weight=FLOAT32)
        else:
            tensors["weight"] = self.tensor(OLD + "weight").clone()
            formats = self._formats(form)
            if form.joined and self.has_old_master:
                tensors["master"] = self.tensor(OLD + "master").clone()
            elif form.joined:
                tensors["weight"], tensors["master"] = master.encode_by_hand(self.param(OLD))
            elif form.present:
                tensors["master"] = self.param(OLD)
        tensors.update({name: self.value(OLD, name) for name in rule.moments})

        # random words by the elements' places
        words = torch.zeros(0, dtype=torch.int64)
        if "seed" in options:
            elements = torch.from_numpy(held_of(self.settings.places, self.tensors["grad"]))
            words = words_at(elements, self.settings.number, draw_numbers(self.settings.options))
        # what happens to gradients first, as megaopt.kernels.step.controls has it
        scale, coefficient, controls = self.settings.scale, self.settings.coefficient, None
        if scale is not None or coefficient is not None:
            whole = torch.tensor(1.0 if scale is None else scale, dtype=torch.float32)
            inverse, clip = (1.0 / whole.double()).float(), coefficient
            controls = torch.tensor(
                [whole, inverse, 1.0 if clip is None else clip, 0.0, float(scale is not None)]
            )
        arguments = (tensors, formats, rule, rule.scalars(options), controls, 0)
        step_with_words(*arguments, words, *lanes)

        if not self.steps_matrix:
            yield "weight", tensors["weight"]
            if master.scaled:
                yield from self._encoded("master", master, tensors["master"])
            elif master.present:
                yield "master", tensors["master"]
        for index, name in enumerate(rule.moments):
            form = self.form(name)
            bits = (moment_bits_reference(words, index),) if form.draws else ()
            yield from self._encoded(name, form, tensors[name], *bits)

    def _encoded(
        self, name: str, form: Format, value: torch.Tensor, *bits: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Codes of new values, with the recorded scale: with each inverse that it may be of."""
        if not form.scaled:
            yield name, form.encode_reference(value, None, *bits)
            return
        scale = self.tensor(MASTER_SCALE if name == "master" else f"{name}_scale")
        for inverse in inverses(scale, form):
            yield name, form.encode_reference(value, inverse, *bits)

    def unit(self, form: Format, scale: float) -> tuple[float, float]:
        """Returns the change that storing may make: relative, and absolute."""
        name = form.name.removesuffix("_stochastic").removeprefix("scaled_")
        times = 2.0 if form.draws else 1.0
        # a scale's inverse, the product with it and the one with the scale are rounded
        relative = UNITS.get(name, 0.0) * times + 4 * 2.0**-24 * form.scaled
        return relative, LEAST.get(name, 2.0**-126) * times * scale


def inverses(scale: torch.Tensor, form: Format) -> Iterator[torch.Tensor]:
    """The inverses that codes were made with, by the scale that was kept beside them."""
    one = torch.ones_like(scale)
    around = (one / scale).view(torch.int32)
    for place in (0, -1, 1) if form.scale_of_inverse else (0,):
        inverse = (around + place).view(torch.float32)
        if not form.scale_of_inverse or torch.equal(one / inverse, scale):
            yield inverse


def equal_bits(tensors: Mapping[str, Tensor], settings: Given, kind: str) -> dict[str, Mask]:
    """Returns for each quantity which elements have the bits that the twin makes.

    Raises Unknown where the twin's bits are not known.
    """
    twin = Twin(tensors, settings, kind)
    contract = settings.options["contract"]
    if contract == "te" or (twin.steps_matrix and contract != "ieee"):
        raise Unknown(f"contract {contract} has no twin")
    lanes: list[tuple[torch.Tensor, ...]] = [()]
    if twin.rule.lanes:  # which kernel torch takes depends on addresses
        like = torch.ones_like(twin.tensor("grad"), dtype=torch.bool)
        lanes = [(like,), (~like,)]
    equal: dict[str, Mask] = {}
    for masks in lanes:
        for name, codes in twin.step(*masks):
            size = f"<u{codes.element_size()}"
            integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[codes.element_size()]
            bits = codes.view(integer).numpy().view(size)
            recorded = tensors[name].bits[tensors[name].held].astype(size)
            equal[name] = equal.get(name, False) | (bits == recorded)
    return equal


def numbers(
    tensors: Mapping[str, Tensor], settings: Given, kind: str
) -> dict[str, tuple[Array, Array]]:
    """The fp32 numbers of parameter ("param") and moments, and what storing may have changed.

    Old ones have "old " before their names. Raises Unknown for formats in blocks.
    """
    twin = Twin(tensors, settings, kind)
    arrays: dict[str, tuple[Array, Array]] = {}
    forms = {name: twin.form(name) for name in twin.rule.moments}
    for name, form in forms.items():
        scale = float(twin.tensor(f"{name}_scale")) if form.scaled else 1.0
        arrays[name] = _with_error(twin.value("", name), *twin.unit(form, scale))
        if OLD + name in tensors or settings.is_new:
            arrays[OLD + name] = _with_error(twin.value(OLD, name), 0.0, 0.0)
    stored = twin.master if twin.master.present else twin.weight
    scale = float(twin.tensor(MASTER_SCALE)) if stored.scaled else 1.0
    arrays["param"] = _with_error(twin.param(""), *twin.unit(stored, scale))
    arrays[OLD + "param"] = _with_error(twin.param(OLD), 0.0, 0.0)
    return arrays


def _with_error(value: torch.Tensor, relative: float, least: float) -> tuple[Array, Array]:
    array = value.double().numpy()
    error = numpy.abs(array) * relative + (least if relative else 0.0)
    return array, numpy.zeros_like(array) if not relative else error
