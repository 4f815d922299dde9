"""GaLoreAdamW: AdamW whose moments of matrices are those of a projected gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, get_args

import torch
from typing_extensions import Unpack

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.chunks.table import is_capturing
from megaopt.kernels.formats import MASTERS, MOMENTS
from megaopt.kernels.galore.launch import AUTO, LAUNCHED, why_not_kernel
from megaopt.kernels.galore.ranks import galore_plan
from megaopt.kernels.galore.rule import (
    GALORE,
    GALORE_WHOLE,
    LEFT,
    RIGHT,
    LowRank,
    saves,
)
from megaopt.kernels.galore.wave import is_fused
from megaopt.kernels.refusals import one_of, refuse
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.galore import GALORE_ADAMW
from megaopt.kernels.rules.matrix import PROJECTION, Matrix
from megaopt.optimizer import FusedOptimizer
from megaopt.options.arguments import options_of, show_options
from megaopt.options.checks import NOT_NEGATIVE
from megaopt.options.choices import LowRankKernel, Precision, ProjType, Refresh
from megaopt.options.options import Numbers, Options, SharedOptions
from megaopt.params import ParamView, view_of
from megaopt.params.dtensor import DTensorView
from megaopt.params.flat import FLAT, PARTS, is_flat_part
from megaopt.params.view import EMBEDDING, whole_shape_of
from megaopt.saving.parse import with_states

PROJ_TYPES = get_args(ProjType)
PROJECTING = ("rank", "update_proj_gap", "proj_type")
"""Keys of groups that choose projections: no numbers of the step."""


def side_of(proj_type: str, rows: int, columns: int) -> str:
    """Returns the side on which a gradient [rows, columns] is projected."""
    if proj_type == "std":
        return RIGHT if rows >= columns else LEFT
    if proj_type == "reverse_std":
        return LEFT if rows >= columns else RIGHT
    # a matrix whose rows are split over ranks can be projected on the right without the others
    return LEFT if proj_type == "left" else RIGHT


@dataclass(frozen=True, kw_only=True)
class GaLoreOptions(Options):
    """GaLoreAdamW's own options."""

    NUMBERS: ClassVar[Numbers] = Numbers(
        {
            "lr": NOT_NEGATIVE,
            "eps": NOT_NEGATIVE,
            "weight_decay": NOT_NEGATIVE,
            "scale": NOT_NEGATIVE,
        },
        has_betas=True,
        flags=("bias_correction",),
        choices=PROJECTING,
    )
    OF_ALL: ClassVar[tuple[str, ...]] = (
        *("kernel", "precision", "refresh", "stagger"),
        "correct_bias",
    )

    exp_avg_dtype: torch.dtype | str = torch.float32
    exp_avg_sq_dtype: torch.dtype | str = torch.float32
    kernel: LowRankKernel = "auto"
    precision: Precision = "ieee"
    refresh: Refresh = "subspace"
    stagger: bool = True

    OFFLOADS = False
    MATRIX = GALORE
    MATRIX_KEYS = ("rank", "proj_type")
    MATRIX_MARKS = (EMBEDDING,)
    MATRIX_TURNS = ("update_proj_gap",)
    MATRIX_OFF = ("rank", None)

    def __post_init__(self) -> None:
        """Raises ValueError for an option out of its range, or options that contradict."""
        super().__post_init__()
        if self.kernel in LAUNCHED and MASTERS[self.master_weight_dtype].scaled:
            raise ValueError(
                "master_weight_dtype must not have a scale for the whole tensor with "
                f"kernel={self.kernel!r}, which stores a matrix tile by tile, got "
                f"{self.master_weight_dtype}; kernel='torch' takes it"
            )
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if self.kernel == "fused" else ():
            if not is_fused([MOMENTS[getattr(self, name)]]):
                raise ValueError(
                    f"{name} must not have scales with kernel='fused', which steps moments tile by "
                    f"tile, got {getattr(self, name)}; kernel='grouped' takes it"
                )

    def matrix_plan(self, backend: str, formats: Formats, *tables: Any) -> Any:
        """The plan of the kernel."""
        kernel: str = self.kernel
        if kernel == "auto":
            is_launched = backend == "triton" and not formats.master.scaled
            kernel = AUTO[self.precision] if is_launched else "torch"
        return galore_plan(kernel, formats, *tables)

    @cached_property
    def draws(self) -> list[str]:
        """Groups always have a seed, for the first projections."""
        return [*super().draws, "projections"]

    def matrix(self, param: torch.Tensor, group: Mapping[str, Any]) -> Matrix | None:
        """Returns how a matrix is projected; None for others, and where the rank saves nothing."""
        rank, shape = group.get("rank"), whole_shape_of(param)
        is_embedding = getattr(param, EMBEDDING, None) is True
        if rank is None or is_embedding or len(shape) != 2 or not saves(rank, shape):
            return None
        side, split = side_of(group["proj_type"], *shape), view_of(param).split
        # the rows of one rank are projected on the right without the others: of a DTensor that one
        # dimension of its mesh splits by rows
        dims, is_alone = () if split is None else split[1], False
        if side == RIGHT and len(dims) == 1:
            placement: Any = param.placements[dims[0]]  # type: ignore[attr-defined]  # a DTensor's
            is_alone = bool(placement.is_shard(0))
        is_whole = hasattr(param, PARTS) or not (split is None or is_alone)
        rule = GALORE_WHOLE if is_whole else GALORE
        return Matrix(rule, LowRank(side, rank, self.precision, self.refresh, self.stagger))

    def check_numbers(self, group: Mapping[str, Any], where: str) -> None:
        """Raises ValueError for what a group says of its projections."""
        if "correct_bias" in group:
            name, value = f"{where}: correct_bias", group["correct_bias"]
            refuse(name, "left out: its name here is bias_correction", value)
        one_of(f"{where}: proj_type", group["proj_type"], PROJ_TYPES)
        gap, rank = group["update_proj_gap"], group["rank"]
        if type(gap) is not int or gap < 1:
            refuse(f"{where}: update_proj_gap", "a whole number >= 1", gap)
        if rank is None:
            return
        if type(rank) is not int or rank < 1:
            refuse(f"{where}: rank", "None or a whole number >= 1", rank)
        # parameters that cannot be projected
        for index, param in enumerate(group["params"]):
            view, alone, allowed = view_of(param), f"None beside its parameter {index}, a", None
            if type(view) not in (ParamView, DTensorView):
                kind = type(param).__name__
                allowed = f"{alone} {kind}: only plain matrices and DTensors are projected yet"
            if is_flat_part(param) and not hasattr(param, PARTS):
                allowed = f"{alone} {FLAT}"
            if allowed is not None:
                refuse(f"{where}: rank", allowed, rank)

    def check_saved(self, saved: Mapping[str, Any], where: str) -> None:
        """Raises ValueError for a group of this optimizer's that lacks a number."""
        if "contract" not in saved or not any(name in saved for name in (*PROJECTING, "scale")):
            return
        missing = [name for name in self.names_but_step if name not in saved]
        if missing:
            raise ValueError(
                f"{where} of the state dict must have {', '.join(self.names_but_step)}, as this "
                f"optimizer saves them, got none of {', '.join(missing)}"
            )


