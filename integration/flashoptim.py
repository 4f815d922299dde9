"""flashoptim 0.1's optimizers and helpers under their names, over this package's.

Changing the import keeps a script; the bits are this package's, and not flashoptim's: 8-bit moments
are rounded stochastically, the fused step has the bits of the unfused one, and a resume those of
the run. flashoptim itself is not needed.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import megaopt
from megaopt.models import cast as casting
from megaopt.models import fp32 as model_state
from megaopt.models import release as gradient_release
from megaopt.models.release import GradientRelease as GradientReleaseHandle
from megaopt.optimizer import FusedOptimizer
from megaopt.options.checks import one_of, refuse, shown

__all__ = [
    "FlashAdam",
    "FlashAdamW",
    "FlashLion",
    "FlashSGD",
    "FlashSGDW",
    "GradientReleaseHandle",
    "cast_model",
    "enable_gradient_release",
]

MASTERS: dict[int | None, dict[str, Any]] = {
    # to nearest, masters of 24 bits stand still where an update is below half of their last place
    24: {"master_weights": True, "master_weight_dtype": "remainder8_stochastic"},
    32: {"master_weights": True, "master_weight_dtype": "remainder16"},
    None: {"master_weights": False, "weight_rounding": "stochastic"},
}
"""What master_weight_bits asks for."""

ALLOW_INEFFECTIVE = "FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS"
"""flashoptim's variable: where it is set and not empty, models of fp32 weights take any bits."""

QUANTIZED = {
    "exp_avg": "block_e4m3",
    "exp_avg_sq": "block_e5m3",
    "momentum_buffer": "block_e4m3",
}
"""How quantize=True stores each moment."""

RUNNING = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Layers that selective=True keeps; torch's own take 16-bit inputs beside fp32 weights."""


SHARED = """\
Args:
    {rule}: as megaopt.{base} takes them.
    {more}quantize: True: moments of 8 bits in blocks of 128 elements, "block_e4m3" and, for
        exp_avg_sq, "block_e5m3". The codes are not flashoptim's: a block's scale is a power of two
        in a byte, where flashoptim has one in fp16 for 32 elements, and rounding is stochastic,
        where flashoptim rounds to nearest. Of parameters with fewer than 4,096 elements, 65,536 in
        one dimension, or with rows of no whole blocks, moments are fp32. False: moments are fp32,
        of bf16 weights too.
    compress_state_dict: True or False alike: a state dict has the codes and scales, which is exact;
        flashoptim's False writes them out in bf16.
    master_weight_bits: of bf16 weights. 24: a byte beside the weight, rounded stochastically
        ("remainder8_stochastic"). 32: two bytes beside the weight, which are exact fp32 masters
        ("remainder16"); flashoptim's lose the last bit of some. None: weights alone, rounded
        stochastically, where flashoptim rounds to nearest. fp32 weights have no masters.
    check_numerics: only False. What it looks for, updates below half of a weight's last place,
        loses nothing where weights or masters are rounded stochastically.
    fused: True: the kernels where the parameters are on a GPU; False: plain torch, to the same
        bits.
    seed: of the random bits, from 0 to 2**64 - 1; not flashoptim's.

Raises:
    ValueError: as megaopt.{base}; {raised}check_numerics is True;
        master_weight_bits, by default too, is not None where all weights are fp32, as in
        flashoptim (FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS allows it here and there), or
        for fp16 weights.
"""
"""What the docstrings of all of flashoptim's optimizers go on with."""

OURS = (megaopt.FusedAdam, megaopt.FusedLion, megaopt.FusedSGD)
OWN = ("quantize", "compress_state_dict", "master_weight_bits", "check_numerics", "fused", "seed")
DECOUPLE = (
    "decouple_lr: only False: weight_decay / lr in the place of weight_decay, lr being the first\n"
    "        one, decays by the same amount.\n    "
)


