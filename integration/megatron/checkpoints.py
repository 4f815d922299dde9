"""The distributed optimizer's checkpoints: Megatron's formats, exact, with what they leave out."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megaopt.galore import GaLoreOptions
from megaopt.kernels.refusals import refuse
from megaopt.state.owned import owned_of
from megaopt.state.tensors import MASTER

ADAM = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"


class Saved(MegatronOptimizer):
    """The common part of the distributed optimizer and those of whole weights, in a save."""

    fills_states = True
    """A save, and a load, first makes all states complete."""

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Megatron's; nothing where all parameters are frozen.

        Raises ImportError for a save without what Megatron's writer needs.
        """
        # processes that write would end without it, and the ranks wait for them till their timeout
        name = "megatron.core.dist_checkpointing.strategies.filesystem_async"
        if not is_loading and not getattr(importlib.import_module(name), "HAVE_PSUTIL", True):
            raise ImportError(
                "Megatron's writer of checkpoints needs psutil, which is not installed: "
                "pip install psutil, or megaopt with its extra 'megatron'"
            )
        if self.is_stub_optimizer:
            return {}
        if self.fills_states:
            self.initialize_states()
        arguments = (model_sharded_state_dict, is_loading, *args)
        return super().sharded_state_dict(*arguments, **kwargs)


