"""FusedMuon: Muon for matrices, AdamW for all other parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType
from typing import Any, ClassVar, NamedTuple

import torch
from typing_extensions import Unpack

from megaopt.kernels.formats import MASTERS
from megaopt.kernels.muon.orthogonal import COEFFICIENTS, RATIOS, Orthogonal, coefficients_of
from megaopt.kernels.muon.plan import muon_plan
from megaopt.kernels.muon.rule import MUON, MUON_PEER
from megaopt.kernels.refusals import one_of, refuse
from megaopt.kernels.rules import RULES, Rule
from megaopt.kernels.rules.base import in_one_row
from megaopt.kernels.rules.matrix import Matrix, MatrixRule
from megaopt.optimizer import FusedOptimizer
from megaopt.options.arguments import options_of, show_options
from megaopt.options.checks import DECAY, NOT_NEGATIVE, errors_of, number
from megaopt.options.choices import MuonContract, MuonMethod, MuonPrecision, SecondMoment, SteppedBy
from megaopt.options.options import Numbers, Options, SharedOptions
from megaopt.options.placement import StateDevice
from megaopt.options.replicas import REPLICAS
from megaopt.params import ParamView, view_of
from megaopt.params.flat import FLAT, PARTS, is_flat_part
from megaopt.params.view import EMBEDDING, whole_shape_of

ORTHOGONALIZING = ("ns_coefficients", "ns_steps", "adjust_lr_fn", "split_sizes")
"""Keys of groups that say how matrices are made orthogonal: no numbers of the step."""
MARKS = {"use_muon": False, EMBEDDING: True}
"""Attributes of parameters that Muon does not step, with the values that say so."""
SPLIT_SIZES = "muon_split_sizes"
"""The attribute of a parameter that says its split_sizes, where its group says none."""


# --- the rules, which share a row of scalars


def _of_adam(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group as AdamW reads it."""
    eps = group["eps" if group["use_muon"] is False else "adam_eps"]
    return {**group, "eps": eps, "bias_correction": True}


@cache
def rules_of(contract: str) -> tuple[Rule, MatrixRule]:
    """AdamW and Muon under a contract; beside Emerging-Optimizers' Muon AdamW's is ieee."""
    adamw = RULES["adamw", "ieee" if contract == "eo" else contract]
    adamw_of_groups = replace(
        adamw,
        scalars=lambda group: adamw.scalars(_of_adam(group)),
        hyper=lambda group: adamw.hyper(_of_adam(group)),
        tables=lambda group, device: adamw.tables(_of_adam(group), device),
    )
    muon = MUON if contract == "ieee" else MUON_PEER
    first, inner, apply = in_one_row(adamw_of_groups, muon.inner, muon.apply)
    return first, replace(muon, inner=inner, apply=apply)


# --- options

FACTOR = NOT_NEGATIVE._replace(
    allowed=f"None, one of {', '.join(map(repr, RATIOS))} or {NOT_NEGATIVE.allowed}"
)


def why_adamw(param: torch.Tensor, group: Mapping[str, Any]) -> str | None:
    """Says why AdamW steps a parameter of a group; None where Muon does."""
    if group["use_muon"] is False:
        return "its group has use_muon=False"
    if len(whole_shape_of(param)) < 2:
        return "it has fewer than two dimensions"
    for name, value in MARKS.items():
        if getattr(param, name, None) is value:
            return f"it is marked {name}={value}"
    return None