class _Flash(FusedOptimizer):
    """What flashoptim's optimizers have in common."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Gives the optimizers of this file the docstring of all their arguments."""
        super().__init_subclass__(**arguments)
        if cls.__module__ != __name__:
            return
        names = list(inspect.signature(cls).parameters)
        decouples = "decouple_lr" in names
        shared = SHARED.format(
            rule=", ".join(name for name in names if name not in (*OWN, "decouple_lr")),
            base=next(base.__name__ for base in cls.__mro__ if base in OURS),
            more=DECOUPLE if decouples else "",
            raised="decouple_lr, " if decouples else "",
        )
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{shared}"

    def _check_param(self, param: torch.Tensor, label: str) -> None:
        if _bits_of(self) is not None and param.dtype == torch.float16:
            raise ValueError(
                f"{label}: master_weight_bits must be None for torch.float16 weights, got "
                f"{_bits_of(self)}: such masters lie beside bf16 weights; "
                "megaopt.FusedAdam(..., master_weights=True, master_weight_dtype='kahan') has one "
                "for both"
            )
        super()._check_param(param, label)

    def _check_bits(self) -> None:
        params = self._owned.params
        if _bits_of(self) is None or os.environ.get(ALLOW_INEFFECTIVE):
            return
        if params and all(param.dtype == torch.float32 for param in params):
            raise ValueError(
                "master_weight_bits must be None where all weights are torch.float32, which have "
                f"no masters, got {_bits_of(self)}, the default or given: flashoptim refuses it "
                f"too, unless the environment has {ALLOW_INEFFECTIVE}"
            )

    def get_fp32_model_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """megaopt.get_fp32_model_state_dict of the model, or of what DDP wraps.

        What the optimizer does not own stays as it is, where flashoptim casts it to fp32.
        """
        return model_state.get_fp32_model_state_dict(_unwrapped(model), self)

    def set_fp32_model_state_dict(
        self, model: nn.Module, fp32_state_dict: Mapping[str, torch.Tensor]
    ) -> None:
        """megaopt.set_fp32_model_state_dict, not strict, as in flashoptim; buffers are set too."""
        own = _unwrapped(model)
        model_state.set_fp32_model_state_dict(own, self, fp32_state_dict, strict=False)


def _bits_of(optimizer: FusedOptimizer) -> int | None:
    kind = optimizer.options.master_weight_dtype
    return {"remainder8_stochastic": 24, "remainder16": 32}.get(str(kind))


def _unwrapped(model: nn.Module) -> nn.Module:
    if not isinstance(model, DistributedDataParallel):
        return model
    wrapped: nn.Module = model.module
    return wrapped


def _options(
    moments: tuple[str, ...],
    quantize: bool,
    compress_state_dict: bool,
    master_weight_bits: int | None,
    check_numerics: bool,
    fused: bool,
    seed: int,
) -> dict[str, Any]:
    """The arguments of this package's optimizers that stand for flashoptim's; moments: by name."""
    one_of("quantize", quantize, (True, False))
    one_of("compress_state_dict", compress_state_dict, (True, False))
    one_of("master_weight_bits", master_weight_bits, MASTERS)
    if check_numerics is not False:
        refuse("check_numerics", "False, as no such check is here", check_numerics)
    one_of("fused", fused, (True, False))
    return {
        **{f"{name}_dtype": QUANTIZED[name] for name in moments if quantize},
        **MASTERS[master_weight_bits],
        "backend": "auto" if fused else "reference",
        "seed": seed,
    }


def _check_decouple_lr(decouple_lr: bool) -> None:
    if decouple_lr is not False:
        raise ValueError(
            f"decouple_lr must be False, got {shown(decouple_lr)}: weight_decay / lr in the place "
            "of weight_decay, lr being the first one, decays by the same amount"
        )


class FlashAdam(_Flash, megaopt.FusedAdam):
    """flashoptim's FlashAdam: megaopt.FusedAdam with L2 weight decay (adam_w_mode=False).

    Arguments are flashoptim's, with its order and defaults.
    """

    _adam_w_mode = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: int | None = 24,
        check_numerics: bool = False,
        fused: bool = True,
        *,
        seed: int = 0,
    ) -> None:
        own = (quantize, compress_state_dict, master_weight_bits, check_numerics, fused, seed)
        options = {**_options(("exp_avg", "exp_avg_sq"), *own), "makes_states": "stepped"}
        mode = self._adam_w_mode
        super().__init__(params, lr, betas, eps, weight_decay, adam_w_mode=mode, **options)
        self._check_bits()


class FlashAdamW(FlashAdam):
    """flashoptim's FlashAdamW: megaopt.FusedAdam, with a weight_decay of 0.01 by default.

    Arguments are flashoptim's, with its order and defaults.
    """

    _adam_w_mode = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        decouple_lr: bool = False,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: int | None = 24,
        check_numerics: bool = False,
        fused: bool = True,
        *,
        seed: int = 0,
    ) -> None:
        _check_decouple_lr(decouple_lr)
        own = (quantize, compress_state_dict, master_weight_bits, check_numerics, fused)
        super().__init__(params, lr, betas, eps, weight_decay, *own, seed=seed)


