"""Short runs of FusedAdam on the same numbers in different ways, and the first bit that differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megaopt import FusedAdam
from megaopt.commands.bits import first_unequal
from megaopt.float8 import Float8Weight
from megaopt.kernels.backends import BACKENDS

__all__ = ["REFERENCE", "SHAPES", "Place", "Tensors", "differ", "numbers", "places", "train"]

Tensors = dict[str, Tensor]
"""Weights and states by name, on the CPU."""

# a scalar, less than a program takes at a time, and more
SHAPES = ((), (33, 31), (2049,))
STATES = ("master_param", "exp_avg", "exp_avg_sq")
SCALES = tuple(f"{name}_scale" for name in STATES)
# a subnormal, a negative zero, and large and small numbers
SPECIAL = (1e-40, -0.0, 3e4, -6e-8)


@dataclass(frozen=True)
class Place:
    """A backend on a device."""

    backend: Any
    """A name of BACKENDS."""
    device: torch.device

    def __str__(self) -> str:
        return f"{self.backend} on {self.device.type}"


REFERENCE = Place("reference", torch.device("cpu"))


def places() -> list[Place]:
    """Where contract ieee can be stepped here, the reference on the CPU first."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    found = [Place(name, device) for device in devices for name in BACKENDS]
    works = [each for each in found if BACKENDS[each.backend].why_not(each.device) is None]
    return sorted(works, key=lambda place: place != REFERENCE)


def numbers(shape: Sequence[int], seed: int) -> Tensor:
    """fp32 on the CPU: normal ones of many magnitudes, the first of them special."""
    # drawn on the CPU: a GPU's generator gives other numbers for the same seed
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, 3, tuple(shape), generator=generator)
    drawn = torch.ldexp(torch.randn(tuple(shape), generator=generator), exponents)
    special = torch.tensor(SPECIAL)[: drawn.numel() // 2]
    drawn.view(-1)[: len(special)] = special
    return drawn


def train(
    place: Place,
    options: dict[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
    shapes: Sequence[Sequence[int]] = SHAPES,
    recipe: str | None = None,
    cut: bool = False,
    steps: int = 3,
    clip_norm: float | None = None,
) -> Tensors:
    """Weights, states and the norm after each of some steps.

    Args:
        place: where.
        options: of FusedAdam, lr and decay aside.
        dtype: of weights and gradients.
        shapes: of the weights; with a recipe of two dimensions.
        recipe: makes fp8 weights.
        cut: the optimizer is given two unaligned views of each weight in its place.
        steps: how many.
        clip_norm: of `step`.

    Returns:
        Whole tensors, also of weights that were cut.
    """
    weights = [
        _weight(numbers(shape, n).to(dtype).to(place.device), recipe)
        for n, shape in enumerate(shapes)
    ]
    pieces = [_cut(weight) if cut else [weight] for weight in weights]
    given = [piece for several in pieces for piece in several]
    made: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, **options}
    optimizer = FusedAdam(given, backend=place.backend, **made)
    found: Tensors = {}
    for step in range(steps):
        for number, (weight, several) in enumerate(zip(weights, pieces, strict=True)):
            grad = numbers(weight.shape, 1000 * (step + 1) + number).to(dtype).to(place.device)
            _give(several, grad)
        optimizer.step(clip_norm=clip_norm)
        if clip_norm is not None:
            found[f"norm at step {step + 1}"] = optimizer.grad_norm.cpu().clone()
        for number, (weight, several) in enumerate(zip(weights, pieces, strict=True)):
            where = f"of weight {number} after step {step + 1}"
            tensors = _tensors(optimizer, weight, several)
            found |= {f"{name} {where}": tensor for name, tensor in tensors.items()}
    return found


def _weight(values: Tensor, recipe: str | None) -> Parameter:
    return Parameter(values if recipe is None else Float8Weight.from_values(values, recipe))


def _cut(weight: Parameter) -> list[Parameter]:
    flat = weight.detach().view(-1)
    middle = flat.numel() // 2 | 1
    return [Parameter(part) for part in (flat[:middle], flat[middle:])]


def _give(pieces: list[Parameter], grad: Tensor) -> None:
    if len(pieces) == 1:
        pieces[0].grad = grad
        return
    start = 0
    for piece in pieces:
        piece.grad = grad.view(-1)[start : start + piece.numel()]
        start += piece.numel()


def _tensors(optimizer: FusedAdam, weight: Parameter, pieces: list[Parameter]) -> Tensors:
    """Copies of a weight and its states, put together."""
    own = weight.tensors() if isinstance(weight, Float8Weight) else {"weight": weight.detach()}
    found = {name: tensor.cpu().clone() for name, tensor in own.items()}
    for name in (*STATES, *SCALES):
        parts = [optimizer.state[piece].get(name) for piece in pieces]
        held = [part.reshape(-1) for part in parts if part is not None]
        if held:
            found[name] = torch.cat(held).cpu()
    return found


def differ(found: Tensors, expected: Tensors) -> str | None:
    """The first place where tensors differ in a bit, NaNs compared by place; None: nowhere."""
    if found.keys() != expected.keys():
        odd = sorted(found.keys() ^ expected.keys())
        return f"{odd[0]} is there on one side alone"
    for name, tensor in expected.items():
        ours, theirs = found[name].reshape(-1), tensor.reshape(-1)
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return f"{name}: {ours.dtype} {len(ours)}, and not {theirs.dtype} {len(theirs)}"
        if (unequal := first_unequal(ours, theirs)) is not None:
            return f"{name}, element {unequal.place}: {unequal.bits}, and not {unequal.others}"
    return None
