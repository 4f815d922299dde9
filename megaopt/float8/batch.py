"""fp8 weights in a step: their buffers, the cast, delayed scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from megaopt.batches import SCALE, Batch, copy_back
from megaopt.float8.delayed import update_scales
from megaopt.float8.foreign import ForeignWeight
from megaopt.float8.parts import Parts, Weight, start_of, weight_of
from megaopt.float8.ranks import group_of, order_of, put_together
from megaopt.float8.shard import Float8Shard
from megaopt.float8.weight import Float8Weight
from megaopt.kernels.formats import MASTERS
from megaopt.kernels.step.batch import Buffers, Cast, Extent, Formats
from megaopt.kernels.step.cast_launch import CastPlan
from megaopt.kernels.step.controls import SKIP
from megaopt.kernels.step.watch import Grads, Wanted

FP32_MASTER = MASTERS[torch.float32]


def kind_of(param: torch.Tensor) -> tuple[Any, ...]:
    """What parameters of one batch have in common beyond their formats: ranks, library, outputs."""
    weight = weight_of(param)
    if weight is None:
        return ()
    return group_of(param), type(weight), columnwise_of(weight) is not None


def columnwise_of(weight: Weight) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes and scales of blocks along columns, where the weight keeps them too."""
    return weight.columnwise if isinstance(weight, ForeignWeight) else None


