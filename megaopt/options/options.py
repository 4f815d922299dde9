"""The options of an optimizer, and their checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    TypedDict,
    get_args,
    get_origin,
    get_type_hints,
)

import torch

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.formats import BESIDE as BESIDE_WEIGHTS
from megaopt.kernels.formats import (
    MASTERS,
    MOMENTS,
    NONE,
    WEIGHTS,
    Format,
)
from megaopt.kernels.place import Place
from megaopt.kernels.refusals import listed, one_of, refuse, same, shown
from megaopt.options.checks import COUNT, DECAY, Range, number
from megaopt.options.choices import (
    Backend,
    Contract,
    ExternalWrite,
    MakesStates,
    MasterWeights,
    Nonfinite,
    Rounding,
    StepCounts,
)
from megaopt.options.placement import STATE_DEVICE, StateDevice, placement_of

if TYPE_CHECKING:
    from megaopt.kernels.rules.matrix import Matrix

SQUARED = "_sq_dtype"
"""The ending of the options of moments that are never negative."""

BESIDE = "kahan_beside"
"""Key of groups whose weights have compensations, and in a state dict the weights' dtypes: a
compensation, always bf16, is of no use beside another weight than its own."""

FORMATS = "state_formats"
"""Key of all groups: the formats of moments and masters by name, as in "exp_avg=float32,
master=remainder16". A load compares them: dtypes do not tell all formats apart."""

BLOCKS, IN_ROWS = "blocks", "in rows"
"""Entry of FORMATS: no block of a moment goes from one row into the next. Not in older ones."""

FLAGS = (True, False)

MISSING = object()
"""Stands for a value that is not there, where None is one."""

VARIANTS = ("amsgrad", "maximize")
"""Options that torch's groups name too."""


@dataclass(frozen=True)
class Numbers:
    """The numbers that groups of an optimizer have, beside the step count."""

    ranges: Mapping[str, Range]
    """The allowed range of each number; lr is the first."""
    has_betas: bool = False
    """There is a pair of decays, in [0, 1), under the key betas."""
    flags: tuple[str, ...] = ()
    """The keys whose value is True or False."""
    choices: tuple[str, ...] = ()
    """The keys that choose how MATRIX steps matrices, which `check_numbers` looks at."""


class SharedOptions(TypedDict, total=False):
    """The options that every optimizer takes, by name.

    foreach and fused (None, True or False) and differentiable (only False) are taken for torch's
    calls, and change nothing.

    Args:
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
            place (`2**-17` and about as much of the weight). A name whose master does not fit a
            weight is refused.
        store_param_remainders: keeps, of an fp32 master, the 16 bits that its bf16 weight does not
            hold: exact, 2 bytes less per weight; weights then round ties away from zero. Needs
            masters and bf16 weights; fp32 weights may be among them.
        weight_rounding: "stochastic" rounds bf16, fp16 and fp8 weights so that they are in the mean
            the values that the rule gave; for weights without masters, fp32 ones may be among them.
            "nearest" loses updates below half a unit in a weight's last place.
        seed: of the random bits of stochastic rounding, from 0 to `2**64 - 1`; where something is
            rounded so, the groups have it, and it is saved with them. A group's `param_numbers`,
            one number from 0 to `2**32 - 1` for each parameter, tell parameters apart; without it
            they are numbered in the order of the groups. Two optimizers with one seed draw the same
            bits for parameters of the same number: give each its own. docs/numbers.md says what a
            bit is made of, and what a load takes over.
        use_decoupled_grad: reads `p.decoupled_grad`, in fp32, bf16 or fp16, not `p.grad`.
        capturable: lr and step become tensors on the parameters' device (fp32 of shape (), int32 of
            shape (1,)): a step waits for nothing, and a CUDA graph can capture it. Change lr by
            `group["lr"].fill_`, as torch's schedulers do; the other numbers of a group are as they
            were at the capture. Needs all parameters on one device.
        nonfinite: what an infinity or NaN among the gradients does: "propagate" lets it through the
            arithmetic; "skip" leaves the step out, so that nothing changes, step counts included;
            "error" raises. "skip" and "error" cost a pass over the gradients, and, without
            capturable, waiting for it.
        on_external_write: what a step does about a weight with a master that somebody else wrote
            (load_state_dict, fill_, clamp_, `p.data = new`) since the last one. "refresh": the
            elements that are no cast of their master any more set the master, the others keep every
            bit of it; warns once. "error": raises RuntimeError. "ignore": goes on from the master,
            which puts the old values back. refresh_masters says which writes are not seen.
        backend: "triton", "reference", or "auto": triton where the parameters are on a GPU.
        maximize: steps along the gradient, not against it. Not under contract te.
    """

    dtype: torch.dtype | None
    master_weights: MasterWeights
    master_weight_dtype: torch.dtype | str
    store_param_remainders: bool
    weight_rounding: Rounding
    seed: int
    use_decoupled_grad: bool
    capturable: bool
    nonfinite: Nonfinite
    on_external_write: ExternalWrite
    backend: Backend
    maximize: bool
    foreach: bool | None
    differentiable: bool
    fused: bool | None


