"""The parameters that an optimizer is given: their groups, masters, backends; all checked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megaopt.agreement import Notice
from megaopt.batches import Batches
from megaopt.capture import check_device_numbers, on_device
from megaopt.checks import refuse, shown
from megaopt.dtensor import check_dtensor, is_dtensor, local_of
from megaopt.float8.batch import check_whole
from megaopt.float8.parts import weight_of
from megaopt.kernels.backends import default_backend, why_not
from megaopt.kernels.contracts import CONTRACTS
from megaopt.kernels.rules import Rule
from megaopt.masters import MasterWeights, check_master_weights
from megaopt.options import Options, check_group, check_group_options, check_weight
from megaopt.ownership import Versions
from megaopt.torch_names import check_keys


class States(defaultdict[torch.Tensor, Any]):
    """`state`: false until one has content.

    torch.distributed.checkpoint leaves out the step that makes the states where `if state`, and all
    ranks have to take that step together: an entry that one rank made by looking is no state.
    """

    def __bool__(self) -> bool:
        return any(self.values())


class GroupedOptimizer(torch.optim.Optimizer):
    """Knows its parameters, and what is allowed for them; binds nothing to them."""

    use_decoupled_grad: bool = False
    """Read `p.decoupled_grad` instead of `p.grad`; may be assigned at any time."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        options: Options,
        master_weights: MasterWeights,
    ) -> None:
        self.options = options
        self._master_weights: MasterWeights = None
        self._forget()
        super().__init__(_entries("params", params), {**defaults, "step": 0, **options.marks})
        self.state = States(dict)
        self.master_weights = master_weights

    def _forget(self) -> None:
        """Lets go of everything that is made again when it is needed."""
        self._batches: Batches | None = None
        self._captured: list[Batches] = []  # CUDA graphs read their tables
        self._preparations: dict[torch.device, Any] = {}
        self._versions = Versions([])
        self._warned = self._warned_of_masters = False
        self._was_stepped = False
        self._notices: list[Notice] = []
        self._amax_counts: dict[Any, int] = {}  # by group of ranks: of the last step

    @property
    def rule(self) -> Rule:
        """The update rule under the optimizer's contract."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch.optim.Optimizer does.

        Raises ValueError, TypeError, or RuntimeError for a device; then nothing has changed, the
        dict that was given included.
        """
        group, index = _new_group(param_group), len(self.param_groups)
        given = dict(param_group)
        try:
            super().add_param_group(group)
            self._check_new_group(group, index)
            numbers = self._numbers(self.param_groups) if self.options.capturable else []
            param_group.update(group)
            self.param_groups[index] = param_group
            for own, new in zip(self.param_groups, numbers, strict=False):
                own.update(new)
        except BaseException:
            del self.param_groups[index:]
            param_group.clear()
            param_group.update(given)
            raise

    def check_numbers(self, group: Mapping[str, Any], where: str) -> None:
        """For numbers of a group that do not go together: a subclass raises ValueError."""

    def _check_new_group(self, group: dict[str, Any], index: int) -> None:
        where = f"group {index}"
        _check_duplicates(group["params"], where)
        check_names(group.get("param_names"), len(group["params"]), where)
        check_keys(group, self.options, where)
        check_group(group, self.options.NUMBERS, where, lr_is_needed=False)
        self.check_numbers(group, where)
        check_group_options(group, self.options, where)
        for place, param in enumerate(group["params"]):
            self._check_param(param, self._where(index, place))

    @property
    def master_weights(self) -> MasterWeights:
        """Whether weights have masters, or the list of external ones, as it was assigned.

        A list has one tensor per parameter in group order (None for an fp32 weight); the tensors
        are used as they are: `state[p]["master_param"] is master_weights[i]`. Raises ValueError for
        a list of wrong length or an entry of wrong shape, dtype or device.
        """
        return self._master_weights

    @master_weights.setter
    def master_weights(self, masters: MasterWeights) -> None:
        params, _, wheres = self._flat()
        check_master_weights(masters, params, wheres, self.options)
        wanted = self._wants_masters(masters)
        if self.options.store_param_remainders and not wanted:
            raise ValueError(
                "store_param_remainders=True needs masters to keep: pass master_weights=True or "
                "dtype=torch.float32"
            )
        if self.options.store_param_remainders and params:
            for param, where in zip(params, wheres, strict=True):
                check_weight(param, where, self.options, wanted)
            if all(param.dtype != torch.bfloat16 for param in params):
                raise ValueError(
                    "store_param_remainders=True needs torch.bfloat16 weights; none of the "
                    f"{len(params)} parameters is"
                )
        self._batches = None
        self._master_weights = masters
        self._versions = Versions(params)

    def _wants_masters(self, masters: MasterWeights) -> bool:
        return self.options.dtype is not None or (masters is not None and masters is not False)

    def _flat(self) -> tuple[list[torch.Tensor], list[int], list[str]]:
        """All parameters in group order, their groups, and what errors call them."""
        places = [
            (param, group, self._where(group, index))
            for group, content in enumerate(self.param_groups)
            for index, param in enumerate(content["params"])
        ]
        return [p for p, _, _ in places], [g for _, g, _ in places], [w for _, _, w in places]

    def _where(self, group: int, index: int) -> str:
        names = self.param_groups[group].get("param_names")
        return f"parameter {names[index]!r}" if names else f"parameter {index} of group {group}"

    def _check_groups(self, device: torch.device) -> None:
        for index, group in enumerate(self.param_groups):
            where = f"group {index}"
            if self.options.capturable:
                check_device_numbers(group, device, where)
                group = {**group, "lr": 0.0, "step": 0}  # these are not waited for
            check_group(group, self.options.NUMBERS, where)
            self.check_numbers(group, where)

    def _device(self) -> torch.device:
        """Of the first parameter; the CPU without parameters."""
        firsts = (group["params"][0].device for group in self.param_groups if group["params"])
        return next(firsts, torch.device("cpu"))

    def _check_one_device(self, reason: str = "capturable=True") -> None:
        """Raises ValueError where parameters are on several, which `reason` does not allow."""
        devices = {param.device for group in self.param_groups for param in group["params"]}
        if len(devices) > 1:
            raise ValueError(
                f"parameters on {', '.join(sorted(map(str, devices)))} are not allowed with "
                f"{reason}: one device"
            )

    def _numbers(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What capturable=True puts on the device in each group; the groups stay as they are."""
        self._check_one_device()
        device = self._device()
        return [on_device(group, device, f"group {i}") for i, group in enumerate(groups)]

    def _check_param(self, param: torch.Tensor, where: str) -> None:
        try:
            weight_of(param)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        masters = self._wants_masters(self._master_weights)
        subclass: object = param  # for mypy, to which no tensor is such a subclass
        if is_dtensor(param):
            check_dtensor(param, where, self.options, self.rule.moments, masters)
        elif is_traceable_wrapper_subclass(subclass) and weight_of(param) is None:
            raise ValueError(
                f"{where}: tensor subclass {type(subclass).__name__} is not allowed: torch.Tensor, "
                "torch.distributed.tensor.DTensor, megaopt.float8.Float8Weight, or, once "
                "megaopt.integration.transformer_engine is imported, the fp8 tensors of "
                "TransformerEngine"
            )
        check_whole(param, where)
        check_weight(local_of(param), where, self.options, masters, weight_of(param) is not None)
        contract = CONTRACTS[self.options.contract]
        reason = why_not(self._backend(param.device), contract, param.device)
        if reason is not None:
            asked = "contract" if contract.needs_gpu else "backend"
            everywhere = "backend='reference'"
            if contract.needs_gpu:
                everywhere = "megaopt.FusedAdam with contract='ieee'"
            raise RuntimeError(
                f"{asked}={getattr(self.options, asked)!r} does not work for {where} on "
                f"{param.device}: {reason}; {everywhere} works everywhere"
            )

    def _backend(self, device: torch.device) -> str:
        backend = self.options.backend
        return default_backend(device) if backend == "auto" else backend

    def _external(self, params: list[torch.Tensor], wheres: list[str]) -> list[torch.Tensor | None]:
        """The external master of each parameter, checked against the parameters of now."""
        masters = self._master_weights
        if masters is None or isinstance(masters, bool):
            return [None] * len(params)
        check_master_weights(masters, params, wheres, self.options)
        pairs = zip(masters, params, strict=True)
        # an fp32 weight is its own master, unless it is kept in fp8
        return [
            None if p.dtype == torch.float32 and weight_of(p) is None else master
            for master, p in pairs
        ]


def _entries(name: str, values: Any) -> Any:
    """What torch takes as parameters, in a list of its own; groups are copied.

    Raises TypeError where torch would fail without a message.
    """
    if isinstance(values, (torch.Tensor, set)):
        return values  # torch takes or refuses it
    try:
        each = iter(values)
    except TypeError:
        raise TypeError(
            f"{name} must be tensors, (name, tensor) pairs or groups, got {shown(values)}"
        ) from None
    entries = [dict(entry) if isinstance(entry, dict) else entry for entry in each]
    for index, entry in enumerate(entries):
        if isinstance(entry, tuple) and (len(entry) != 2 or not isinstance(entry[0], str)):
            raise TypeError(
                f"{name}[{index}] must be a tensor or a (name, tensor) pair, got {shown(entry)}"
            )
    return entries


def _new_group(param_group: Any) -> dict[str, Any]:
    """A copy of a group to be added, for torch to write into."""
    if not isinstance(param_group, dict) or "params" not in param_group:
        raise TypeError(f"param_group must be a dict with 'params', got {shown(param_group)}")
    return {**param_group, "params": _entries("params", param_group["params"])}


def _check_duplicates(params: list[torch.Tensor], where: str) -> None:
    """Raises ValueError where a parameter stands in a group twice, which would step it twice."""
    places: dict[int, int] = {}
    for place, param in enumerate(params):
        first = places.setdefault(id(param), place)
        if first != place:
            raise ValueError(
                f"{where}: each parameter must be there once, got one at {first} and {place}"
            )


def check_names(names: Any, count: int, where: str) -> None:
    """Raises ValueError unless they are the names of so many parameters, or None."""
    if names is None:
        return
    is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    if not is_list or len(names) != count:
        refuse(f"{where}: param_names", f"a list of {count} names", names)