@dataclass(frozen=True, kw_only=True)
class MuonOptions(Options):
    """FusedMuon's own options."""

    NUMBERS: ClassVar[Numbers] = Numbers(
        {
            "lr": NOT_NEGATIVE,
            "weight_decay": NOT_NEGATIVE,
            "momentum": DECAY,
            "eps": NOT_NEGATIVE,
            "adam_eps": NOT_NEGATIVE,
        },
        has_betas=True,
        flags=("nesterov",),
        choices=("use_muon", *ORTHOGONALIZING),
    )
    COUNTS_STEPS: ClassVar[bool] = False
    OF_ALL: ClassVar[tuple[str, ...]] = ("method", "precision", "second_moment")
    MATRIX: ClassVar[MatrixRule] = MUON
    MATRIX_KEYS: ClassVar[tuple[str, ...]] = ("use_muon", "eps", *ORTHOGONALIZING)
    MATRIX_MARKS: ClassVar[tuple[str, ...]] = (*MARKS, SPLIT_SIZES)
    MATRIX_OFF: ClassVar[tuple[str, Any]] = ("use_muon", False)
    TAKEN: ClassVar[tuple[str, ...]] = (REPLICAS,)

    momentum_buffer_dtype: torch.dtype | str = torch.float32
    exp_avg_dtype: torch.dtype | str = torch.float32
    exp_avg_sq_dtype: torch.dtype | str = torch.float32
    method: MuonMethod = "auto"
    precision: MuonPrecision = "bf16"
    second_moment: SecondMoment | None = None
    contract: MuonContract = "ieee"  # type: ignore[assignment]  # others than other optimizers'

    matrix_plan = staticmethod(muon_plan)

    def __post_init__(self) -> None:
        """Raises ValueError for an option out of its range, or options that contradict."""
        super().__post_init__()
        if self.contract == "ieee":
            return
        under = f"with contract={self.contract!r}, whose steps are torch's operations"
        if self.capturable:
            refuse("capturable", f"False {under}, by numbers on the host", True)
        if self.state_device is not None:
            refuse("state_device", f"None {under}, on one device", self.state_device)

    @property
    def OFFLOADS(self) -> bool:  # type: ignore[override]  # computed
        """States may be in host memory."""
        return self.contract == "ieee"

    def check_matrix(self, view: ParamView, where: str, masters: bool) -> None:
        """Raises ValueError for a matrix that another library's Muon cannot step as it does."""
        name, whole = "master_weight_dtype", "torch.float32, of whole masters,"
        is_fp32 = self.format_names["master"] == MASTERS[torch.float32].name
        if view.weight is not None and not (masters and is_fp32):
            refuse(name, f"{whole} for {where}", self.master_weight_dtype if masters else None)
        if self.contract == "ieee":
            return
        under, buffer_dtype = f"with contract={self.contract!r}", self.momentum_buffer_dtype
        if len(view.whole_shape) != 2:
            refuse(where, f"of two dimensions {under}", view.param)
        if view.replicas is not None and self.contract == "torch":
            refuse(f"{where}: {REPLICAS}", f"None {under}", view.split)
        if view.split is not None and self.contract == "torch":
            raise ValueError(f"{where} must be whole {under}, got a rank's part of a matrix")
        dtype = torch.float32 if masters else view.param.dtype
        if masters and not is_fp32:
            refuse(name, f"{whole} {under}", self.master_weight_dtype)
        if self.contract == "eo" and dtype != torch.float32:
            refuse(where, f"fp32 or have an fp32 master {under}", dtype)
        if buffer_dtype is not dtype:
            refuse("momentum_buffer_dtype", f"{dtype} {under}, as {where} is kept", buffer_dtype)

    def how(self, group: Mapping[str, Any], param: Any = None) -> Orthogonal:
        """Returns how matrices of a group are made orthogonal; raises ValueError for bad entries.

        param: one of the group's, which may have split_sizes of its own.
        """
        name, sizes = "split_sizes", group["split_sizes"]
        if sizes is None:
            name, sizes = SPLIT_SIZES, getattr(param, SPLIT_SIZES, None)
        is_list = isinstance(sizes, (list, tuple)) and len(sizes) > 0
        are_sizes = is_list and all(type(size) is int and size >= 1 for size in sizes)
        if sizes is not None and not are_sizes:
            refuse(name, "None or a list of whole numbers >= 1", sizes)
        adjust, coefficients = group["adjust_lr_fn"], group["ns_coefficients"]
        if not isinstance(adjust, (str, NoneType)):
            adjust = number("adjust_lr_fn", adjust, FACTOR)
        if not isinstance(coefficients, (str, list, tuple)):
            sets = f"three numbers, a list of such or one of {', '.join(map(repr, COEFFICIENTS))}"
            refuse("ns_coefficients", sets, coefficients)
        eps = number("eps", group["eps"], NOT_NEGATIVE)
        return Orthogonal(
            coefficients_of(coefficients, group["ns_steps"]),
            eps=eps,
            method=self.method,
            precision=self.precision,
            adjust=adjust,
            second_moment=self.second_moment,
            split_sizes=None if sizes is None else tuple(sizes),
            contract=self.contract,
        )

    def matrix(self, param: torch.Tensor, group: Mapping[str, Any]) -> Matrix | None:
        """Returns how Muon steps a parameter; None where AdamW does."""
        if not group or why_adamw(param, group) is not None:
            return None
        return Matrix(rules_of(self.contract)[1], self.how(group, param))

    def check_numbers(self, group: Mapping[str, Any], where: str) -> None:
        """Raises ValueError for what a group says of its matrices."""
        one_of(f"{where}: use_muon", group["use_muon"], (None, True, False))
        if group["use_muon"] is False:
            if group["split_sizes"] is not None:
                refuse(f"{where}: split_sizes", "None beside use_muon=False", group["split_sizes"])
            return
        with errors_of(where):
            self.how(group)
        # parameters that Muon is asked to step, and cannot
        name, use_muon = f"{where}: use_muon", group["use_muon"]
        for index, param in enumerate(group["params"]):
            which = f"its parameter {index}"
            for mark in MARKS:
                value = getattr(param, mark, None)
                one_of(f"{where}: {which}: its attribute {mark}", value, (None, True, False))
            reason = why_adamw(param, group)
            if is_flat_part(param) and not hasattr(param, PARTS):
                refuse(name, f"False beside {which}, a {FLAT}", use_muon)
            if reason is not None and use_muon:
                refuse(name, f"None or False beside {which}, as {reason}", use_muon)
            # another library's tensor may have no view, and sizes may not fit the rows
            if reason is None:
                view_of(param)
                with errors_of(f"{where}: {which}"):
                    self.how(group, param).pieces(whole_shape_of(param))