class StepOptions(SharedOptions, total=False):
    """The options that FusedAdam, FusedLion and FusedSGD take beside SharedOptions.

    Args:
        direct_cast: fp8 weights are made of the new fp32 values as they are (True), or of those
            rounded to the weight's dtype first (False), as bf16 weights that are cast to fp8 are.
            None: as each weight's recipe says; TransformerEngine's tensors are rounded first.
        round_scaled_grads: rounds an unscaled gradient, and a clipped one, to its own dtype, as it
            would be after a pass that writes it back (torch.nn.utils.clip_grad_norm_, say). False
            keeps fp32. Of fp32 gradients both are the same.
        write_unscaled_grads: a step that unscales gradients, for a GradScaler, stores them unscaled
            (not clipped) in the place of the scaled ones, rounded to their dtype, as torch's fused
            and TransformerEngine's capturable optimizers do. False leaves gradients as they are,
            and saves writing them.
        state_device: "cpu" keeps moments and masters in pinned host memory, which the step's launch
            reads and writes over the bus: the same bits, no copy on the card; {"moments": "cpu"}
            or {"masters": "cpu"} that part alone, of parameters with n elements or more where the
            dict has "at_least": n. None: beside the weights. A group may say another. State tensors
            are then on the CPU, but for scales; before code of yours reads or writes one, wait:
            torch.cuda.synchronize(). Methods of the optimizer wait by themselves. External masters
            are pinned tensors (megaopt.state.masters.pinned) where masters are on the CPU. States
            of weights on the CPU are there anyway. The card has to map host memory, else
            RuntimeError.
        step_counts: whose steps an update counts, in bias corrections and random bits. "group": all
            of the parameter's group, as TransformerEngine counts, so that a parameter that gets its
            first gradient late starts with the corrections of a late step: with betas (0.9, 0.999)
            its first updates are up to 6.6 times lr. "parameter": those that the parameter took
            itself, as torch counts; `state[p]["step"]` and state dicts have them. None: "parameter"
            under contract torch, else "group".
    """

    direct_cast: bool | None
    round_scaled_grads: bool
    write_unscaled_grads: bool
    state_device: StateDevice
    step_counts: StepCounts | None


OF_OPTIMIZERS = {
    "master_weights": None,
    "use_decoupled_grad": False,
    "foreach": None,
    "differentiable": False,
    "fused": None,
}
"""SharedOptions that are no field of Options, with their defaults."""

