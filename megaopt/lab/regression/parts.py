"""The recorded parts of a training: tensors, or a rank's parts of them, and their digests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from megaopt.kernels.digest.codes import codes_of
from megaopt.kernels.place import Place
from megaopt.recording.digest import of_places
from megaopt.recording.files import Value, Writer
from megaopt.recording.table import Array, Rows

Part = tuple[Value, torch.Tensor]
"""A rank's part of a quantity: all of it, or elements that follow each other."""


def part(
    name: str,
    quantity: str,
    tensor: torch.Tensor,
    shape: Sequence[int] | None = None,
    start: int = 0,
) -> Part:
    """A tensor as it is recorded.

    Args:
        name: the parameter's.
        quantity: "weight", "master", a moment, or another tensor of the state.
        tensor: contiguous.
        shape: of the whole tensor; None: the tensor is whole.
        start: place of the tensor's first element in the whole one.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    whole = tuple(tensor.shape if shape is None else shape)
    return Value(name, quantity, dtype, whole, (start, 0, 0, tensor.numel())), tensor.detach()


def open_recording(folder: Path, rank: int, world: int, about: Mapping[str, Any]) -> Writer:
    """The writer of a rank's recording, which begins with what is to be known of the training."""
    return Writer(folder, rank, {"world": world, "level": "step", "every": 1, "training": about})


def rows_of(parts: Iterable[Part], writer: Writer, device: torch.device) -> Array:
    """The digests of parts, which are computed on a device, as the writer's rows.

    Every NaN counts as the same: its sign and payload come from the processor, and from which
    operation met it first. A NaN beside a number is a difference, and so is 0.0 beside -0.0.
    """
    entries = [(value, tensor.to(device)) for value, tensor in parts if tensor.numel()]
    places = [Place(0, value.place[0]) for value, _ in entries if value.place is not None]
    digests = of_places([tensor for _, tensor in entries], places).cpu()
    for number in digests[:, 2].nonzero().flatten().tolist():
        tensor = entries[number][1]
        alike = alike_codes(tensor).view(tensor.dtype)
        digests[number] = of_places([alike], [places[number]])[0].cpu()
    return Rows(numpy.array([writer.number(value) for value, _ in entries]), digests).array()


def flip_master_bit(parts: Iterable[Part]) -> None:
    """Flips the lowest mantissa bit of one element in the middle of the first fp32 master.

    Raises:
        RuntimeError: there is none, on this rank.
    """
    for value, tensor in parts:
        if value.quantity == "master" and tensor.dtype == torch.float32 and tensor.numel():
            bits = tensor.view(torch.int32).view(-1)
            bits[bits.numel() // 2] ^= 1
            return
    raise RuntimeError("this rank holds no element of an fp32 master")


def alike_codes(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns as integers of the same width, of every NaN that of torch.nan."""
    codes = codes_of(tensor)
    if not tensor.is_floating_point():
        return codes
    nan = codes_of(torch.tensor(math.nan).to(tensor.dtype))
    return codes.masked_fill(tensor.detach().isnan(), int(nan.item()))
