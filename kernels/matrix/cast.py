"""Steps the masters of fp8 weights as matrices, and makes codes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import torch

from megaopt.kernels.chunks.batch import Buffers, Formats
from megaopt.kernels.formats import NONE
from megaopt.kernels.matrix.plan import FLOAT32
from megaopt.kernels.rules.muon import keep, keep_reference


def master_formats(formats: Formats) -> Formats:
    """Returns the formats of a step of the fp32 masters, in the weights' place."""
    return replace(formats, weight=FLOAT32, master=NONE, cast=None)


class CastMatrixPlan:
    """A plan of matrices that steps fp32 masters, and a plan of fp8 weights that makes their codes.

    Args:
        formats: of every buffer, with a cast.
        matrices: the plan of the masters, of `master_formats`.
        make: the plan of fp8 weights: of formats and a rule.
    """

    fills = False

    def __init__(self, formats: Formats, matrices: Any, make: Callable[..., Any]) -> None:
        assert formats.matrix is not None
        self.formats, self.stale = formats, True
        self.addresses: dict[str, numpy.ndarray] = {}  # `look` is told the tensors
        self._matrices = matrices
        # the codes' pass stores masters as they are, by a rule that leaves them so
        rule, updates = (
            formats.matrix.rule.apply,
            {"update": keep, "update_reference": keep_reference},
        )
        keeping = replace(rule, name=f"{rule.name}_keep", reads_param=True, **updates)
        cast_formats = replace(
            formats, grad=FLOAT32, moments=(), moment_names=(), maximize=False, rounds_grad=False,
            matrix=None,
        )  # fmt: skip
        self._casts = make(cast_formats, keeping)
        self.accumulate = matrices.accumulate
        self.cast, self.move_scales = self._casts.cast, self._casts.move_scales

    @property
    def many_calls(self) -> bool:
        """A step is many calls on the host, as Plan has it."""
        return bool(self._matrices.many_calls or self._casts.many_calls)

    def look(self, buffers: Buffers) -> None:
        """Notes the buffers for the step."""
        # the plan of the matrices steps the masters as if they were the weights
        masters, slots = buffers["master"], self._matrices.formats.slots
        self._matrices.look({slot: {**buffers, "weight": masters}[slot] for slot in slots})
        # the codes' pass takes nothing of a gradient: masters stand in its place
        self._casts.look({**buffers, "grad": masters})

    def ready(self, scalars: Any) -> Any:
        """Takes the memory of the codes' pass; returns the rows."""
        self._casts.ready(scalars)
        return self._matrices.ready(scalars)

    def step(self, scalars: Any, controls: torch.Tensor | None = None) -> None:
        """Takes one step of the masters, and finds the amaxes of what they become."""
        # masters first: the second pass reads what they have become
        self._matrices.step(scalars, controls)
        self._casts.step(scalars, controls)