# --- the optimizer


class Stepped(NamedTuple):
    """The way in which FusedMuon steps one parameter."""

    name: str
    """The parameter, as errors call it."""
    rule: str
    """"muon" or "adamw"."""
    matrices: tuple[tuple[int, int], ...]
    """The shapes of its matrices, which are made orthogonal each by itself; none of AdamW's."""
    why: str
    """"by its shape", or "as" and the reason: its group, its dimensions, or a mark."""
    ranks: int = 1
    """The count of ranks that divide the making of updates; 1: this one makes all of its own."""

    def __str__(self) -> str:
        """One line."""
        counts = {shape: self.matrices.count(shape) for shape in self.matrices}
        shapes = ", ".join(f"{count} x {list(shape)}" for shape, count in counts.items())
        divided = f", divided among {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.name}: {self.rule}{f' {shapes}' if shapes else ''}, {self.why}{divided}"


class FusedMuon(FusedOptimizer):
    """Muon (Jordan et al. 2024) for matrices and AdamW for the rest, writing the model's weights.

    The momentum of a matrix is made about orthogonal by Newton and Schulz's iteration, on tensor
    cores, and the update is that times lr and a factor of its shape. docs/numbers.md gives every
    operation; the bits of a matrix are the same on every backend, whatever else is stepped beside
    it. A parameter of two dimensions is a matrix, one of three a batch of them, and more, as of
    convolutions, are one of [first, all others].

    The names and defaults of torch.optim.Muon come first. A group may say use_muon: True for
    Muon; False for AdamW, as KellerJordan's MuonWithAuxAdam has it; None, the default, leaves it to
    each parameter: AdamW steps those of fewer than two dimensions, and those that are marked by
    `param.use_muon = False` or Megatron-Core's `is_embedding_or_output_parameter`. Embeddings and
    output layers are matrices too: mark them, or put them in a group with use_muon=False.
    `describe` lists what goes where. A group may also say split_sizes, the rows of each of several
    matrices that lie one below another, as in a fused QKV weight; so may a parameter, by its
    attribute `muon_split_sizes`, where its group does not. Sizes that add up to a part of the rows
    come again until these are used up, and the rows of each size make one matrix: Megatron-Core's
    QKV weights, say, which have q, k and v of one query group after another.

    A state has momentum_buffer (and, with second_moment, variance_neuron, fp32 of shape (rows,)),
    or exp_avg and exp_avg_sq; and master_param. Of DTensors (FSDP2's) one rank makes the update of
    a matrix, of the parts that all send it; with `replicas` ranks that have whole weights divide
    the work likewise. docs/how-to/muon.md tells more.

    Args:
        params: as for FusedAdam; fp8 weights that Muon steps need whole fp32 masters.
        lr: step size, of Muon and AdamW alike, where a group does not say another; at least 0.
        weight_decay: decoupled: the part of a weight that goes per step of size one, times lr, of
            both. At least 0.
        momentum: Muon's decay of momentum_buffer per step, in [0, 1): an average, which takes
            1 - momentum of each gradient.
        nesterov: the direction is the average of gradient and buffer, not the buffer.
        ns_coefficients: a, b and c of each step X' = a X + b (X X^T) X + c (X X^T)^2 X: three
            numbers for all steps, a list of such, or a set's name: "simple" (these), "quintic",
            "polar_express", "cans", "deepseekv4" (of ten steps) or "cubic5" (of five).
        eps: the least norm by which Muon divides a direction, from 1e-30 to 1. In groups with
            use_muon=False it is AdamW's, added to the root of exp_avg_sq.
        ns_steps: how many steps, from 1 to 99.
        adjust_lr_fn: by what the update of a matrix [rows, columns] is multiplied. None and
            "original": sqrt(max(1, rows / columns)). "match_rms_adamw": 0.2 sqrt(max(rows,
            columns)), with which AdamW's lr and weight_decay serve. "spectral": sqrt(max(rows,
            columns)). "spectral_unclamped": sqrt(rows / columns). "deepseekv4": 0.18 sqrt(max(rows,
            columns)). Or a number >= 0.
        betas: AdamW's decay per step of exp_avg and exp_avg_sq; each in [0, 1).
        adam_eps: AdamW's eps of parameters whose group does not say use_muon=False, in units of the
            gradient; and the default of eps in groups that do. At least 0.
        method: "standard": X X^T in each step. "gram": polynomials of one X X^T (Dao-AILab's
            gram-newton-schulz), which takes less of long matrices. "auto": by a matrix's shape,
            with precision "fp16"; "standard" with "bf16", in which Gram's form is 11 to 33% off,
            and refused.
        precision: of all numbers between products, whose sums are fp32: "bf16", as torch's, or
            "fp16", whose errors are some eighth of those.
        second_moment: "normuon": rows of the update are divided by the root of a mean of their
            squares over steps (Li et al. 2025, arXiv:2510.05491), over whole rows of the whole
            matrix; the update keeps its norm.
        momentum_buffer_dtype: of Muon's moment, as FusedAdam's exp_avg_dtype. With 8 bits take
            "block_int8": with "block_e4m3" losses are higher (docs/how-to/muon.md).
        exp_avg_dtype: of AdamW's, as for FusedAdam.
        exp_avg_sq_dtype: likewise.
        contract: "ieee": the same bits everywhere. "torch": the bits of torch.optim.Muon, of the
            torch and processor at hand, for tensors of two dimensions; AdamW's are
            torch.optim.AdamW's with fused=True, on an NVIDIA GPU. "eo": those of
            Emerging-Optimizers' Muon as Megatron-Core uses it, AdamW's are ieee's.
        state_device: as for FusedAdam; a group may say another. Only with contract "ieee".
        replicas: a torch.distributed.ProcessGroup or DeviceMesh, whose ranks all have the same
            plain parameters, gradients and states, as those of DistributedDataParallel have: each
            matrix is made orthogonal by one of them, which sends the update to the others, 2 bytes
            a parameter. All take their steps together. The bits are those without it, and states
            stay whole on every rank. Vectors, AdamW's parameters, DTensors and fp8 weights are
            stepped as without it. A group may say another, or None. Not with contract "torch".

    Raises:
        TypeError, ValueError, RuntimeError: as FusedAdam. ValueError also for use_muon=True beside
            a vector or a parameter that is marked.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor | None = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Sequence[Any] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | float | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        method: MuonMethod = "auto",
        precision: MuonPrecision = "bf16",
        second_moment: SecondMoment | None = None,
        momentum_buffer_dtype: torch.dtype | str = torch.float32,
        exp_avg_dtype: torch.dtype | str = torch.float32,
        exp_avg_sq_dtype: torch.dtype | str = torch.float32,
        contract: MuonContract = "ieee",
        state_device: StateDevice = None,
        replicas: Any = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        defaults, checked, masters = options_of(self, MuonOptions, locals())
        # an optimizer whose defaults have betas is Adam to torch's schedulers, which then cycle
        # these (OneCycleLR, CyclicLR); of Muon it is the momentum
        self._betas = defaults.pop("betas")
        choices = {"use_muon": None, "split_sizes": None}
        super().__init__(params, {**defaults, **choices}, checked, masters, replicas)

    @property
    def rule(self) -> Rule:
        """AdamW, of the parameters that Muon does not step."""
        return rules_of(self.options.contract)[0]

    def _group_defaults(self, group: dict[str, Any]) -> dict[str, Any]:
        """AdamW's betas; and its eps for a group with use_muon=False."""
        if group.get("use_muon") is not False:
            return {"betas": self._betas}
        return {"betas": self._betas, "eps": group.get("adam_eps", self.defaults["adam_eps"])}

    def __getstate__(self) -> dict[str, Any]:
        """Adds the betas that new groups take to what FusedAdam pickles."""
        return {**super().__getstate__(), "_betas": self._betas}

    def describe(self) -> list[Stepped]:
        """Tells how each parameter is stepped, in group order; each entry prints as one line."""
        owned, lines = self._owned, []
        places = zip(owned.views, owned.labels, owned.group_numbers, strict=True)
        for view, label, index in places:
            group = owned.groups[index]
            if view.matrix is None:
                lines.append(Stepped(label, "adamw", (), f"as {why_adamw(view.param, group)}"))
                continue
            pieces = tuple(view.matrix.how.pieces(view.whole_shape))
            why = "as its group has use_muon=True" if group["use_muon"] else "by its shape"
            ranks = 1 if view.split is None else view.split[0].size()
            lines.append(Stepped(label, "muon", pieces, why, ranks))
        return lines

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as FusedAdam; also state dicts of torch.optim.Muon and other libraries' Muon.

        These are KellerJordan's and Emerging-Optimizers', whose momentum is an average as here; and
        dion's and Moonlight's, whose momentum is a sum, 1 / (1 - momentum) times as large: it is
        multiplied by 1 - momentum, and a warning says so. How those make updates (coefficients,
        steps, factors of shapes) is not in their state dicts: give it to the constructor.
        """
        super().load_state_dict(from_others(state_dict, self.param_groups))

    @torch.no_grad()
    def to_torch_state_dict(
        self, rule: SteppedBy | None = None, *, drop_masters: bool = False
    ) -> dict[str, Any]:
        """A state dict that torch.optim.Muon, or torch.optim.AdamW, loads and steps on.

        Moments with a scale are given as their fp32 numbers, others as they are stored, without a
        copy. torch casts what it loads to the parameter's dtype: moments of another dtype do not
        keep their bits there. Groups have torch's keys.

        Args:
            rule: "muon": of the parameters that Muon steps, in their order, in groups of their own;
                groups without any are left out. "adamw": of the others, likewise. "both": of all,
                with this optimizer's groups, for a FusedMuon of other formats or of another
                contract. None: of all, where one rule steps all.
            drop_masters: leaves masters out; who loads then goes on from the weights, as they are
                rounded.

        Raises:
            ValueError: rule is None, and both rules step parameters; a weight has a master and
                drop_masters is False; a weight is in fp8; a group has what torch's optimizer has
                not (split_sizes, a set of coefficients), no lr, or more steps than torch counts.
        """
        from megaopt.saving.torch_state import muon_state_dict

        return muon_state_dict(self, self._owned, rule, drop_masters)


show_options(FusedMuon, MuonOptions, SharedOptions)


# --- state dicts of others

RENAMED = {
    "mu": "momentum",
    "epsilon": "eps",
    "wd": "weight_decay",
    "adamw_betas": "betas",
    "adamw_eps": "adam_eps",
}
"""dion's keys of groups, and Moonlight's."""
STATES = {
    "muon": {"momentum": "momentum_buffer"},
    "adamw": {"momentum": "exp_avg", "variance": "exp_avg_sq"},
}
"""dion's names of states, by a group's algorithm."""
OF_MOONLIGHT = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
OF_NO_MUON = {"dampening": "SGD's", "centered": "RMSprop's"}
"""Keys of groups of optimizers that have a momentum_buffer of another kind, and whose they are."""
LEFT_OUT = ("algorithm", "beta1", "beta2", "muon_beta2", "cautious_wd", "flatten", "adjust_lr")
"""dion's keys of groups that say nothing here."""


