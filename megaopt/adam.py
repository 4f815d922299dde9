"""FusedAdam: Adam and AdamW in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import Unpack

from megaopt.kernels.formats import MOMENTS
from megaopt.kernels.rules import RULES, Rule
from megaopt.optimizer import FusedOptimizer
from megaopt.options.arguments import options_of, show_options
from megaopt.options.checks import NOT_NEGATIVE
from megaopt.options.choices import Contract, MakesStates
from megaopt.options.options import VARIANTS, Numbers, Options, SharedOptions, StepOptions


@dataclass(frozen=True, kw_only=True)
class AdamOptions(Options):
    """FusedAdam's own options."""

    NUMBERS: ClassVar[Numbers] = Numbers(
        {"lr": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE},
        has_betas=True,
        flags=("bias_correction",),
    )
    MARKS: ClassVar[tuple[str, ...]] = ("contract", "adam_w_mode")

    exp_avg_dtype: torch.dtype | str = torch.float32
    exp_avg_sq_dtype: torch.dtype | str = torch.float32
    adam_w_mode: bool = True
    amsgrad: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for an option out of its range, or options that contradict."""
        super().__post_init__()
        if self.makes_states is None:
            habit = "stepped" if self.contract == "torch" else "trainable"
            object.__setattr__(self, "makes_states", habit)
        if self.amsgrad and MOMENTS[self.exp_avg_sq_dtype].draws:
            raise ValueError(
                "exp_avg_sq_dtype must round to nearest with amsgrad=True, got "
                f"{self.exp_avg_sq_dtype!r}: the largest of numbers that are rounded up and down "
                "is too large"
            )
        for name in VARIANTS:
            if self.contract == "te" and getattr(self, name):
                raise ValueError(
                    f"{name} must be False with contract='te', got True: TransformerEngine's "
                    "FusedAdam has none"
                )

    @property
    def max_exp_avg_sq_dtype(self) -> torch.dtype | str:
        """The dtype of AMSGrad's third moment."""
        return self.exp_avg_sq_dtype