class FlashLion(_Flash, megaopt.FusedLion):
    """flashoptim's FlashLion: megaopt.FusedLion, with an lr of 0.001 by default.

    Arguments are flashoptim's, with its order and defaults.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        decouple_lr: bool = False,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: int | None = 24,
        check_numerics: bool = False,
        fused: bool = True,
        *,
        seed: int = 0,
    ) -> None:
        _check_decouple_lr(decouple_lr)
        own = (quantize, compress_state_dict, master_weight_bits, check_numerics, fused, seed)
        super().__init__(params, lr, betas, weight_decay, **_options(("exp_avg",), *own))
        self._check_bits()


class FlashSGD(_Flash, megaopt.FusedSGD):
    """flashoptim's FlashSGD: megaopt.FusedSGD with L2 weight decay.

    Arguments are flashoptim's, with its order and defaults. With dampening the buffer starts as the
    first gradient, as in torch.optim.SGD; flashoptim's starts as 1 - dampening of it.
    """

    _decoupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: int | None = 24,
        check_numerics: bool = False,
        fused: bool = True,
        *,
        seed: int = 0,
    ) -> None:
        own = (quantize, compress_state_dict, master_weight_bits, check_numerics, fused, seed)
        options = {
            **_options(("momentum_buffer",), *own),
            "decoupled_weight_decay": self._decoupled,
        }
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **options)
        self._check_bits()


class FlashSGDW(FlashSGD):
    """flashoptim's FlashSGDW: megaopt.FusedSGD with decoupled weight decay.

    Arguments are flashoptim's, with its order and defaults.
    """

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        decouple_lr: bool = False,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: int | None = 24,
        check_numerics: bool = False,
        fused: bool = True,
        *,
        seed: int = 0,
    ) -> None:
        _check_decouple_lr(decouple_lr)
        own = (quantize, compress_state_dict, master_weight_bits, check_numerics, fused)
        rule = (lr, momentum, dampening, weight_decay, nesterov)
        super().__init__(params, *rule, *own, seed=seed)


# --- helpers


def cast_model(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    selective: bool = True,
    full_precision_layers: Sequence[str | nn.Module] | None = None,
    full_precision_recast_layers: Sequence[str | nn.Module] | None = None,
) -> None:
    """Casts as flashoptim's; megaopt.cast_model makes masters of the fp32 weights too.

    Args:
        model: cast in place.
        dtype: torch.bfloat16 or torch.float16.
        selective: keeps BatchNorm and InstanceNorm layers in fp32.
        full_precision_layers: modules, or names with * and ? as in fnmatch, that stay in fp32, get
            16-bit inputs as fp32, and give fp32.
        full_precision_recast_layers: likewise; they give dtype.

    Raises:
        ValueError: dtype or selective is not allowed, or a name or module is not the model's, which
            flashoptim ignores in silence. Nothing has changed then.
    """
    one_of("dtype", dtype, casting.SHORT)
    one_of("selective", selective, (True, False))
    ending = _layers(model, "full_precision_layers", full_precision_layers)
    recast = _layers(model, "full_precision_recast_layers", full_precision_recast_layers)
    chosen = {id(module) for module in (*ending, *recast)}

    def keep(name: str, module: nn.Module) -> bool:
        return id(module) in chosen or (selective and isinstance(module, RUNNING))

    casting.cast_model(model, dtype, keep, recast=False)
    for module in ending:
        casting.compute_in_fp32(module, None)
    for module in recast:
        casting.compute_in_fp32(module, dtype)


def _layers(
    model: nn.Module, argument: str, given: Sequence[str | nn.Module] | None
) -> list[nn.Module]:
    """The modules that are meant, once each."""
    found: dict[int, nn.Module] = {}
    named = list(model.named_modules(remove_duplicate=False))
    for each in given or ():
        meant = [
            module
            for name, module in named
            if module is each or (isinstance(each, str) and fnmatchcase(name, each))
        ]
        if not meant:
            refuse(argument, "modules of the model, or their names", each)
        found.update({id(module): module for module in meant})
    return list(found.values())


def enable_gradient_release(
    model: nn.Module,
    optimizer: FusedOptimizer,
    *,
    grad_scaler: None = None,
    pre_step: None = None,
) -> GradientReleaseHandle:
    """megaopt.release_gradients, under flashoptim's name.

    `optimizer.step()` stays after each backward pass, and counts the step; in flashoptim it does
    nothing, and may be left out.

    Args:
        model: has parameters of the optimizer.
        optimizer: of this package.
        grad_scaler: only None, as in flashoptim.
        pre_step: only None: which parameters are stepped is for the list that
            megaopt.release_gradients takes.

    Raises:
        ValueError: as megaopt.release_gradients; grad_scaler or pre_step is not None.
    """
    for name, value in {"grad_scaler": grad_scaler, "pre_step": pre_step}.items():
        if value is not None:
            refuse(name, "None: each parameter is stepped with its gradient as it is", value)
    return gradient_release.release_gradients(model, optimizer)
