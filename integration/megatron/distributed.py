"""Megatron's DistributedOptimizer, whose passes over gradients and weights are left to the step."""

from __future__ import annotations

import copy
from typing import Any

import torch

from megaopt.integration.megatron.adam import MainShardsFace
from megaopt.integration.megatron.float8 import absent_shards, is_mxfp8, own_shards, weights_of
from megaopt.integration.megatron.gradients import Gradients
from megaopt.integration.megatron.numbers import numbers_of
from megaopt.params import view_of
from megaopt.state.tensors import MASTER


class Sharded(Gradients):
    """What both modes have in common."""

    def __init__(self, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, self.own_config(config), *args, **kwargs)
        self._is_stepping = False
        self._outside = {}
        self.shards, self.fused = {}, None
        self._start()
        if not self.is_stub_optimizer:
            self.init_state_fn = self.initialize_states
            self._take_shards()
            self._say_what_shards_are()
            self._look_at_shards()

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
        """Tells megaopt.params which parameter a shard is a part of, and where it begins."""
        numbers = numbers_of(self)
        for model, shard in self.shards.items():
            shard.megaopt_first_element = self._get_model_param_range_map(model)["param"].start
            shard.megaopt_whole_shape = tuple(model.shape)
            shard.megaopt_number = numbers[model]

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
            for model, main in outside.items():
                self.shards[model] = self._place_of(model) if self._is_in_place(model) else main
            self._outside.update(outside)
        both = zip(self.shard_fp32_groups, self.model_float16_groups, strict=True)
        weights = [[*ours, *(self.shards[model] for model in cast)] for ours, cast in both]
        self.optimizer = MainShardsFace(self.fused, weights, absent_shards(self))

    def _is_in_place(self, model: torch.Tensor) -> bool:
        """Whether the step writes an MXFP8 parameter's bf16 values where they are gathered.

        That is its own bf16 gradient, which the step has read. Beside fp32 gradients they lie on
        those of other elements; with overlap Megatron first zeroes gradients, then copies.
        """
        buffer = self.buffers[self.model_param_gbuf_map[model][0]]
        overlaps: bool = self.config.overlap_param_gather
        return not overlaps and bool(buffer.grad_data.dtype == buffer.param_data.dtype)

    @torch.no_grad()
    def _copy_main_params_to_param_buffer(self) -> None:
        """Megatron's copy of main shards to the buffer that is gathered, in one call.

        Of MXFP8 parameters, which Megatron casts from there, but for those that the step has
        written there. It has written all other weights.
        """
        moved = dict(self._outside)
        if self._is_stepping:
            moved = {m: main for m, main in moved.items() if self.shards[m] is main}
        if moved:
            torch._foreach_copy_([self._place_of(m) for m in moved], list(moved.values()))
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
