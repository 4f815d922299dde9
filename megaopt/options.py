"""What an optimizer was asked for, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from megaopt.checks import (
    COUNT,
    DECAY,
    NOT_NEGATIVE,
    POSITIVE,
    is_dense,
    listed,
    number,
    one_of,
    refuse,
    same,
    shown,
)
from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.contracts import CONTRACTS
from megaopt.kernels.formats import MASTERS, MOMENTS, NONE, WEIGHTS, Format, names

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

CHOICES: dict[str, tuple[Any, ...]] = {
    "contract": tuple(CONTRACTS),
    "backend": ("auto", *BACKENDS),
    "dtype": (None, torch.float32),
    "master_weight_dtype": (torch.float32, torch.float16),
    "exp_avg_dtype": tuple(MOMENTS),
    "exp_avg_sq_dtype": tuple(MOMENTS),
    "nonfinite": NONFINITE,
    "direct_cast": (None, *FLAGS),
    "round_scaled_grads": FLAGS,
    "on_external_write": EXTERNAL_WRITES,
    "write_unscaled_grads": FLAGS,
    "store_param_remainders": FLAGS,
    "adam_w_mode": FLAGS,
    "capturable": FLAGS,
}
"""What each option may be."""

HYPER = {"lr": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE}
"""The numbers of a group, beside betas and the step count."""

UNSUPPORTED = ("amsgrad", "maximize")
"""Features that torch's groups name, which must be off."""

MARKS = ("contract", "adam_w_mode")
"""Options that every group and every state dict names: they say what the bits of a state mean.

They are keys of the groups from the start, as torchtitan and torch.distributed.checkpoint read from
a flattened state dict only what the optimizer's own groups have.
"""


@dataclass(frozen=True)
class Options:
    """The choices that hold for all groups of an optimizer, as FusedAdam documents them."""

    dtype: torch.dtype | None
    master_weight_dtype: torch.dtype
    exp_avg_dtype: torch.dtype
    exp_avg_sq_dtype: torch.dtype
    store_param_remainders: bool
    adam_w_mode: bool
    contract: str
    backend: str
    capturable: bool = False
    nonfinite: str = "propagate"
    direct_cast: bool | None = None
    round_scaled_grads: bool = False
    on_external_write: str = "refresh"
    write_unscaled_grads: bool = False

    def __post_init__(self) -> None:
        """Takes TransformerEngine's names over; raises ValueError for what is not allowed."""
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(self, name) is torch.uint8:  # as TransformerEngine calls fp8, always e4m3
                object.__setattr__(self, name, torch.float8_e4m3fn)
        for name, allowed in CHOICES.items():
            one_of(name, getattr(self, name), allowed)
        self._check_moment("exp_avg_dtype")
        self._check_moment("exp_avg_sq_dtype")
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
            allowed = (str(other) for other in MOMENTS if other not in TORCH_REFUSES)
            raise ValueError(
                f"{name}={dtype} is not allowed with contract='torch': {TORCH_REFUSES[dtype]}; "
                f"{', '.join(allowed)}"
            )

    @property
    def marks(self) -> dict[str, Any]:
        """What every group and every state dict names."""
        return {name: getattr(self, name) for name in MARKS}

    def moment_format(self, dtype: torch.dtype) -> Format:
        """How a moment is stored: under contract torch fp16 has no scale, as torch keeps it."""
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


def check_group(group: Mapping[str, Any], where: str, lr_is_needed: bool = True) -> None:
    """Raises ValueError where a group's hyper-parameter is missing, out of range or NaN.

    lr_is_needed: it may not be None, as it may before the first step.
    """
    missing = [n for n in (*HYPER, "betas", "bias_correction", "step") if n not in group]
    if missing:
        raise ValueError(f"{where} must have {', '.join(missing)}, got {listed(group)}")
    if group["lr"] is None and not lr_is_needed:
        group = {**group, "lr": 0.0}
    for name, allowed in HYPER.items():
        number(f"{where}: {name}", group[name], allowed)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        refuse(f"{where}: betas", "two numbers", betas)
    for index, beta in enumerate(betas):
        number(f"{where}: betas[{index}]", beta, DECAY)
    one_of(f"{where}: bias_correction", group["bias_correction"], FLAGS)
    step = group["step"]
    if not isinstance(step, int):
        refuse(f"{where}: step", COUNT.allowed, step)
    number(f"{where}: step", step, COUNT)


def check_unsupported(group: Mapping[str, Any], where: str) -> None:
    """Raises ValueError where a group asks for a feature that there is not."""
    for name in UNSUPPORTED:
        if group.get(name, False) is not None:
            one_of(f"{where}: {name}", group.get(name, False), (False,))


def check_group_options(group: Mapping[str, Any], options: Options, where: str) -> None:
    """Raises ValueError where a new group asks for what is one choice for all groups."""
    check_unsupported(group, where)
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
        raise ValueError(f"{where}: dtype {weight.dtype} is not allowed: {names(WEIGHTS)}")
    remainders = options.store_param_remainders and masters
    if remainders and float8:
        raise ValueError(
            f"{where}: store_param_remainders=True is not allowed for fp8 weights: a remainder is "
            "the half of a master that its bf16 weight does not hold"
        )
    if remainders and weight.dtype == torch.float16:
        raise ValueError(
            f"{where}: store_param_remainders=True is not allowed for torch.float16 weights: "
            "torch.bfloat16 (whose bits are an fp32 master's upper half), or torch.float32"
        )
