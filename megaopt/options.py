"""What an optimizer was asked for, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch

from megaopt.checks import (
    COUNT,
    DECAY,
    POSITIVE,
    Range,
    is_dense,
    listed,
    number,
    one_of,
    refuse,
    same,
    shown,
)
from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.formats import MASTERS, MOMENTS, NONE, WEIGHTS, Format

NONFINITE = ("propagate", "skip", "error")
"""What an infinity or NaN in a gradient does: goes through the step's arithmetic; leaves the whole
step out; raises FloatingPointError."""

EXTERNAL_WRITES = ("refresh", "error", "ignore")
"""What a step does about a weight that was written outside the optimizer: it sets the master to the
written elements, and warns once; it raises RuntimeError; it goes on from the master."""

TORCH_REFUSES = {
    torch.float8_e4m3fn: "torch's optimizers keep none in fp8",
}
"""Moments that contract torch does not cover, and why."""

FLAGS = (True, False)

VARIANTS = ("amsgrad", "maximize")
"""Options that torch's groups name too."""


@dataclass(frozen=True)
class Numbers:
    """What a group of an optimizer says in numbers, beside its step count."""

    ranges: Mapping[str, Range]
    """By name; lr is the first."""
    has_betas: bool = False
    """There is a pair of decays, in [0, 1), under the key betas."""
    flags: tuple[str, ...] = ()
    """What is True or False."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All keys."""
        return (*self.names_but_step, "step")

    @cached_property
    def names_but_step(self) -> tuple[str, ...]:
        """All keys but the step count's."""
        lr, *others = self.ranges
        betas = ("betas",) if self.has_betas else ()
        return (lr, *betas, *others, *self.flags)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The choices that hold for all groups of an optimizer, as FusedAdam documents them.

    A subclass for each optimizer adds its own, among them `<moment>_dtype` for each moment.
    """

    NUMBERS: ClassVar[Numbers]
    COUNTS_STEPS: ClassVar[bool] = True
    """Another library's optimizer of this kind counts steps; otherwise a state means that it took
    at least one."""
    MARKS: ClassVar[tuple[str, ...]] = ("contract",)
    """Options that every group and every state dict names: they say what the bits of a state mean.

    They are keys of the groups from the start, as torchtitan and torch.distributed.checkpoint read
    from a flattened state dict only what the optimizer's own groups have.
    """
    CHOICES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "contract": ("ieee",),
        "backend": ("auto", *BACKENDS),
        "dtype": (None, torch.float32),
        "master_weight_dtype": (torch.float32, torch.float16),
        "nonfinite": NONFINITE,
        "direct_cast": (None, *FLAGS),
        "round_scaled_grads": FLAGS,
        "on_external_write": EXTERNAL_WRITES,
        "write_unscaled_grads": FLAGS,
        "store_param_remainders": FLAGS,
        "capturable": FLAGS,
        "maximize": FLAGS,
    }
    """What each option may be."""

    dtype: torch.dtype | None = None
    master_weight_dtype: torch.dtype = torch.float32
    store_param_remainders: bool = False
    contract: str = "ieee"
    backend: str = "auto"
    capturable: bool = False
    nonfinite: str = "propagate"
    direct_cast: bool | None = None
    round_scaled_grads: bool = False
    on_external_write: str = "refresh"
    write_unscaled_grads: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        """Takes TransformerEngine's names over; raises ValueError for what is not allowed."""
        moments = [f.name for f in fields(self) if f.name.endswith("_dtype")]
        moments.remove("master_weight_dtype")
        for name in moments:
            if getattr(self, name) is torch.uint8:  # as TransformerEngine calls fp8, always e4m3
                object.__setattr__(self, name, torch.float8_e4m3fn)
        for name, allowed in self.CHOICES.items():
            one_of(name, getattr(self, name), allowed)
        for name in moments:
            key = getattr(self, name)
            if not (isinstance(key, (str, torch.dtype)) and key in MOMENTS):
                one_of(name, key, MOMENTS.allowed)
        for name in moments:
            self._check_moment(name)
        if self.capturable and self.nonfinite == "error":
            raise ValueError(
                "nonfinite='error' is not allowed with capturable=True: nothing waits for the "
                "gradients then; 'propagate' or 'skip'"
            )
        if self.dtype is not None and self.master_weight_dtype != self.dtype:
            raise ValueError(
                f"master_weight_dtype must be {self.dtype}, as dtype={self.dtype} asks for, got "
                f"{self.master_weight_dtype}; for masters in that leave dtype out and pass "
                "master_weights=True"
            )
        if self.store_param_remainders and self.master_weight_dtype != torch.float32:
            raise ValueError(
                "store_param_remainders=True keeps exact fp32 masters: master_weight_dtype="
                f"{self.master_weight_dtype} is not allowed beside it, only torch.float32"
            )

    def _check_moment(self, name: str) -> None:
        dtype = getattr(self, name)
        if self.contract == "torch" and dtype in TORCH_REFUSES:
            allowed = (str(other) for other in MOMENTS.allowed if other not in TORCH_REFUSES)
            raise ValueError(
                f"{name}={dtype} is not allowed with contract='torch': {TORCH_REFUSES[dtype]}; "
                f"{', '.join(allowed)}"
            )

    def check_numbers(self, group: Mapping[str, Any], where: str) -> None:
        """For numbers of a group that do not go together: a subclass raises ValueError."""

    @property
    def marks(self) -> dict[str, Any]:
        """What every group and every state dict names."""
        return {name: getattr(self, name) for name in self.MARKS}

    def moment_format(self, moment: str) -> Format:
        """How a moment is stored: under contract torch fp16 has no scale, as torch keeps it."""
        dtype = getattr(self, f"{moment}_dtype")
        plain = self.contract == "torch" and dtype == torch.float16
        return WEIGHTS[dtype] if plain else MOMENTS[dtype]

    def master_format(
        self, weight_dtype: torch.dtype, wanted: bool, float8: bool = False
    ) -> Format:
        """How the master of a weight of this dtype is stored; NONE where it has none.

        float8: the weight is kept in fp8; weight_dtype is what it is to everybody.
        """
        if not wanted or (weight_dtype == torch.float32 and not float8):
            return NONE
        return MASTERS[torch.int16 if self.store_param_remainders else self.master_weight_dtype]


