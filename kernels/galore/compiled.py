"""The elementwise steps of GaLore's kernel "compiled", by torch.compile."""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import torch

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.optional_triton import INTERPRETED
from megaopt.kernels.place import Place
from megaopt.kernels.rules import Rule
from megaopt.kernels.step.reference import (
    step_with_words,
    words_of,
)

LIMIT = 64
"""Combinations of formats in one process; beyond torch's own limit, 8, it compiles no more."""
COMPILERS = ("g++", "clang++", "c++")


def why_not_compiled(device: torch.device) -> str | None:
    """Returns the reason why torch.compile does not work on the device; None where it does."""
    from torch._dynamo.eval_frame import is_dynamo_supported  # half a second

    if not is_dynamo_supported():
        return "torch.compile does not support this Python"
    if device.type == "cpu":
        has_compiler = any(map(shutil.which, COMPILERS))
        return (
            None if has_compiler else f"torch.compile needs a C++ compiler ({', '.join(COMPILERS)})"
        )
    if INTERPRETED:
        return "TRITON_INTERPRET=1 is set: torch.compile's kernels are Triton's"
    from torch.utils._triton import has_triton

    return None if has_triton() else "torch.compile needs Triton and a GPU that it works on"


class CompiledStep:
    """`step_tensor`, compiled once for each rule and formats, for tensors of any shape."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Formats], Any] = {}

    def __call__(
        self,
        tensors: dict[str, torch.Tensor],
        formats: Formats,
        rule: Rule,
        scalars: tuple[float, ...],
        controls: torch.Tensor | None = None,
        place: Place = Place(0),  # noqa: B008 a tuple
    ) -> None:
        """Steps as megaopt.kernels.step.reference.step_tensor, by rules without lanes."""
        weight = tensors["weight"]
        # a random word for each number, made outside of what is compiled
        words = words_of(weight, rule, scalars, place, formats.draws)
        # as a tensor: a step with other numbers is not another program
        row = torch.as_tensor(scalars[: rule.row_length], device=weight.device).unbind()
        # flat, as torch.compile takes a Parameter's shape as fixed; a tensor in two slots is one
        flat = {id(tensor): tensor.detach().view(-1) for tensor in tensors.values()}
        flat_tensors = {slot: flat[id(tensor)] for slot, tensor in tensors.items()}
        key = (rule.name, formats)
        if key not in self._known:
            # dynamic: sizes are not fixed, so that one program steps tensors of all shapes
            function = partial(step_with_words, formats=formats, rule=rule)
            self._known[key] = torch.compile(function, dynamic=True)
        with torch._dynamo.config.patch(recompile_limit=LIMIT):
            self._known[key](
                flat_tensors, row=row, controls=controls, first=place.first, words=words
            )
