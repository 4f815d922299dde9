"""Gradients of Megatron's distributed optimizer where DDP leaves them: their norm and clipping."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer import optimizer as base

from megaopt.integration.megatron.checkpoints import CheckpointedOptimizer
from megaopt.kernels.shards import local_of

Norm = float | torch.Tensor


def norm_groups() -> tuple[str | None, ...]:
    """The groups that Megatron gives a norm of their own, and None for all other gradients."""
    return (None, *getattr(base, "SEPARATE_GRAD_NORM_GROUPS", ()))


def norm_group_of(param: torch.Tensor) -> str | None:
    """The group whose norm a parameter's gradient counts for; releases up to 0.16 have none."""
    group = getattr(param, "grad_norm_group", None)
    return group if group in norm_groups() else None


class Clipping(base.MegatronOptimizer):
    """Clips by the step: gradients stay as they are, and the step is told a coefficient."""

    fused: Any
    """The fused optimizer that steps the shards; None without parameters."""
    shards: dict[Any, Any]
    """The part of each model parameter that is stepped; its `decoupled_grad` is the gradient."""
    grad_name: str
    """Under which name Megatron looks for the gradients of its optimizer's parameters."""
    _has_clipped_grads = _clips_in_place = _is_stepping = False

    def step_with_ready_grads(self) -> bool:
        """Megatron's, with weights that the step has written."""
        self._is_stepping = True
        try:
            return bool(super().step_with_ready_grads())
        finally:
            self._is_stepping = False
            self._forget_grads()

    def _forget_grads(self) -> None:
        """Lets go of gradients that the next step finds anew."""
        for shard in self.shards.values():
            shard.decoupled_grad = None

    def _copy_main_params_to_model_params(self) -> None:
        if not self._is_stepping:  # otherwise the step has written them
            super()._copy_main_params_to_model_params()

    def clip(self, grad_norm: Norm, norms_by_group: Mapping[str, Norm] | None = None) -> None:
        """Tells the next step by what Megatron would multiply gradients of this norm.

        Where some have a norm of their own, gradients are multiplied here, as Megatron does it.
        """
        if not self.shards or self.config.clip_grad <= 0.0:  # without buffers no device
            return
        # norms by group: the step knows one coefficient, so gradients are multiplied here
        if self._clips_in_place:
            norms: dict[str | None, Norm] = {None: grad_norm}
            norms.update((norms_by_group or {}).items())
            for shard in self.shards.values():
                norm = norms.get(norm_group_of(shard))
                coefficient = None if norm is None else self._coefficient(norm)
                if coefficient is not None:
                    shard.decoupled_grad.mul_(coefficient)
        else:
            # fp32 of one element, on the device where the norm is there
            self.fused.clip_coefficient = self._coefficient(grad_norm)

    def _coefficient(self, norm: Norm) -> torch.Tensor | None:
        """The factor of gradients of this norm, fp32 of one element; None: they stay."""
        # a norm on the device stays there: nobody waits
        coefficient = self.config.clip_grad / (norm + 1.0e-6)
        if isinstance(coefficient, torch.Tensor):
            return coefficient.clamp(max=1.0)
        if not coefficient < 1.0:  # of a NaN Megatron makes nothing, on the host
            return None
        # a number: the step takes a tensor all the same
        device = next(iter(self.shards.values())).decoupled_grad.device
        return torch.full((1,), coefficient, dtype=torch.float32, device=device)

    def clip_grad_norm(self, clip_grad: float) -> Any:
        """The norm; the next step clips."""
        grad_norm = self.get_grad_norm()
        has_more = clip_grad > 0.0 and len(norm_groups()) > 1
        norms = self._compute_grad_norms_by_group() if has_more else None
        self.clip(grad_norm, norms)
        return grad_norm

    def skips(self, grad_norm: float | torch.Tensor) -> bool:
        """Returns whether a norm is so large that Megatron leaves the step out."""
        threshold = getattr(self.config, "grad_norm_skip_threshold", math.inf)
        return (
            not self.is_stub_optimizer and math.isfinite(threshold) and bool(grad_norm > threshold)
        )

    @contextlib.contextmanager
    def clipped_grads(self) -> Iterator[None]:
        """Puts copies of clipped gradients where Megatron's code looks for them, within it."""
        # another block around this one has put them there
        if self.is_stub_optimizer or self._has_clipped_grads:
            yield
            return

        # fp32 copies, multiplied by the coefficient as the step would
        params = self.get_parameters()
        # this rank's shards in the order of Megatron's parameters
        shards = [self.optimizer.weight_of(param) for param in params]
        grads = [shard.decoupled_grad for shard in shards]
        coefficient = self.fused.clip_coefficient
        clipped = [
            local_of(grad).float() * (1 if coefficient is None else coefficient) for grad in grads
        ]
        # rounded to the gradient's dtype, where the step rounds so
        if self.fused.options.round_scaled_grads:
            pairs = zip(clipped, grads, strict=True)
            clipped = [value.to(grad.dtype).float() for value, grad in pairs]
        # Megatron's code reads them as gradients of its own parameters
        self._set_grads(params, clipped)
        self._has_clipped_grads = True
        try:
            yield
        finally:
            # gradients of the shards come back: Megatron's code may have dropped them
            self._has_clipped_grads = False
            self._set_grads(params, [None] * len(params))
            for shard, grad in zip(shards, grads, strict=True):
                shard.decoupled_grad = grad

    def count_zeros(self) -> Any:
        """Counts the clipped gradients that are 0, over all ranks."""
        with self.clipped_grads():
            return super().count_zeros()

    def _set_grads(self, params: list[torch.Tensor], grads: list[Any]) -> None:
        for param, grad in zip(params, grads, strict=True):
            setattr(param, self.grad_name, grad)


