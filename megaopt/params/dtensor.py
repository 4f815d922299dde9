"""DTensors as parameters: each rank steps its own shard.

torch.distributed.tensor is never imported here: before somebody else has, there is no DTensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megaopt.kernels.formats import Format
from megaopt.kernels.place import Place
from megaopt.kernels.rules.matrix import WHOLE
from megaopt.kernels.shards import PLAIN, place_of_shard, shard_first
from megaopt.kernels.shards import dtensor_class as dtensor_class
from megaopt.kernels.shards import is_dtensor as is_dtensor
from megaopt.kernels.shards import local_of as local_of
from megaopt.kernels.shards import waited as waited
from megaopt.options.options import Options
from megaopt.params.view import MASTER, SCALE, STEP, MatrixView, ParamView


def locals_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with each tensor's own shard."""
    return {name: local_of(value) for name, value in state.items()}


def same_sharding(value: Any, param: Any) -> bool:
    """Whether two tensors are split alike: plain both, or DTensors of one mesh and placements."""
    spec, param_spec = getattr(value, "_spec", None), getattr(param, "_spec", None)
    if spec is param_spec:  # of plain tensors none; FSDP2 gives every gradient its parameter's
        return True
    if spec is None or param_spec is None:
        return False
    names = ("placements", "mesh", "shard_order")  # not every torch has the last
    return all(getattr(spec, n, None) == getattr(param_spec, n, None) for n in names)


def check_sharding(value: Any, param: Any, where: str) -> None:
    """Raises ValueError for a tensor that is not split over ranks as the parameter is.

    Also for a DTensor whose shard is a subclass: it may have no memory of its own.
    """
    if not isinstance(value, torch.Tensor):
        return
    if not same_sharding(value, param):
        raise ValueError(
            f"{where} must be {_sharding(param)}, got {_sharding(value)}{_hint(param)}"
        )
    local = local_of(value)
    if is_dtensor(value) and type(local) not in PLAIN:
        raise ValueError(
            f"{where}: the shard of a DTensor must be a plain torch.Tensor, got "
            f"{type(local).__name__}"
        )


def _sharding(value: Any) -> str:
    if not is_dtensor(value):
        return f"a plain tensor of shape {tuple(value.shape)}"
    return f"a DTensor of placements {tuple(value.placements)} on {value.device_mesh}"


def _hint(param: Any) -> str:
    if not is_dtensor(param):
        return ""
    return (
        "; redistribute(placements=...) changes a DTensor's, and distribute_tensor(..., "
        "param.device_mesh, param.placements) splits a whole tensor"
    )


