"""Sampled elements as a recording has them, and what is known of the step beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy

from megaopt.recording.checks import is_float
from megaopt.recording.files import Recording, Value, places_of_samples
from megaopt.recording.measure import FLOATS, as_numbers
from megaopt.recording.rounded import Array

Bits = numpy.ndarray[Any, Any]
Mask = numpy.ndarray[Any, numpy.dtype[numpy.bool_]]

OLD = "old "
"""The prefix of quantities from before a step."""


class Unknown(Exception):
    """A recording does not have what a law asks for; the message says what."""


class Tensor(NamedTuple):
    """The samples of one quantity."""

    value: Value
    bits: Bits
    held: Mask
    """The mask of the elements that the recording has."""


Tensors = dict[str, Tensor]
"""One parameter's, by quantity."""


class Given(NamedTuple):
    """The inputs of a parameter's step beside tensors."""

    options: Mapping[str, Any]
    """The group's options, over the optimizer's, over the law's own; with "step"."""
    is_new: bool
    """The step made the parameter's state."""
    places: Sequence[int]
    """The places of the samples in the parameter."""
    number: int
    """The parameter's number in the optimizer."""
    scale: float | None
    """The factor by which gradients are still multiplied; None: no factor."""
    coefficient: float | None
    """The factor by which the step clips gradients; None: no factor."""


@dataclass
class ParameterSamples:
    """One parameter's samples of a step."""

    rank: int
    """The place of the first rank that has some."""
    source: int
    """The optimizer's number there."""
    tensors: Tensors = field(default_factory=dict)
    is_double: bool = False
    """Whether there are two tensors of this name, as older versions recorded some."""


def stepped_in(recording: Recording, step: int) -> dict[str, ParameterSamples]:
    """All samples of a step, by parameter."""
    steps_by_param: dict[str, ParameterSamples] = {}
    last_ranks: dict[tuple[str, str], int] = {}
    for place, rank in enumerate(recording.ranks):
        for source in sorted(rank.scalars.get(step, ())):
            for value, held, bits in rank.samples(step, source):
                stepped = steps_by_param.setdefault(value.name, ParameterSamples(place, source))
                # each rank has some of a tensor's samples; a second tensor comes from the same one
                mask = numpy.array([held >> i & 1 for i in range(len(bits))], bool)
                key, before = (value.name, value.quantity), stepped.tensors.get(value.quantity)
                if before is not None:
                    stepped.is_double |= last_ranks[key] == place
                    if len(before.bits) == len(bits):
                        bits, mask = numpy.where(mask, bits, before.bits), mask | before.held
                last_ranks[key] = place
                stepped.tensors[value.quantity] = Tensor(value, bits, mask)
    return steps_by_param


def held_of(places: Sequence[int], tensor: Tensor) -> Bits:
    """Returns the places of samples that the recording has."""
    return numpy.array(places)[numpy.flatnonzero(tensor.held)]


def decoded(tensor: Tensor) -> Array:
    """The numbers of samples, fp64; raises Unknown for codes, which mean nothing alone."""
    if tensor.value.dtype not in FLOATS:
        raise Unknown(f"{tensor.value.quantity} is of {tensor.value.dtype}")
    return as_numbers(tensor.bits[tensor.held], tensor.value.dtype)


CODES = ("state1", "state2")
"""The states that bitsandbytes keeps in 8 bits, beside absmax1 and absmax2."""
BLOCKS = (256, 2048)
"""Elements that share an absmax in bitsandbytes' states, now and in older versions."""
STEP = 2 / (2**16 - 1)
"""Its library for CPUs looks codes up by this much of the absmax: near 0 codes are denser."""


def of_codes(tensors: Tensors, quantity: str) -> tuple[Array, Array]:
    """The numbers of bitsandbytes' 8-bit codes, and a code's width there; fp64.

    NaN where the element's block is not among the sampled ones, which are all 64 of small tensors.
    Raises Unknown where nothing is known.
    """
    codes, absmax = tensors[quantity], tensors[quantity.replace("state", "absmax")]
    name, numel = codes.value.name, int(numpy.prod(codes.value.shape))
    count = int(numpy.prod(absmax.value.shape))
    size = next((size for size in BLOCKS if -(-numel // size) == count), numel)
    blocks = numpy.full(count, numpy.nan)
    blocks[held_of(places_of_samples(name, count, 4), absmax)] = decoded(absmax)
    places = held_of(places_of_samples(name, numel, 1), codes)
    scale = blocks[places // size]
    if numpy.isnan(scale).all():
        raise Unknown(f"the blocks of {quantity.removeprefix(OLD)} are not sampled")
    try:
        from bitsandbytes.functional import create_dynamic_map
    except ImportError:
        raise Unknown("bitsandbytes, whose table it takes, is not installed") from None
    make_map: Any = create_dynamic_map
    table: Array = make_map(signed=quantity.endswith("1")).double().numpy()
    width = numpy.diff(table, prepend=table[0], append=table[-1])
    indices = codes.bits[codes.held].astype(int)
    widths = numpy.maximum(width[indices], width[indices + 1]) + STEP
    return table[indices] * scale, widths * scale


def number(option: Any) -> Any:
    """Returns a recording's option as Python has it."""
    if isinstance(option, list):
        return tuple(map(number, option))
    is_number = isinstance(option, str) and option.lstrip("-").startswith(("0x", "inf", "nan"))
    if is_number and is_float(option):
        return float.fromhex(option)
    return option


def scaling(line: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Returns a step's factors from its line: what still scales gradients, and what clips them."""
    scale, norm, clip_norm = (number(line.get(n)) for n in ("grad_scale", "grad_norm", "clip_norm"))
    coefficient = number(line.get("clip_coefficient"))
    if clip_norm is not None and norm is not None:
        # as megaopt's step computes it, in fp32; a NaN stays
        single = numpy.float32
        with numpy.errstate(all="ignore"):
            ratio = single(clip_norm) / (single(norm) + single(1e-6))
        coefficient = 1.0 if ratio > 1 else float(ratio)
    return scale, coefficient


def is_cast(weight: Tensor, master: Tensor) -> bool:
    """Whether 16-bit weights are the nearest to fp32 masters; ties may go away from zero too."""
    both = weight.held & master.held
    weight_bits, fp32 = weight.bits[both], master.bits[both].astype("<u4")
    if weight.value.dtype == "float16":
        with numpy.errstate(all="ignore"):
            casts = [fp32.view("<f4").astype("<f2").view("<u2")]
    else:
        lower = fp32 & 0xFFFF
        casts = [((fp32 >> 16) + up) & 0xFFFF for up in (lower > 0x8000, lower >= 0x8000)]
    nan = (fp32 & 0x7FFFFFFF) > 0x7F800000
    return bool((nan | numpy.any([weight_bits == cast for cast in casts], axis=0)).all())
