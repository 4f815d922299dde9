"""A parameter as the optimizer sees it: what holds for plain tensors, and other kinds change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megaopt.kernels.chunks.batch import Extent, Formats
from megaopt.kernels.formats import WEIGHTS, Format
from megaopt.kernels.place import Place
from megaopt.kernels.refusals import is_dense
from megaopt.options.checks import has_shared_elements
from megaopt.options.options import Options
from megaopt.options.placement import MASTER as MASTER
from megaopt.options.placement import SCALE as SCALE
from megaopt.options.placement import STEP as STEP
from megaopt.options.placement import Home
from megaopt.params.codes import decoded_joined, encode_joined

if TYPE_CHECKING:
    from megaopt.kernels.rules.matrix import Matrix

FEWEST_IN_ROWS, FEWEST_IN_A_ROW = 4096, 65536
"""Elements from which moments are kept in blocks: of norms and biases, which take little memory and
matter much, they are fp32."""

EMBEDDING = "is_embedding_or_output_parameter"
"""Megatron-Core's attribute of parameters; where it is True no rule for matrices steps one."""


def whole_shape_of(param: torch.Tensor) -> tuple[int, ...]:
    """A parameter's shape over all ranks, of a flat part too where it says so."""
    return tuple(getattr(param, "megaopt_whole_shape", param.shape))