PEERS_WITH_SCALERS: dict[str, Any] = {"contract": "te", "write_unscaled_grads": True}
"""The options that give FusedAdam the bits of peers whose step takes a GradScaler."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The choices that hold for all groups of an optimizer, as SharedOptions documents them.

    A subclass for each optimizer adds its own, among them `<moment>_dtype` for each moment. An
    option whose type is a bool or a Literal may be one of these values.
    """

    NUMBERS: ClassVar[Numbers]
    ARGUMENTS: ClassVar[tuple[str, ...]] = ()
    """The arguments of the optimizer's constructor beside params."""
    COUNTS_STEPS: ClassVar[bool] = True
    """Another library's optimizer of this kind counts steps; otherwise a state means that it took
    at least one."""
    OF_ALL: ClassVar[tuple[str, ...]] = ()
    """Options that every step looks for in groups, to refuse another value, and keys that none may
    have; as MARKS. Others are looked for where a group gets a key, or one of its numbers changes.
    """
    MARKS: ClassVar[tuple[str, ...]] = ("contract",)
    """Options that every group and every state dict names: they say what the bits of a state mean.

    They are keys of the groups from the start, as torchtitan and torch.distributed.checkpoint read
    from a flattened state dict only what the optimizer's own groups have.
    """
    OFFLOADS: ClassVar[bool] = True
    """States may be in host memory."""
    TAKEN: ClassVar[tuple[str, ...]] = ()
    """Keys of new groups, beside state_device, that the optimizer takes out of them."""
    MATRIX: ClassVar[Any] = None
    """The MatrixRule that steps whole matrices; None: each parameter is stepped elementwise."""
    MATRIX_KEYS: ClassVar[tuple[str, ...]] = ()
    """Keys of groups that choose how MATRIX steps their parameters: with another value they are
    sorted anew."""
    MATRIX_MARKS: ClassVar[tuple[str, ...]] = ()
    """Attributes of parameters that choose the same, where groups leave it to them."""
    MATRIX_TURNS: ClassVar[tuple[str, ...]] = ()
    """Keys of groups that say, with the step, when what matrices keep is made anew."""
    MATRIX_OFF: ClassVar[tuple[str, Any]] = ("", None)
    """A key of groups, and its value that leaves all their parameters to the elementwise rule."""
    dtype: torch.dtype | None = None
    master_weight_dtype: torch.dtype | str = torch.float32
    store_param_remainders: bool = False
    weight_rounding: Rounding = "nearest"
    seed: int = 0
    contract: Contract = "ieee"
    backend: Backend = "auto"
    capturable: bool = False
    nonfinite: Nonfinite = "propagate"
    direct_cast: bool | None = None
    round_scaled_grads: bool = False
    on_external_write: ExternalWrite = "refresh"
    write_unscaled_grads: bool = False
    maximize: bool = False
    state_device: StateDevice = None
    step_counts: StepCounts | None = None
    makes_states: MakesStates | None = None

    def __post_init__(self) -> None:
        """Takes TransformerEngine's names over; raises ValueError for wrong options."""
        # moments by the names of their options, `<moment>_dtype`
        kind: Any = type(self)  # mypy takes no dataclass for hashable
        choices_by_name, moments, _ = fields_of(kind)
        for name in moments:
            if getattr(self, name) is torch.uint8:  # as TransformerEngine calls fp8, always e4m3
                object.__setattr__(self, name, torch.float8_e4m3fn)

        # values of each option by itself
        for name, choices in choices_by_name.items():
            one_of(name, getattr(self, name), choices)
        one_of("dtype", self.dtype, (None, torch.float32))
        # dtypes, and names of masters that lie beside their weights
        inner = {form.name for forms in BESIDE_WEIGHTS.values() for form in forms.values()}
        named = [name for name, form in MASTERS.items() if form.joined and name not in inner]
        kinds_of_masters = (torch.float32, torch.float16, *named)
        one_of("master_weight_dtype", self.master_weight_dtype, kinds_of_masters)
        # a dtype, or a format's name; the message lists those that suit the moment
        for name in moments:
            key = getattr(self, name)
            if not (isinstance(key, (str, torch.dtype)) and key in MOMENTS):
                one_of(
                    name,
                    key,
                    [choice for choice in MOMENTS.allowed if _fits(name, MOMENTS[choice])],
                )

        # then what options say together
        for name in moments if self.contract == "torch" else ():
            if self._is_scaled(getattr(self, name)):
                keys = [key for key in MOMENTS.allowed if isinstance(key, torch.dtype)]
                allowed = [str(key) for key in keys if not self._is_scaled(key)]
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)} with contract='torch', got "
                    f"{getattr(self, name)}: torch's optimizers keep no scales"
                )
        check_seed(self.seed)
        placement_of(self.state_device)
        if self.contract == "torch" and self.draws:
            raise ValueError(
                "contract='torch' must round to nearest, as torch's optimizers do, got "
                f"{', '.join(self.draws)}; contract='ieee' rounds stochastically too"
            )
        self._check_blocks(moments)
        if self.capturable and self.nonfinite == "error":
            raise ValueError(
                "nonfinite must be 'propagate' or 'skip' with capturable=True, where nothing waits "
                "for the gradients, got 'error'"
            )
        if self.dtype is not None and self.master_weight_dtype != self.dtype:
            raise ValueError(
                f"master_weight_dtype must be {self.dtype}, as dtype={self.dtype} asks for, got "
                f"{self.master_weight_dtype}; for masters in that leave dtype out and pass "
                "master_weights=True"
            )
        if self.store_param_remainders and self.master_weight_dtype != torch.float32:
            raise ValueError(
                "master_weight_dtype must be torch.float32 with store_param_remainders=True, whose "
                "remainders keep exact fp32 masters (master_weight_dtype='remainder16' alone asks "
                f"for the same), got {shown(self.master_weight_dtype)}"
            )

    def _is_scaled(self, key: torch.dtype | str) -> bool:
        """Whether moments of this kind have a scale, also under contract torch."""
        return MOMENTS[key].scaled and not (self.contract == "torch" and key == torch.float16)

    def _check_blocks(self, moments: Sequence[str]) -> None:
        """Raises ValueError for moments in blocks that go with nothing else that was asked for."""
        # formats by option; those in blocks have codes with a scale for each block
        formats = {name: MOMENTS[getattr(self, name)] for name in moments}
        blocks = {name: form for name, form in formats.items() if form.block}
        if not blocks:
            return
        listing = ", ".join(f"{name}={form.name!r}" for name, form in blocks.items())

        # exp_avg_sq is never negative: its formats in blocks have no sign, those of others have one
        for name, form in blocks.items():
            if not _fits(name, form):
                fit = [f.name for f in MOMENTS.values() if f.block and _fits(name, f)]
                reason = "has a sign" if form.unsigned else "is never negative"
                raise ValueError(
                    f"{name} must be one of {', '.join(fit)} among those in blocks, as that moment "
                    f"{reason}, got {form.name!r}"
                )
        if self.contract == "torch":
            raise ValueError(
                f"{listing} must not be given with contract='torch': torch's optimizers keep no "
                "moments in blocks"
            )

        # one pass stores blocks of one size, and makes no scale for the whole tensor
        if len({form.block for form in blocks.values()}) > 1:
            raise ValueError(f"moments in blocks must have blocks of one size, got {listing}")
        scaled = [f"{name}={form.name!r}" for name, form in formats.items() if form.scaled]
        if MASTERS[self.master_weight_dtype].scaled:
            scaled.append(f"master_weight_dtype={self.master_weight_dtype}")
        if scaled:
            raise ValueError(
                f"{listing} must not be given beside {', '.join(scaled)}: a scale for the whole "
                "tensor takes two passes over it, moments in blocks are stored in one"
            )

    @property
    def counts_apart(self) -> bool:
        """Whether each parameter has a step count of its own, as torch counts by default."""
        usual = "parameter" if self.contract == "torch" else "group"
        return (self.step_counts or usual) == "parameter"

    @cached_property
    def draws(self) -> list[str]:
        """Lists what rounds stochastically, by which groups have a seed, as messages have it."""
        slots = [slot for slot in self.format_names if slot != "master"]
        formats = {f"{slot}_dtype": self.moment_format(slot) for slot in slots}
        formats["master_weight_dtype"] = MASTERS[self.master_weight_dtype]
        arguments = [f"{name}={form.name!r}" for name, form in formats.items() if form.draws]
        is_drawn = self.weight_rounding == "stochastic"
        return [*arguments, *(["weight_rounding='stochastic'"] if is_drawn else [])]

    @cached_property
    def names_but_step(self) -> tuple[str, ...]:
        """The keys that every group has, but the step count's."""
        (lr, *rest), numbers = self.NUMBERS.ranges, self.NUMBERS
        betas, seed = ("betas",) * numbers.has_betas, ("seed",) * bool(self.draws)
        return (lr, *betas, *rest, *numbers.flags, *seed, *numbers.choices)

    def matrix(self, param: torch.Tensor, group: Mapping[str, Any]) -> Matrix | None:
        """Returns how MATRIX steps a parameter of a group; None: it is stepped elementwise.

        Where a rule makes no choice of its own, it steps all parameters of two dimensions.
        """
        if not self.MATRIX or param.dim() != 2:
            return None
        from megaopt.kernels.rules.matrix import Matrix

        return Matrix(self.MATRIX)

    def matrix_plan(
        self,
        backend: str,
        formats: Formats,
        shapes: Sequence[torch.Size],
        groups: Sequence[int],
        places: Sequence[Place],
        device: torch.device,
    ) -> Any:
        """The plan of matrices of one combination of formats.

        backend: what steps other parameters of the device. shapes, groups and places are of each
        matrix: its own, its row of scalars, and where it lies in its parameter.
        """
        from megaopt.kernels.matrix.plan import MatrixPlan  # for matrices alone

        if backend != "triton":
            return MatrixPlan(formats, groups, places)
        from megaopt.kernels.matrix.launch import LaunchedStep

        return MatrixPlan(formats, groups, places, LaunchedStep())

    def check_matrix(self, view: Any, where: str, masters: bool) -> None:
        """Raises ValueError, in a subclass, for a matrix that does not go with the options.

        view: the matrix's ParamView. masters: whether weights have masters.
        """

    def check_numbers(self, group: Mapping[str, Any], where: str) -> None:
        """Raises ValueError, in a subclass, for numbers of a group that do not go together."""

    def check_saved(self, saved: Mapping[str, Any], where: str) -> None:
        """Raises ValueError, in a subclass, for a group of a state dict that lacks something."""

    @property
    def group_keys(self) -> dict[str, Any]:
        """The entries that every new group has beside its numbers."""
        # FORMATS: by slot, and which parameters keep blocks where there are any
        slots = [slot for slot in self.format_names if slot != "master"]
        blocks = any(self.moment_format(slot).block for slot in slots)
        names = {**self.format_names, **({BLOCKS: IN_ROWS} if blocks else {})}
        formats_mark = ", ".join(f"{slot}={name}" for slot, name in names.items())
        is_kahan = self.master_weight_dtype in BESIDE_WEIGHTS[torch.float16]
        kahan_mark = {BESIDE: ""} if is_kahan else {}
        drawn = {"seed": self.seed} if self.draws else {}
        marks = {name: getattr(self, name) for name in self.MARKS}
        return {"step": 0, **marks, FORMATS: formats_mark, **drawn, **kahan_mark}

    @cached_property
    def format_names(self) -> dict[str, str]:
        """The names of the formats of moments and masters, by slot."""
        kind: Any = type(self)
        _, moments, _ = fields_of(kind)
        slots = [name.removesuffix("_dtype") for name in moments]
        names_by_slot = {slot: self.moment_format(slot).name for slot in slots}
        return {**names_by_slot, "master": self.master_format(torch.bfloat16, True).name}

    def moment_format(self, moment: str) -> Format:
        """Returns a moment's format; under contract torch fp16 has no scale, as torch keeps it.

        A moment is in blocks only where the parameter keeps blocks (ParamView.keeps_blocks).
        """
        # fp16 without a scale is stored as a weight of fp16 is
        dtype = getattr(self, f"{moment}_dtype")
        plain = MOMENTS[dtype].scaled and not self._is_scaled(dtype)
        return WEIGHTS[dtype] if plain else MOMENTS[dtype]

    def master_format(
        self, weight_dtype: torch.dtype, has_master: bool, codes: torch.dtype | None = None
    ) -> Format:
        """Returns the format of the master of a weight of this dtype; NONE where it has none.

        codes: the fp8 dtype in which the weight is kept; weight_dtype is the one that it shows.
        """
        # fp32 weights are their own masters
        is_rounded = codes is not None or weight_dtype in (torch.bfloat16, torch.float16)
        if not has_master or not is_rounded:
            return NONE
        # some masters are stored otherwise beside some weights
        key = torch.int16 if self.store_param_remainders else self.master_weight_dtype
        return BESIDE_WEIGHTS.get(codes or weight_dtype, {}).get(key) or MASTERS[key]


