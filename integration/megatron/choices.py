"""The options of a plugged-in optimizer, and checks of what goes with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

import megaopt.integration.transformer_engine_weights  # noqa: F401  fp8 tensors become known
from megaopt.adam import AdamOptions
from megaopt.integration.megatron.adam import (
    ShardAdam,
    ShardGaLore,
    ShardLion,
    Shards,
    ShardSGD,
)
from megaopt.integration.megatron.checks import (
    IN_SHARDS,
    REQUIRED,
    WITH_MATRICES,
    check_fields,
    check_graph,
    check_matrices,
    check_parameter,
    check_release,
)
from megaopt.kernels.refusals import one_of, refuse
from megaopt.kernels.rules.adam_numbers import MOMENTS
from megaopt.options.choices import Backend, Contract
from megaopt.params import view_of

MODES = ("main_shards", "precision_aware")
MUON = ("muon", "dist_muon")
"""Megatron's names of Muon; the latter is that of the layer-wise optimizer."""

GALORE = ("rank", "update_proj_gap", "scale", "proj_type", "precision", "refresh", "stagger")
"""Arguments of GaLoreAdamW that galore may have."""
_OWN_PARTS = "each tensor-parallel rank would project its own part of a matrix"
UNCUT = [
    ("tensor_model_parallel_size", 1, _OWN_PARTS),
    ("expert_tensor_parallel_size", 1, _OWN_PARTS),
]
"""Fields of a model's config beside galore."""


