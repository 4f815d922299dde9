"""FusedAdam: Adam and AdamW in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from megaopt.kernels.contracts import CONTRACTS
from megaopt.kernels.formats import MOMENTS
from megaopt.kernels.rules import RULES, Rule
from megaopt.optimizer import FusedOptimizer
from megaopt.options.checks import NOT_NEGATIVE, one_of
from megaopt.options.choices import (
    Backend,
    Contract,
    ExternalWrite,
    MakesStates,
    Nonfinite,
    Rounding,
    StepCounts,
)
from megaopt.options.names import check_arguments
from megaopt.options.options import FLAGS, VARIANTS, Numbers, Options
from megaopt.options.placement import StateDevice
from megaopt.saving.torch_state import torch_state_dict
from megaopt.state.masters import MasterWeights


@dataclass(frozen=True, kw_only=True)
class AdamOptions(Options):
    """FusedAdam's own options."""

    NUMBERS: ClassVar[Numbers] = Numbers(
        {"lr": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE},
        has_betas=True,
        flags=("bias_correction",),
    )
    MARKS: ClassVar[tuple[str, ...]] = ("contract", "adam_w_mode")
    CHOICES: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Options.CHOICES,
        "contract": tuple(CONTRACTS),
        "adam_w_mode": FLAGS,
        "amsgrad": FLAGS,
    }

    exp_avg_dtype: torch.dtype | str = torch.float32
    exp_avg_sq_dtype: torch.dtype | str = torch.float32
    adam_w_mode: bool = True
    amsgrad: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for what is not allowed."""
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
        """Of AMSGrad's third moment."""
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
            state is DTensors of the same mesh and placements; no formats with scales then.
        lr: step size, in units of the parameter per step of size one; at least 0. May be a tensor
            of one element, which the step reads (on a GPU that waits for it). None, not with
            capturable: a schedule sets it before the first step.
        betas: decay per step of exp_avg and exp_avg_sq; each in [0, 1).
        eps: added to the root of exp_avg_sq, in units of the gradient; at least 0.
        weight_decay: decoupled (AdamW): the part of a weight that goes per step of size one, times
            lr; otherwise L2: added to the gradient per unit of the weight. At least 0.
        amsgrad: divides by the root of the largest exp_avg_sq so far (Reddi et al. 2018), which the
            state keeps as max_exp_avg_sq, in exp_avg_sq_dtype. Not under contract te.
        dtype: torch.float32 keeps an fp32 master for each weight that is not fp32. None leaves it
            to master_weights.
        master_weights: True keeps a master, in master_weight_dtype, for each weight that is not
            fp32. A list gives the masters, in group order: one tensor for each parameter (None for
            an fp32 weight), or for each that is not fp32; used as they are, not copied. None or
            False without dtype: the weights alone are updated. May be assigned after construction.
        master_weight_dtype: torch.float32, or torch.float16 with a scale per tensor; or the name of
            a master that lies beside its 16-bit weight: "remainder16" (exact fp32: an int16 beside
            a bf16 weight, as store_param_remainders keeps it), "remainder8" (an int8: 24 bits
            beside a bf16 weight, 16 beside an fp8 code), "kahan" (a bf16 beside a bf16 or fp16
            weight), and the last two rounded stochastically, "remainder8_stochastic" and
            "kahan_stochastic". Rounded to nearest, these two lose updates below half of their last
            place (2**-17 and about as much of the weight). A name whose master does not fit a
            weight is refused.
        exp_avg_dtype: torch.float32, torch.bfloat16, or, with a scale per tensor, torch.float16 or
            torch.float8_e4m3fn (which torch.uint8 stands for too, as in TransformerEngine); or
            "bfloat16_stochastic", which does not stall as torch.bfloat16 does: take it for both. Or
            8 bits in blocks, "block_e4m3" (for exp_avg_sq "block_e5m3"), rounded stochastically:
            128 elements share a scale of one byte, state["exp_avg_scale"]. "block64_e4m3" and its
            like have blocks of 64; "..._nearest" rounds to nearest, where exp_avg_sq stalls. Or 4
            bits, two a byte, in blocks of 32, "block32_e3m0" (for exp_avg_sq "block32_e4m0"), where
            the last dimension is a multiple of 32: right in the mean too, with updates noisier by
            84% of it; "..._nearest" is not for training: exp_avg stays where gradients stop. Those
            of fewer than 4,096 elements, 65,536 in one dimension, keep fp32 moments then, and so do
            those whose rows are no whole blocks. What draws is not for contract torch, nor for
            exp_avg_sq with amsgrad; blocks are not for a rank's part of an fp8 weight.
        exp_avg_sq_dtype: likewise, chosen independently; blocks are of one size.
        store_param_remainders: keeps, of an fp32 master, the 16 bits that its bf16 weight does not
            hold: exact, 2 bytes less per weight; weights then round ties away from zero. Needs
            masters and bf16 weights; fp32 weights may be among them.
        weight_rounding: "stochastic" rounds bf16, fp16 and fp8 weights so that they are in the mean
            the values that the rule gave; for weights without masters, fp32 ones may be among them.
            "nearest" loses updates below half a unit in a weight's last place.
        seed: of the random bits of what is rounded stochastically, from 0 to 2**64 - 1; in the
            groups, and saved with them, where there is such. A group's `param_numbers`, one number
            from 0 to 2**32 - 1 for each parameter, tell parameters apart; without it they are
            numbered in the order of the groups. Two optimizers with one seed draw the same bits for
            parameters of the same number: give each its own. docs/numbers.md says what a bit is
            made of, and what a load takes over.
        bias_correction: divides the moments by 1 - beta**step.
        adam_w_mode: AdamW; False for Adam with L2 weight decay.
        use_decoupled_grad: reads `p.decoupled_grad`, of any of the three dtypes, not `p.grad`.
        capturable: lr and step become tensors on the parameters' device (fp32 of shape (), int32 of
            shape (1,)): a step waits for nothing, and a CUDA graph can capture it. Change lr by
            `group["lr"].fill_`, as torch's schedulers do; the other numbers of a group are as they
            were at the capture. Needs all parameters on one device.
        nonfinite: what an infinity or NaN among the gradients does: "propagate" lets it through the
            arithmetic; "skip" leaves the step out, so that nothing changes, step counts included;
            "error" raises. "skip" and "error" cost a pass over the gradients, and, without
            capturable, waiting for it.
        direct_cast: fp8 weights are made of the new fp32 values as they are (True), or of those
            rounded to the weight's dtype first (False), as bf16 weights that are cast to fp8 are.
            None: as each weight's recipe says; TransformerEngine's tensors are rounded first.
        round_scaled_grads: rounds an unscaled gradient, and a clipped one, to its own dtype, as it
            would be after a pass that writes it back (torch.nn.utils.clip_grad_norm_, say). False
            keeps fp32. Of fp32 gradients both are the same.
        on_external_write: what a step does about a weight with a master that somebody else wrote
            (load_state_dict, fill_, clamp_, `p.data = new`) since the last one. "refresh": the
            elements that are no cast of their master any more set the master, the others keep every
            bit of it; warns once. "error": raises RuntimeError. "ignore": goes on from the master,
            which puts the old values back. refresh_masters says which writes are not seen.
        write_unscaled_grads: a step that unscales gradients, for a GradScaler, stores them unscaled
            (not clipped) in the place of the scaled ones, rounded to their dtype, as torch's fused
            and TransformerEngine's capturable optimizers do. False leaves gradients as they are,
            and saves writing them.
        state_device: "cpu" keeps moments and masters in pinned host memory, which the step's launch
            reads and writes over the bus: the same bits, no copy on the card; {"moments": "cpu"}
            or {"masters": "cpu"} that part alone. None: beside the weights. A group may say
            another. State tensors are then on the CPU, but for scales; before code of yours reads
            or writes one, wait: torch.cuda.synchronize(). Methods of the optimizer wait by
            themselves. External masters are pinned tensors (megaopt.state.masters.pinned) where
            masters are on the CPU. States of weights on the CPU are there anyway. The card has to
            map host memory, else RuntimeError.
        step_counts: whose steps an update counts, in bias corrections and random bits. "group": all
            of the parameter's group, as TransformerEngine counts, so that a parameter that gets its
            first gradient late starts with the corrections of a late step. "parameter": those that
            the parameter took itself, as torch counts; state[p]["step"] has them, and state dicts.
            None: "parameter" under contract torch, else "group".
        makes_states: whose state a step makes. "stepped": of parameters with a gradient, as torch.
            "trainable": also of those without one that require gradients, so that after any step
            their state can be read. "all": of frozen ones (requires_grad=False) too, as
            TransformerEngine, at the price of their memory; torch.distributed.checkpoint loads no
            state of a frozen parameter (docs/how-to/fsdp2.md). None: "stepped" under contract
            torch, else "trainable".
        contract: how operations are rounded, by name (megaopt.kernels.contracts.CONTRACTS).
        backend: "triton", "reference", or "auto": triton where the parameters are on a GPU.
        maximize: steps along the gradient, not against it. Not under contract te.
        foreach: None, True or False, as torch's optimizers take it: how they compute, which is
            nothing here.
        differentiable: only False.
        fused: as foreach.
        **unknown: none, as a type checker sees too; refused by name.

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
        dtype: torch.dtype | None = None,
        master_weights: MasterWeights = None,
        master_weight_dtype: torch.dtype | str = torch.float32,
        exp_avg_dtype: torch.dtype | str = torch.float32,
        exp_avg_sq_dtype: torch.dtype | str = torch.float32,
        store_param_remainders: bool = False,
        weight_rounding: Rounding = "nearest",
        seed: int = 0,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        use_decoupled_grad: bool = False,
        capturable: bool = False,
        nonfinite: Nonfinite = "propagate",
        direct_cast: bool | None = None,
        round_scaled_grads: bool = False,
        on_external_write: ExternalWrite = "refresh",
        write_unscaled_grads: bool = False,
        state_device: StateDevice = None,
        step_counts: StepCounts | None = None,
        makes_states: MakesStates | None = None,
        contract: Contract = "ieee",
        backend: Backend = "auto",
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **unknown: NoReturn,
    ) -> None:
        check_arguments(
            "FusedAdam",
            AdamOptions.NUMBERS,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
            unknown=unknown,
        )
        one_of("use_decoupled_grad", use_decoupled_grad, (True, False))
        options = AdamOptions(
            dtype=dtype,
            master_weight_dtype=master_weight_dtype,
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
            store_param_remainders=store_param_remainders,
            weight_rounding=weight_rounding,
            seed=seed,
            adam_w_mode=adam_w_mode,
            contract=contract,
            backend=backend,
            capturable=capturable,
            nonfinite=nonfinite,
            direct_cast=direct_cast,
            round_scaled_grads=round_scaled_grads,
            on_external_write=on_external_write,
            write_unscaled_grads=write_unscaled_grads,
            state_device=state_device,
            step_counts=step_counts,
            makes_states=makes_states,
            maximize=maximize,
            amsgrad=amsgrad,
        )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults, options, master_weights)
        self.use_decoupled_grad = use_decoupled_grad

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
        return torch_state_dict(self, drop_masters)