class GaLoreAdamW(FusedOptimizer):
    """AdamW with GaLore (Zhao et al. 2024, arXiv:2403.03507) for the matrices that have a rank.

    Of a matrix [m, n] the gradient is projected to [m, rank] or [rank, n], Adam's moments are of
    that, and the direction that they give is projected back. The order of operations is that of
    galore_torch's AdamW; docs/numbers.md lists them, and says which bits are promised.

    Groups say, as galore_torch's do, rank, update_proj_gap, scale and proj_type; the arguments here
    are for groups that do not. Parameters without a rank, of other than two dimensions, with
    Megatron-Core's mark is_embedding_or_output_parameter=True, or where projection and projected
    gradient together are no smaller than the gradient, take FusedAdam's step, where eps is beside
    the corrected root and decay comes with the update.

    A state has exp_avg and exp_avg_sq of the projected gradient's shape, master_param, projection,
    fp32, and captured_energy, fp32 of shape (): which part of the gradient's square the projection
    kept when it was made, from 0 to 1. The last two are zeros until a step, one that is not left
    out, has a gradient that is finite and not 0.

    Of DTensors (FSDP2's) each rank projects its own rows, on the right; when a projection is made
    anew, ranks add up what it takes. Where products add up over ranks, on the left or with columns
    that are split, one rank makes each matrix's update in every step, with one process's bits.
    Moments are DTensors split as their parameter, and projections DTensors that every rank has
    whole.

    The seed is also that of the first projections. With capturable `step()` makes only projections
    that are not there yet; `refresh()`, called between replays, makes those anew whose turn it is.

    Args:
        params: as for FusedAdam; with a rank no fp8 weights, and no flat parts of matrices, but for
            those of Megatron's distributed optimizer (docs/how-to/megatron.md).
        lr: as for FusedAdam.
        betas: as for FusedAdam.
        eps: added to the root of exp_avg_sq, of matrices with a rank before bias correction, in
            units of the gradient; at least 0.
        weight_decay: decoupled; of matrices with a rank the part of the weight after the update
            that goes per step, times lr. At least 0.
        rank: dimensions to which gradients are projected, at least 1; one above the matrix's
            smaller dimension is that, the full rank, which saves nothing. None: not at all.
        update_proj_gap: steps from one projection to the next; at least 1.
        scale: what the update that was projected back is multiplied by; at least 0.
        proj_type: "right" projects rows, to [m, rank], "left" columns, to [rank, n]. "std" projects
            the smaller dimension, "reverse_std" the larger. "auto" takes the side that needs no
            other rank where rows are split over ranks: the right one.
        kernel: what steps the matrices with a rank; others go by `backend`. "torch": plain torch,
            matrix by matrix. "compiled": the same, what is elementwise by torch.compile. "hybrid":
            torch's product for the projection, then one launch for Adam and one for the rest, for
            many matrices. "grouped": a launch for the projections, too, as "hybrid" has it but
            with precision "ieee". "fused": two launches, of which the one for the projections
            takes Adam's step; not of moments with scales. The latter three not for masters with a
            scale. "auto": where the backend is "triton", "hybrid" with precision "ieee", else
            "fused" or "grouped", whichever is faster for a shape; elsewhere "torch".
        precision: of the numbers in the two products of a step; sums are fp32's. "ieee": fp32.
            "tf32": rounded to TF32, 10 bits of mantissa. "bf16": to bf16. Of the last two every
            kernel and device has the same bits, those of Hopper's tensor cores, which a CPU
            computes more slowly than ieee products. Torch's global settings change nothing of it;
            refreshes are torch's, of fp32 numbers, or with "tf32" and "bf16" of bf16 gradients by
            a GPU's tensor cores, with factors in two bf16 numbers: projections are a device's own.
        refresh: how projections follow the gradient: "subspace", by two passes of subspace
            iteration from the last projection; or "svd", galore_torch's, a whole SVD, for which
            the host waits; ranks gather a gradient whose rows they have. A gradient that is zero
            or not finite leaves a projection as it is; one of fewer independent rows or columns
            than the rank is captured whole, and with "subspace" the rest of the projection stays.
        stagger: refreshes parameter number i in the steps of number i modulo the gap, one after
            another. False: all in one step, as galore_torch.
        bias_correction: galore_torch's correct_bias.
        exp_avg_dtype: of the moment, also of the projected gradient, as for FusedAdam.
        exp_avg_sq_dtype: likewise.

    Raises:
        TypeError, ValueError, RuntimeError: as FusedAdam.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor | None = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        proj_type: ProjType = "std",
        kernel: LowRankKernel = "auto",
        precision: Precision = "ieee",
        refresh: Refresh = "subspace",
        stagger: bool = True,
        bias_correction: bool = True,
        exp_avg_dtype: torch.dtype | str = torch.float32,
        exp_avg_sq_dtype: torch.dtype | str = torch.float32,
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(params, *options_of(self, GaLoreOptions, locals()))

    @property
    def rule(self) -> Rule:
        """AdamW, of the parameters that are not projected."""
        return GALORE_ADAMW

    def _check_param(self, param: torch.Tensor, label: str) -> None:
        super()._check_param(param, label)
        options: Any = self.options
        reason = why_not_kernel(options.kernel, param.device)
        if reason is not None:
            raise RuntimeError(
                f"kernel={options.kernel!r} does not work for {label} on {param.device}: {reason}; "
                "kernel='torch' works everywhere"
            )

    @torch.no_grad()
    def refresh(self, steps: int | None = None) -> None:
        """Makes the projections anew whose turn it is; for capturable=True, before a step.

        It reads the gradients that are in memory now, of parameters that have one. Before a step's
        replay, where the backward pass is outside the graph, these are the step's own: then the
        bits are those of capturable=False, as long as no step is left out. It knows neither of
        found_inf nor of nonfinite: a gradient that is not finite leaves its projection as it is.

        Args:
            steps: how many steps every group has taken, where the caller knows it; None: the
                groups' own counts, for which the host waits.

        Raises:
            ValueError: as `step`, and for a number of steps that is none.
            RuntimeError: capturable=False, where `step` does this; or while a CUDA graph captures.
        """
        owned = self._owned
        if not self.options.capturable:
            raise RuntimeError(
                "refresh() is for capturable=True, got capturable=False, where step() makes "
                "projections anew itself"
            )
        if is_capturing(owned.device):
            raise RuntimeError(
                "refresh() must be called between replays, got a CUDA graph that is being "
                "captured: it would repeat the refresh in every replay"
            )
        if steps is not None and (type(steps) is not int or steps < 0):
            refuse("steps", "None or a whole number >= 0", steps)
        stepper, groups = self.stepper, self.param_groups
        stepper.check_numbers(groups)
        batches, seen = stepper.gather(groups, self.state, self.use_decoupled_grad, self._check)
        # the steps that each group has taken: read from the device at once, where nobody says
        counts: list[int] = [steps or 0] * len(groups)
        if steps is None:
            counts = torch.cat([group["step"] for group in groups]).tolist()
        failed: Exception | None = None
        for batch, shards in zip(batches.batches, seen.shards, strict=True):
            if batch.matrices is None:
                continue
            batch.feed(seen.grads(), shards)
            try:
                batch.matrices.refresh(groups, counts)
                batch.matrices.plan.renew()
            except BaseException as error:
                batch.take_back()
                if not isinstance(error, Exception):
                    raise
                failed = failed or error  # other ranks may wait for this one in the next batch
            else:
                batch.abandon()
        if failed is not None:
            raise failed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as FusedAdam; state dicts of galore_torch's AdamW too, projections included."""
        # galore_torch's names become this package's, in copies; a projection on both sides has none
        loaded: Any = with_states(state_dict, _state)
        groups = loaded.get("param_groups") if isinstance(loaded, Mapping) else None
        if isinstance(groups, (list, tuple)):
            new_groups = []
            for group in groups:
                if isinstance(group, Mapping) and "correct_bias" in group:
                    rest = {name: group[name] for name in group if name != "correct_bias"}
                    group = {**rest, "bias_correction": group["correct_bias"]}
                new_groups.append(group)
            loaded = {**loaded, "param_groups": new_groups}
        super().load_state_dict(loaded)


show_options(GaLoreAdamW, GaLoreOptions, SharedOptions)


# --- state dicts of galore_torch


PROJECTOR = "projector"
"""Key of galore_torch's states: an object that has the projection, as ortho_matrix."""


def _state(state: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if PROJECTOR not in state:
        return state
    matrix = getattr(state[PROJECTOR], "ortho_matrix", None)
    rest = {name: value for name, value in state.items() if name != PROJECTOR}
    if matrix is None:
        return rest
    if not isinstance(matrix, torch.Tensor):
        refuse(f"{where}: {PROJECTOR!r}", "one of type std, reverse_std, right or left", matrix)
    return {**rest, PROJECTION: matrix}
