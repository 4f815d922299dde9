"""flashoptim 0.1's optimizers and helpers under their names, over this package's.

Changing the import keeps a script; the bits are this package's, and not flashoptim's: 8-bit moments
are rounded stochastically, the fused step has the bits of the unfused one, and a resume those of
the run. flashoptim itself is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

import megaopt
from megaopt.integration.drop_in import IN_BLOCKS, DropIn, DropInOptions, Meanings
from megaopt.kernels.refusals import one_of, refuse
from megaopt.models.cast import RUNNING, SHORT, compute_in_fp32
from megaopt.models.release import GradientRelease as GradientReleaseHandle
from megaopt.optimizer import FusedOptimizer

MASTERS: dict[int | None, dict[str, Any]] = {
    # to nearest, masters of 24 bits stand still where an update is below half of their last place
    24: {"master_weights": True, "master_weight_dtype": "remainder8_stochastic"},
    32: {"master_weights": True, "master_weight_dtype": "remainder16"},
    None: {"master_weights": False, "weight_rounding": "stochastic"},
}
"""The options that each master_weight_bits stands for."""
ALLOW_INEFFECTIVE = "FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS"
"""flashoptim's variable: where it is set and not empty, models of fp32 weights take any bits."""
MEANS: Meanings = {
    "quantize": {True: IN_BLOCKS, False: {}},
    "compress_state_dict": {True: {}, False: {}},
    "fused": {True: {"backend": "auto"}, False: {"backend": "reference"}},
    "check_numerics": {False: {}},
    "decouple_lr": {False: {}},
    "master_weight_bits": MASTERS,
}
COMMON: dict[str, Any] = {"quantize": True, "compress_state_dict": True, "master_weight_bits": 24}
COMMON |= {"check_numerics": False, "fused": True, "*": None, "seed": 0}
DECOUPLED = {"decouple_lr": False, **COMMON}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
ADAMW = {**ADAM, "weight_decay": 1e-2}
LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}
SGD = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}


class _Flash(DropIn, means=MEANS):
    """Arguments are flashoptim's, with its order and defaults.

    Args:
        params, lr, betas, eps, weight_decay, momentum, dampening, nesterov: as the optimizer of
            megaopt takes them.
        decouple_lr: only False, where it is: weight_decay / lr in the place of weight_decay, lr
            being the first one, decays by the same amount.
        quantize: True: moments of 8 bits in blocks of 128 elements, "block_e4m3" and, for
            exp_avg_sq, "block_e5m3", rounded stochastically; flashoptim has blocks of 32, rounded
            to nearest. Small ones, and where rows are no whole blocks, are fp32
            (docs/how-to/low_memory.md). False: fp32, of bf16 weights too.
        compress_state_dict: True or False alike: a state dict has the codes and scales, exactly.
        master_weight_bits: of bf16 weights. 24: a byte beside the weight, rounded stochastically
            ("remainder8_stochastic"). 32: two bytes beside the weight, which are exact fp32 masters
            ("remainder16"). None: weights alone, rounded stochastically. fp32 ones have no masters.
        check_numerics: only False. What it looks for, updates below half of a weight's last place,
            loses nothing where weights or masters are rounded stochastically.
        fused: True: kernels where parameters are on a GPU; False: plain torch, to the same bits.
        seed: of the random bits, from 0 to `2**64 - 1`.

    Raises:
        ValueError: as the optimizer of megaopt; an argument that has to have one value has another;
            master_weight_bits, by default too, is not None where all weights are fp32, as in
            flashoptim (FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS allows it), or for fp16
            weights.
    """

    def __init__(
        self, params: Iterable[Any], *arguments: Any, **options: Unpack[DropInOptions]
    ) -> None:
        super().__init__(params, *arguments, **options)
        is_fp32 = {param.dtype for param in self._owned.params} == {torch.float32}
        if is_fp32 and not os.environ.get(ALLOW_INEFFECTIVE):
            self._refuse_masters(
                "master_weight_bits", "where all weights are torch.float32, which have no masters, "
                f"as in flashoptim, unless the environment has {ALLOW_INEFFECTIVE}",
            )  # fmt: skip

    def _check_param(self, param: torch.Tensor, label: str) -> None:
        if param.dtype == torch.float16:
            self._refuse_masters(f"{label}: master_weight_bits", "for torch.float16 weights")
        super()._check_param(param, label)

    def _refuse_masters(self, name: str, where: str) -> None:
        kind = self.options.master_weight_dtype
        bits = next((n for n in (24, 32) if MASTERS[n]["master_weight_dtype"] == kind), None)
        if bits is not None:
            refuse(name, f"None {where}", bits)

    def get_fp32_model_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """megaopt.get_fp32_model_state_dict of the model, or of what DDP wraps.

        What the optimizer does not own stays as it is, where flashoptim casts it to fp32.
        """
        model = model.module if isinstance(model, DistributedDataParallel) else model
        return megaopt.get_fp32_model_state_dict(model, self)

    def set_fp32_model_state_dict(
        self, model: nn.Module, fp32_state_dict: Mapping[str, torch.Tensor]
    ) -> None:
        """megaopt.set_fp32_model_state_dict, not strict, as in flashoptim; buffers are set too."""
        model = model.module if isinstance(model, DistributedDataParallel) else model
        megaopt.set_fp32_model_state_dict(model, self, fp32_state_dict, strict=False)