def extent_of(param: torch.Tensor) -> Extent:
    """Which elements of the weight a parameter holds."""
    weight = weight_of(param)
    assert weight is not None
    columns = weight.shape[-1] if weight.dim() else 1
    shared = isinstance(param, Float8Shard)
    return Extent(weight.numel() // max(columns, 1), columns, start_of(param), shared)


def cast_of(param: torch.Tensor, direct: bool | None = None) -> Cast | None:
    """How a parameter's new values become fp8; None for a plain one.

    direct: as Float8Recipe.direct, in its place; None: the recipe's own.
    """
    weight = weight_of(param)
    if weight is None:
        return None
    recipe = weight.recipe if direct is None else replace(weight.recipe, direct=direct)
    return Cast(recipe, weight.dtype)


def first_master(param: torch.Tensor) -> torch.Tensor:
    """fp32 values that a master starts from: those that the weight was made of, if still there."""
    weight = weight_of(param)
    assert weight is not None
    values = weight.high_precision_initial_value()
    return part_of(weight.dequantize() if values is None else values, param)


def dequantized(param: torch.Tensor) -> torch.Tensor:
    """The fp32 values that a parameter's codes stand for."""
    weight = weight_of(param)
    assert weight is not None
    return part_of(weight.dequantize(), param)


def part_of(whole: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Of a tensor of a whole weight's shape what belongs to a parameter; fp32, its shape."""
    start = start_of(param)
    return whole.flatten()[start : start + param.numel()].view(param.shape).float()


def check_whole(param: torch.Tensor, where: str) -> None:
    """Raises ValueError for a part of a weight whose codes along columns would need all of it."""
    weight = weight_of(param)
    if weight is not None and columnwise_of(weight) and param.numel() != weight.numel():
        raise ValueError(
            f"{where}: a part ({param.numel()} of {weight.numel()} elements) of a weight with "
            "columnwise data is not allowed: the whole"
        )


def plan_formats(formats: Formats) -> Formats:
    """The formats that kernels step: without a master fp8 weights get one for the step."""
    return formats if formats.master.present else replace(formats, master=FP32_MASTER)


@dataclass
class Float8Batch(Batch):
    """The fp8 weights, or parts of them, of one device, combination of formats and group of ranks.

    The kernels step masters. A weight without one is dequantized into an fp32 master that lasts for
    the step (4 bytes a parameter of scratch).
    """

    _amaxes: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    _own_amaxes: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parts = Parts(self.params)

    @property
    def addresses(self) -> list[Any]:
        """None: the plan is given tensors, which are not those of the parameters."""
        return []

    def enter(self, grads: Grads, writes_grads: bool = False) -> None:
        """Before a step: gathers the tensors behind the weights, and amaxes that are 0."""
        # of what is a subclass to others only shape, gradient and the like are wanted here
        with torch._C.DisableTorchFunctionSubclass():
            self._parts.look()
            own = super().buffers(grads)
        own["weight"] = self._parts.codes
        self._written_grads = own["grad"] if writes_grads else []
        self._copies = {
            slot: [tensor.contiguous() for tensor in tensors] for slot, tensors in own.items()
        }
        if not self.formats.master.present:
            self._copies["master"] = [dequantized(param).flatten() for param in self.params]
        self.plan.look({**self._copies, **self._beside()})

    def _beside(self) -> Buffers:
        """Scales and amaxes of the whole weights."""
        parts = self._parts
        if not self._own_amaxes:
            sizes = [math.prod(w.recipe.scale_shape(w.shape)) for w in parts.weights]
            self._amaxes = torch.zeros(sum(sizes), device=self.device)
            self._own_amaxes = list(torch.split(self._amaxes, sizes))
        self._amaxes.zero_()
        columns = [columnwise_of(weight) for weight in parts.weights]
        outputs: Buffers = {}
        if columns[0] is not None:
            outputs["weight_columns"] = [codes for codes, _ in columns]  # type: ignore[misc]
            outputs["weight_columns_scale_inv"] = [inv for _, inv in columns]  # type: ignore[misc]
        return {
            **outputs,
            "weight_scale": parts.attributes("scale"),
            "weight_scale_inv": parts.attributes("scale_inv"),
            "weight_amax": self._own_amaxes,
        }

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share the weights; None where there are no others."""
        return group_of(self.params[0])

    def amaxes(self) -> list[tuple[int, torch.Tensor]]:
        """The parameters' numbers, and their weights' amaxes, which a step has raised."""
        orders = map(order_of, self.params, self.positions)
        return list(zip(orders, self._own_amaxes, strict=True))

    def why_not_captured(self) -> str | None:
        """None where a CUDA graph can repeat the step of these weights, else the reason."""
        if self.group is not None:
            return "fp8 weights are shared with other ranks, with which a graph would have to meet"
        if isinstance(weight_of(self.params[0]), ForeignWeight):
            return "another library's fp8 weights are told of new codes by the host"
        return None

    def leave(self, controls: torch.Tensor | None = None) -> None:
        """After a step, and after the ranks have put amaxes together: the weights are cast."""
        self.plan.cast()
        if self.formats.cast is not None and self.formats.cast.recipe.scaling == "delayed":
            self._move_scales(None if controls is None else controls[SKIP] != 0)
        self._parts.changed()
        copies = self._leave_grads()
        for slot in self.formats.state_slots:
            copy_back(self._own_states(slot), copies[slot])

    def _move_scales(self, skip: torch.Tensor | None) -> None:
        """The next step's scales, from this one's amaxes; others' libraries move their own."""
        parts = self._parts
        if isinstance(parts.weights[0], ForeignWeight):
            latest = parts.attributes("latest_amax")
            torch._foreach_copy_(
                latest, torch._foreach_maximum(latest, list[Any](self._own_amaxes))
            )
            return
        if isinstance(self.plan, CastPlan):
            self.plan.move_scales(parts.attributes("amax_history"))
            return
        for weight, amax in zip(parts.weights, self._own_amaxes, strict=True):
            assert isinstance(weight, Float8Weight)
            assert weight.latest_amax is not None
            weight.latest_amax.copy_(torch.maximum(weight.latest_amax, amax))
            update_scales(weight, skip)

    def wanted(self) -> Wanted:
        """As of plain weights; the parameters have no memory to look at."""
        wanted = super().wanted()
        dtypes = list(wanted.dtypes[: 2 + len(self.names)])
        dtypes[1] = self.params[0].dtype
        scales = [False, False, *(name.endswith(SCALE) for name in self.names)]
        return replace(wanted, dtypes=dtypes, scales=scales, contiguous=False)


def share_amaxes(batches: Sequence[Batch]) -> dict[dist.ProcessGroup, int]:
    """Between steps and casts: amaxes become the largest of all ranks; how many each group has."""
    shared: dict[dist.ProcessGroup, list[tuple[int, torch.Tensor]]] = {}
    for batch in batches:
        if isinstance(batch, Float8Batch) and batch.group is not None:
            shared.setdefault(batch.group, []).extend(batch.amaxes())
    return put_together(shared)