@dataclass(frozen=True)
class Choices:
    """The options of get_megatron_optimizer that are megaopt's."""

    mode: str = "main_shards"
    contract: Contract | Literal["eo"] = "ieee"
    backend: Backend = "auto"
    exp_avg_dtype: torch.dtype | str | None = None
    exp_avg_sq_dtype: torch.dtype | str | None = None
    master_weight_dtype: torch.dtype | str | None = None
    store_param_remainders: bool | None = None
    round_scaled_grads: bool | None = None
    seed: int = 0
    capturable: bool | None = None
    offloads: bool = False
    """config.optimizer_cpu_offload, of which Megatron is not told."""
    divides_matrices: bool = True
    """Data-parallel ranks that all step whole matrices by Muon divide the making of updates."""
    galore: Mapping[str, Any] | None = None
    """Arguments of GaLoreAdamW, which then steps all parameters; None: FusedAdam does."""
    original_config: Any = None
    """Megatron's config where it names lion or sgd: Megatron is then told of adam."""

    def __post_init__(self) -> None:
        """Raises ValueError for a choice out of its range, or choices that contradict."""
        one_of("mode", self.mode, MODES)
        one_of("divides_matrices", self.divides_matrices, (True, False))
        if self.mode == "main_shards" and self.store_param_remainders:
            raise ValueError(
                "store_param_remainders must be False with mode='main_shards', where Megatron "
                f"keeps whole fp32 masters, got {self.store_param_remainders!r}; "
                "mode='precision_aware' takes it"
            )
        if self.mode == "main_shards" and self.master_weight_dtype not in (None, torch.float32):
            raise ValueError(
                f"master_weight_dtype must be None or torch.float32 with mode='main_shards', where "
                f"Megatron keeps fp32 masters, got {self.master_weight_dtype!r}; "
                "mode='precision_aware' takes others"
            )
        if self.original_config is not None:
            # options that Adam has and the config's own optimizer has not
            condition = f"with config.optimizer={self.original_config.optimizer!r}"
            if self.contract != "ieee":
                raise ValueError(f"contract must be 'ieee' {condition}, got {self.contract!r}")
            if self.galore is not None:
                refuse("galore", f"None {condition}", self.galore)
            if self.exp_avg_sq_dtype is not None:
                raise ValueError(
                    f"exp_avg_sq_dtype must be None {condition}, whose one moment is of "
                    f"exp_avg_dtype, got {self.exp_avg_sq_dtype!r}"
                )
        # arguments of GaLoreAdamW, and options of Adam's that it has not, or not with Megatron
        if self.galore is not None:
            keys = self.galore.keys() if isinstance(self.galore, Mapping) else set()
            if not {"rank"} <= keys <= set(GALORE):
                names = ", ".join(GALORE)
                refuse("galore", f"None or a dict with 'rank', and of {names}", self.galore)
            allowed: dict[str, tuple[object, ...]] = {
                "mode": ("main_shards",),
                "contract": ("ieee",),
                "round_scaled_grads": (None, False),
                "capturable": (None, False),
            }
            for name, values in allowed.items():
                if getattr(self, name) not in values:
                    among = " or ".join(map(repr, values))
                    refuse(name, f"{among} with galore", getattr(self, name))
        # neither moment may be in a format with scales
        options = self._options()
        for moment in () if self.galore is None else MOMENTS:
            if options.moment_format(moment.name).has_scale:
                name = f"{moment.name}_dtype"
                refuse(name, "a format without scales with galore", getattr(self, name))

    @property
    def adam_contract(self) -> Contract:
        """The contract of Adam's parameters, also beside Muon's "eo"."""
        return "ieee" if self.contract == "eo" else self.contract

    def _options(self) -> AdamOptions:
        """The options that Megatron's config does not give; ValueError where they contradict."""
        return AdamOptions(
            master_weight_dtype=_given(self.master_weight_dtype, torch.float32),
            exp_avg_dtype=_given(self.exp_avg_dtype, torch.float32),
            exp_avg_sq_dtype=_given(self.exp_avg_sq_dtype, torch.float32),
            store_param_remainders=bool(self.store_param_remainders),
            contract=self.adam_contract,
            step_counts="group",
            backend=self.backend,
            round_scaled_grads=bool(self.round_scaled_grads),
            capturable=bool(self.capturable),
            seed=self.seed,
        )

    def make_adam(
        self,
        params: list[dict[str, Any]],
        *,
        adam_w_mode: bool = True,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
        capturable: bool = False,
        **kwargs: Any,
    ) -> Shards:
        """Makes the optimizer; Megatron passes the arguments of TransformerEngine's FusedAdam.

        Its dtypes and remainders count where none were chosen here. use_decoupled_grad comes with
        config.use_precision_aware_optimizer, where Megatron clips gradients in their dtype,
        capturable with config.optimizer_cuda_graph.
        """
        owns_masters = self.mode == "precision_aware"
        # what was chosen counts before what Megatron passes
        remainders, rounds = self.store_param_remainders, self.round_scaled_grads
        if remainders is None:
            remainders = store_param_remainders and owns_masters
        # what all fused optimizers take; moments and their options follow for each kind
        options: dict[str, Any] = {
            "lr": kwargs["lr"],
            "weight_decay": kwargs["weight_decay"],
            # in main_shards the masters are Megatron's, and come as a list later
            "master_weights": owns_masters,
            "master_weight_dtype": _given(self.master_weight_dtype, master_weight_dtype),
            "store_param_remainders": remainders,
            "seed": self.seed,
            "use_decoupled_grad": True,
            "round_scaled_grads": use_decoupled_grad if rounds is None else rounds,
            "capturable": capturable if self.capturable is None else self.capturable,
            # Megatron's own gathers write the weights that its masters made
            "on_external_write": "ignore",
            "backend": self.backend,
        }
        if self.offloads:
            # in main_shards the moments alone: the masters are Megatron's, on the device
            options["state_device"] = "cpu" if owns_masters else {"moments": "cpu"}

        # the one moment of Lion and SGD is of exp_avg's dtype
        first = _given(self.exp_avg_dtype, exp_avg_dtype)
        if self.original_config is not None and self.original_config.optimizer == "lion":
            betas = self.original_config.lion_beta1, self.original_config.lion_beta2
            return ShardLion(params, betas=betas, exp_avg_dtype=first, **options)
        if self.original_config is not None and self.original_config.optimizer == "sgd":
            momentum = self.original_config.sgd_momentum
            return ShardSGD(params, momentum=momentum, momentum_buffer_dtype=first, **options)

        options |= {
            "betas": kwargs["betas"],
            "eps": kwargs["eps"],
            "exp_avg_dtype": first,
            "exp_avg_sq_dtype": _given(self.exp_avg_sq_dtype, exp_avg_sq_dtype),
        }
        if self.galore is not None:
            del options["round_scaled_grads"]  # it has no such
            return ShardGaLore(params, **self.galore, **options)
        return ShardAdam(
            params,
            adam_w_mode=adam_w_mode,
            contract=self.adam_contract,
            step_counts="group",
            makes_states="stepped",
            **options,
        )

    def check_config(self, config: Any, model_chunks: Sequence[Any]) -> None:
        """Raises ValueError where Megatron's settings, or its parameters, are not supported."""
        # fields of the config that every optimizer of ours needs, or goes without
        for name, (allowed, reason) in REQUIRED.items():
            value = getattr(config, name, allowed)
            if value != allowed:
                raise ValueError(f"config.{name} must be {allowed!r}, got {value!r}: {reason}")
        if self.contract == "eo":
            raise ValueError("contract must be 'ieee', 'te' or 'torch' without Muon, got 'eo'")
        check_release(config, self.original_config)
        # states of all parameters are offloaded, or of none
        fraction = config.optimizer_offload_fraction
        if self.offloads and fraction != 1.0:
            raise ValueError(
                "config.optimizer_offload_fraction must be 1.0 with optimizer_cpu_offload=True, as "
                f"megaopt offloads the states of all parameters, got {fraction!r}"
            )

        asks = config.use_precision_aware_optimizer and self.mode == "main_shards"
        if asks and config.main_params_dtype != torch.float32:
            raise ValueError(
                "config.main_params_dtype must be torch.float32 with mode='main_shards', where "
                f"Megatron keeps fp32 masters, got {config.main_params_dtype}"
            )
        # the host may read nothing within a captured step
        if getattr(config, "optimizer_cuda_graph", False):
            check_graph(config, model_chunks)
        if self.galore is not None:
            check_fields(config, [*WITH_MATRICES, IN_SHARDS], "galore")

        # then DDP's settings, and every parameter
        options, moments = self._options(), tuple(moment.name for moment in MOMENTS)
        for chunk in model_chunks:
            if chunk.ddp_config.use_megatron_fsdp:
                raise ValueError(
                    "use_megatron_fsdp must be False, as shards are the distributed optimizer's, "
                    "got True"
                )
            if not chunk.ddp_config.use_distributed_optimizer:
                raise ValueError(
                    "use_distributed_optimizer must be the same in OptimizerConfig and in "
                    "DistributedDataParallelConfig, got True and False"
                )
            if self.galore is not None:
                check_fields(chunk.config, UNCUT, "galore")
                check_matrices(chunk, "galore")
            for name, param in chunk.named_parameters():
                check_parameter(name, param, config.reuse_grad_buf_for_mxfp8_param_ag)
                view_of(param).check(f"parameter {name!r}", options, moments, masters=True)


def _given(value: torch.dtype | str | None, otherwise: torch.dtype) -> torch.dtype | str:
    """The chosen value, also if it is wrong and false, to be refused; `otherwise` for None."""
    return otherwise if value is None else value