class CheckpointedOptimizer(Saved, DistributedOptimizer):
    """All formats have fp32 values, whatever the state is stored as: each loads into each."""

    fills_states = False
    fused: Any = None
    """The fused optimizer that steps the shards; None without parameters."""
    shards: dict[Any, Any]
    """This rank's part of each model parameter that it owns part of."""
    _outside: dict[Any, torch.Tensor]
    """Main shards of MXFP8 parameters: Megatron casts those weights, and none at a load."""

    @property
    def optimizer_state_keys(self) -> tuple[str, ...]:
        """The names of the moments, as releases after 0.16 ask for them."""
        return ADAM if self.fused is None else tuple(self.fused.rule.moments)

    @property
    def _keys(self) -> tuple[str, ...]:
        return ("param", *self.optimizer_state_keys)

    def _names_of(self, shard: torch.Tensor) -> dict[str, str | None]:
        """The name of each of them in a state; None: nothing, in whose place there are zeros.

        Muon's one moment stands in the place of Adam's first, which its other parameters have.
        """
        names = dict.fromkeys((MOMENTUM, *self.optimizer_state_keys))
        # moments that this shard's rule keeps, in the order of Megatron's keys
        moments = [name for name in names if name in self.fused.state[shard]]
        return dict(zip_longest(self._keys, (MASTER, *moments)))

    def state_dict(self) -> dict[str, Any]:
        """Groups and loss scale; Megatron's own takes step counts from where torch keeps them.

        Nothing where all parameters are frozen: there is no fused optimizer.
        """
        if self.is_stub_optimizer:
            return {}
        # groups without their parameters, with plain numbers: files are read where no card is
        packed = self.optimizer.state_dict()
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in packed["param_groups"]
        ]
        for group in groups:  # with capturable they are on the device
            lr = group["lr"]
            group["lr"] = lr.item() if isinstance(lr, torch.Tensor) else lr
            group["step"] = int(group["step"])
        align_steps(groups)
        contents: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if self.grad_scaler:
            contents["grad_scaler"] = self.grad_scaler.state_dict()
        return contents

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Megatron's, into a complete state: it would make one of uninitialized memory.

        Raises ValueError for moments of other projections.
        """
        if self.is_stub_optimizer:
            return
        # moments of other projections, and of none, which are Adam's, have another basis
        names = GaLoreOptions.MATRIX_KEYS
        source, target = (
            {tuple(group.get(name) for name in names) for group in groups}
            for groups in (state_dict["optimizer"]["param_groups"], self.optimizer.param_groups)
        )
        if source != target:
            keys = f"{' and '.join(names)} of a checkpoint's groups"
            refuse(keys, f"those of galore, {target}", source)
        self.optimizer.initialize_states()
        super().load_state_dict(state_dict)

    def _get_main_param_and_optimizer_states(self, model_param: torch.Tensor) -> dict[str, Any]:
        shard = self.shards[model_param]
        if MASTER not in self.fused.state.get(shard, {}):  # nothing yet, or moments that were given
            self.fused.initialize_states()
        # fp32 values of master and moments, each as many as the shard has elements
        tensors = {}
        for key, name in self._names_of(shard).items():
            # a key of which this state has no moment, as the second of Muon's: zeros
            if name is None:
                tensors[key] = torch.zeros(shard.shape, dtype=torch.float32, device="cpu")
                continue
            tensor: torch.Tensor = self.fused.get_unscaled_state(shard, name)
            # a moment of fewer numbers (GaLore) is spread over as many as the shard has
            spread = self._spread(shard, name)
            if spread is not None:
                tensor = spread.write(tensor, name == self._keys[1])
            tensors[key] = tensor
            if not self._is_sharing:
                continue
            # for a file what was decoded is copied to host memory: all of it would take much of
            # the card; memory of the state or of the shard is no decoded copy
            state = self.fused.state[shard].values()
            held = [shard, *(value for value in state if isinstance(value, torch.Tensor))]
            memory = tensor.untyped_storage().data_ptr()
            is_held = any(value.untyped_storage().data_ptr() == memory for value in held)
            # and what is saved from pinned memory: the process that writes an asynchronous save
            # would take it out of there
            is_apart = self.fused.stepper.homes.default and tensor.device.type == "cpu"
            if not is_held or (is_apart and not self._is_loading):
                tensors[key] = host_copy(tensor)
        return tensors

    _is_sharing = _is_loading = False
    """True while all of the state is gathered, for a file or to be read from one."""

    def _set_main_param_and_optimizer_states(
        self, model_param: torch.Tensor, tensors: dict[str, Any]
    ) -> None:
        shard = self.shards[model_param]
        for key, name in self._names_of(shard).items():
            if name is None:
                continue
            # what was spread is read back
            value, spread = tensors[key], self._spread(shard, name)
            if spread is not None:
                value = spread.read(value, name == self._keys[1])
            self.fused.set_scaled_state(shard, name, value)

    def _spread(self, shard: torch.Tensor, name: str) -> Spread | None:
        view = owned_of(self.fused).view(shard)
        is_as_the_weight = name == MASTER or not view.kept
        return None if is_as_the_weight else Spread(view, self.fused.state[shard])

    # --- weights are what their masters say, after any load

    def load_parameter_state_from_dp_zero(self, *args: Any, **kwargs: Any) -> None:
        """Megatron's; then the weights are cast anew."""
        super().load_parameter_state_from_dp_zero(*args, **kwargs)
        self.refresh_weights()

    def load_parameter_state_from_dp_reshardable(self, state_dict: Any) -> None:
        """Megatron's; then the weights are cast anew."""
        super().load_parameter_state_from_dp_reshardable(state_dict)
        self.refresh_weights()

    def load_parameter_state_from_fully_reshardable(self, state_dict: Any) -> None:
        """Megatron's; then the weights are cast anew."""
        super().load_parameter_state_from_fully_reshardable(state_dict)
        self.refresh_weights()

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Casts every master into its shard of the weights; the ranks have to gather them.

        What ranks keep of whole matrices they bring together.
        """
        for view in owned_of(self.fused).views if self.fused.options.MATRIX else []:
            if view.kept:
                Spread(view, self.fused.state[view.param]).bring_together(self.data_parallel_group)
        if self.fused.options.master_format(torch.bfloat16, True).joined:
            return  # such a master set its weight
        for model, shard in self.shards.items():
            if shard.dtype != torch.float32 and model not in self._outside:
                shard.copy_(self.fused.get_unscaled_state(shard, MASTER))

    # --- dp_zero_gather_scatter: several instances of the distributed optimizer

    def sharded_param_state_dp_zero(
        self, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Megatron's, where each instance reads what the first one saved; it would read nothing."""
        instance = self.distributed_optimizer_instance_id
        if is_loading and instance > 0 and self.data_parallel_group.rank() == 0:
            key = f"optimizer.distributed.dp_group_idx_{self.data_parallel_group_idx}.param_state"
            return ShardedObject(key, None, (1,), (0,), replica_id=instance)
        arguments = (model_sharded_state_dict, is_loading, *args)
        return super().sharded_param_state_dp_zero(*arguments, **kwargs)

    # --- dp_reshardable: ranks that hold nothing but padding of a bucket

    def get_parameter_state_dp_reshardable(self) -> dict[Any, Any]:
        """Megatron's, in which no bucket is empty; it would refuse to save one."""
        self._is_sharing = True
        try:
            state: dict[Any, Any] = super().get_parameter_state_dp_reshardable()
        finally:
            self._is_sharing = False
        # a bucket of which this rank has only padding has no entry
        group = self.data_parallel_group
        empty = [
            (entries, bucket)
            for index, buffer in enumerate(self.buffers)
            for buckets in state[index].values()
            for entries, bucket in zip(buckets, buffer.buckets, strict=True)
            if not entries
        ]
        for entries, bucket in empty:
            # it gets one of zeros: the bucket's share of this rank, cut at the end of what is saved
            size = bucket.grad_data.numel() // group.size()
            end = min(max(bucket.numel_unpadded - group.rank() * size, 0), size)
            zeros = torch.zeros(end, dtype=torch.float32, device=bucket.grad_data.device)
            tensors = {key: zeros.clone() for key in self._keys}
            range_of_padding = {"gbuf_local_start": 0, "gbuf_local_end": end, "padding": True}
            entries.append({**tensors, **range_of_padding})
        return state

    def sharded_param_state_dp_reshardable(
        self, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> dict[Any, Any]:
        """Megatron's, where each rank takes part in each bucket, as loads need it."""
        self._is_loading = is_loading
        arguments = (model_sharded_state_dict, is_loading, *args)
        try:
            state: dict[Any, Any] = super().sharded_param_state_dp_reshardable(*arguments, **kwargs)
        finally:
            self._is_loading = False
        entries = [
            entry
            for index in range(len(self.buffers))
            for buckets in state[index].values()
            for bucket_entries in buckets
            for entry in bucket_entries
        ]
        # an entry without elements lies past the end of what is saved: every rank has to read
        # something of each bucket, here another rank's first element, and forgets it
        replica = (self.distributed_optimizer_instance_id, 0, self.data_parallel_group.rank())
        first = {"local_shape": (1,), "global_offset": (0,), "replica_id": replica}
        for entry in entries:
            if not entry["param"].data.numel():
                zero = entry["param"].data.new_zeros(1)
                read = {key: replace(entry[key], data=zero.clone(), **first) for key in self._keys}
                padding = entry["padding"]
                entry.clear()
                entry.update(padding=padding, **read)
        return state

    # --- fully_reshardable: several buckets

    def sharded_param_state_fully_reshardable(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's, with the padding between buckets that it counts on.

        The supported releases cut parameters at places in the padded buffer out of tensors without
        padding: right with one bucket, other parameters' elements with several.
        """
        self._keeps_padding = True
        try:
            return super().sharded_param_state_fully_reshardable(*args, **kwargs)
        finally:
            self._keeps_padding = False

    _keeps_padding = False

    def get_parameter_state_dp_zero(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's."""
        state = super().get_parameter_state_dp_zero(*args, **kwargs)
        # None on ranks that get none of the gathered tensors
        if self._keeps_padding and state is not None:
            for index, buffer in enumerate(self.buffers):
                for tensors in state[index].values():
                    for key in self._keys:
                        tensors[key] = padded(tensors[key], buffer)
        return state


def align_steps(groups: Sequence[dict[str, Any]]) -> None:
    """Gives groups that were never stepped the step of the others, as Megatron's checkpoints have.

    A group that is empty on one rank is loaded on others, where it is not.
    """
    # 0 is of groups that were never stepped
    steps = {int(group["step"]) for group in groups} - {0}
    if len(steps) == 1:
        (step,) = steps
        for group in groups:
            if isinstance(group["step"], torch.Tensor):
                group["step"].fill_(step)
            else:
                group["step"] = step


class Spread:
    """Moments of fewer numbers than their weight has, and what is kept, in a part of its size.

    Of a weight's elements as many stand for a moment's numbers as it has, spread evenly: a part has
    those that stand for its own part of the moment. Beside the first moment the first of the others
    stand for what the state keeps: altogether these are no more numbers than the weight's.

    Args:
        view: of a flat part of a matrix.
        state: the parameter's.
    """

    def __init__(self, view: Any, state: dict[str, Any]) -> None:
        # low: the moment's shape; whole: the weight's
        low, whole = view.matrix.low_shape(view.whole_shape), view.whole_shape
        # places: int64 [numel + 1], elements of the weight; firsts: moment's numbers before each
        places = view.first_of() + torch.arange(view.local.numel() + 1)
        firsts = places * math.prod(low) // math.prod(whole)
        # is_low: bool [numel], elements that stand for a number of the moment
        self._is_low, rest_counts = firsts.diff() > 0, places - firsts
        # what is kept (projection, captured energy) takes the elements that stand for no moment
        self._tensors = [state[name] for name in view.kept]
        most = sum(tensor.numel() for tensor in self._tensors)
        self._begin, self._end = (min(int(rest_counts[i]), most) for i in (0, -1))
        """This part's first number of all that is kept, and the one behind its last."""
        self._places = (~self._is_low).nonzero()[: self._end - self._begin, 0]

    def write(self, moment: torch.Tensor, is_first: bool) -> torch.Tensor:
        """The part of a moment, in the first one with what is kept; fp32, on the CPU."""
        values = torch.zeros(self._is_low.shape)
        values[self._is_low] = moment.cpu()
        if is_first:
            values[self._places] = self._numbers()[self._begin : self._end].cpu()
        return values

    def read(self, value: torch.Tensor, is_first: bool) -> torch.Tensor:
        """The part of a moment that was written; what is kept goes into the state."""
        value = value.cpu()
        if is_first:
            numbers = self._numbers()
            numbers[self._begin : self._end] = value[self._places]
            self._keep(numbers)
        return value[self._is_low]

    def bring_together(self, group: Any) -> None:
        """Puts together what is kept of the parts that ranks have read."""
        # each rank has its own part of the numbers, all others are 0: the sum has all parts
        numbers = self._numbers().view(torch.int32)  # a sum of these with zeros keeps every bit
        numbers[: self._begin], numbers[self._end :] = 0, 0
        dist.all_reduce(numbers, group=group)
        self._keep(numbers.view(torch.float32))

    def _numbers(self) -> torch.Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in self._tensors])

    def _keep(self, numbers: torch.Tensor) -> None:
        parts = torch.split(numbers, [tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in host memory of their own."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def padded(compact: torch.Tensor, buffer: Any) -> torch.Tensor:
    """A buffer's elements at their places in it, of all its buckets one after another."""
    # compact: the unpadded elements of all buckets, one behind another, without gaps
    whole = compact.new_zeros(buffer.numel)
    start = 0
    for bucket in buffer.buckets:
        end = start + bucket.numel_unpadded
        whole[bucket.offset : bucket.offset + bucket.numel_unpadded] = compact[start:end]
        start = end
    return whole
