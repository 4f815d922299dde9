"""Stands in the place of Megatron's optimizers: the step does their passes over the weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from megatron.core import optimizer as factory
from megatron.core.optimizer import ChainedOptimizer, distrib_optimizer
from megatron.core.optimizer.clip_grads import l2_norm_impl
from megatron.core.utils import local_multi_tensor_l2_norm
from torch.distributed.device_mesh import DeviceMesh

from megaopt.float8.shard import Float8Shard
from megaopt.integration.megatron.adam import MainShardsAdapter, Shards
from megaopt.integration.megatron.checkpoints import align_steps
from megaopt.integration.megatron.choices import Choices
from megaopt.integration.megatron.float8 import is_fp8, is_mxfp8, weights_of
from megaopt.integration.megatron.gradients import Gradients, norm_groups
from megaopt.muon import SPLIT_SIZES
from megaopt.params import view_of
from megaopt.params.flat import PARTS, FlatParts
from megaopt.params.view import EMBEDDING
from megaopt.state.tensors import MASTER


class Sharded(Gradients):
    """The common part of both modes."""

    def __init__(self, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        # Megatron's own makes main shards and maps of buffers from the groups
        super().__init__(optimizer, self.own_config(config), *args, **kwargs)
        self._outside = {}
        self.shards, self.fused = {}, None
        self._bound_to, self._norm_shards, self._norm_grads = [], {}, {}
        # a rank may have no parameter to step: then there is no fused optimizer
        if not self.is_stub_optimizer:
            self.init_state_fn = self.initialize_states
            self._take_shards()
            self._say_what_shards_are()
            self._adapt()
            self._look_at_shards()

    def own_config(self, config: Any) -> Any:
        """The config that Megatron's code reads in this optimizer."""
        return config

    def initialize_states(self, optimizer: Any = None, config: Any = None) -> None:
        """Makes all states complete; Megatron's own makes moments alone, in the shards' dtype."""
        self.fused.initialize_states()

    def _take_shards(self) -> None:
        # pairs of lists, one list a group: model parameters, and this rank's flat parts of them
        both = [
            (self.model_fp32_groups, self.shard_fp32_groups),
            (self.model_float16_groups, self.shard_float16_groups),
        ]
        for models, shards in both:
            for group, group_shards in zip(models, shards, strict=True):
                self.shards.update(zip(group, group_shards, strict=True))
        self.fused = self.optimizer

    def _say_what_shards_are(self) -> None:
        """Tells megaopt.params which parameter a shard is a part of, and where it begins."""
        numbers = numbers_of(self.buffers)
        for model, shard in self.shards.items():
            shard.megaopt_first_element = self._get_model_param_range_map(model)["param"].start
            shard.megaopt_whole_shape = tuple(model.shape)
            shard.megaopt_number = numbers[model]

    def _adapt(self) -> None:
        """Stands between Megatron and the fused optimizer where they know other parameters."""

    # --- the step

    def _forget_grads(self) -> None:
        """Views of DDP's buffer stay."""
        if not self.is_stub_optimizer and self._has_copies():
            self._norm_grads = {}
            super()._forget_grads()

    @torch.no_grad()
    def restore_from_cpu(self) -> None:
        """Megatron's; shards of weights lie in the parameter buffer again."""
        super().restore_from_cpu()
        for model, shard in self.shards.items():
            if view_of(shard).weight is not None or model in self._outside:
                continue  # it has no memory of its own, or no place in the buffer
            # a shard that came back in memory of its own becomes a view of the buffer again
            place = self._place_of(model)
            if shard.data_ptr() != place.data_ptr():
                place.copy_(shard)
                shard.data = place

    def _place_of(self, model: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a parameter in the buffer that is gathered."""
        # the range counts from the bucket's first element, over all data-parallel ranks
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
        # this rank's parts of fp8 weights, in the place of what Megatron has for these; order: the
        # weight's number, alike on all ranks, by which they meet for scales
        for index, param in weights_of(self):
            if param in self.model_param_gbuf_map:
                part = self._get_model_param_range_map(param)["param"]
                of_rank = part.start, part.end, self.data_parallel_group
                self.shards[param] = Float8Shard(param, *of_rank, order=index)
        # MXFP8 weights: Megatron casts them after the gather, from bf16 values in the buffer
        both = zip(self.model_float16_groups, self.shard_fp32_from_float16_groups, strict=True)
        for models, mains in both:
            outside = {m: main for m, main in zip(models, mains, strict=True) if is_mxfp8(m)}
            for model, main in outside.items():
                # stepped in the buffer where the step may write there, else as the fp32 main shard:
                # its place is that of its own bf16 gradient, which the step has read, but of other
                # elements' beside fp32 gradients; with overlap Megatron first zeroes gradients
                buffer = self.buffers[self.model_param_gbuf_map[model][0]]
                is_alike = buffer.grad_data.dtype == buffer.param_data.dtype
                is_in_place = is_alike and not self.config.overlap_param_gather
                self.shards[model] = self._place_of(model) if is_in_place else main
            self._outside.update(outside)

    def _adapt(self) -> None:
        self.optimizer = MainShardsAdapter(self.fused, self._pairs())

    def _pairs(self) -> list[list[tuple[Any, Any]]]:
        """Returns the main shards of each group of Megatron's, each with what is stepped."""
        # Megatron's order within a group: fp32 parameters first, then those of 16 bits
        both = zip(self.model_fp32_groups, self.model_float16_groups, strict=True)
        models = [[*fp32, *cast] for fp32, cast in both]

        # a main shard each (fp32), beside what the step writes as the weight
        groups = zip(self.fused.param_groups, models, strict=True)
        pairs = [
            [*zip(group["params"], (self.shards[model] for model in group_models), strict=True)]
            for group, group_models in groups
        ]
        # fp8 weights of which this rank has no part: an empty shard with an empty gradient, by
        # which the step takes part in the scales of every weight
        for index, param in weights_of(self):
            if param not in self.model_param_gbuf_map:
                shard: Any = Float8Shard(param, 0, 0, self.data_parallel_group, order=index)
                shard.decoupled_grad = param.main_grad.new_empty(0)
                pairs[0].append((_nothing_of(shard), shard))
        return pairs

    @torch.no_grad()
    def _copy_main_params_to_param_buffer(self) -> None:
        """Megatron's copy of main shards to the buffer that is gathered, in one call.

        Of MXFP8 parameters, which Megatron casts from there, but for those that the step has
        written there. It has written all other weights.
        """
        # after a step those in place have their values in the buffer already
        moved = dict(self._outside)
        if self._is_stepping:
            moved = {m: main for m, main in moved.items() if self.shards[m] is main}

        # one launch copies all: fp32 main shards to bf16 places
        if moved:
            torch._foreach_copy_([self._place_of(m) for m in moved], list(moved.values()))
        # not a method of all releases' chunks
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
        # every rank comes here: casts of fp8 weights meet for their scales
        if any(weights_of(self)):  # also where this rank has no part of them
            self._copy_main_params_to_model_params()
            if not self.ddp_config.overlap_param_gather:
                for chunk in self.model_chunks:
                    chunk.start_param_sync()
        else:
            super().refresh_weights()


class MatrixShards(MainShards):
    """Mode main_shards with a rule for matrices: ranks bring their parts of each together.

    So all have the same parameters in the same order, with an empty shard of those of which
    Megatron gives them nothing.
    """

    def __init__(self, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        # Megatron's init drops parameters of which it gives this rank nothing: the lists before it
        groups = [] if optimizer is None else optimizer.param_groups
        self._models = [list(group["params"]) for group in groups]
        self._absent: dict[Any, Any] = {}
        super().__init__(optimizer, config, *args, **kwargs)

        # empty shards have empty gradients, of the dtype that the others' have
        for model, shard in self._absent.items():
            kind = torch.float32 if self._has_copies() else model.main_grad.dtype
            shard.decoupled_grad = model.main_grad.new_empty(0, dtype=kind)

    def _pairs(self) -> list[list[tuple[Any, Any]]]:
        """Returns main shards and weights of all parameters of each group, in Megatron's order."""
        # by the shard's id the main shard that Megatron has for it
        mains = {id(shard): main for group_pairs in super()._pairs() for main, shard in group_pairs}
        pairs: list[list[tuple[Any, Any]]] = []
        for models in self._models:
            shards = [self._shard_of(model) for model in models]
            pairs.append([(mains.get(id(shard), _nothing_of(shard)), shard) for shard in shards])
        return pairs

    def _shard_of(self, model: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter, or an empty one."""
        if model in self.shards:
            return self.shards[model]
        return self._absent.setdefault(model, model.detach().view(-1)[:0])

    def _say_what_shards_are(self) -> None:
        """Tells also which rank has what of a matrix, and which parameters are Adam's."""
        # the data-parallel ranks, along one dimension
        numbers, kind = numbers_of(self.buffers), self.buffers[0].grad_data.device.type
        mesh = DeviceMesh.from_group(self.data_parallel_group, kind)
        for buffer in self.buffers:
            for model in buffer.params:
                shard: Any = self._shard_of(model)
                # a bucket is cut into equal shares, one a rank, at elements of the whole buffer
                start, end, index = buffer.param_index_map[model]
                bucket, ranks = buffer.buckets[index], buffer.data_parallel_group.size()
                size = bucket.grad_data.numel() // ranks
                # places of the cuts, from the parameter's first element on, at most its size
                places = [bucket.offset + rank * size for rank in range(ranks + 1)]
                # by rank: the first element of the parameter there, the one behind the last
                ends = [*pairwise(min(max(place, start), end) - start for place in places)]
                shard.megaopt_first_element = ends[mesh.get_local_rank()][0]
                shard.megaopt_whole_shape = (*model.shape,)
                shard.megaopt_number = numbers[model]
                # muon reads these of the shard, which has no rows and columns to tell them
                setattr(shard, PARTS, FlatParts(mesh, ends))
                setattr(shard, SPLIT_SIZES, getattr(model, SPLIT_SIZES, None))
                setattr(shard, EMBEDDING, getattr(model, EMBEDDING, None))
                shard.use_muon = None if model.dim() == 2 else False


def _nothing_of(shard: torch.Tensor) -> torch.Tensor:
    """An empty main shard beside an empty shard; the shard itself where it is fp32."""
    if shard.dtype == torch.float32:
        return shard
    return torch.empty(0, dtype=torch.float32, device=shard.device)


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
        # values of a state dict by model parameter, in the place of the weights
        named = {}
        if state_dict is not None:
            named = self._build_model_param_to_state_dict_param_map(state_dict)
        self.fused.initialize_states()
        for model, shard in self.shards.items():
            # masters of the state: fp32 values of the shard's range of the flat parameter
            part = self._get_model_param_range_map(model)["param"]
            value = named.get(model, model).detach().reshape(-1)[part.start : part.end]
            self.fused.set_scaled_state(shard, MASTER, value)


# --- numbers


EXPERTS = 1 << 30
"""Added for parameters of experts, which an optimizer of their own numbers from 0 again."""
SHARED_EMBEDDING = 1 << 31
"""The word embeddings: copies on the first and the last pipeline stage have to stay equal."""


def numbers_of(buffers: Sequence[Any]) -> dict[torch.Tensor, int]:
    """The place of each parameter in the buffers of an optimizer.

    All data-parallel ranks lay out their buffers alike, and so do tensor-parallel ranks, which keep
    copies of norms and biases. Parts of one weight on tensor-parallel ranks, and parameters of
    different pipeline stages, draw the same bits for other elements.
    """
    numbers = {}
    for place, param in enumerate(param for buffer in buffers for param in buffer.params):
        numbers[param] = place if getattr(param, "allreduce", True) else place + EXPERTS
        if getattr(param, "shared_embedding", False):
            numbers[param] = SHARED_EMBEDDING
    return numbers


# --- several optimizers


class Chained(ChainedOptimizer):
    """Steps one or several optimizers of ours (dense and expert parameters, say)."""

    def __init__(self, chained_optimizers: list[Any]) -> None:
        super().__init__(chained_optimizers)
        # 16-bit gradients go to the norm as they are only where those of all optimizers do
        # one list for the norm's kernel, which has one dtype
        allowed = l2_norm_impl is not local_multi_tensor_l2_norm and all(
            optimizer.has_16_bit_norm for optimizer in chained_optimizers
        )
        for optimizer in chained_optimizers:
            optimizer.has_16_bit_norm = allowed

    @torch.no_grad()
    def step(self) -> tuple[bool, Any, Any]:
        """Megatron's step, where gradients stay as they are and the steps are told a coefficient.

        Returns:
            Whether there was an update; the gradients' norm and how many of them are 0, both None
            after an overflow, the latter also if config.log_num_zeros_in_grad is not set.
        """
        self.grad_norms_by_group: dict[str, Any] = {}
        # with a loss scale: unscales gradients, and looks over all ranks for one that is not finite
        if self.prepare_grads():
            return False, None, None
        # the norm of all gradients, summed up over ranks
        grad_norm = self.get_grad_norm()
        if len(norm_groups()) > 1 and self.config.clip_grad > 0.0:
            self._compute_grad_norms_by_group()  # ranks ask each other, once
        # a coefficient is noted for the step; gradients stay as they are
        for optimizer in self.chained_optimizers:
            optimizer.clip(grad_norm, self.grad_norms_by_group)
        # a norm above the config's threshold leaves the step out
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        is_skipped = any(optimizer.skips(grad_norm) for optimizer in self.chained_optimizers)
        return not is_skipped and self.step_with_ready_grads(), grad_norm, zeros

    def _synchronize_steps(self) -> int | None:
        """Megatron's, for groups that were never stepped and steps on the device too."""
        stepped = [
            optimizer for optimizer in self.chained_optimizers if not optimizer.is_stub_optimizer
        ]
        groups = [group for optimizer in stepped for group in optimizer.optimizer.param_groups]
        align_steps(groups)
        steps = {int(group["step"]) for group in groups if group["params"]}
        if len(steps) > 1:
            raise ValueError(f"chained optimizers must be at one step, got steps {sorted(steps)}")
        return steps.pop() if steps else None

    def count_zeros(self) -> Any:
        """Counts the clipped gradients that are 0, over all ranks."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.chained_optimizers:
                stack.enter_context(optimizer.clipped_grads())
            return super().count_zeros()


# --- in the place of Megatron's


MEGATRONS = "megatrons_own"
"""The attribute of our function that is Megatron's, in whose place it stands."""


def owner_of(choices: Choices) -> type:
    """The distributed optimizer of these choices."""
    if choices.galore is not None:
        return MatrixShards
    return PrecisionAware if choices.mode == "precision_aware" else MainShards


def made_of_shards(choices: Choices) -> Any:
    """Our function in the place of Megatron's that makes an optimizer of groups."""
    make = megatrons_own()  # within another's block its choices would win

    def checked(config: Any, model_chunks: list[Any], *args: Any, **kwargs: Any) -> Any:
        model_choices = replace(choices, offloads=config.optimizer_cpu_offload)
        # fp8 parameters are in mode main_shards: Megatron has their masters, in fp32
        params = (param for chunk in model_chunks for param in chunk.parameters())
        if choices.mode != "main_shards" and any(map(is_fp8, params)):
            for name in ("store_param_remainders", "master_weight_dtype"):
                value = getattr(choices, name)
                if value not in (None, False, torch.float32):
                    raise ValueError(
                        f"{name} must be None with fp8 parameters, whose masters are Megatron's, "
                        f"in fp32, got {value!r}"
                    )
            model_choices = replace(model_choices, mode="main_shards", store_param_remainders=None)
        model_choices.check_config(config, model_chunks)
        if model_choices.offloads:  # Megatron itself would make an optimizer a device
            config = copy.copy(config)
            config.optimizer_cpu_offload = False
        # Megatron's function looks these names up when it makes the optimizer
        factory.Adam = model_choices.make_adam
        factory.DistributedOptimizer = owner_of(model_choices)
        return make(config, model_chunks, *args, **kwargs)

    setattr(checked, MEGATRONS, make)
    return checked


def standing_in(make: Any, make_adam: Any, owner: type) -> list[tuple[Any, str, Any]]:
    """Modules, names in them, and what these are to be while Megatron makes an optimizer.

    Args:
        make: in the place of Megatron's function that makes an optimizer of groups.
        make_adam: of the class of the inner optimizer.
        owner: of the distributed optimizer.
    """
    return [
        (factory, "_get_megatron_optimizer_based_on_param_groups", make),
        (factory, "Adam", make_adam),
        # otherwise it takes torch's AdamW, whatever Adam is
        (factory, "USING_PYTORCH_OPTIMIZER", False),
        (factory, "DistributedOptimizer", owner),
        (factory, "ChainedOptimizer", Chained),
        # release 0.16 looks whether it is given an instance of this
        (distrib_optimizer, "Adam", Shards),
    ]


def megatrons_own() -> Any:
    """Megatron's function that makes an optimizer of groups, also within another's block."""
    make = factory._get_megatron_optimizer_based_on_param_groups
    return getattr(make, MEGATRONS, make)


def replacements(choices: Choices) -> list[tuple[Any, str, Any]]:
    """The same for all optimizers but Muon."""
    return standing_in(made_of_shards(choices), choices.make_adam, owner_of(choices))