@cache
def fields_of(kind: Any) -> tuple[dict[str, tuple[Any, ...]], list[str], frozenset[str]]:
    """Returns what the options of a class are.

    Returns:
        The values of each whose type is a bool or a Literal, or None beside these; those that are
        dtypes of moments; and those, but for VARIANTS, of which a group may name the optimizer's
        value alone.
    """
    names, types = [field.name for field in fields(kind)], get_type_hints(kind)
    choices: dict[str, tuple[Any, ...]] = {}
    for name in names:
        # of X | None both; anything else by itself
        parts = get_args(types[name])
        is_optional = len(parts) == 2 and parts[1] is NoneType
        inner = parts[0] if is_optional else types[name]
        if inner is bool or get_origin(inner) is Literal:
            values = FLAGS if inner is bool else get_args(inner)
            choices[name] = (None, *values) if is_optional else values
    dtypes = [name for name in names if name.endswith("_dtype") and name != "master_weight_dtype"]
    # torch's groups all name capturable, which moves no number
    of_all = {*names} - {"capturable", "seed", STATE_DEVICE, *VARIANTS}
    return choices, dtypes, frozenset(of_all)


def _fits(name: str, form: Format) -> bool:
    """Whether a moment of this name may be stored so: some blocks hold no signs, and others do."""
    return not form.block or form.unsigned == name.endswith(SQUARED)