class FlashAdam(
    _Flash, megaopt.FusedAdam, takes={**ADAM, **COMMON}, adam_w_mode=False, makes_states="stepped"
):
    """flashoptim's FlashAdam: megaopt.FusedAdam with L2 weight decay (adam_w_mode=False)."""


class FlashAdamW(FlashAdam, takes={**ADAMW, **DECOUPLED}, adam_w_mode=True):
    """flashoptim's FlashAdamW: megaopt.FusedAdam, with a weight_decay of 0.01 by default."""


class FlashLion(_Flash, megaopt.FusedLion, takes={**LION, **DECOUPLED}):
    """flashoptim's FlashLion: megaopt.FusedLion, with an lr of 0.001 by default."""


class FlashSGD(_Flash, megaopt.FusedSGD, takes={**SGD, **COMMON}):
    """flashoptim's FlashSGD: megaopt.FusedSGD with L2 weight decay.

    With dampening the buffer starts as the first gradient, as in torch.optim.SGD; flashoptim's
    starts as 1 - dampening of it.
    """


class FlashSGDW(FlashSGD, takes={**SGD, **DECOUPLED}, decoupled_weight_decay=True):
    """flashoptim's FlashSGDW: megaopt.FusedSGD with decoupled weight decay."""


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
        ValueError: dtype or selective is another, or a name or module is not the model's, which
            flashoptim ignores in silence. Nothing has changed then.
    """
    one_of("dtype", dtype, SHORT)
    one_of("selective", selective, (True, False))
    fp32_ids = {id(layer) for layer in model.modules() if selective and isinstance(layer, RUNNING)}
    # the modules that are meant, once each, with the dtype that they give; None: fp32
    outputs: list[tuple[nn.Module, torch.dtype | None]] = []
    for argument, layers, output in (
        ("full_precision_layers", full_precision_layers, None),
        ("full_precision_recast_layers", full_precision_recast_layers, dtype),
    ):
        modules: dict[int, nn.Module] = {}
        for layer in layers or ():
            meant = {
                id(module): module
                for name, module in model.named_modules(remove_duplicate=False)
                if module is layer or (isinstance(layer, str) and fnmatchcase(name, layer))
            }
            if not meant:
                refuse(argument, "modules of the model, or their names", layer)
            modules |= meant
        fp32_ids |= modules.keys()
        outputs += [(module, output) for module in modules.values()]
    megaopt.cast_model(model, dtype, lambda name, module: id(module) in fp32_ids, recast=False)
    for module, output in outputs:
        compute_in_fp32(module, output)


def enable_gradient_release(
    model: nn.Module, optimizer: FusedOptimizer, *, grad_scaler: None = None, pre_step: None = None
) -> GradientReleaseHandle:
    """megaopt.release_gradients; ValueError where grad_scaler or pre_step is not None.

    `optimizer.step()` stays after each backward pass, and counts the step; in flashoptim it does
    nothing, and may be left out. megaopt.release_gradients takes a list of the parameters to step.
    """
    one_of("grad_scaler", grad_scaler, (None,))
    one_of("pre_step", pre_step, (None,))
    return megaopt.release_gradients(model, optimizer)
