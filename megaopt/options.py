"""What an optimizer was asked for, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.contracts import CONTRACTS
from megaopt.kernels.formats import MASTERS, MOMENTS, NONE, WEIGHTS, Format, names
from megaopt.kernels.rules.base import round_to_fp32

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
        one_of("contract", self.contract, CONTRACTS)
        one_of("backend", self.backend, ("auto", *BACKENDS))
        one_of("dtype", self.dtype, (None, torch.float32))
        one_of("master_weight_dtype", self.master_weight_dtype, (torch.float32, torch.float16))
        self._check_moment("exp_avg_dtype")
        self._check_moment("exp_avg_sq_dtype")
        one_of("nonfinite", self.nonfinite, NONFINITE)
        one_of("direct_cast", self.direct_cast, (None, True, False))
        one_of("round_scaled_grads", self.round_scaled_grads, (True, False))
        one_of("on_external_write", self.on_external_write, EXTERNAL_WRITES)
        one_of("write_unscaled_grads", self.write_unscaled_grads, (True, False))
        if self.capturable and self.nonfinite == "error":
            raise ValueError(
                "nonfinite='error' is not allowed with capturable=True: nothing waits for the "
                "gradients then; 'propagate' or 'skip'"
            )
        if self.dtype is not None and self.master_weight_dtype != self.dtype:
            raise ValueError(
                f"dtype={self.dtype} asks for fp32 masters and master_weight_dtype="
                f"{self.master_weight_dtype} for others: for those leave dtype out and pass "
                "master_weights=True"
            )
        if self.store_param_remainders and self.master_weight_dtype != torch.float32:
            raise ValueError(
                "store_param_remainders=True keeps exact fp32 masters: master_weight_dtype="
                f"{self.master_weight_dtype} is not allowed beside it, only torch.float32"
            )

    def _check_moment(self, name: str) -> None:
        if getattr(self, name) == torch.uint8:  # as TransformerEngine calls fp8, always e4m3
            object.__setattr__(self, name, torch.float8_e4m3fn)
        dtype = getattr(self, name)
        one_of(name, dtype, MOMENTS)
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


def one_of(name: str, value: object, allowed: Any) -> None:
    """Raises ValueError unless the value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not allowed: one of {', '.join(map(str, allowed))}")


def check_group(group: Mapping[str, Any], where: str, lr_is_needed: bool = True) -> None:
    """Raises ValueError where a group's hyper-parameter is out of range or NaN.

    lr_is_needed: it may not be None, as it may before the first step.
    """
    if group["lr"] is None:
        if lr_is_needed:
            raise ValueError(f"{where}: lr must be a number >= 0, got None")
        group = {**group, "lr": 0.0}

    def check(name: str, value: object, fits: bool, allowed: str) -> None:
        if not fits:
            raise ValueError(f"{where}: {name}={value!r} is not allowed: {allowed}")

    lr, eps, weight_decay = (
        number(group[name], f"{where}: {name}") for name in ("lr", "eps", "weight_decay")
    )
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        fits = value >= 0 and round_to_fp32(value) < math.inf
        check(name, group[name], fits, "a finite number, at least 0, in fp32")
    betas = group["betas"]
    check("betas", betas, isinstance(betas, (tuple, list)) and len(betas) == 2, "two numbers")
    for index, beta in enumerate(betas):
        fits = 0 <= number(beta, f"{where}: betas[{index}]") < 1
        check(f"betas[{index}]", beta, fits, "at least 0, less than 1")
    step = group["step"]
    check("step", step, isinstance(step, int) and step >= 0, "a whole number, at least 0")


def check_group_options(group: Mapping[str, Any], options: Options, where: str) -> None:
    """Raises ValueError where a new group asks for what is one choice for all groups."""
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise ValueError(f"{where}: {name}={group[name]!r} is not allowed: False")
    for name in ("master_weights", "use_decoupled_grad"):
        if name in group:
            raise ValueError(
                f"{where}: {name} is not allowed in a group: it is an argument of the optimizer"
            )
    # torch's groups all name capturable, which moves no number
    for name in {field.name for field in fields(options)} - {"capturable"}:
        own = getattr(options, name)
        if name in group and group[name] != own:
            raise ValueError(
                f"{where}: {name}={group[name]!r} is not allowed: {own!r}, the optimizer's own "
                "argument, which holds for all groups"
            )


def check_clipping(clip_norm: Any, coefficient: Any) -> None:
    """Raises ValueError for a step's arguments that are not allowed."""
    if clip_norm is not None:
        if isinstance(clip_norm, torch.Tensor):
            raise ValueError(
                f"clip_norm={clip_norm!r} is not allowed: a number of the host; clip_coefficient "
                "may be a tensor"
            )
        if not 0 < round_to_fp32(number(clip_norm, "clip_norm")) < math.inf:
            raise ValueError(
                f"clip_norm={clip_norm!r} is not allowed: a finite number above 0, in fp32"
            )
    if coefficient is None:
        return
    is_tensor = isinstance(coefficient, torch.Tensor)
    if not is_tensor or coefficient.numel() != 1 or coefficient.dtype != torch.float32:
        raise ValueError(
            f"clip_coefficient={coefficient!r} is not allowed: one element of torch.float32"
        )
    if clip_norm is not None:
        raise ValueError(f"clip_norm={clip_norm!r} is not allowed beside clip_coefficient: either")


def number(value: Any, name: str) -> float:
    """A number or one-element tensor as a Python float; ValueError for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(
            f"{name} is a tensor of shape {tuple(value.shape)}: one element is allowed"
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} is not allowed: a number") from None


def has_shared_elements(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor lie in one place, as expand makes them."""
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def check_weight(
    weight: torch.Tensor, where: str, options: Options, masters: bool, float8: bool = False
) -> None:
    """Raises ValueError for a parameter that this optimizer cannot own.

    float8: it is kept in fp8, and has no memory of its own to look at.
    """
    if weight.layout != torch.strided:
        raise ValueError(f"{where}: layout {weight.layout} is not allowed: torch.strided")
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