def check_group(
    group: Mapping[str, Any], options: Options, where: str, lr_is_needed: bool = True
) -> None:
    """Raises ValueError where a group's hyper-parameter is missing, out of range or NaN.

    lr_is_needed: it may not be None, as it may before the first step.
    """
    # keys first, then one choice for all groups, then numbers
    numbers = options.NUMBERS
    check_there(group, (*options.names_but_step, "step"), where)
    check_variant(group, options, where)
    kind: Any = type(options)
    _, _, of_all = fields_of(kind)
    for name in filter(of_all.__contains__, group):
        value = getattr(options, name)
        if not same(group[name], value):
            raise ValueError(
                f"{where}: {name} must be {value!r}, the optimizer's own argument, which holds for "
                f"all groups, got {shown(group[name])}"
            )
    # a learning rate may follow before the first step
    if group["lr"] is None and not lr_is_needed:
        group = {**group, "lr": 0.0}
    for name, allowed in numbers.ranges.items():
        number(f"{where}: {name}", group[name], allowed)
    if numbers.has_betas:
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            refuse(f"{where}: betas", "two numbers", betas)
        for index, beta in enumerate(betas):
            number(f"{where}: betas[{index}]", beta, DECAY)
    for name in numbers.flags:
        one_of(f"{where}: {name}", group[name], FLAGS)

    step = group["step"]
    if not isinstance(step, int):
        refuse(f"{where}: step", COUNT.allowed, step)
    number(f"{where}: step", step, COUNT)
    if options.draws:
        check_seed(group["seed"], f"{where}: seed")
    check_param_numbers(group, where)
    options.check_numbers(group, where)


