"""A parameter as the optimizer sees it: what holds for plain tensors, and other kinds change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megaopt.kernels.chunks.batch import Cast, Extent, Formats
from megaopt.kernels.formats import WEIGHTS, Format
from megaopt.kernels.place import Place
from megaopt.kernels.rules.matrix import WHOLE, Matrix
from megaopt.options.options import Options, check_weight
from megaopt.options.placement import MASTER as MASTER
from megaopt.options.placement import SCALE as SCALE
from megaopt.options.placement import STEP as STEP
from megaopt.options.placement import Home
from megaopt.params.codes import decoded_joined, encode_joined

FEWEST_IN_ROWS, FEWEST_IN_A_ROW = 4096, 65536
"""Elements from which moments are kept in blocks: of norms and biases, which take little memory and
matter much, they are fp32."""

EMBEDDING = "is_embedding_or_output_parameter"
"""Megatron-Core's attribute of parameters; where it is True no rule for matrices steps one."""


def whole_shape_of(param: torch.Tensor) -> tuple[int, ...]:
    """A parameter's shape over all ranks, of a flat part too where it says so."""
    return tuple(getattr(param, "megaopt_whole_shape", param.shape))


class ParamView:
    """A parameter that is a plain tensor; the subclasses say what is different for theirs."""

    weight: Any = None
    """The fp8 weight that the parameter is, or is a part of: a Float8Weight or ForeignWeight."""
    group: Any = None
    """The process group whose ranks hold the other parts of the fp8 weight; None without one."""
    split: tuple[Any, tuple[int, ...]] | None = None
    """The device mesh of a DTensor, and its dimensions over which the parameter is split."""
    is_sharded = False
    """It is a DTensor, and so is its state."""
    matrix: Matrix | None = None
    """The rule that steps it as a whole matrix, and how; None: it is stepped elementwise."""
    home: Home | None = None
    """The home of its state in host memory; None: all of it is beside the weight."""

    def __init__(self, param: Any) -> None:
        self.param = param

    @property
    def local(self) -> torch.Tensor:
        """The tensor that this rank steps: of a DTensor its shard, otherwise the parameter."""
        param: torch.Tensor = self.param
        return param

    @property
    def is_strange(self) -> bool:
        """Whether nothing steps its kind: `check` raises an error, unless it is frozen."""
        is_wrapper = is_traceable_wrapper_subclass(self.param)
        is_ours = self.is_sharded or self.weight is not None
        return self.param.dtype not in WEIGHTS or (is_wrapper and not is_ours)

    @property
    def is_idle(self) -> bool:
        """The parameter is frozen, and of a kind that nothing steps: codes of int8, say.

        A tensor that is no torch.nn.Parameter is meant to be stepped, whatever it says.
        """
        is_frozen = isinstance(self.param, torch.nn.Parameter) and not self.param.requires_grad
        return is_frozen and self.is_strange

    @property
    def codes(self) -> torch.Tensor:
        """The memory that a step writes as the weight."""
        return self.local

    @property
    def code_dtype(self) -> torch.dtype | None:
        """The fp8 dtype in which the weight is kept; None where it is kept as it is."""
        return None if self.weight is None else self.weight.recipe.dtype

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The parameter's shape over all ranks."""
        return whole_shape_of(self.param)

    def state_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's tensor of the state, by a moment's or the master's name."""
        return tuple(self.local.shape)

    def whole_state_shape(self, name: str) -> tuple[int, ...]:
        """The same shape over all ranks, as the optimizer's user sees it."""
        return tuple(self.param.shape)

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of fp32 tensors that a state may have beside moments and master."""
        return {}

    def state_device(self, name: str) -> torch.device:
        """The device of this rank's tensor of the state under a name."""
        return torch.device("cpu") if self.is_apart(name) else self.local.device

    def is_apart(self, name: str) -> bool:
        """Whether the state's tensor of this name is in host memory: what is kept never is."""
        return self.home is not None and name in self.home.placement and name not in self.kept

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

    def keeps_blocks(self, form: Format) -> bool:
        """Whether its moments may be in a format of blocks; small ones stay fp32.

        The row rule: no block goes from one row, all elements of an index of the first dimension,
        into the next, so that ranks may split rows: rows that are no whole blocks stay fp32. Of
        packed codes the last dimension has to be of whole blocks.
        The whole parameter's shape decides, so that it is so on all ranks, however many they are.
        Only flat parts (Megatron's shards) have blocks of a parameter that is flat, too.
        """
        # small tensors stay fp32; one dimension is one row, and has to be larger
        shape = self.whole_shape
        if math.prod(shape) < (FEWEST_IN_ROWS if len(shape) > 1 else FEWEST_IN_A_ROW):
            return False
        # rows of whole blocks; a flat part is cut anywhere, its blocks count from the whole's start
        if len(shape) > 1 and not self._is_flat_part and math.prod(shape[1:]) % form.block:
            return False
        return form.packed == 1 or shape[-1] % form.block == 0

    @property
    def _is_flat_part(self) -> bool:
        return any(hasattr(self.param, f"megaopt_{n}") for n in ("whole_shape", "first_element"))

    def block_scales_shape(self, block: int) -> tuple[int, ...]:
        """The shape of the scales of `local`: (rows, blocks of a row); (blocks,) of one dimension.

        Those of a flat part are counted from the block in which it starts.
        """
        rows, *rest = self.local.shape
        if rest and not self._is_flat_part:
            return (rows, math.prod(rest) // block)
        # the first block may begin before this part, the last may end behind it
        numel = self.local.numel()
        return (-(-(numel + self.first_element % block) // block) if numel else 0,)

    @property
    def first_element(self) -> int:
        """The index, in the whole parameter, of this rank's first element; row by row."""
        return int(getattr(self.param, "megaopt_first_element", 0))

    def first_of(self, name: str) -> int:
        """The same of the state tensor of this name."""
        return self.first_element

    def number(self, place: int) -> int:
        """The parameter's number, the same on all ranks that hold a part of it; not checked.

        Where nobody gave it one, its place among all parameters of the optimizer, in group order.
        """
        number: int = getattr(self.param, "megaopt_number", place)
        return number

    def place(self, number: int) -> Place:
        """Returns the place of `local` in the whole parameter, for random bits.

        number: the parameter's.
        """
        return Place(number, self.first_element)

    def state_place(self, name: str, number: int) -> Place:
        """Returns the place of this rank's state tensor of this name in the whole one."""
        return self.place(number)

    @property
    def sharding(self) -> tuple[object, ...] | None:
        """The split of a DTensor, as ranks compare it; None for other kinds."""
        return None

    @property
    def described(self) -> tuple[object, ...]:
        """The shape, dtypes and sharding, which ranks that hold parts of it must have alike."""
        weight = None if self.weight is None else (self.weight.recipe, self.weight.dtype)
        return self.whole_shape, self.param.dtype, self.sharding, weight

    @property
    def batch_key(self) -> tuple[object, ...]:
        """The facts that parameters of one batch share, beside device and formats."""
        return (self.split,)

    @property
    def counted(self) -> list[torch.Tensor]:
        """The tensors whose version counters count writes to the parameter."""
        # torch counts no writes to inference tensors
        return [] if self.param.is_inference() else [self.param]

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor of this rank as the parameter is: of a DTensor a DTensor."""
        return local

    def wrap_state(self, state: Mapping[str, Any], originals: Sequence[Any] = ()) -> dict[str, Any]:
        """A state of this rank's tensors as the parameter is; `originals` stay these objects."""
        return dict(state)

    def check(self, where: str, options: Options, moments: tuple[str, ...], masters: bool) -> None:
        """Raises ValueError for a parameter that the optimizer cannot own."""
        self._check_kind(where, options, moments, masters)
        for name in moments:
            self._check_pairs(where, name, options.moment_format(name))
        check_weight(self.local, where, options, masters, self.code_dtype)

    def _check_pairs(self, where: str, name: str, form: Format) -> None:
        """Raises ValueError for a part that has one element of a byte's two.

        No other rank's part may need the same byte, nor a row of this one's end within it.
        """
        if form.packed == 1 or not self.keeps_blocks(form):
            return
        # an odd start, or an odd row, would split a byte
        shape, first = tuple(self.local.shape), self.first_element
        if first % form.packed or (shape[-1] if shape else 1) % form.packed:
            raise ValueError(
                f"{where}: {name}_dtype={form.name!r} keeps two elements in a byte: a part of a "
                "parameter must start at an even element and have an even number of them in its "
                f"last dimension, got one of shape {shape} from element {first} on"
            )

    def _check_kind(
        self, where: str, options: Options, moments: tuple[str, ...], masters: bool
    ) -> None:
        if is_traceable_wrapper_subclass(self.param):
            raise ValueError(
                f"{where}: the tensor must be a torch.Tensor, torch.distributed.tensor.DTensor, "
                "megaopt.float8.Float8Weight, or, once megaopt.integration.transformer_engine is "
                "imported, one of TransformerEngine's fp8 tensors, got the tensor subclass "
                f"{type(self.param).__name__}"
            )

    def check_shared(self, where: str) -> None:
        """Raises ValueError for a part whose other parts no rank is known to hold."""

    def cast(self, direct: bool | None = None) -> Cast | None:
        """Returns the cast of new values to fp8 codes; None where the weight is not fp8.

        direct: takes the place of the recipe's own `direct`; None leaves it.
        """
        return None

    @property
    def extent(self) -> Extent:
        """The elements of an fp8 weight that it holds."""
        raise TypeError("only fp8 weights have an extent")

    def value(self, formats: Formats) -> torch.Tensor:
        """The fp32 value of the weight's codes, of `local`'s shape."""
        values: torch.Tensor = formats.weight.decode_reference(self.local.detach())
        return values

    def initial_value(self, formats: Formats) -> torch.Tensor:
        """The fp32 value that a master starts from, of `local`'s shape."""
        return self.value(formats)

    def joined_value(self, form: Format, code: torch.Tensor) -> torch.Tensor:
        """The fp32 values of the weight with what is stored beside it, of `local`'s shape."""
        return decoded_joined(form, self.local.detach(), code)

    def join(self, form: Format, value: torch.Tensor, code: torch.Tensor) -> torch.Tensor | None:
        """Stores in `code` what a weight does not hold of fp32 values; returns the new weight.

        None where the weight has to stay, and `code` gets what brings it nearest.
        """
        return encode_joined(code, value, form, self.local)


class MatrixView(ParamView):
    """A plain tensor stepped whole, or as several matrices; its moments are of the low shape."""

    matrix: Matrix

    def __init__(self, param: Any, matrix: Matrix) -> None:
        super().__init__(param)
        self.matrix = matrix

    def check(self, where: str, options: Options, moments: tuple[str, ...], masters: bool) -> None:
        """Raises ValueError for a parameter that the optimizer cannot own."""
        super().check(where, options, moments, masters)
        options.check_matrix(self, where, masters)

    @property
    def low_shape(self) -> tuple[int, ...]:
        """The shape of this rank's moments."""
        return self.matrix.low_shape(self.local.shape)

    def state_shape(self, name: str) -> tuple[int, ...]:
        """The low shape, but for the master."""
        return tuple(self.local.shape) if name == MASTER else self.low_shape

    def whole_state_shape(self, name: str) -> tuple[int, ...]:
        """The same over all ranks."""
        shape = tuple(self.param.shape)
        return shape if name == MASTER else self.matrix.low_shape(shape)

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what the rule keeps."""
        return self.matrix.kept(self.local.shape)

    def keeps_blocks(self, form: Format) -> bool:
        """Whether the moments are large enough, and their rows of whole blocks."""
        shape = self.matrix.low_shape(self.whole_shape)
        columns = math.prod(shape[1:]) if form.packed == 1 else shape[-1]
        return columns % form.block == 0 and math.prod(shape) >= FEWEST_IN_ROWS

    def block_scales_shape(self, block: int) -> tuple[int, ...]:
        """The shape of the moments' scales: (rows, blocks of a row)."""
        rows, *columns = self.low_shape
        return (rows, math.prod(columns) // block)

    def check_blocks_of_matrices(self, where: str, name: str, form: Format) -> None:
        """Raises ValueError where a matrix that goes to its owner alone has parts of blocks."""
        # cuts: the matrices that the parameter holds, each made by one rank; runs of its elements
        rule, how = self.matrix.rule, self.matrix.how
        if not form.block or rule.meets != WHOLE or not self.keeps_blocks(form):
            return
        cuts = rule.cut(how, self.whole_state_shape(name.removesuffix("_dtype")))
        sizes = [size for cut in cuts for _, size in cut.runs]
        if any(size % form.block for size in sizes):
            shapes = sorted({tuple(cut.shape) for cut in cuts})
            raise ValueError(
                f"{where}: {name}={form.name!r} must find whole blocks of {form.block} elements in "
                f"each matrix that one of several ranks makes, got matrices of {shapes}"
            )


class ReplicatedView(MatrixView):
    """A plain matrix that all ranks of a mesh have: one of them makes its update for all."""

    def __init__(self, param: Any, matrix: Matrix, mesh: Any) -> None:
        super().__init__(param, matrix)
        self.split = mesh, ()

    @property
    def sharding(self) -> tuple[object, ...]:
        """The count of ranks with copies; not which, as other dimensions of parallelism differ."""
        assert self.split is not None
        return "replicas", self.split[0].size()

    def box_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in which `boxes` of this one are counted."""
        return tuple(shape)

    def boxes(
        self, coordinates: Sequence[Sequence[int]], shape: Sequence[int]
    ) -> list[tuple[tuple[int, int], ...]]:
        """Returns what ranks at places of the mesh have: all of a tensor of this shape."""
        return [tuple((0, size) for size in shape)] * len(coordinates)

    def _check_kind(
        self, where: str, options: Options, moments: tuple[str, ...], masters: bool
    ) -> None:
        super()._check_kind(where, options, moments, masters)
        formats = {
            **{f"{name}_dtype": options.moment_format(name) for name in moments},
            "master_weight_dtype": options.master_format(self.param.dtype, masters),
        }
        for name, form in formats.items():
            self.check_blocks_of_matrices(where, name, form)
            if form.scaled:
                raise ValueError(
                    f"{where}: {name} must be a format without a scale per tensor with replicas, "
                    f"got {getattr(options, name)}: one parameter's matrices go to several ranks"
                )
