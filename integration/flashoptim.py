"""flashoptim 0.1's optimizers and helpers under their names, over this package's.

Changing the import keeps a script; the bits are this package's, and not flashoptim's: 8-bit moments
are rounded stochastically, the fused step has the bits of the unfused one, and a resume those of
the run. flashoptim itself is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import megaopt
from megaopt.integration.drop_in import DropIn
from megaopt.models import cast as casting
from megaopt.models import fp32 as model_state
from megaopt.models import release as gradient_release
from megaopt.models.release import GradientRelease as GradientReleaseHandle
from megaopt.optimizer import FusedOptimizer
from megaopt.options.checks import one_of, refuse

MASTERS: dict[int | None, dict[str, Any]] = {
    # to nearest, masters of 24 bits stand still where an update is below half of their last place
    24: {"master_weights": True, "master_weight_dtype": "remainder8_stochastic"},
    32: {"master_weights": True, "master_weight_dtype": "remainder16"},
    None: {"master_weights": False, "weight_rounding": "stochastic"},
}
"""What master_weight_bits asks for."""
ALLOW_INEFFECTIVE = "FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS"
"""flashoptim's variable: where it is set and not empty, models of fp32 weights take any bits."""
RUNNING = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Layers that selective=True keeps; torch's own take 16-bit inputs beside fp32 weights."""

QUANTIZE = {"quantize": True, "compress_state_dict": True, "master_weight_bits": 24}
COMMON = {**QUANTIZE, "check_numerics": False, "fused": True, "seed": 0}
DECOUPLED = {"decouple_lr": False, **COMMON}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
SGD = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
SHARED = """\
Arguments are flashoptim's, with its order and defaults.

Args:
    params, lr, betas, eps, weight_decay, momentum, dampening, nesterov: as the optimizer of megaopt
        takes them.
    decouple_lr: only False, where it is: weight_decay / lr in the place of weight_decay, lr being
        the first one, decays by the same amount.
    quantize: True: moments of 8 bits in blocks of 128 elements, "block_e4m3" and, for exp_avg_sq,
        "block_e5m3", rounded stochastically; flashoptim has blocks of 32, rounded to nearest. Of
        small parameters, and where rows are no whole blocks, moments are fp32
        (docs/how-to/low_memory.md). False: fp32, of bf16 weights too.
    compress_state_dict: True or False alike: a state dict has the codes and scales, which is exact.
    master_weight_bits: of bf16 weights. 24: a byte beside the weight, rounded stochastically
        ("remainder8_stochastic"). 32: two bytes beside the weight, which are exact fp32 masters
        ("remainder16"). None: weights alone, rounded stochastically. fp32 weights have no masters.
    check_numerics: only False. What it looks for, updates below half of a weight's last place,
        loses nothing where weights or masters are rounded stochastically.
    fused: True: kernels where parameters are on a GPU; False: plain torch, to the same bits.
    seed: of the random bits, from 0 to 2**64 - 1.

Raises:
    ValueError: as the optimizer of megaopt; an argument that has to have one value has another;
        master_weight_bits, by default too, is not None where all weights are fp32, as in flashoptim
        (FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS allows it), or for fp16 weights.
"""


class _Flash(DropIn):
    """What flashoptim's optimizers have in common."""

    _shared = SHARED
    _allowed: ClassVar = {
        **dict.fromkeys(("quantize", "compress_state_dict", "fused"), (True, False)),
        **dict.fromkeys(("check_numerics", "decouple_lr"), (False,)),
        "master_weight_bits": (*MASTERS,),
    }
    _formats: ClassVar = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        is_fp32 = {param.dtype for param in self._owned.params} == {torch.float32}
        if is_fp32 and not os.environ.get(ALLOW_INEFFECTIVE):
            self._refuse_masters(
                "master_weight_bits", "where all weights are torch.float32, which have no masters, "
                f"as in flashoptim, unless the environment has {ALLOW_INEFFECTIVE}",
            )  # fmt: skip

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        rule = {name: value for name, value in given.items() if name not in self._allowed}
        masters = MASTERS[given["master_weight_bits"]]
        formats = self._formats if given["quantize"] else {}
        return {**rule, **masters, **formats, "backend": "auto" if given["fused"] else "reference"}

    def _check_param(self, param: torch.Tensor, label: str) -> None:
        if param.dtype == torch.float16:
            self._refuse_masters(f"{label}: master_weight_bits", "for torch.float16 weights")
        super()._check_param(param, label)

    def _refuse_masters(self, name: str, where: str) -> None:
        """Raises ValueError if there are masters beside weights."""
        kind = self.options.master_weight_dtype
        bits = next((n for n in (24, 32) if MASTERS[n]["master_weight_dtype"] == kind), None)
        if bits is not None:
            refuse(name, f"None {where}", bits)

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


