"""The groups, options, rule and masters of an optimizer, as they are now; and their checks."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from megaopt.kernels.backends import default_backend, why_not
from megaopt.kernels.chunks.batch import Cast, Formats
from megaopt.kernels.contracts import CONTRACTS
from megaopt.kernels.formats import (
    GRADS,
    MOMENTS,
    STOCHASTIC_FLOAT8,
    STOCHASTIC_WEIGHTS,
    WEIGHTS,
)
from megaopt.kernels.host_memory import HostMemory, padded
from megaopt.kernels.refusals import refuse
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.base import PARAM
from megaopt.options.checks import errors_of
from megaopt.options.choices import MasterWeights
from megaopt.options.options import (
    PARAM_NUMBER,
    Options,
    check_group,
    check_param_numbers,
    check_there,
    is_param_number,
)
from megaopt.options.placement import Homes
from megaopt.options.replicas import Replicas
from megaopt.params import ParamView, view_of
from megaopt.params.view import SCALE, whole_shape_of
from megaopt.state.masters import check_master_weights, has_master, places_of
from megaopt.state.numbers import check_device_numbers, on_device
from megaopt.state.tensors import MASTER, shape_of, state_name

Group = dict[str, Any]


class Owned:
    """An optimizer's parameters and what holds for them; made anew whenever it is asked for.

    Args:
        groups: the optimizer's.
        options: the optimizer's.
        rule: the update rule.
        masters: as `master_weights` was assigned.
        homes: of the states.
        replicas: the ranks that hold copies of parameters.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        options: Options,
        rule: Rule,
        masters: MasterWeights,
        homes: Homes,
        replicas: Replicas,
    ) -> None:
        self.groups, self.options, self.masters, self.homes = groups, options, masters, homes
        self.replicas = replicas
        has_copies = bool(replicas.groups) or replicas.default is not None
        self._copies = replicas if has_copies else None
        """The ranks with copies of parameters; None where nobody named any."""
        self.rule = rule.drawing if options.draws else rule
        self.has_external_masters = not (masters is None or isinstance(masters, bool))
        """Whether the caller gave a list of masters."""
        self.wants_masters = options.dtype is not None or masters is True
        self.wants_masters |= self.has_external_masters
        """Whether weights that are not fp32 have masters."""

    # --- parameters, in group order

    @cached_property
    def _lists(self) -> list[Any]:
        """The parameters of each group; ValueError where somebody put something else there."""
        lists = [group.get("params") for group in self.groups]
        for index, params in enumerate(lists):
            if not isinstance(params, (list, tuple)):
                refuse(f"group {index}: params", "a list of tensors", params)
        return lists

    @cached_property
    def params(self) -> list[torch.Tensor]:
        """All parameters; ValueError where somebody put something else into a group."""
        all_params = [param for group_params in self._lists for param in group_params]
        for place, param in enumerate(all_params):
            if not isinstance(param, torch.Tensor):
                refuse(self.labels[place], "a tensor", param)
        return all_params

    @cached_property
    def views(self) -> list[ParamView]:
        """The views of all parameters, in the groups' order."""
        pairs = zip(self.params, self.group_numbers, strict=True)
        return [self.view(param, index) for param, index in pairs]

    def view(self, param: torch.Tensor, index: int | None = None) -> ParamView:
        """The view of one parameter, which may be in no group any more; index: its group's."""
        # only these are looked through: whoever asks for all parameters asks one by one
        for place, group in enumerate(self.groups if index is None and self.options.MATRIX else ()):
            if any(param is group_param for group_param in group["params"]):
                index = place
                break
        # none for a parameter that is in no group any more
        group = {} if index is None else self.groups[index]
        if index is not None:
            check_there(group, self.options.MATRIX_KEYS, f"group {index}")
        # None: stepped elementwise; else how, as the group or the parameter's marks say
        matrix = self.options.matrix(param, group)
        mesh = None
        if matrix is not None and self._copies is not None:
            mesh = self._copies.of(param)
        view = view_of(param, matrix, mesh)
        # states are beside weights unless somebody asked for host memory
        homes = self.homes
        if homes.groups or homes.default.moments or homes.default.masters:
            view.home = homes.of(param)
        return view

    @property
    def shared_views(self) -> list[ParamView]:
        """The views of parameters of which other ranks hold parts; others are passed over.

        An error is on its way: what it may be about, a group's values, keeps no parameter from
        having the view that other ranks have.
        """
        views, usual = [], {id(view.param): view for view in self.usual_views}
        for index, group in enumerate(self.groups):
            # as the group has it, else without the group's values
            for param in _tensors_of(group):
                try:
                    views.append(self.view(param, index))
                except Exception:
                    views += [usual[id(param)]] if id(param) in usual else []
        return [view for view in views if view.split is not None or view.group is not None]

    @property
    def usual_views(self) -> list[ParamView]:
        """The views of all parameters whatever groups say; what is no parameter is passed over."""
        views, rule = [], self.options.MATRIX
        for param in (tensor for group in self.groups for tensor in _tensors_of(group)):
            with contextlib.suppress(Exception):
                # vectors have no matrix rule
                if rule is None or len(whole_shape_of(param)) < 2:
                    views.append(view_of(param))
                else:
                    from megaopt.kernels.rules.matrix import Matrix

                    mesh = None if self._copies is None else self._copies.of(param)
                    views.append(view_of(param, Matrix(rule), mesh))
        return views

    def settings(self) -> list[object]:
        """The groups' numbers, how many parameters each has, and the options.

        Ranks that hold parts of the same parameters must have them alike.
        """
        options = self.options
        # plain numbers, so that 1, 1.0 and a tensor of it compare alike by their repr
        names = (*options.names_but_step, *options.MATRIX_KEYS, *options.MATRIX_TURNS, "step")
        groups = [
            {name: _plain(group.get(name)) for name in (*dict.fromkeys(names), "param_numbers")}
            for group in self.groups
        ]
        return [groups, [*map(len, self._lists)], options, self.wants_masters]

    def described(self) -> list[tuple[Any, ...]]:
        """The name of each parameter, how it is stepped, and where its state is; likewise."""
        return [
            (label, number, view.described, view.matrix, view.home and view.home.placement)
            for label, number, view in zip(self.labels, self.numbers, self.views, strict=True)
        ]

    @cached_property
    def group_numbers(self) -> list[int]:
        """The group of each parameter."""
        return [index for index, params in enumerate(self._lists) for _ in params]

    @cached_property
    def labels(self) -> list[str]:
        """The names of the parameters in errors."""
        counts = map(len, self._lists)
        return [self.label(group, i) for group, count in enumerate(counts) for i in range(count)]

    def label(self, group: int, index: int) -> str:
        """Returns the name of a parameter of a group in errors."""
        names: Any = self.groups[group].get("param_names")
        count = len(self.groups[group]["params"])
        is_named = isinstance(names, (list, tuple)) and len(names) == count
        return f"parameter {names[index]!r}" if is_named else f"parameter {index} of group {group}"

    def index(self, param: Any) -> int:
        """A parameter's place; raises ValueError for another tensor."""
        for index, owned_param in enumerate(self.params):
            if owned_param is param:
                return index
        refuse("param", "a parameter of this optimizer", param)

    # --- moments, formats and masters

    def moments(self, view: ParamView) -> tuple[str, ...]:
        """The names of a parameter's moments: those of the rule that steps it."""
        rule = self.rule if view.matrix is None else view.matrix.rule.inner
        return tuple(moment.name for moment in rule.moment_specs)

    def state_names(self, view: ParamView) -> tuple[str, ...]:
        """The names that a parameter's state may have here; under others it is somebody else's."""
        scaled = (*self.moments(view), MASTER)
        return (*scaled, *(name + SCALE for name in scaled), *view.kept)

    @property
    def all_moments(self) -> tuple[str, ...]:
        """The names of the moments that some parameter has, or may have."""
        matrix = self.options.MATRIX
        return tuple(dict.fromkeys((*self.rule.moments, *(matrix.inner.moments if matrix else ()))))

    def formats(self, view: ParamView, grad_dtype: torch.dtype = torch.float32) -> Formats:
        """The formats of a parameter's buffers."""
        moments = (self.rule if view.matrix is None else view.matrix.rule.inner).moment_specs
        # cast: how fp8 codes are made of values; None for plain weights
        dtype, options, cast = view.param.dtype, self.options, None
        if view.weight is not None:
            recipe = view.weight.recipe
            if options.direct_cast is not None:
                recipe = replace(recipe, direct=options.direct_cast)
            cast = Cast(recipe, view.weight.dtype)
        master = options.master_format(dtype, self.wants_masters, view.code_dtype)
        weight = WEIGHTS[dtype] if cast is None else cast.recipe.format
        # a weight without a master may be rounded stochastically: by dtype the format that draws,
        # of 16 bits and of fp8 codes
        if not master.present and options.weight_rounding == "stochastic":
            drawing = (*STOCHASTIC_WEIGHTS.values(), *STOCHASTIC_FLOAT8.values())
            weight = {form.dtype: form for form in drawing}.get(weight.dtype, weight)
        # small moments, and those whose rows are no whole blocks, stay fp32
        chosen_forms = [options.moment_format(moment.name) for moment in moments]
        moment_formats = tuple(
            MOMENTS[torch.float32] if form.block and not view.keeps_blocks(form) else form
            for form in chosen_forms
        )
        # facts of the kernel that casts: whether values are exact, and whether moments in blocks,
        # if there are any, can be stored by tiles of a whole weight, whose columns hold whole
        # blocks
        if cast is not None:
            columns, width = cast.quantizer.columns, view.extent.columns
            rows_hold = bool(columns) and not view.extent.shared
            rows_hold = rows_hold and all(
                form.packed == 1 and form.block % columns == 0 and width % form.block == 0
                for form in moment_formats
                if form.block
            )
            cast = replace(cast, exact=weight.draws or master.joined, rows_hold_blocks=rows_hold)
        return Formats(
            GRADS[grad_dtype],
            weight,
            master,
            moment_formats,
            tuple(moment.name for moment in moments),
            cast,
            # of fp32 it is no other kernel
            options.round_scaled_grads and grad_dtype != torch.float32,
            options.write_unscaled_grads,
            options.maximize,
            view.matrix,
            tuple(moment.name for moment in moments if moment.starts_as == PARAM),
        )

    def external_masters(self) -> list[torch.Tensor | None]:
        """The caller's master of each parameter; None where there is none.

        Raises ValueError where the list does not fit the parameters any more.
        """
        # True and False ask for masters that are made here
        masters = self.masters
        if masters is None or isinstance(masters, bool):
            return [None] * len(self.params)
        check_master_weights(masters, self.views, self.labels, self.options)
        # an fp32 weight is its own master: its entry says no more
        param_masters: list[torch.Tensor | None] = [None] * len(self.views)
        places = places_of(masters, self.views, self.options)
        for place, master in zip(places or (), masters, strict=True):
            if has_master(self.views[place], self.options):
                param_masters[place] = master
        return param_masters

    # --- host memory

    @contextlib.contextmanager
    def room(self, state: Mapping[Any, Any], places: Sequence[int]) -> Iterator[None]:
        """Host memory for what the states of some parameters lack: one allocation a device.

        Raises HostMemoryError where it cannot be pinned.
        """
        sizes: dict[HostMemory, int] = {}
        # bytes that each device's memory lacks, added up before anything is taken
        for place in places:
            view = self.views[place]
            if view.home is None:
                continue
            # the tensors that `complete` will make: bytes of each, padded as the memory is cut
            param_state, formats = state.get(view.param, {}), self.formats(view)
            for slot in formats.state_slots:
                name = state_name(slot)
                is_external = name == MASTER and self.has_external_masters
                is_new = param_state.get(name) is None and not is_external
                if is_new and name in view.home.placement:
                    size = math.prod(shape_of(slot, formats, view)) * formats.dtype(slot).itemsize
                    memory = view.home.memory
                    sizes[memory] = sizes.get(memory, 0) + padded(size)
        # one pinned allocation a device, out of which states take their pieces
        with contextlib.ExitStack() as stack:
            for memory, size in sizes.items():
                stack.enter_context(memory.room(size))
            yield

    # --- random bits

    @cached_property
    def numbers(self) -> list[int]:
        """The number of each parameter, for its random bits: its group's, or that of its view."""
        for index, group in enumerate(self.groups):
            check_param_numbers(group, f"group {index}")
        # the group's numbers, or None for each of its parameters
        param_numbers: list[int | None] = []
        for group in self.groups:
            param_numbers += group.get("param_numbers") or [None] * len(group["params"])
        pairs = enumerate(zip(self.views, param_numbers, strict=True))
        return [view.number(i) if number is None else number for i, (view, number) in pairs]

    def check_places(self) -> None:
        """Raises ValueError where two parameters would draw the same random bits.

        Also for a parameter's number of its own that is none.
        """
        if not self.options.draws:
            return
        drawn = [*zip(self.views, self.numbers, self.labels, strict=True)]
        for _, number, label in drawn:
            if not is_param_number(number):
                refuse(f"{label}: megaopt_number", PARAM_NUMBER, number)
        # of each number the local elements that draw by it: first, last, and the parameter's name
        seen: dict[int, list[tuple[int, int, str]]] = {}
        for view, number, label in drawn:
            place, numel = view.place(number), view.local.numel()
            if numel:
                part = (place.first, place.last(numel), label)
                seen.setdefault(place.number, []).append(part)
        for number, parts in seen.items():
            # by their first elements: parts that meet are neighbours then
            parts.sort()
            for (_, end, left_label), (start, _, right_label) in itertools.pairwise(parts):
                if start <= end:
                    raise ValueError(
                        f"{right_label}: number {number}, by which random bits are drawn, must be "
                        f"its own, got that of {left_label}, at elements that both have; "
                        "param_numbers of a group sets others"
                    )

    # --- devices

    @cached_property
    def device(self) -> torch.device:
        """The device of the first parameter; the CPU without parameters."""
        first = next((params[0] for params in self._lists if params), None)
        if not (first is None or isinstance(first, torch.Tensor)):
            return self.params[0].device  # which says what is wrong
        return torch.device("cpu") if first is None else first.device

    def backend(self, device: torch.device) -> str:
        """The backend's name for a device."""
        backend = self.options.backend
        return default_backend(device) if backend == "auto" else backend

    def check_one_device(self, reason: str = "capturable=True") -> None:
        """Raises ValueError where parameters are on several, which `reason` does not allow."""
        devices = {param.device for param in self.params}
        if len(devices) > 1:
            raise ValueError(
                f"parameters must be on one device with {reason}, got them on "
                f"{', '.join(sorted(map(str, devices)))}"
            )

    # --- checks

    def check_groups(self) -> None:
        """Raises ValueError for a number of a group that the coming step cannot use."""
        device, steps = self.device, dict[int, int]()
        if self.options.MATRIX:  # whose checks look at parameters
            _ = self.params
        for index, group in enumerate(self.groups):
            where = f"group {index}"
            if self.options.capturable:
                check_device_numbers(group, device, where)
                # one tensor in two groups would count twice a step
                if steps.setdefault(id(group["step"]), index) != index:
                    first = steps[id(group["step"])]
                    refuse(f"{where}: step", f"another tensor than group {first}'s", group["step"])
                group = {**group, "lr": 0.0, "step": 0}  # these are not waited for
            check_group(group, self.options, where)

    def device_numbers(self, groups: Sequence[Mapping[str, Any]]) -> list[Group]:
        """Makes what capturable=True puts on the device, by group; the groups stay as they are."""
        self.check_one_device()
        return [on_device(group, self.device, f"group {i}") for i, group in enumerate(groups)]

    def check_steppable(self, places: Iterable[int]) -> None:
        """Raises ValueError for a parameter, by its place, that can have no state."""
        for place in places:
            view, label = self.views[place], self.labels[place]
            if view.local.is_meta:
                raise ValueError(
                    f"{label} must have elements to step, got one on meta: make the optimizer "
                    "after the model has its memory (to_empty() makes new parameters)"
                )
            if view.is_strange:
                view.check(label, self.options, self.moments(view), self.wants_masters)

    def check_param(self, param: torch.Tensor, label: str) -> None:
        """Raises ValueError or RuntimeError for a parameter that the optimizer cannot own."""
        # all checks ask for the shape
        if is_lazy(param):
            raise ValueError(
                f"{label} must have a shape, got an uninitialized parameter of a lazy module: make "
                "the optimizer after a first forward pass"
            )
        # errors of views name the parameter
        with errors_of(label):
            view = self.view(param)
        if view.is_idle:
            return
        view.check(label, self.options, self.moments(view), self.wants_masters)
        # host memory that a kernel can read, where states are to be there
        home = view.home
        reason = None if home is None else home.memory.by.why_not(param.device)
        if reason is not None:
            raise RuntimeError(
                f"state_device='cpu' does not work for {label} on {param.device}: {reason}; "
                "state_device=None keeps states beside the weights"
            )
        # the backend that steps this device must keep the contract there: that of matrices is
        # their rule's own, and so may be the optimizer's, of matrices alone ("eo")
        contract = CONTRACTS["ieee"]
        if view.matrix is None:
            contract = CONTRACTS.get(self.options.contract, contract)
        reason = why_not(self.backend(param.device), contract, param.device)
        if reason is None:
            return
        option = "contract" if contract.needs_gpu else "backend"
        everywhere = "backend='reference'"
        if contract.needs_gpu:
            everywhere = "megaopt.FusedAdam with contract='ieee'"
        raise RuntimeError(
            f"{option}={getattr(self.options, option)!r} does not work for {label} on "
            f"{param.device}: {reason}; {everywhere} works everywhere"
        )


def _tensors_of(group: Mapping[str, Any]) -> list[torch.Tensor]:
    """The parameters of a group; none where there is no list of them."""
    params = group.get("params")
    return (
        [p for p in params if isinstance(p, torch.Tensor)]
        if isinstance(params, (list, tuple))
        else []
    )


def _plain(value: Any) -> object:
    """A group's value as ranks compare it: the same of 1, 1.0 and a tensor of it."""
    # a tensor on a device is waited for
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        return value
    number = float(value)
    return int(value) if number.is_integer() else number  # a seed has 64 bits


def owned_of(optimizer: Any) -> Owned:
    """Returns what an optimizer owns; raises ValueError for one of another package."""
    owned = getattr(optimizer, "_owned", None)
    if not isinstance(owned, Owned):
        refuse("optimizer", "an optimizer of megaopt", optimizer)
    return owned