class FusedAdam(FusedOptimizer):
    """Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019) that writes the model's weights.

    One launch updates exp_avg, exp_avg_sq and the masters and stores the cast weights, for any
    number of tensors and groups (per combination of formats). docs/numbers.md gives every operation
    in order; the bits are the same on every backend.

    Takes the place of transformer_engine.pytorch.optimizers.FusedAdam: its keywords, attributes and
    methods.

    Args:
        params: parameters, named parameters or groups, as for torch.optim; fp32, bf16 or fp16,
            dense, of any shape. Of DTensors (FSDP2's, say) each rank steps its shards, and their
            state is DTensors of the same mesh and placements; then no formats with a scale per
            tensor.
        lr: step size, in units of the parameter per step of size one; at least 0. May be a tensor
            of one element, which the step reads (on a GPU that waits for it). None, not with
            capturable: a schedule sets it before the first step.
        betas: decay per step of exp_avg and exp_avg_sq; each in [0, 1).
        eps: added to the root of exp_avg_sq, in units of the gradient; at least 0.
        weight_decay: decoupled (AdamW): the part of a weight that goes per step of size one, times
            lr; otherwise L2: added to the gradient per unit of the weight. At least 0.
        amsgrad: divides by the root of the largest exp_avg_sq so far (Reddi et al. 2018), which the
            state keeps as max_exp_avg_sq, in exp_avg_sq_dtype. Not under contract te.
        exp_avg_dtype: the format of exp_avg. torch.float32; or torch.bfloat16; or
            "bfloat16_stochastic", which does not stall as torch.bfloat16 does: take it for both.
            With a scale per tensor: torch.float16 or torch.float8_e4m3fn (torch.uint8 means the
            same, as in TransformerEngine).
            With 8 bits in blocks: "block_e4m3" (for exp_avg_sq "block_e5m3"), rounded
            stochastically. 128 elements share a scale of one byte, state["exp_avg_scale"]; those of
            "block64_e4m3" and its like are 64. "..._nearest" rounds to nearest: exp_avg_sq stalls.
            "block_int8" and "block64_int8", of exp_avg alone, are linear, for Muon's momentum:
            what is less than 1/128 of its block's largest is lost or noise there.
            With 4 bits, two a byte, in blocks of 32: "block32_e3m0" (for exp_avg_sq
            "block32_e4m0"), where the last dimension is a multiple of 32. They too are right in the
            mean; updates are noisier by 84% of it. "..._nearest" is not for training: exp_avg stays
            where gradients stop.
            With blocks, parameters of fewer than 4,096 elements (65,536 in one dimension), or whose
            rows are no whole blocks, keep fp32 moments; beside a rank's part of an fp8 weight those
            in blocks are refused. Stochastic formats do not go with contract torch, and in
            exp_avg_sq not with amsgrad.
        exp_avg_sq_dtype: likewise, chosen independently; blocks are of one size.
        bias_correction: divides the moments by `1 - beta**step`.
        adam_w_mode: AdamW; False for Adam with L2 weight decay.
        makes_states: whose state a step makes. "stepped": of parameters with a gradient, as torch.
            "trainable": also of those without one that require gradients, so that after any step
            their state can be read. "all": of frozen ones (requires_grad=False) too, as
            TransformerEngine, at the price of their memory; torch.distributed.checkpoint loads no
            state of a frozen parameter (docs/how-to/fsdp2.md). None: "stepped" under contract
            torch, else "trainable".
        contract: how operations are rounded, by name (megaopt.kernels.contracts.CONTRACTS).

    Raises:
        TypeError: an argument has a name that is not here.
        ValueError: an argument is out of range, unknown, or contradicts another; the message names
            it, its value and what is allowed.
        TypeError: params is no iterable of tensors, (name, tensor) pairs or groups.
        RuntimeError: the backend does not work on a parameter's device; the message says why.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor | None = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        exp_avg_dtype: torch.dtype | str = torch.float32,
        exp_avg_sq_dtype: torch.dtype | str = torch.float32,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        makes_states: MakesStates | None = None,
        contract: Contract = "ieee",
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(params, *options_of(self, AdamOptions, locals()))

    @property
    def rule(self) -> Rule:
        """AdamW or Adam, under the optimizer's contract; te has others for capturable=True."""
        rule = self.eager_rule
        return rule.capturable if self.options.capturable and rule.capturable else rule

    @property
    def eager_rule(self) -> Rule:
        """AdamW or Adam, under the optimizer's contract, without capturable=True."""
        options: Any = self.options
        name = "adamw" if options.adam_w_mode else "adam"
        return RULES[name + "_amsgrad" * options.amsgrad, options.contract]

    @torch.no_grad()
    def to_torch_state_dict(self, *, drop_masters: bool = False) -> dict[str, Any]:
        """A state dict that torch.optim.AdamW (or Adam, for adam_w_mode=False) loads and steps on.

        `load_state_dict` takes it back, and whatever torch made of it. Each parameter with a state
        has its step count, fp32 as torch's, and its moments; those with a scale are given
        as their fp32 numbers, others as they are stored, without a copy. torch casts what it loads
        to the parameter's dtype: moments of another dtype do not keep their bits there. Groups have
        torch's keys, which win over those that torch's optimizer was made with: fused=True under
        contract torch, whose bits these are, else None.

        Args:
            drop_masters: leaves masters out; torch then goes on from the weights, as they are
                rounded.

        Raises:
            ValueError: a weight has a master and drop_masters is False; a weight is in fp8; a group
                has bias_correction=False, no lr, or more steps than torch's fp32 count holds.
        """
        from megaopt.saving.torch_state import adam_state_dict

        return adam_state_dict(self, self._owned, drop_masters)


show_options(FusedAdam, AdamOptions, SharedOptions, StepOptions)