def from_others(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> Any:
    """A state dict of another library's Muon in this package's names; anything else as it is.

    groups: the optimizer's, whose numbers stay where a state dict has none. Raises ValueError for
    what Muon cannot go on from; warns where momentum is converted.
    """
    mapping: Any = state_dict if isinstance(state_dict, Mapping) else {}
    saved, states = mapping.get("param_groups"), mapping.get("state")
    fits = isinstance(saved, (list, tuple)) and isinstance(states, Mapping)
    if not fits or not all(isinstance(entry, Mapping) for entry in saved):
        return state_dict
    for index, group in enumerate(saved):
        is_own = "contract" in group and "use_muon" in group  # where they are of its users
        for key in () if is_own else OF_NO_MUON.keys() & group.keys():
            where = f"group {index} of the state dict: {key!r}"
            refuse(where, f"left out: it is {OF_NO_MUON[key]}", group[key])
    if len(saved) != len(groups) or any("contract" in entry for entry in saved):
        return state_dict
    new_states, new_groups = dict(states), []
    for index, (group, current_group) in enumerate(zip(saved, groups, strict=True)):
        # names of ours; numbers that it has not stay
        new = {RENAMED.get(key, key): value for key, value in group.items() if key not in LEFT_OUT}
        if "mu" in group:
            algorithm = group.get("algorithm")
            one_of(f"group {index} of the state dict: algorithm", algorithm, STATES)
            new.update(betas=(group["beta1"], group["beta2"]), use_muon=algorithm == "muon")
        if current_group["use_muon"] is False and "adamw_eps" in group:
            new["eps"] = new["adam_eps"]
        missing = [name for name in ("betas", "eps", "momentum") if name not in new]
        new_groups.append({**{name: current_group[name] for name in missing}, **new})
        for key in group.get("params", ()):
            if isinstance(new_states.get(key), Mapping):
                new_states[key] = _state(new_states[key], group, f"state {key!r} of the state dict")
    if any(_is_a_sum(group) for group in saved):
        warnings.warn(
            "momentum of the state dict is a sum of gradients, as dion and Moonlight keep it: "
            "momentum_buffer here is an average, and becomes 1 - momentum times that",
            stacklevel=3,
        )
    # a step count each, if any has one: Muon's takes that of the others
    mappings = {k: state for k, state in new_states.items() if isinstance(state, Mapping)}
    most = max((state["step"] for state in mappings.values() if "step" in state), default=None)
    if most is not None:
        new_states |= {key: {"step": most, **state} for key, state in mappings.items() if state}
    return {**state_dict, "state": new_states, "param_groups": new_groups}


def _is_a_sum(group: Mapping[str, Any]) -> bool:
    """Whether the momentum of a group's states is a sum: of dion's and Moonlight's Muon."""
    return "mu" in group or "adamw_betas" in group


def _state(saved: Mapping[str, Any], group: Mapping[str, Any], where: str) -> dict[str, Any]:
    names = STATES.get(group.get("algorithm", ""), {}) if "mu" in group else OF_MOONLIGHT
    state = {names.get(key, key): value for key, value in saved.items() if key != "use_muon"}
    if "exp_avg" in state and "step" not in {*state, *group}:
        raise ValueError(f"{where} must have a step count beside 'exp_avg', got none")
    buffer = state.get("momentum_buffer")
    if _is_a_sum(group) and isinstance(buffer, torch.Tensor):
        momentum = float(group["mu" if "mu" in group else "momentum"])
        state["momentum_buffer"] = buffer.float() * (1.0 - momentum)
    if isinstance(state.get("variance_neuron"), torch.Tensor):
        state["variance_neuron"] = state["variance_neuron"].flatten()
    return state
