"""What ranks do together that hold shards of the same DTensors: the norm, and whether to step.

Every rank calls the same collectives in the same order, whatever it finds in its own gradients and
states; also a rank that is about to raise an error which the others do not have.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
import torch.distributed as dist

from megaopt.kernels.backends import Plan
from megaopt.kernels.norm.bins import new_bins
from megaopt.kernels.step.batch import Formats
from megaopt.kernels.step.preparation import Measured, Request
from megaopt.kernels.step.table import DeviceTable, is_capturing
from megaopt.params import ParamView, view_of
from megaopt.params.dtensor import local_of
from megaopt.params.view import PLAIN
from megaopt.step.batches import Batch, Batches
from megaopt.step.ranks import vote as agreement
from megaopt.step.ranks.vote import Notice, RanksDiffer, digest_of

Split = tuple[Any, tuple[int, ...]]
"""A device mesh, and the dimensions of it over which a tensor is split."""

WORDS = 3
"""Behind the norm's table: a digest of the collectives that a rank is going to call, a digest of
all that ranks have to have alike, and whether found_inf is set."""
REFUSED = digest_of("this rank raises an error")
"""The second digest of a rank that does not step."""


class SumOverRanks:
    """Tensors of which other ranks hold the rest: measured together, as if they were whole.

    The norm's tables of shards add up as integers: the bits are those of whole tensors. Every rank
    takes part, also one that has no gradient and no plan.
    """

    def __init__(self, split: Split, device: torch.device, plans: Sequence[Plan] = ()) -> None:
        self.split, self.device, self.plans = split, device, plans
        bins = new_bins(device)
        # it stays where it is, for CUDA graphs
        with torch.inference_mode(False):
            self._sum = torch.zeros(bins.numel() + WORDS, dtype=torch.int64, device=device)
            self._bins = self._sum[:-WORDS].view(bins.shape)
        self._sent = DeviceTable(device)
        self._alike = self._sum[:0]

    @property
    def ranks(self) -> int:
        """How many add up."""
        mesh, dims = self.split
        return math.prod(mesh.size(dim) for dim in dims)

    @property
    def collectives(self) -> tuple[object, ...]:
        """What the ranks that meet here have in common; a submesh has other ranks elsewhere."""
        mesh, dims = self.split
        return self.device.type, mesh.device_type, mesh.mesh_dim_names, tuple(mesh.shape), dims

    def measure(
        self,
        digests: tuple[int, int],
        differs: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        empty: bool = False,
    ) -> None:
        """Measures this rank's gradients.

        Args:
            digests: this rank's.
            differs: int64 of shape (1,), 1 where an earlier sum has shown that ranks differ.
            found_inf: this rank's.
            empty: whether none of them is measured.
        """
        begin, self._alike = self._words(digests)
        self._sum.copy_(begin)
        if differs is not None:
            self._sum[-2:-1].add_(differs.to(self.device))
        if found_inf is not None:
            self._sum[-1:].copy_(found_inf.reshape(1) != 0)
        for plan in () if empty else self.plans:
            plan.accumulate(self._bins)

    def add_up(self) -> None:
        """Adds up what all ranks have measured."""
        mesh, dims = self.split
        for dim in dims:
            dist.all_reduce(self._sum, dist.ReduceOp.SUM, group=mesh.get_group(dim))

    def apart(self) -> torch.Tensor:
        """Bool [WORDS]: what of the digests is another on another rank; any rank's found_inf."""
        return self._sum[-WORDS:] != self._alike

    def _words(self, digests: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """On the device: an empty table with this rank's words, and the words where all agree."""
        own = numpy.array([*digests, 0], dtype=numpy.int64)
        empty = numpy.zeros(self._bins.numel(), dtype=numpy.int64)
        # numpy's product is modulo 2**64, as the sum is
        table = self._sent.update(numpy.concatenate([empty, own, own * self.ranks]))
        return table[:-WORDS], table[-WORDS:]

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the squares of all ranks' gradients, which were added up, to the bins."""
        bins.add_(self._bins)


def sums_of(views: Sequence[ParamView], batches: Sequence[Batch] = ()) -> list[SumOverRanks]:
    """One sum for each way in which DTensors are split, in one order on all ranks.

    Those of the most ranks come first, so that as many as possible raise together.

    Args:
        views: of all the optimizer's parameters, those without a gradient included.
        batches: of those that have one; each holds parameters of one split.
    """
    plans: dict[tuple[torch.device, Split], list[Plan]] = {}
    for view in views:
        if view.split is not None:
            plans.setdefault((view.param.device, view.split), [])
    for batch in batches:
        split = view_of(batch.params[0]).split
        if split is not None:
            plans[batch.device, split].append(batch.plan)
    sums = [SumOverRanks(split, device, own) for (device, split), own in plans.items()]
    return sorted(sums, key=lambda each: -each.ranks)


def check_not_flattened(views: Sequence[ParamView], labels: Sequence[str]) -> None:
    """Raises ValueError for FSDP1's flat parameters, of which each rank has its own norm."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for view, label in zip(views, labels, strict=True):
        if getattr(view.param, "_fsdp_flattened", False):
            raise ValueError(
                f"{label} must not be FullyShardedDataParallel's (FSDP1) in a step that measures "
                "the gradients (clip_norm, nonfinite other than 'propagate'): each rank would see "
                "its own part alone, got one; FSDP2 (fully_shard) adds up over ranks, or pass "
                "clip_coefficient, found from a norm of all ranks"
            )


class Meeting:
    """The ranks that hold the rest of an optimizer's DTensors, before a step.

    Args:
        views: of all the optimizer's parameters.
        labels: what errors call them.
        batches: of the parameters that have a gradient.
    """

    def __init__(
        self, views: Sequence[ParamView], labels: Sequence[str], batches: Sequence[Batch]
    ) -> None:
        check_not_flattened(views, labels)
        self.sums = sums_of(views, batches)
        self._were_alike = False
        self.is_over = False
        """This step's collectives have been called."""
        if self.sums:
            formats = {place: each.formats for each in batches for place in each.positions}
            self._collectives = collectives_of(self.sums)
            self._whole = digest_of(described(views, labels, formats))
            self._message = refusal(len(views), list(formats.values()))
            self._notices = [Notice(each.device, self._message) for each in self.sums]

    def meet(self, request: Request, waits: bool) -> tuple[Request, list[Notice]]:
        """Measures the gradients of all ranks, and compares what the ranks are going to step.

        The answer is read at once on a CPU, where nothing has to be waited for, by a rank whose
        batches are new, and where the host waits anyway. Otherwise the step is left out on the
        device where ranks differ, and the host reads the notices before the next one.

        Args:
            request: this rank's.
            waits: whether the host waits in this step in any case.

        Returns:
            The request with the found_inf of all ranks; what is to be read before the next step.

        Raises:
            ValueError: ranks do not step the same, or one has raised an error; on all ranks.
        """
        self.is_over = not self.sums
        if not self.sums:
            return request, []
        devices = {each.device for each in self.sums}
        at_once = all(map(agreement.is_read_at_once, devices))
        reads = at_once or waits or not self._were_alike
        reads = reads and not any(map(is_capturing, devices))
        asked = (request.clip_norm, request.skip_nonfinite)
        digests = self._collectives, digest_of((self._whole, asked))
        differs, found_inf = None, request.found_inf
        for index, (each, notice) in enumerate(zip(self.sums, self._notices, strict=True)):
            with self._or_withdraw(index):
                each.measure(digests, differs, found_inf)
            each.add_up()
            self.is_over = each is self.sums[-1]
            with self._or_withdraw(index + 1):
                apart = each.apart()
                differs = apart[:2].any().long().reshape(1)
                found_inf = None if found_inf is None else apart[2].float()
            if not reads:
                notice.post(differs)
            elif bool(apart[0]):
                raise RanksDiffer(self._message)  # the next collective might never end
        if reads and bool(differs):
            raise RanksDiffer(self._message)
        self._were_alike = self._were_alike or reads
        if not at_once and differs is not None:  # in one form always: a graph may be captured next
            skip = differs[0].float()
            found_inf = skip if found_inf is None else torch.maximum(found_inf, skip)
        return replace(request, found_inf=found_inf), [] if reads else self._notices

    @contextlib.contextmanager
    def _or_withdraw(self, index: int) -> Iterator[None]:
        """Where this rank has no memory, say, the others wait for it: from this sum on."""
        try:
            yield
        except Exception:
            _withdraw(self.sums[index:], self._collectives)
            raise


def withdraw(views: Sequence[ParamView]) -> None:
    """Meets the ranks in place of `Meeting.meet` where this one raises an error: all will.

    Args:
        views: of all the optimizer's parameters.
    """
    sums = sums_of(views)
    _withdraw(sums, collectives_of(sums))


def _withdraw(sums: Sequence[SumOverRanks], collectives: int) -> None:
    for each in sums:
        each.measure((collectives, REFUSED), empty=True)
        each.add_up()
        if bool(each.apart()[0]):  # who reads that comes no further
            return


def collectives_of(sums: Sequence[SumOverRanks]) -> int:
    """A digest of what ranks call together; they meet in all of it or raise after the first."""
    return digest_of([each.collectives for each in sums])


def described(
    views: Sequence[ParamView], labels: Sequence[str], formats: Mapping[int, Formats]
) -> list[tuple[object, ...]]:
    """What ranks have to have alike of each parameter, formats being of those with a gradient."""
    found: list[tuple[object, ...]] = []
    for place, (view, label) in enumerate(zip(views, labels, strict=True)):
        own = formats.get(place)
        kept = own and (own.master.name, *(each.name for each in own.moments), own.matrix)
        found.append((label, view.whole_shape, view.param.dtype, view.sharding, kept))
    return found


def refusal(params: int, formats: Sequence[Formats]) -> str:
    """The message for ranks that do not step the same; of this rank what it steps."""
    masters = sum(each.master.present for each in formats)
    return (
        "ranks that hold shards of the same DTensors must step the same (the parameters' order, "
        "groups, names, shapes, dtypes and placements, which have a gradient, the formats of "
        f"masters and moments, clip_norm), got {params} parameters, {len(formats)} gradients and "
        f"{masters} masters on rank {dist.get_rank()}, and something else, or an error, on another"
    )


def measured(batches: Batches, device: torch.device) -> list[Measured]:
    """What the norm of all gradients on a device is measured of, after the ranks met."""
    own = [each for each in batches.batches if each.device == device]
    whole = [batch.plan for batch in own if view_of(batch.params[0]).split is None]
    return [*whole, *(each for each in batches.meeting.sums if each.device == device)]


def is_zero(grad: Any) -> bool:
    """Whether a gradient can be read, and this rank's part of it is 0."""
    local = local_of(grad)
    return type(local) in PLAIN and local.layout == torch.strided and not bool(local.any())


def on_any_rank(flag: bool, views: Sequence[ParamView]) -> bool:
    """Whether it is so on any rank of the meshes of the parameters; waits for the answer."""
    found = torch.tensor([int(flag)], device="cpu")
    for mesh in dict.fromkeys(view.param.device_mesh for view in views if view.is_sharded):
        found = _most(found, mesh)
    return bool(found)


def each_on_any_rank(flags: Sequence[bool], views: Sequence[ParamView]) -> list[bool]:
    """The same of each parameter by itself: on any rank of its own mesh."""
    found = torch.tensor(flags, dtype=torch.int64, device="cpu")
    for mesh in dict.fromkeys(view.param.device_mesh for view in views if view.is_sharded):
        own = [i for i, v in enumerate(views) if v.is_sharded and v.param.device_mesh == mesh]
        found[own] = _most(found[own], mesh).cpu()
    return [bool(flag) for flag in found.tolist()]


def _most(numbers: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The largest of all ranks of a mesh, on its device."""
    numbers = numbers.to(mesh.device_type)
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return numbers