class ParamView:
    """A parameter that is a plain tensor; the subclasses say what is different for theirs.

    Args:
        param: the parameter.
        matrix: the rule that steps it as a whole matrix, and how; its moments are of the low shape
            then. None: it is stepped elementwise.
        replicas: the mesh of ranks that all have the matrix, of which one makes its update for all;
            None: this rank knows of no others.
    """

    weight: Any = None
    """The fp8 weight that the parameter is, or is a part of: a Float8Weight or ForeignWeight."""
    extent: Extent
    """The elements of the fp8 weight that it holds; other kinds have none."""
    group: Any = None
    """The process group whose ranks hold the other parts of the fp8 weight; None without one."""
    is_sharded = False
    """It is a DTensor, and so is its state."""
    is_flat = False
    """It is a flat part of a matrix, whose other parts are on known ranks."""
    home: Home | None = None
    """The home of its state in host memory; None: all of it is beside the weight."""

    def __init__(self, param: Any, matrix: Matrix | None = None, replicas: Any = None) -> None:
        self.param, self.matrix, self.replicas = param, matrix, replicas
        self.local: torch.Tensor = param
        """The tensor that this rank steps: of a DTensor its shard, otherwise the parameter."""
        self.codes: torch.Tensor = param
        """The memory that a step writes as the weight."""
        self.code_dtype: torch.dtype | None = None
        """The fp8 dtype in which the weight is kept; None where it is kept as it is."""
        self.split: tuple[Any, tuple[int, ...]] | None = None
        """The mesh of ranks that have other parts, or copies, and its dimensions that split it."""
        self.sharding: tuple[object, ...] | None = None
        """The split as ranks compare it: not which ranks, as these differ elsewhere."""
        if replicas is not None:
            self.split, self.sharding = (replicas, ()), ("replicas", replicas.size())
        # nothing steps such a kind: `check` raises an error, unless it is frozen (codes of int8,
        # say); a tensor that is no torch.nn.Parameter is meant to be stepped, whatever it says
        is_ours = self.is_sharded or self.weight is not None
        self.is_strange = param.dtype not in WEIGHTS or (
            is_traceable_wrapper_subclass(param) and not is_ours
        )
        is_frozen = isinstance(param, torch.nn.Parameter) and not param.requires_grad
        self.is_idle = is_frozen and self.is_strange
        # its blocks are counted from the whole's start
        marks = ("megaopt_whole_shape", "megaopt_first_element")
        self._is_part = any(hasattr(param, name) for name in marks)

    # --- shapes and places

    @cached_property
    def whole_shape(self) -> tuple[int, ...]:
        """The parameter's shape over all ranks; nested tensors, which are refused, have none."""
        return tuple(self.weight.shape) if self.weight is not None else whole_shape_of(self.param)

    def state_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's tensor of the state, by a moment's or the master's name."""
        shape = tuple(self.local.shape)
        return shape if self.matrix is None or name == MASTER else self.matrix.low_shape(shape)

    def whole_state_shape(self, name: str) -> tuple[int, ...]:
        """The same shape over all ranks, as the optimizer's user sees it."""
        shape = tuple(self.param.shape)
        return shape if self.matrix is None or name == MASTER else self.matrix.low_shape(shape)

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of fp32 tensors that a state has beside moments and master."""
        if self.matrix is None:
            return {}
        # of the whole matrix, where that comes together
        rule = self.matrix.rule
        shape = self.whole_shape if rule.is_whole else self.local.shape
        return rule.state_shapes(self.matrix.how, shape)

    def keeps_blocks(self, form: Format) -> bool:
        """Whether its moments may be in a format of blocks; small ones stay fp32.

        The row rule: no block goes from one row, all elements of an index of the first dimension,
        into the next, so that ranks may split rows: rows that are no whole blocks stay fp32. Of
        packed codes the last dimension has to be of whole blocks.
        The whole parameter's shape decides, so that it is so on all ranks, however many they are.
        Only flat parts (Megatron's shards) have blocks of a parameter that is flat, too.
        """
        shape, fewest = self.whole_shape, FEWEST_IN_ROWS
        if self.matrix is not None:
            shape = self.matrix.low_shape(shape)
        elif len(shape) < 2:  # one dimension is one row, and has to be larger
            fewest = FEWEST_IN_A_ROW
        if math.prod(shape) < fewest:
            return False
        # rows of whole blocks; an elementwise flat part is cut anywhere
        is_cut = self.matrix is None and (len(shape) < 2 or self._is_part)
        if not is_cut and form.packed == 1:
            return math.prod(shape[1:]) % form.block == 0
        return form.packed == 1 or shape[-1] % form.block == 0

    def block_scales_shape(self, block: int) -> tuple[int, ...]:
        """The shape of moments' scales: (rows, blocks of a row); (blocks,) of one dimension.

        Those of a flat part are counted from the block in which it starts.
        """
        rows, *columns = self.state_shape("")
        if self.matrix is not None or (columns and not self._is_part):
            return (rows, math.prod(columns) // block)
        # the first block may begin before this part, the last may end behind it
        numel = self.local.numel()
        return (-(-(numel + self.first_of() % block) // block) if numel else 0,)

    def boxes(
        self, coordinates: Sequence[Sequence[int]], shape: Sequence[int]
    ) -> list[tuple[tuple[int, int], ...]]:
        """The parts at places of the mesh: the first index and the one behind the last.

        shape: of the parameter, or of another tensor that is split as it is. Of replicas each rank
        has all of it; of flat parts boxes are counted in the one dimension of all elements.
        """
        return [tuple((0, size) for size in shape)] * len(coordinates)

    def first_of(self, name: str = MASTER) -> int:
        """The index of this rank's first element in the whole state tensor of this name.

        Row by row; by default in the whole parameter.
        """
        if self.weight is not None:
            return self.extent.start
        return int(getattr(self.param, "megaopt_first_element", 0))

    def number(self, place: int) -> int:
        """The parameter's number, the same on all ranks that hold a part of it; not checked.

        Where nobody gave it one, its place among all parameters of the optimizer, in group order.
        """
        number: int = getattr(self.param, "megaopt_number", place)
        return number

    def place(self, number: int, name: str = MASTER) -> Place:
        """The place of this rank's state tensor of a name in the whole one, for random bits.

        number: the parameter's. By default the place of `local` in the whole parameter.
        """
        return Place(number, self.first_of(name))

    # --- memory of states

    def is_apart(self, name: str) -> bool:
        """Whether the state's tensor of this name is in host memory: what is kept never is."""
        return self.home is not None and name in self.home.placement and name not in self.kept

    def state_device(self, name: str) -> torch.device:
        """The device of this rank's tensor of the state under a name."""
        return torch.device("cpu") if self.is_apart(name) else self.local.device

    def empty_state(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for the state's tensor of this name: on a device, or pinned in host memory."""
        if self.home is not None and self.is_apart(name):
            return self.home.memory.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.local.device)

    def keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that was made for the state, where the state's tensor of this name is."""
        if not self.is_apart(name):
            return tensor
        return self.empty_state(name, tuple(tensor.shape), tensor.dtype).copy_(tensor)

    # --- what parameters are compared by

    @property
    def described(self) -> tuple[object, ...]:
        """The shape, dtypes and sharding, which ranks that hold parts of it must have alike."""
        weight = None if self.weight is None else (self.weight.recipe, self.weight.dtype)
        return self.whole_shape, self.param.dtype, self.sharding, weight

    @property
    def counted(self) -> list[torch.Tensor]:
        """The tensors whose version counters count writes to the parameter."""
        # nobody says what counts writes to another library's fp8 weight
        if self.weight is not None:
            return [] if self.weight.is_foreign else [self.weight]
        # a shard counts writes to to_local(); torch counts none to inference tensors
        tensors = (self.param, self.local) if self.is_sharded else (self.param,)
        return [tensor for tensor in tensors if not tensor.is_inference()]

    def wrap(self, local: torch.Tensor, name: str = MASTER) -> torch.Tensor:
        """A tensor of this rank, of the state's name, as the parameter is: of a DTensor one."""
        return local

    def wrap_state(self, state: Mapping[str, Any], originals: Sequence[Any] = ()) -> dict[str, Any]:
        """A state of this rank's tensors as the parameter is; `originals` stay these objects."""
        return dict(state)

    # --- checks

    def check(self, where: str, options: Options, moments: tuple[str, ...], masters: bool) -> None:
        """Raises ValueError for a parameter that the optimizer cannot own."""
        forms = {f"{name}_dtype": options.moment_format(name) for name in moments}
        master = options.master_format(self.param.dtype, masters)
        self._check_kind(where, options, {**forms, "master_weight_dtype": master})
        # no other rank's part may need the byte of two elements, nor a row of this one's end in it
        for name, form in forms.items():
            if form.packed == 1 or not self.keeps_blocks(form):
                continue
            shape, first = tuple(self.local.shape), self.first_of()
            if first % form.packed or (shape[-1] if shape else 1) % form.packed:
                raise ValueError(
                    f"{where}: {name}={form.name!r} keeps two elements in a byte: a part of a "
                    "parameter must start at an even element and have an even number of them in "
                    f"its last dimension, got one of shape {shape} from element {first} on"
                )
        # memory: strided, and one place for each element, as the step writes in place
        weight, codes = self.local, self.code_dtype
        if not is_dense(weight):
            layout = "nested" if weight.is_nested else weight.layout
            raise ValueError(f"{where}: layout must be torch.strided, got {layout}")
        if has_shared_elements(weight):
            raise ValueError(
                f"{where}: each element must have memory of its own, got strides "
                f"{weight.stride()} of shape {tuple(weight.shape)}"
            )
        if weight.dtype not in WEIGHTS:
            raise ValueError(f"{where}: dtype must be one of {WEIGHTS}, got {weight.dtype}")
        # a master that lies beside its weight is made for one dtype of weights
        needed = options.master_format(weight.dtype, masters, codes).requires_weight
        if needed not in (None, codes or weight.dtype):
            # which option asked for it, as the message has it
            option = "store_param_remainders=True"
            if not options.store_param_remainders:
                option = f"master_weight_dtype={options.master_weight_dtype!r}"
            if codes is not None:
                raise ValueError(
                    f"{where}: master_weight_dtype of fp8 weights must be torch.float32, "
                    f"torch.float16, 'remainder8' or 'remainder8_stochastic', got {option}: such a "
                    "master is what its 16-bit weight does not hold"
                )
            raise ValueError(
                f"{where}: dtype must be {needed} (whose bits are a master's upper half), or "
                f"torch.float32, with {option}, got {weight.dtype}"
            )
        if self.matrix is not None:
            options.check_matrix(self, where, masters)

    def _check_kind(self, where: str, options: Options, forms: Mapping[str, Format]) -> None:
        """Raises ValueError for what only this kind of parameters refuses.

        forms: of moments and master, by the names of their options.
        """
        if is_traceable_wrapper_subclass(self.param):
            raise ValueError(
                f"{where}: the tensor must be a torch.Tensor, torch.distributed.tensor.DTensor, "
                "megaopt.float8.Float8Weight, or, once megaopt.integration.transformer_engine is "
                "imported, one of TransformerEngine's fp8 tensors, got the tensor subclass "
                f"{type(self.param).__name__}"
            )
        for name, form in forms.items() if self.replicas is not None else ():
            self._check_cuts(where, name, form)
            if form.scaled:
                raise ValueError(
                    f"{where}: {name} must be a format without a scale per tensor with replicas, "
                    f"got {getattr(options, name)}: one parameter's matrices go to several ranks"
                )

    def _check_cuts(self, where: str, name: str, form: Format) -> None:
        """Raises ValueError where a matrix that goes to its owner alone has parts of blocks."""
        if self.matrix is None or not self.matrix.rule.is_whole:
            return
        if not form.block or not self.keeps_blocks(form):
            return
        # cuts: the matrices that the parameter holds, each made by one rank; runs of its elements
        shape = self.whole_state_shape(name.removesuffix("_dtype"))
        cuts = self.matrix.rule.cut(self.matrix.how, shape)
        if any(size % form.block for cut in cuts for _, size in cut.runs):
            shapes = sorted({tuple(cut.shape) for cut in cuts})
            raise ValueError(
                f"{where}: {name}={form.name!r} must find whole blocks of {form.block} elements in "
                f"each matrix that one of several ranks makes, got matrices of {shapes}"
            )

    def check_shared(self, where: str) -> None:
        """Raises ValueError for a part whose other parts no rank is known to hold."""

    # --- values

    def value(self, formats: Formats, initial: bool = False) -> torch.Tensor:
        """The fp32 value of the weight's codes, of `local`'s shape.

        initial: the value that a master starts from, where that is another.
        """
        values: torch.Tensor = formats.weight.decode_reference(self.local.detach())
        return values

    def joined_value(self, form: Format, code: torch.Tensor) -> torch.Tensor:
        """The fp32 values of the weight with what is stored beside it, of `local`'s shape."""
        return decoded_joined(form, self.local.detach(), code)

    def join(self, form: Format, value: torch.Tensor, code: torch.Tensor) -> torch.Tensor | None:
        """Stores in `code` what a weight does not hold of fp32 values; returns the new weight.

        None where the weight has to stay, and `code` gets what brings it nearest.
        """
        return encode_joined(code, value, form, self.local)
