"""Megatron's DistributedOptimizer, whose passes over gradients and weights are left to the step."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer import optimizer as base

from megaopt.integration.megatron.adam import MainShardsFace
from megaopt.integration.megatron.checkpoints import CheckpointedOptimizer
from megaopt.integration.megatron.float8 import absent_shards, is_mxfp8, own_shards, weights_of
from megaopt.integration.megatron.numbers import numbers_of
from megaopt.params import view_of
from megaopt.state import MASTER

Norm = float | torch.Tensor


def norm_groups() -> tuple[str | None, ...]:
    """None for the norm of all other gradients, and the groups that Megatron gives their own."""
    return (None, *getattr(base, "SEPARATE_GRAD_NORM_GROUPS", ()))


def norm_group_of(param: torch.Tensor) -> str | None:
    """The group whose norm a parameter's gradient counts for; releases up to 0.16 have none."""
    group = getattr(param, "grad_norm_group", None)
    return group if group in norm_groups() else None


class Sharded(CheckpointedOptimizer):
    """What both modes have in common.

    Gradients are read where DDP leaves them, in its buffer: `shard.decoupled_grad` is a view of it.
    With a loss scale they are unscaled there by Megatron's own pass, since the norm, whose bits are
    Megatron's, is of unscaled numbers; those of 16 bits are cast to fp32 before, as Megatron does.
    """

    grad_name: str
    """Under which name Megatron looks for the gradients of its optimizer's parameters."""

    def __init__(self, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, self.own_config(config), *args, **kwargs)
        self.has_16_bit_norm = True
        self._is_stepping = self._has_clipped_grads = False
        self._bound_to: list[tuple[torch.Tensor, int]] = []
        self._norm_shards: dict[str | None, list[Any]] = {}
        self._norm_grads: dict[str | None, list[torch.Tensor]] = {}
        self._outside: dict[torch.Tensor, torch.Tensor] = {}  # main shards of MXFP8 parameters
        self.shards, self.fused, self._clips_in_place = {}, None, False
        if not self.is_stub_optimizer:
            self.init_state_fn = self.initialize_states
            self._take_shards()
            self._say_what_shards_are()
            # parameters with a norm of their own: the step knows one coefficient for all
            self._clips_in_place = config.clip_grad > 0.0 and any(map(norm_group_of, self.shards))
            self._norm_shards = {group: self._ask_for_norm_shards(group) for group in norm_groups()}
            self.has_16_bit_norm = self._may_have_16_bit_norm()

    def own_config(self, config: Any) -> Any:
        """The config that Megatron's code reads in this optimizer."""
        return config

    def initialize_states(self, optimizer: Any = None, config: Any = None) -> None:
        """Makes all states complete; Megatron's own makes moments alone, in the shards' dtype."""
        self.fused.initialize_states()

    def _take_shards(self) -> None:
        both = [
            (self.model_fp32_groups, self.shard_fp32_groups),
            (self.model_float16_groups, self.shard_float16_groups),
        ]
        for models, shards in both:
            for group, own in zip(models, shards, strict=True):
                self.shards.update(zip(group, own, strict=True))
        self.fused = self.optimizer

    def _say_what_shards_are(self) -> None:
        """Of which parameter a shard is a part, and where it begins, as megaopt.params reads it."""
        numbers = numbers_of(self)
        for model, shard in self.shards.items():
            shard.megaopt_first_element = self._get_model_param_range_map(model)["param"].start
            shard.megaopt_whole_shape = tuple(model.shape)
            shard.megaopt_number = numbers[model]

    # --- gradients

    def _copy_model_grads_to_main_grads(self) -> None:
        """Where the gradients lie, which stays as long as DDP's buffers do."""
        if self.is_stub_optimizer or self._is_bound():
            return
        for model, shard in self.shards.items():
            part = self._get_model_param_range_map(model)["param"]
            grad = model.main_grad.view(-1)[part.start : part.end]
            shard.decoupled_grad = grad.float() if self._has_copies() else grad
        self._bound_to = self._buffers_now()
        self._norm_grads = {
            group: [shard.decoupled_grad for shard in shards]
            for group, shards in self._norm_shards.items()
        }

    def _is_bound(self) -> bool:
        """Whether all gradients are views of the buffers as they are now."""
        if self._has_copies():
            return False
        shard = next(iter(self.shards.values()), None)
        if shard is None:
            return True
        now, was = self._buffers_now(), self._bound_to
        return (
            len(now) == len(was)
            and all(a[0] is b[0] and a[1] == b[1] for a, b in zip(now, was, strict=True))
            and getattr(shard, "decoupled_grad", None) is not None
        )

    def _has_copies(self) -> bool:
        """Whether gradients of 16 bits are cast: multiplied in place they would be rounded."""
        dtypes = {buffer.grad_data.dtype for buffer in self.buffers}
        rounds = self.fused is not None and self.fused.options.round_scaled_grads
        is_scaled = self.grad_scaler is not None or (self._clips_in_place and not rounds)
        return is_scaled and dtypes != {torch.float32}

    def _buffers_now(self) -> list[tuple[torch.Tensor, int]]:
        return [(buffer.grad_data, buffer.grad_data.data_ptr()) for buffer in self.buffers]

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        return [shard.decoupled_grad for shard in self.shards.values()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes gradients if set_to_none is False; otherwise DDP does, and they stay bound."""
        if not set_to_none and self._is_bound():
            for shard in self.shards.values():
                shard.decoupled_grad.zero_()

    # --- their norm

    def _ask_for_norm_shards(self, norm_group: str | None) -> list[Any]:
        """The shards whose gradients count for a norm: neither shared nor duplicates.

        Megatron decides, asked once with stand-ins for the gradients.
        """
        asked = self.get_parameters()
        stand_ins = [param.detach() for param in asked]
        self._set_grads(asked, stand_ins)
        with warnings.catch_warnings():  # shards of fp32 weights are not leaves
            warnings.simplefilter("ignore", UserWarning)
            ask = getattr(super(), "get_grads_for_grad_norm", None)
            counted = ask(norm_group) if ask else super().get_main_grads_for_grad_norm()
        self._set_grads(asked, [None] * len(asked))
        found = {id(each) for each in counted}
        pairs = zip(self._flat_shards(), stand_ins, strict=True)
        return [shard for shard, stand_in in pairs if id(stand_in) in found]

    def _set_grads(self, params: list[torch.Tensor], grads: list[Any]) -> None:
        for param, grad in zip(params, grads, strict=True):
            setattr(param, self.grad_name, grad)

    def _flat_shards(self) -> list[Any]:
        """In the order of Megatron's parameters; those that it gives this rank nothing of apart."""
        groups = self.fused.param_groups[: len(self.optimizer.param_groups)]
        return [shard for group in groups for shard in group["params"]]

    def _may_have_16_bit_norm(self) -> bool:
        """Whether the norm's kernel sums bf16 or fp16 gradients as it would sum fp32 copies.

        It takes four numbers at a time where they are aligned, as copies are, one at a time
        elsewhere: two orders.
        """
        if self.grad_scaler:
            return False
        self._copy_model_grads_to_main_grads()
        return all(
            grad.dtype != torch.float32
            and (grad.numel() % 4 != 0 or grad.data_ptr() % (4 * grad.element_size()) == 0)
            for grads in self._norm_grads.values()
            for grad in grads
        )

    def get_main_grads_for_grad_norm(self) -> list[torch.Tensor]:
        """The gradients that count for the norm, in fp32 wherever that could move its bits."""
        return self.get_grads_for_grad_norm()

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        """As releases after 0.16 call it, also for the norm of a group of its own."""
        grads = self._norm_grads.get(grad_norm_group, [])
        return [grad if self.has_16_bit_norm else grad.float() for grad in grads]

    # --- clipping

    def clip(self, grad_norm: Norm, norms_by_group: Mapping[str, Norm] | None = None) -> None:
        """Tells the next step by what Megatron would multiply gradients of this norm.

        Where some have a norm of their own, gradients are multiplied here, as Megatron does it.
        """
        if self.is_stub_optimizer or self.config.clip_grad <= 0.0:
            return
        if self._clips_in_place:
            norms: dict[str | None, Norm] = {None: grad_norm}
            norms.update((norms_by_group or {}).items())
            for shard in self.shards.values():
                norm = norms.get(norm_group_of(shard))
                coefficient = None if norm is None else self._coefficient(norm)
                if coefficient is not None:
                    shard.decoupled_grad.mul_(coefficient)
        else:
            self.optimizer.clip_coefficient = self._coefficient(grad_norm)

    def _coefficient(self, norm: Norm) -> torch.Tensor | None:
        """What gradients of a norm are multiplied by, fp32 of one element; None: nothing."""
        coefficient = self.config.clip_grad / (norm + 1.0e-6)
        if isinstance(coefficient, torch.Tensor):
            return coefficient.clamp(max=1.0)
        if coefficient >= 1.0:
            return None
        return torch.full((1,), coefficient, device=self.buffers[0].grad_data.device)

    def clip_grad_norm(self, clip_grad: float) -> Any:
        """The norm; the next step clips."""
        grad_norm = self.get_grad_norm()
        has_more = clip_grad > 0.0 and len(norm_groups()) > 1
        norms = self._compute_grad_norms_by_group() if has_more else None
        self.clip(grad_norm, norms)
        return grad_norm

    def skips(self, grad_norm: float | torch.Tensor) -> bool:
        """Whether a norm is so large that Megatron leaves the step out."""
        threshold = getattr(self.config, "grad_norm_skip_threshold", math.inf)
        return (
            not self.is_stub_optimizer and math.isfinite(threshold) and bool(grad_norm > threshold)
        )

    @contextlib.contextmanager
    def clipped_grads(self) -> Iterator[None]:
        """Within it, clipped gradients are where Megatron's code looks for them; copies."""
        if self.is_stub_optimizer or self._has_clipped_grads:
            yield
            return
        params, shards = self.get_parameters(), self._flat_shards()
        grads = [shard.decoupled_grad for shard in shards]
        coefficient = self.optimizer.clip_coefficient
        clipped = [grad.float() * (1 if coefficient is None else coefficient) for grad in grads]
        if self.fused.options.round_scaled_grads:
            pairs = zip(clipped, grads, strict=True)
            clipped = [value.to(grad.dtype).float() for value, grad in pairs]
        self._set_grads(params, clipped)
        self._has_clipped_grads = True
        try:
            yield
        finally:
            self._has_clipped_grads = False
            self._set_grads(params, [None] * len(params))
            for shard, grad in zip(shards, grads, strict=True):
                shard.decoupled_grad = grad

    def count_zeros(self) -> Any:
        """How many of the clipped gradients are 0, over all ranks."""
        with self.clipped_grads():
            return super().count_zeros()

    # --- the step

    def step_with_ready_grads(self) -> bool:
        """Megatron's, with weights that the step has written."""
        self._is_stepping = True
        try:
            return bool(super().step_with_ready_grads())
        finally:
            self._is_stepping = False
            if not self.is_stub_optimizer and self._has_copies():
                self._norm_grads = {}
                for shard in self.shards.values():
                    shard.decoupled_grad = None

    def _copy_main_params_to_model_params(self) -> None:
        if not self._is_stepping:  # otherwise the step has written them
            super()._copy_main_params_to_model_params()

    @torch.no_grad()
    def restore_from_cpu(self) -> None:
        """Megatron's; shards of weights lie in the parameter buffer again."""
        super().restore_from_cpu()
        for model, shard in self.shards.items():
            if view_of(shard).weight is not None or model in self._outside:
                continue  # it has no memory of its own, or no place in the buffer
            place = self._place_of(model)
            if shard.data_ptr() != place.data_ptr():
                place.copy_(shard)
                shard.data = place

    def _place_of(self, model: torch.Tensor) -> torch.Tensor:
        """Where the buffer that is gathered has this rank's part of a parameter."""
        part = self._get_model_param_range_map(model)["gbuf_world_in_bucket"]
        index, _, bucket = self.model_param_gbuf_map[model]
        whole: torch.Tensor = self.buffers[index].buckets[bucket].param_data
        return whole.view(-1)[part.start : part.end]


class MainShards(Sharded):
    """Mode main_shards: groups and state are of Megatron's fp32 main shards, which it owns."""

    grad_name = "grad"

    def own_config(self, config: Any) -> Any:
        """A copy without the precision-aware mode, where Megatron would leave masters to fp8."""
        if not config.use_precision_aware_optimizer:
            return config
        config = copy.copy(config)
        config.use_precision_aware_optimizer = False
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False
        return config

    def _take_shards(self) -> None:
        super()._take_shards()
        self.shards.update(own_shards(self))  # in the place of what Megatron has for fp8 weights
        groups = zip(self.model_float16_groups, self.shard_fp32_from_float16_groups, strict=True)
        for models, mains in groups:
            outside = {m: main for m, main in zip(models, mains, strict=True) if is_mxfp8(m)}
            self.shards.update(outside)
            self._outside.update(outside)
        both = zip(self.shard_fp32_groups, self.model_float16_groups, strict=True)
        weights = [[*ours, *(self.shards[model] for model in cast)] for ours, cast in both]
        self.optimizer = MainShardsFace(self.fused, weights, absent_shards(self))

    @torch.no_grad()
    def _copy_main_params_to_param_buffer(self) -> None:
        """Megatron's copy of all main shards to the buffer that is gathered, in one call.

        Weights in MXFP8 are cast from there, by Megatron; the step has written the others, which
        release 0.16 keeps outside of that buffer too.
        """
        places = {model: self._place_of(model) for model in self.shards}
        moved = [m for m, own in self.shards.items() if own.data_ptr() != places[m].data_ptr()]
        torch._foreach_copy_([places[m] for m in moved], [self.shards[m] for m in moved])
        for chunk in self.model_chunks:
            reset = getattr(chunk, "reset_param_sync_dispatch_state", None)
            if reset is not None:
                reset()

    def refresh_weights(self) -> None:
        """Casts every master into its shard of the weights; the ranks have to gather them.

        fp8 weights by Megatron's own pass, with scales that the ranks find together. They are
        gathered here where the next forward pass does not: scale_inv is of the new codes, other
        ranks' parts would be as they were loaded.
        """
        if any(weights_of(self)):  # also where this rank has no part of them
            self._copy_main_params_to_model_params()
            if not self.ddp_config.overlap_param_gather:
                for chunk in self.model_chunks:
                    chunk.start_param_sync()
        else:
            super().refresh_weights()


class PrecisionAware(Sharded):
    """Mode precision_aware: parameters are shards of the weights, masters are in their state."""

    grad_name = "decoupled_grad"

    def own_config(self, config: Any) -> Any:
        """A copy, under which Megatron leaves masters to the optimizer.

        Megatron's OptimizerConfig itself refuses that without TransformerEngine.
        """
        config = copy.copy(config)
        config.use_precision_aware_optimizer = True
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        return config

    @torch.no_grad()
    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        """Masters from the weights, or from what a state dict has for them.

        Megatron's own does nothing in this mode, so that weights loaded alone would be overwritten
        by old masters.
        """
        named = {}
        if state_dict is not None:
            named = self._build_model_param_to_state_dict_param_map(state_dict)
        self.fused.initialize_states()
        for model, shard in self.shards.items():
            part = self._get_model_param_range_map(model)["param"]
            value = named.get(model, model).detach().reshape(-1)[part.start : part.end]
            self.fused.set_scaled_state(shard, MASTER, value)
