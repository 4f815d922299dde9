"""Optimizers of whole weights: on every data-parallel rank, or of each weight on one of them.

Megatron's Float16OptimizerWithFloat16Params and FP32Optimizer hold fp32 values of weights, and
LayerWiseDistributedOptimizer gives each rank some of the weights. Here the step writes the weights
too, with Megatron's fp32 values as their masters.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megaopt.integration.megatron.adam import MainShardsAdapter
from megaopt.integration.megatron.checkpoints import Saved, align_steps
from megaopt.integration.megatron.distributed import Chained
from megaopt.integration.megatron.gradients import Clipping, Norm, norm_group_of
from megaopt.muon import SPLIT_SIZES
from megaopt.params import view_of
from megaopt.params.dtensor import locals_of

Meshes = dict[bool, DeviceMesh]
"""The tensor-parallel ranks that share a matrix: of experts, and of others."""


def as_part(local: torch.Tensor, meshes: Meshes) -> torch.Tensor:
    """A weight of Megatron's, or the part of a matrix that it is, as a DTensor in its memory."""
    # cut along rows (0) or columns (1), with a mesh of the ranks that have the other parts
    mesh = meshes.get(getattr(local, "expert_tp", False))
    dim = getattr(local, "partition_dim", -1)
    if mesh is None or dim not in (0, 1):
        return local
    # a view of the weight's memory; run_check would have ranks ask each other
    part = DTensor.from_local(local.detach(), mesh, [Shard(dim)], run_check=False)
    # marks that the optimizer and the norm look for
    for name in (SPLIT_SIZES, "use_muon", "grad_norm_group"):
        if hasattr(local, name):
            setattr(part, name, getattr(local, name))
    return part


class WholeAdapter(MainShardsAdapter):
    """Shows Megatron a fused optimizer of whole weights, with state dicts as torch's are."""

    def master_of(self, main: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """Its fp32 values, split among ranks as it is; None for a weight of fp32."""
        return None if main.dtype == weight.dtype else view_of(weight).wrap(main)

    def state_dict(self) -> dict[str, Any]:
        """States and groups alone: what else ours tells is of one rank's weights.

        Of matrices that ranks share this rank's parts.
        """
        packed = super().state_dict()
        align_steps(packed["param_groups"])
        states = {place: locals_of(state) for place, state in packed["state"].items()}
        return {"state": states, "param_groups": packed["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as MainShardsAdapter; also what Megatron saved of other inner optimizers.

        torch's AdamW has a step in each state. Emerging-Optimizers' Muon has none; it becomes that
        of the other optimizers of the chain.
        """
        # one count for all groups: the largest that a state has
        groups, states = state_dict["param_groups"], state_dict["state"].values()
        steps = {int(state["step"]) for state in states if "step" in state}
        if steps:
            groups = [{**group, "step": max(steps)} for group in groups]
        # parts of shared matrices become DTensors again
        weights = [weight for group in self.fused.param_groups for weight in group["params"]]
        parts = {
            place: {name: view_of(weights[place]).wrap(value) for name, value in state.items()}
            for place, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": parts, "param_groups": groups})
        if not any("step" in group for group in groups):
            for group in self.param_groups:
                group["step"] = 0


class Whole(Clipping, Saved):
    """The common part of both kinds; before Megatron's class among the bases."""

    grad_name = "grad"
    has_16_bit_norm = False
    """The norm is Megatron's, of its fp32 copies of gradients."""

    def __init__(self, optimizer: Any, config: Any, *args: Any) -> None:
        # Megatron's class puts fp32 copies (mains) of 16-bit weights into the groups
        super().__init__(optimizer, config, *args)
        self.shards, self.fused = {}, optimizer
        if self.is_stub_optimizer:
            return

        # by group: mains, models in their places, weights as they are stepped
        names = ("float16_groups", "fp32_from_float16_groups")
        both = zip(*(getattr(self, name, ()) for name in names), strict=True)
        models_by_main = {
            id(main): model
            for group_models, mains in both
            for model, main in zip(group_models, mains, strict=True)
        }
        groups = [group["params"] for group in optimizer.param_groups]
        models = [[models_by_main.get(id(main), main) for main in mains] for mains in groups]
        meshes = getattr(optimizer, "meshes", {})
        weights = [[as_part(model, meshes) for model in group_models] for group_models in models]
        pairs = [[*zip(*columns, strict=True)] for columns in zip(groups, weights, strict=True)]
        self.optimizer = WholeAdapter(optimizer, pairs)

        # ranks with copies of a weight divide the work on it
        copies = getattr(optimizer, "copies", {})
        for weight in itertools.chain.from_iterable(weights):
            if weight in copies:  # no part of a matrix that tensor-parallel ranks share
                optimizer.stepper.replicas.groups[weight] = copies[weight]
        self.init_state_fn = self.initialize_states
        for group_models, parts in zip(models, weights, strict=True):
            self.shards.update(zip(group_models, parts, strict=True))
        # weights with a norm of their own: the step knows one coefficient for all
        self._clips_in_place = any(map(norm_group_of, self.shards))

    def initialize_states(self, optimizer: Any = None, config: Any = None) -> None:
        """Makes all states complete, as Megatron asks for it before a checkpoint is loaded."""
        self.fused.initialize_states()

    def prepare_grads(self) -> bool:
        """Megatron's; the step reads gradients where DDP left them."""
        # Megatron's own copies and unscales gradients; with norms by group these copies are clipped
        found_inf, params = bool(super().prepare_grads()), self.get_parameters()
        for (model, weight), param in zip(self.shards.items(), params, strict=True):
            grad = param.grad if self._clips_in_place else model.main_grad
            weight.decoupled_grad = view_of(weight).wrap(grad)
        return found_inf

    def clip(self, grad_norm: Norm, norms_by_group: Mapping[str, Norm] | None = None) -> None:
        """Tells the next step, as Clipping; Megatron's fp32 copies of gradients are dropped."""
        # the copies were for the norm; the step reads gradients of the weights
        super().clip(grad_norm, norms_by_group)
        params = self.get_parameters()
        self._set_grads(params, [None] * len(params))


class WholeFloat16(Whole, Float16OptimizerWithFloat16Params):
    """Weights of 16 bits, and fp32 ones among them."""


class WholeFloat32(Whole, FP32Optimizer):
    """Weights of fp32."""


class LayerWise(LayerWiseDistributedOptimizer, Chained):
    """Whole weights, each stepped by the one data-parallel rank that owns it."""

    has_16_bit_norm = False

    def clip(self, grad_norm: Norm, norms_by_group: Mapping[str, Norm] | None = None) -> None:
        """Tells the steps of this rank's weights by what gradients of this norm are multiplied."""
        for optimizer in self.chained_optimizers:
            optimizer.clip(grad_norm, norms_by_group)

    def skips(self, grad_norm: Norm) -> bool:
        """Returns whether a norm is so large that Megatron leaves the step out."""
        return any(optimizer.skips(grad_norm) for optimizer in self.chained_optimizers)

    @contextlib.contextmanager
    def clipped_grads(self) -> Iterator[None]:
        """Puts copies of clipped gradients where Megatron's code looks for them, within it."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.chained_optimizers:
                stack.enter_context(optimizer.clipped_grads())
            yield

    def count_zeros(self) -> Any:
        """Counts the clipped gradients that are 0, over all ranks."""
        with self.clipped_grads():
            return super().count_zeros()
