"""DTensors as parameters: each rank steps its own shard.

torch.distributed.tensor is never imported here: before somebody else has, there is no DTensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megaopt.kernels.formats import Format
from megaopt.kernels.place import Place
from megaopt.kernels.shards import (
    PLAIN,
    dtensor_class,
    is_dtensor,
    local_of,
    place_of_shard,
    shard_first,
)
from megaopt.options.options import Options
from megaopt.params.view import MASTER, SCALE, STEP, ParamView

if TYPE_CHECKING:
    from megaopt.kernels.rules.matrix import Matrix


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
        tensors: tuple[Any, Any] = (param, value)
        expected, actual = (
            f"a DTensor of placements {tuple(tensor.placements)} on {tensor.device_mesh}"
            if is_dtensor(tensor)
            else f"a plain tensor of shape {tuple(tensor.shape)}"
            for tensor in tensors
        )
        hint = (
            "; redistribute(placements=...) changes a DTensor's, and distribute_tensor(..., "
            "param.device_mesh, param.placements) splits a whole tensor"
        )
        raise ValueError(
            f"{where} must be {expected}, got {actual}{hint if is_dtensor(param) else ''}"
        )
    local = local_of(value)
    if is_dtensor(value) and type(local) not in PLAIN:
        raise ValueError(
            f"{where}: the shard of a DTensor must be a plain torch.Tensor, got "
            f"{type(local).__name__}"
        )


class DTensorView(ParamView):
    """A parameter that is a DTensor; moments of a matrix rule are sharded as it is."""

    is_sharded = True

    def __init__(self, param: Any, matrix: Matrix | None = None) -> None:
        super().__init__(param, matrix)
        self.local = self.codes = local_of(param)
        # a mesh without its ranks: a submesh has others elsewhere
        mesh, placements = param.device_mesh, param.placements
        self.sharding = placements, mesh.device_type, mesh.mesh_dim_names, tuple(mesh.shape)
        # dimensions of the mesh that split it; None if fully replicated
        dims = tuple(i for i, placement in enumerate(placements) if not placement.is_replicate())
        self.split = (mesh, dims) if dims else None

    def boxes(
        self, coordinates: Sequence[Sequence[int]], shape: Sequence[int]
    ) -> list[tuple[tuple[int, int], ...]]:
        """The shards at places of the mesh: the first index and the one behind the last."""
        from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

        # the private function takes a place of the mesh; the public one knows this rank's alone
        param, shard_boxes = self.param, []
        for coordinate in coordinates:
            sizes, starts = _compute_local_shape_and_global_offset(
                torch.Size(shape), param.device_mesh.shape, list(coordinate), param.placements
            )
            shard_boxes.append(tuple((a, a + n) for a, n in zip(starts, sizes, strict=True)))
        return shard_boxes

    def _low_box(self, name: str) -> tuple[tuple[int, int], ...] | None:
        """This rank's box of a state tensor; None where that is as large as the parameter."""
        if self.matrix is None or name == MASTER:
            return None
        low = self.matrix.low_shape(self.whole_shape)
        here = self.param.device_mesh.get_coordinate()
        return None if low == self.whole_shape else self.boxes([here], low)[0]

    def state_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's tensor of the state; moments are split as the parameter is."""
        box = self._low_box(name)
        return tuple(self.local.shape if box is None else (end - begin for begin, end in box))

    def first_of(self, name: str = MASTER) -> int:
        """The index of the shard's first element in the whole state tensor of this name."""
        box = self._low_box(name)
        if box is None:  # a shard may hold rows in part
            return shard_first(self.param)
        (row, _), (column, _) = box
        return row * self.whole_state_shape(name)[1] + column

    def place(self, number: int, name: str = MASTER) -> Place:
        """The place of the shard's elements in the parameter, or in a whole state tensor.

        Raises ValueError for a shard of a part of two dimensions behind the first.
        """
        shape, whole_shape = self.state_shape(name), self.whole_state_shape(name)
        return place_of_shard(number, self.param, self.first_of(name), shape, whole_shape)

    def wrap(self, local: torch.Tensor, name: str = MASTER) -> torch.Tensor:
        """A DTensor of the parameter's mesh and placements, with the shard's memory.

        What a matrix rule keeps every rank has whole. The class is called as FSDP2 calls it:
        DTensor.from_local moves what it gets to the mesh's kind of device, and shards that FSDP2
        offloads lie on the CPU.

        local: of the shape of this rank's shard, or packed codes, or uint8 scales of its blocks:
            of one dimension [blocks], else [rows, blocks of a row].
        """
        param, spec, shape = self.param, self.param._spec, self.local.shape
        # whole: the DTensor's shape, dense; by default its meta data are the parameter's
        whole: tuple[int, ...] | None = None
        if name in self.kept:
            from torch.distributed.tensor import Replicate

            # the same mesh, Replicate in each of its dimensions; a shape and strides of its own
            meta = spec.tensor_meta._replace(shape=local.shape, stride=local.stride())
            spec = type(spec)(spec.mesh, (Replicate(),) * spec.mesh.ndim, meta)
        elif self._low_box(name) is not None:
            # of a smaller matrix; packed codes and scales have fewer columns in proportion
            (rows, columns), (_, width) = self.whole_state_shape(name), self.state_shape(name)
            whole = (rows, columns * local.shape[1] // width if width else columns)
        elif name.endswith(SCALE) and len(shape) == 1:  # shards of one size
            whole = (local.numel() * (param.numel() // shape.numel()),)
        elif name.endswith(SCALE):
            block = shape[1:].numel() // local.shape[1]
            whole = (param.shape[0], param.shape[1:].numel() // block)
        elif local.shape != shape:
            # packed codes; columns are split between whole blocks
            together = shape[-1] // local.shape[-1]
            whole = (*param.shape[:-1], param.shape[-1] // together)
        meta = spec.tensor_meta._replace(dtype=local.dtype)
        if whole is not None:
            stride = tuple(math.prod(whole[dim + 1 :]) for dim in range(len(whole)))
            meta = meta._replace(shape=torch.Size(whole), stride=stride)
        spec = replace(spec, tensor_meta=meta)
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
                new_state[name] = self.wrap(value, name)
        return new_state

    def _check_kind(self, where: str, options: Options, forms: Mapping[str, Format]) -> None:
        """Raises ValueError for a subclass's shards, for sums, and for formats cut by ranks."""
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
        for name, form in forms.items():
            if form.block and self.keeps_blocks(form):
                # sizes: into how many parts each dimension is split
                sizes, shape = (
                    [1] * param.dim(),
                    self.whole_state_shape(name.removesuffix("_dtype")),
                )
                for dim, placement in enumerate(param.placements):
                    if not placement.is_replicate():
                        sizes[placement.dim] *= param.device_mesh.size(dim)
                axis = min(1, param.dim() - 1)  # of one dimension all elements are a row
                is_whole = sizes[axis] == 1 or shape[axis] % (form.block * sizes[axis]) == 0
                is_cut = max(sizes[2:], default=1) > 1 or (param.dim() > 2 and sizes[1] > 1)
                if not is_whole or is_cut:
                    raise ValueError(
                        f"{where}: {name}={form.name!r} must find whole blocks of {form.block} "
                        f"elements in each shard, got placements {tuple(param.placements)} of "
                        f"shape {tuple(shape)}; allowed: rows split over any number of ranks, "
                        "columns of two dimensions, and one dimension, in equal parts of whole "
                        "blocks"
                    )
            # ranks would exchange parts of blocks: each matrix goes to its owner alone
            if self.split is not None:
                self._check_cuts(where, name, form)
            if form.scaled:
                more = " or torch.bfloat16" if name != "master_weight_dtype" else ""
                raise ValueError(
                    f"{where}: {name} must be torch.float32{more} for a DTensor, got "
                    f"{getattr(options, name)}: each rank's shard would have a scale of its own, "
                    "and neither bits nor checkpoints would be independent of the number of ranks"
                )