def _unwrapped(model: Any) -> nn.Module:
    found: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return found


class FlashAdam(_Flash, megaopt.FusedAdam, face={**ADAM, **COMMON}):
    """flashoptim's FlashAdam: megaopt.FusedAdam with L2 weight decay (adam_w_mode=False)."""

    _fixed: ClassVar = {"adam_w_mode": False, "makes_states": "stepped"}


class FlashAdamW(FlashAdam, face={**ADAM, "weight_decay": 1e-2, **DECOUPLED}):
    """flashoptim's FlashAdamW: megaopt.FusedAdam, with a weight_decay of 0.01 by default."""

    _fixed: ClassVar = {"makes_states": "stepped"}


LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0, **DECOUPLED}


class FlashLion(_Flash, megaopt.FusedLion, face=LION):
    """flashoptim's FlashLion: megaopt.FusedLion, with an lr of 0.001 by default."""

    _formats: ClassVar = {"exp_avg_dtype": "block_e4m3"}


class FlashSGD(_Flash, megaopt.FusedSGD, face={**SGD, **COMMON}):
    """flashoptim's FlashSGD: megaopt.FusedSGD with L2 weight decay.

    With dampening the buffer starts as the first gradient, as in torch.optim.SGD; flashoptim's
    starts as 1 - dampening of it.
    """

    _formats: ClassVar = {"momentum_buffer_dtype": "block_e4m3"}


class FlashSGDW(FlashSGD, face={**SGD, **DECOUPLED}):
    """flashoptim's FlashSGDW: megaopt.FusedSGD with decoupled weight decay."""

    _fixed: ClassVar = {"decoupled_weight_decay": True}


def cast_model(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    selective: bool = True,
    full_precision_layers: Sequence[str | nn.Module] | None = None,
    full_precision_recast_layers: Sequence[str | nn.Module] | None = None,
) -> None:
    """Casts as flashoptim's, in place; megaopt.cast_model makes masters of the fp32 weights too.

    Args:
        model: is cast.
        dtype: torch.bfloat16 or torch.float16.
        selective: keeps BatchNorm and InstanceNorm layers in fp32.
        full_precision_layers: modules, or names with * and ? as in fnmatch, that stay in fp32, get
            16-bit inputs as fp32, and give fp32.
        full_precision_recast_layers: likewise; they give dtype.

    Raises:
        ValueError: dtype or selective is something else, or a name or module is not the model's,
            which flashoptim ignores in silence. Nothing has changed then.
    """
    one_of("dtype", dtype, casting.SHORT)
    one_of("selective", selective, (True, False))
    ending = _layers(model, "full_precision_layers", full_precision_layers)
    recast = _layers(model, "full_precision_recast_layers", full_precision_recast_layers)
    kept = {id(module) for module in (*ending, *recast)}
    kept |= {id(each) for each in model.modules() if selective and isinstance(each, RUNNING)}
    casting.cast_model(model, dtype, lambda name, module: id(module) in kept, recast=False)
    for modules, output in ((ending, None), (recast, dtype)):
        for module in modules:
            casting.compute_in_fp32(module, output)


def _layers(
    model: nn.Module, argument: str, given: Sequence[str | nn.Module] | None
) -> list[nn.Module]:
    """The modules that are meant, once each."""
    found: dict[int, nn.Module] = {}
    for each in given or ():
        meant = {
            id(module): module
            for name, module in model.named_modules(remove_duplicate=False)
            if module is each or (isinstance(each, str) and fnmatchcase(name, each))
        }
        if not meant:
            refuse(argument, "modules of the model, or their names", each)
        found |= meant
    return list(found.values())


def enable_gradient_release(
    model: nn.Module, optimizer: FusedOptimizer, *, grad_scaler: None = None, pre_step: None = None
) -> GradientReleaseHandle:
    """megaopt.release_gradients; ValueError where grad_scaler or pre_step is not None.

    `optimizer.step()` stays after each backward pass, and counts the step; in flashoptim it does
    nothing, and may be left out. megaopt.release_gradients takes a list of the parameters to step.
    """
    one_of("grad_scaler", grad_scaler, (None,))
    one_of("pre_step", pre_step, (None,))
    return gradient_release.release_gradients(model, optimizer)