def check_group(
    group: Mapping[str, Any], options: Options, where: str, lr_is_needed: bool = True
) -> None:
    """Raises ValueError where a group's hyper-parameter is missing, out of range or NaN.

    lr_is_needed: it may not be None, as it may before the first step.
    """
    numbers = options.NUMBERS
    missing = [name for name in numbers.names if name not in group]
    if missing:
        raise ValueError(f"{where} must have {', '.join(missing)}, got {listed(group)}")
    if group["lr"] is None and not lr_is_needed:
        group = {**group, "lr": 0.0}
    for name, allowed in numbers.ranges.items():
        number(f"{where}: {name}", group[name], allowed)
    if numbers.has_betas:
        _check_betas(group["betas"], where)
    for name in numbers.flags:
        one_of(f"{where}: {name}", group[name], FLAGS)
    step = group["step"]
    if not isinstance(step, int):
        refuse(f"{where}: step", COUNT.allowed, step)
    number(f"{where}: step", step, COUNT)
    options.check_numbers(group, where)


def _check_betas(betas: Any, where: str) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        refuse(f"{where}: betas", "two numbers", betas)
    for index, beta in enumerate(betas):
        number(f"{where}: betas[{index}]", beta, DECAY)


def check_variant(group: Mapping[str, Any], options: Options, where: str) -> None:
    """Raises ValueError where a group asks for another variant than the optimizer's."""
    for name in VARIANTS:
        own = getattr(options, name, False)
        if group.get(name, own) is not None:
            one_of(f"{where}: {name}", group.get(name, own), (own,))


def check_group_options(group: Mapping[str, Any], options: Options, where: str) -> None:
    """Raises ValueError where a new group asks for what is one choice for all groups."""
    check_variant(group, options, where)
    for name in ("master_weights", "use_decoupled_grad"):
        if name in group:
            raise ValueError(
                f"{where}: {name} is not allowed in a group: it is an argument of the optimizer"
            )
    # torch's groups all name capturable, which moves no number
    for name in {field.name for field in fields(options)} - {"capturable"}:
        own = getattr(options, name)
        if name in group and not same(group[name], own):
            raise ValueError(
                f"{where}: {name} must be {own!r}, the optimizer's own argument, which holds for "
                f"all groups, got {shown(group[name])}"
            )


def check_clipping(clip_norm: Any, coefficient: Any) -> None:
    """Raises ValueError for a step's arguments that are not allowed."""
    if clip_norm is not None:
        if isinstance(clip_norm, torch.Tensor):
            refuse("clip_norm", "a number of the host; clip_coefficient may be a tensor", clip_norm)
        number("clip_norm", clip_norm, POSITIVE)
    if coefficient is None:
        return
    fits = is_dense(coefficient) and coefficient.dtype == torch.float32
    if not fits or coefficient.numel() != 1:
        refuse("clip_coefficient", "one element of torch.float32", coefficient)
    if clip_norm is not None:
        raise ValueError(f"clip_norm={clip_norm!r} is not allowed beside clip_coefficient: either")


def has_shared_elements(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor lie in one place, as expand makes them."""
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def check_weight(
    weight: torch.Tensor, where: str, options: Options, masters: bool, float8: bool = False
) -> None:
    """Raises ValueError for a parameter that this optimizer cannot own.

    float8: it is kept in fp8, and has no memory of its own to look at.
    """
    if not is_dense(weight):
        layout = "nested" if weight.is_nested else weight.layout
        raise ValueError(f"{where}: layout {layout} is not allowed: torch.strided")
    if has_shared_elements(weight):
        raise ValueError(
            f"{where}: strides {weight.stride()} of shape {tuple(weight.shape)} are not allowed: "
            "each element in memory of its own"
        )
    if weight.dtype not in WEIGHTS:
        raise ValueError(f"{where}: dtype {weight.dtype} is not allowed: {WEIGHTS}")
    remainders = options.store_param_remainders and masters
    if remainders and float8:
        raise ValueError(
            f"{where}: store_param_remainders=True is not allowed for fp8 weights: a remainder is "
            "the half of a master that its bf16 weight does not hold"
        )
    required = options.master_format(weight.dtype, masters, float8).requires_weight
    if required not in (None, weight.dtype):
        raise ValueError(
            f"{where}: store_param_remainders=True is not allowed for {weight.dtype} weights: "
            f"{required} (whose bits are an fp32 master's upper half), or torch.float32"
        )
