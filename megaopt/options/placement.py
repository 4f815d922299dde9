"""The places of states: beside the weights, or in host memory that the step reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megaopt.kernels.host_memory import HostMemory, Pinning, pinning
from megaopt.kernels.refusals import refuse

STATE_DEVICE = "state_device"
"""The option, and the key of a group that says something else than the optimizer."""
MASTER = "master_param"
"""The name under which a state has its master."""
SCALE = "_scale"
"""The ending of the names of scales in a parameter's state."""
STEP = "step"
"""The name of a parameter's step count in its state, where parameters have their own."""
REPLACED = "megaopt_replaced"
"""Attribute of a weight in whose place an fp8 one stands now: the name of its layer."""


StateDevice = str | torch.device | Mapping[str, Any] | None


@dataclass(frozen=True)
class Placement:
    """The parts of a state that are in host memory. Scales never are: a byte for many elements."""

    moments: bool = False
    masters: bool = False
    at_least: int = 0
    """Elements that a parameter has whose state is there."""

    def __contains__(self, name: object) -> bool:
        """Whether a state's tensor of this name is there."""
        return self.masters if name == MASTER else self.moments and not str(name).endswith(SCALE)

    def __bool__(self) -> bool:
        return self.moments or self.masters


def placement_of(value: Any, where: str = STATE_DEVICE) -> Placement:
    """The placement that state_device asks for; raises ValueError for a value that names none."""
    # None or a device for all is the same for both parts
    parts = dict(value if isinstance(value, Mapping) else {"moments": value, "masters": value})
    least = parts.pop("at_least", 0)
    are_parts = all(isinstance(part, str) and part in ("moments", "masters") for part in parts)
    is_whole = type(least) is int and least >= 0
    # None, "cpu" or torch.device("cpu", any index)
    names = [d.type if isinstance(d, torch.device) else d for d in parts.values()]
    are_cpus = all(d is None or (isinstance(d, str) and d == "cpu") for d in names)
    if not (are_parts and is_whole and are_cpus):
        refuse(
            where, "None, 'cpu', or a dict of 'moments' and 'masters' with these, and of "
            "'at_least' with a whole number >= 0", value,
        )  # fmt: skip
    return Placement(**{name: device is not None for name, device in parts.items()}, at_least=least)


@dataclass(frozen=True)
class Home:
    """The placement of a parameter's state, and the maker of its host memory."""

    placement: Placement
    memory: HostMemory

    def check(self, tensor: torch.Tensor, where: str) -> None:
        """Raises ValueError for a tensor that the step's launch cannot reach."""
        if tensor.numel() and not self.memory.by.is_pinned(tensor):
            raise ValueError(
                f"{where} must be in pinned memory with state_device='cpu', got a tensor in other "
                "memory; load_state_dict and set_scaled_state copy into pinned memory, and "
                "megaopt.state.masters.pinned makes masters of yours"
            )


@dataclass(eq=False)
class Homes:
    """The homes of an optimizer's states."""

    default: Placement
    """The placement of parameters whose group says nothing."""
    groups: dict[torch.Tensor, Placement] = field(default_factory=dict)
    """The placement of each parameter whose group says one."""
    by: Pinning = field(default_factory=pinning)
    _memories: dict[torch.device, HostMemory] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Returns everything but the memory, for pickle and deepcopy."""
        return {"default": self.default, "groups": self.groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # as new

    def of(self, param: torch.Tensor) -> Home | None:
        """The home of a parameter's state; None where that is beside the weight."""
        # a device that is not served, as the CPU, keeps the states of its weights
        placement, device = self.groups.get(param, self.default), param.device
        is_asked_for = placement.moments or placement.masters
        if not (is_asked_for and param.numel() >= placement.at_least and self.by.serves(device)):
            return None
        if device not in self._memories:
            self._memories[device] = HostMemory(device, self.by)
        return Home(placement, self._memories[device])

    def wait(self) -> None:
        """Waits until no kernel reads or writes states any more; the host may then do so."""
        for device in self._memories:
            self.by.wait(device)