def check_there(group: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Raises ValueError where a group lacks one of these keys."""
    missing = [name for name in names if name not in group]
    if missing:
        raise ValueError(f"{where} must have {', '.join(missing)}, got {listed(group)}")


def check_param_numbers(group: Mapping[str, Any], where: str) -> None:
    """Raises ValueError unless they are a number of 32 bits for each parameter, or not given."""
    numbers = group.get("param_numbers")
    if numbers is None:
        return
    count = len(group.get("params", ()))
    is_list = isinstance(numbers, (list, tuple)) and len(numbers) == count
    if not is_list or not all(map(is_param_number, numbers)):
        allowed = f"a list of {count} whole numbers from 0 to 2**32 - 1"
        refuse(f"{where}: param_numbers", allowed, numbers)


PARAM_NUMBER = "a whole number from 0 to 2**32 - 1"


def is_param_number(value: Any) -> bool:
    """Checks for a number that tells a parameter's random bits from those of others."""
    return type(value) is int and 0 <= value < 2**32


def check_seed(seed: Any, name: str = "seed") -> None:
    """Raises ValueError unless it is the key of a random generator."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        refuse(name, "a whole number from 0 to 2**64 - 1", seed)


def check_variant(group: Mapping[str, Any], options: Options, where: str) -> None:
    """Raises ValueError where a group asks for another variant than the optimizer's."""
    for name in VARIANTS:
        value = getattr(options, name, False)
        if group.get(name, value) is not None:
            one_of(f"{where}: {name}", group.get(name, value), (value,))
