"""The twin of steps of fp8 weights: the stored masters are cast, however the kernels pass on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaopt.kernels.chunks.batch import Buffers, Extent, Formats
from megaopt.kernels.chunks.draws import weight_bits_reference
from megaopt.kernels.place import Place
from megaopt.kernels.quantizers.mxfp8 import columns_reference
from megaopt.kernels.quantizers.scale import amax_reference, multiplied
from megaopt.kernels.rules import Rule
from megaopt.kernels.step.reference import ReferencePlan, words_of

MOVED = ("weight_scale", "weight_amax", "weight_amax_history")
"""The buffers that `move_scales` computes with."""


class CastReferencePlan:
    """A ReferencePlan steps; then the ranks put amaxes together, then `cast`.

    extents: what each tensor holds of its weight.
    """

    many_calls = True
    fills = False
    """False: the values of weights without masters are given."""

    def __init__(
        self,
        formats: Formats,
        rule: Rule,
        groups: Sequence[int],
        extents: Sequence[Extent],
        places: Sequence[Place] | None = None,
    ) -> None:
        assert formats.cast is not None
        self.formats, self.stale = formats, True
        self._steps = ReferencePlan(formats, rule, groups, places)
        self.addresses = self._steps.addresses
        self.accumulate, self.ready = self._steps.accumulate, self._steps.ready
        self._extents, self._recipe = extents, formats.cast.recipe
        self._rounding = formats.cast.rounding
        self._buffers: Buffers = {}
        self._scalars: Sequence[tuple[float, ...]] = ()

    def look(self, buffers: Buffers) -> None:
        """Notes the buffers: codes come one-dimensional, and so has all that goes with them."""
        slots = {*self.formats.by_slot, "weight_remainder"} & buffers.keys()
        flat = {slot: [tensor.view(-1) for tensor in buffers[slot]] for slot in slots}
        buffers = {**buffers, **flat}
        self._steps.look(buffers)
        self._buffers = {slot: tensors for slot, tensors in buffers.items() if slot != "grad"}

    def step(
        self, scalars: Sequence[tuple[float, ...]], controls: torch.Tensor | None = None
    ) -> None:
        """Steps as ReferencePlan does; raises the buffers of amaxes to the stored masters'."""
        self._scalars = scalars
        self._steps.step(scalars, controls)
        # amaxes of the stored masters, in the buffers that ranks put together
        for index in self._steps.stepped:
            tensors, extent = self._tensors(index), self._extents[index]
            if tensors["weight"].numel():
                values, amax = self._placed(self._values(tensors), extent), tensors["weight_amax"]
                new_amax = amax_reference(values, self._recipe)
                amax.copy_(torch.maximum(amax, new_amax.view(amax.shape)))

    def cast(self) -> None:
        """Stores the codes of parts of fp8 weights, and the whole weights' scale_inv."""
        for index in self._steps.stepped:
            self._store(index)
        # masters may go: some are for the step alone
        self._buffers = {slot: tensors for slot, tensors in self._buffers.items() if slot in MOVED}

    def move_scales(self) -> None:
        """Makes the next step's scales, after `cast`."""
        move = self._recipe.quantizer.move_reference
        assert move is not None
        for index in self._steps.stepped:
            tensors = self._tensors(index)
            history = tensors["weight_amax_history"]
            history[:1].copy_(torch.maximum(history[:1], tensors["weight_amax"]))
            move(history, tensors["weight_scale"], self._recipe)

    def _tensors(self, index: int) -> dict[str, torch.Tensor]:
        return {slot: tensors[index] for slot, tensors in self._buffers.items()}

    def _values(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The fp32 values that codes are made of: the stored master, rounded as the recipe says."""
        value = self.formats.master.decode_reference(tensors["master"], tensors.get("master_scale"))
        rounding = self._rounding
        return rounding.decode_reference(rounding.encode_reference(value))

    def _placed(self, values: torch.Tensor, extent: Extent) -> torch.Tensor:
        """Values in their place in the whole weight, 0 elsewhere; as they are without blocks."""
        if self._recipe.block is None:
            return values
        whole = values.new_zeros(extent.rows * extent.columns)
        whole[extent.start : extent.start + values.numel()] = values
        return whole.view(extent.rows, extent.columns)

    def _store(self, index: int) -> None:
        tensors, extent, steps = self._tensors(index), self._extents[index], self._steps
        recipe, values, weight = self._recipe, self._values(tensors), tensors["weight"]
        cast = self.formats.cast
        assert cast is not None
        # random bits for the codes, or none where they are nearest
        bits: tuple[torch.Tensor, ...] = ()
        if self.formats.weight.draws or cast.remainder.draws:
            row, place = self._scalars[steps.groups[index]], steps.places[index]
            bits = (weight_bits_reference(words_of(weight, steps.rule, row, place)),)
        # scales of the amaxes of all ranks, and values in their place in the weight
        amax = tensors["weight_amax"].view(recipe.scale_shape(torch.Size(extent[:2])))
        scale, scale_inv = recipe.quantizer.scales_reference(
            amax, recipe, tensors.get("weight_scale")
        )
        product = multiplied(self._placed(values, extent), scale, recipe.block).flatten()
        # of the products only those that this tensor holds
        start = extent.start if recipe.block else 0
        product = product[start : start + weight.numel()]
        # codes with what lies beside them, or alone
        if "weight_remainder" in tensors:
            codes, remainder = cast.remainder.encode_reference(product, *bits)
            tensors["weight_remainder"].copy_(remainder)
        else:
            codes = self.formats.weight.encode_reference(product, None, *bits)
        weight.copy_(codes)
        tensors["weight_scale_inv"].copy_(scale_inv.view(tensors["weight_scale_inv"].shape))
        # codes along columns take the same random bits
        if "weight_columns" in tensors:
            shape, form = tensors["weight_columns"].shape, self.formats.weight
            drawn = tuple(random_bits.view(shape) for random_bits in bits if form.draws)

            def encode(product: torch.Tensor) -> torch.Tensor:
                codes: torch.Tensor = form.encode_reference(product, None, *drawn)
                return codes

            codes, scale_inv = columns_reference(values.view(shape), recipe, encode)
            tensors["weight_columns"].copy_(codes)
            tensors["weight_columns_scale_inv"].copy_(scale_inv)