class Gradients(Clipping, CheckpointedOptimizer):
    """Gradients are read where DDP leaves them, in its buffer: `shard.decoupled_grad` is a view.

    With a loss scale they are unscaled there by Megatron's own pass, since the norm, whose bits are
    Megatron's, is of unscaled numbers; those of 16 bits are cast to fp32 before, as Megatron does.
    """

    has_16_bit_norm = True
    """True where the norm is given gradients of 16 bits."""

    _bound_to: list[tuple[torch.Tensor, int]]
    """DDP's buffers, and their addresses, when gradients were bound."""
    _norm_shards: dict[str | None, list[Any]]
    """The shards that count for each norm."""
    _norm_grads: dict[str | None, list[torch.Tensor]]
    """Their gradients."""

    def _look_at_shards(self) -> None:
        """Notes what does not change about the shards' gradients, when the optimizer is made."""
        # where any rank has some with a norm of their own: the step knows one coefficient for all
        params = [param for buffer in self.buffers for param in buffer.params]
        self._clips_in_place = self.config.clip_grad > 0.0 and any(map(norm_group_of, params))

        # the shards whose gradients count for a norm, neither shared nor duplicates: Megatron
        # decides, asked once with stand-ins, tensors that it filters as if they were gradients
        params = self.get_parameters()
        stand_ins = [param.detach() for param in params]
        shards = [self.optimizer.weight_of(param) for param in params]
        pairs = [*zip(shards, stand_ins, strict=True)]
        for group in norm_groups():
            self._set_grads(params, stand_ins)
            with warnings.catch_warnings():  # shards of fp32 weights are not leaves
                warnings.simplefilter("ignore", UserWarning)
                # releases after 0.16 ask by group
                ask = getattr(super(), "get_grads_for_grad_norm", None)
                counted = ask(group) if ask else super().get_main_grads_for_grad_norm()
            self._set_grads(params, [None] * len(params))
            counted_ids = {id(grad) for grad in counted}
            self._norm_shards[group] = [shard for shard, grad in pairs if id(grad) in counted_ids]

        # the norm's kernel takes four numbers at a time where they are aligned, as fp32 copies are,
        # one at a time elsewhere: two orders. 16-bit gradients may be summed only as copies would
        self.has_16_bit_norm = False
        if self.grad_scaler:  # unscaled gradients are fp32 copies
            return
        # binds gradients, so that their addresses are known
        self._copy_model_grads_to_main_grads()
        self.has_16_bit_norm = all(
            grad.dtype != torch.float32
            and (grad.numel() % 4 != 0 or grad.data_ptr() % (4 * grad.element_size()) == 0)
            for grads in self._norm_grads.values()
            for grad in grads
        )

    # --- gradients

    def _copy_model_grads_to_main_grads(self) -> None:
        """Notes where the gradients lie, which stays as long as DDP's buffers do."""
        if self._is_bound():
            return
        for model, shard in self.shards.items():
            # main_grad: DDP's buffer, in the weight's shape; this rank's range of it
            part = self._get_model_param_range_map(model)["param"]
            grad = model.main_grad.view(-1)[part.start : part.end]
            # fp32 copies where a loss scale, or clipping in place, would round 16-bit gradients
            shard.decoupled_grad = grad.float() if self._has_copies() else grad
        # where the buffers are, to notice when DDP moves them
        self._bound_to = [(b.grad_data, b.grad_data.data_ptr()) for b in self.buffers]
        self._norm_grads = {
            group: [shard.decoupled_grad for shard in shards]
            for group, shards in self._norm_shards.items()
        }

    def _is_bound(self) -> bool:
        """Returns whether all gradients are views of the buffers as they are now."""
        # one shard stands for all: they are bound and dropped together
        shard = next(iter(self.shards.values()), None)
        if shard is None:  # nor are there buffers where all parameters are frozen
            return True
        if self._has_copies():
            return False
        now = [buffer.grad_data for buffer in self.buffers]
        return (
            len(now) == len(self._bound_to)
            and all(
                data is bound and data.data_ptr() == address
                for data, (bound, address) in zip(now, self._bound_to, strict=True)
            )
            and getattr(shard, "decoupled_grad", None) is not None
        )

    def _has_copies(self) -> bool:
        """Returns whether 16-bit gradients are cast: multiplied in place they would be rounded."""
        dtypes = {buffer.grad_data.dtype for buffer in self.buffers}
        rounds = self.fused is not None and self.fused.options.round_scaled_grads
        is_scaled = self.grad_scaler is not None or (self._clips_in_place and not rounds)
        return is_scaled and dtypes != {torch.float32}

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        return [shard.decoupled_grad for shard in self.shards.values()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes gradients if set_to_none is False; otherwise DDP does, and they stay bound."""
        if not set_to_none and self._is_bound():
            for shard in self.shards.values():
                shard.decoupled_grad.zero_()

    # --- their norm

    def get_main_grads_for_grad_norm(self) -> list[torch.Tensor]:
        """The gradients that count for the norm, in fp32 wherever that could move its bits."""
        return self.get_grads_for_grad_norm()

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        """The same for releases after 0.16, also for a group with a norm of its own."""
        grads = self._norm_grads.get(grad_norm_group, [])
        return [grad if self.has_16_bit_norm else grad.float() for grad in grads]