class DTensorView(ParamView):
    """A parameter that is a DTensor."""

    is_sharded = True

    @property
    def local(self) -> torch.Tensor:
        """The shard of this rank."""
        shard: torch.Tensor = local_of(self.param)
        return shard

    @property
    def split(self) -> tuple[Any, tuple[int, ...]] | None:  # type: ignore[override]  # computed
        """The mesh, and its dimensions that split the parameter; None if fully replicated."""
        placements = enumerate(self.param.placements)
        dims = tuple(i for i, placement in placements if not placement.is_replicate())
        return (self.param.device_mesh, dims) if dims else None

    @property
    def sharding(self) -> tuple[object, ...]:
        """Placements and mesh without its ranks: a submesh has others elsewhere."""
        mesh = self.param.device_mesh
        return self.param.placements, mesh.device_type, mesh.mesh_dim_names, tuple(mesh.shape)

    @property
    def first_element(self) -> int:
        """The index of the shard's first element; a shard may hold rows in part."""
        return shard_first(self.param)

    def box_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in which `boxes` of this one are counted."""
        return tuple(shape)

    def boxes(
        self, coordinates: Sequence[Sequence[int]], shape: Sequence[int]
    ) -> list[tuple[tuple[int, int], ...]]:
        """The shards at places of the mesh: the first index and the one behind the last.

        shape: of the parameter, or of another tensor that is split as it is.
        """
        from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

        # the private function takes a place of the mesh; the public one knows this rank's alone
        param, shard_boxes = self.param, []
        for coordinate in coordinates:
            sizes, starts = _compute_local_shape_and_global_offset(
                torch.Size(shape), param.device_mesh.shape, list(coordinate), param.placements
            )
            shard_boxes.append(tuple((a, a + n) for a, n in zip(starts, sizes, strict=True)))
        return shard_boxes

    def place(self, number: int) -> Place:
        """The place of the shard's elements in the parameter.

        Raises ValueError for a shard of a part of two dimensions behind the first.
        """
        shapes = self.local.shape, self.param.shape
        return place_of_shard(number, self.param, self.first_element, *shapes)

    def wrap_scales(self, local: torch.Tensor) -> torch.Tensor:
        """The scales of a shard's blocks as a DTensor, split as the parameter is."""
        # local: uint8 scales; of one dimension [blocks], else [rows, blocks of a row]
        param, shape = self.param, self.local.shape
        if len(shape) == 1:  # shards of one size
            return self._reshaped(local, (local.numel() * (param.numel() // shape.numel()),))
        block = shape[1:].numel() // local.shape[1]
        return self._reshaped(local, (param.shape[0], param.shape[1:].numel() // block))

    @property
    def counted(self) -> list[torch.Tensor]:
        """The DTensor and its shard, which counts writes to to_local()."""
        return [tensor for tensor in (self.param, self.local) if not tensor.is_inference()]

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor of the parameter's mesh and placements, with the shard's memory.

        The class is called as FSDP2 calls it: DTensor.from_local moves what it gets to the mesh's
        kind of device, and shards that FSDP2 offloads lie on the CPU.
        """
        # codes of the parameter's shape: its own meta data, but for the dtype
        param, shape = self.param, self.local.shape
        if local.shape == shape:
            return self._wrapped(local, param._spec.tensor_meta._replace(dtype=local.dtype))
        # packed codes; columns are split between whole blocks
        together = shape[-1] // local.shape[-1]
        return self._reshaped(local, (*param.shape[:-1], param.shape[-1] // together))

    def _reshaped(self, local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """A DTensor of this shape, dense, split as the parameter is."""
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        meta = self.param._spec.tensor_meta
        facts = {"shape": torch.Size(shape), "stride": stride, "dtype": local.dtype}
        return self._wrapped(local, meta._replace(**facts))

    def _wrapped(self, local: torch.Tensor, meta: Any) -> torch.Tensor:
        spec = replace(self.param._spec, tensor_meta=meta)
        dtensor: torch.Tensor = dtensor_class()(local.detach(), spec, requires_grad=False)
        return dtensor

    def wrap_state(self, state: Mapping[str, Any], originals: Sequence[Any] = ()) -> dict[str, Any]:
        """A state of DTensors; `originals`, whose shards may be in it, stay these objects."""
        # by id of the shard the DTensor that has it
        objects = {
            id(local_of(value)): value for value in originals if isinstance(value, torch.Tensor)
        }
        new_state = {}
        for name, value in state.items():
            # the count is of no shard
            is_tensor = isinstance(value, torch.Tensor) and name != STEP
            new_state[name] = objects.get(id(value), value)
            if is_tensor and id(value) not in objects:
                new_state[name] = self.wrap_named(name, value)
        return new_state

    def wrap_named(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The DTensor of a shard of the state tensor of this name."""
        return self.wrap_scales(local) if name.endswith(SCALE) else self.wrap(local)

    def _check_kind(
        self, where: str, options: Options, moments: tuple[str, ...], masters: bool
    ) -> None:
        param, local = self.param, self.param._local_tensor
        if type(local) not in PLAIN:
            raise ValueError(
                f"{where}: a DTensor must be of a plain torch.Tensor, got one of "
                f"{type(local).__name__}"
            )
        if any(placement.is_partial() for placement in param.placements):
            raise ValueError(
                f"{where}: placements must be Shard and Replicate, got {tuple(param.placements)}; "
                "a Partial is the weight only when the ranks' are added up"
            )
        # moments and masters: whole blocks on each rank, and no scale for the whole tensor
        formats = {
            **{f"{name}_dtype": options.moment_format(name) for name in moments},
            "master_weight_dtype": options.master_format(param.dtype, masters),
        }
        for name, form in formats.items():
            self._check_blocks(where, name, form)
            if form.scaled:
                more = " or torch.bfloat16" if name != "master_weight_dtype" else ""
                raise ValueError(
                    f"{where}: {name} must be torch.float32{more} for a DTensor, got "
                    f"{getattr(options, name)}: each rank's shard would have a scale of its own, "
                    "and neither bits nor checkpoints would be independent of the number of ranks"
                )

    def _check_blocks(self, where: str, name: str, form: Format) -> None:
        """Raises ValueError where a shard would have parts of blocks."""
        param = self.param
        if not form.block or not self.keeps_blocks(form):
            return
        # sizes: into how many parts each dimension is split
        shape = self.whole_state_shape(name.removesuffix("_dtype"))
        sizes = [1] * param.dim()
        for dim, placement in enumerate(param.placements):
            if not placement.is_replicate():
                sizes[placement.dim] *= param.device_mesh.size(dim)
        axis = min(1, param.dim() - 1)  # of one dimension all elements are a row
        is_whole = sizes[axis] == 1 or shape[axis] % (form.block * sizes[axis]) == 0
        if not is_whole or max(sizes[2:], default=1) > 1 or (param.dim() > 2 and sizes[1] > 1):
            raise ValueError(
                f"{where}: {name}={form.name!r} must find whole blocks of {form.block} elements in "
                f"each shard, got placements {tuple(param.placements)} of shape "
                f"{tuple(shape)}; allowed: rows split over any number of ranks, columns of "
                f"two dimensions, and one dimension, in equal parts of whole blocks"
            )


class MatrixDTensorView(MatrixView, DTensorView):
    """A DTensor whose moments are sharded as it is, and of which every rank has what is kept."""

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what the rule keeps: of the whole matrix, where that comes together."""
        is_whole = self.matrix.rule.meets == WHOLE
        return self.matrix.kept(self.whole_shape if is_whole else self.local.shape)

    @property
    def _low_box(self) -> tuple[tuple[int, int], ...]:
        """The first index and the one behind the last of the moments' shard, by dimension."""
        here = self.param.device_mesh.get_coordinate()
        return self.boxes([here], self.matrix.low_shape(self.whole_shape))[0]

    @property
    def low_shape(self) -> tuple[int, ...]:
        """The shape of this rank's moments: they are split as the parameter is."""
        if self._keeps_shape:
            return tuple(self.local.shape)
        return tuple(end - begin for begin, end in self._low_box)

    def first_of(self, name: str) -> int:
        """The index of the shard's first element in the whole state tensor of this name."""
        if name == MASTER or self._keeps_shape:
            return self.first_element
        _, columns = self.matrix.low_shape(self.whole_shape)
        (row, _), (column, _) = self._low_box
        return row * columns + column

    def state_place(self, name: str, number: int) -> Place:
        """The place of the shard's elements in the whole state tensor of this name."""
        shapes = self.state_shape(name), self.whole_state_shape(name)
        return place_of_shard(number, self.param, self.first_of(name), *shapes)

    def _wrap_low(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor of a shard of the moments, of packed codes or of scales, with its memory."""
        # width: columns of this rank's moments; packed codes and scales have fewer in proportion
        (rows, columns), (_, width) = self.matrix.low_shape(self.whole_shape), self.low_shape
        return self._reshaped(
            local, (rows, columns * local.shape[1] // width if width else columns)
        )

    def _check_blocks(self, where: str, name: str, form: Format) -> None:
        """Also where ranks would exchange parts of blocks: each matrix goes to its owner alone."""
        super()._check_blocks(where, name, form)
        if self.split is not None:
            self.check_blocks_of_matrices(where, name, form)

    @property
    def _keeps_shape(self) -> bool:
        return self.matrix.low_shape(self.whole_shape) == self.whole_shape

    def wrap_named(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Wraps what is kept as DTensors that every rank has whole; others as the parameter."""
        if name in self.kept:
            return self.replicated(local)
        is_low = name != MASTER and not self._keeps_shape
        return self._wrap_low(local) if is_low else super().wrap_named(name, local)

    def replicated(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor on the parameter's mesh that every rank has whole."""
        from torch.distributed.tensor import Replicate

        # the same mesh, Replicate in each of its dimensions
        param_spec = self.param._spec
        meta = param_spec.tensor_meta._replace(
            shape=local.shape, stride=local.stride(), dtype=local.dtype
        )
        spec = type(param_spec)(param_spec.mesh, (Replicate(),) * param_spec.mesh.ndim, meta)
        dtensor: torch.Tensor = dtensor_class()(local.detach(), spec, requires_grad=False)
        return dtensor
