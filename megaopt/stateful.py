"""The state of an optimizer's parameters: made, read, set, saved and loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from megaopt import state_dict as state_dicts
from megaopt.batches import MASTER, SCALE, check_state, state_name
from megaopt.dtensor import (
    check_sharding,
    is_dtensor,
    local_of,
    locals_of,
    sharded_as,
    sharded_state,
)
from megaopt.float8.parts import weight_of
from megaopt.float8.shard import Float8Shard
from megaopt.groups import GroupedOptimizer
from megaopt.kernels.step.batch import Formats
from megaopt.state import State, complete, formats_of, get_unscaled, set_unscaled, value_of

FLOAT8 = torch.float8_e4m3fn


def _viewed(states: Mapping[Any, State], found: torch.dtype, wanted: torch.dtype) -> Any:
    """States whose tensors of one dtype are viewed as another: torch cannot pickle fp8 tensors."""

    def view(value: Any) -> Any:
        is_found = isinstance(value, torch.Tensor) and value.dtype == found
        return value.view(wanted) if is_found else value

    made: defaultdict[Any, State] = defaultdict(dict)
    for param, state in states.items():
        made[param] = {name: view(value) for name, value in state.items()}
    return made


class StatefulOptimizer(GroupedOptimizer):
    """Keeps `state[p]`: moments, master, and scales, each in its storage format."""

    @torch.no_grad()
    def initialize_state(
        self, param: torch.Tensor, store_param_remainders: bool | None = None
    ) -> None:
        """Makes a parameter's state complete, its external master included.

        Args:
            param: one of the optimizer's parameters.
            store_param_remainders: as TransformerEngine passes it: the optimizer's own value, or
                False for a weight that has no remainders. Raises ValueError for another.
        """
        params, _, wheres = self._flat()
        index = self._index(param, params)
        self._check_param(param, wheres[index])
        formats = self._formats(param)
        own = {self.options.store_param_remainders, formats.master.joined}
        if store_param_remainders not in {None, *own}:
            raise ValueError(
                f"store_param_remainders={store_param_remainders} is not allowed for "
                f"{wheres[index]}: its master is stored as {formats.master.name}"
            )
        external = self._external(params, wheres)[index]
        self.state[param].update(self._completed(param, formats, external, wheres[index]))

    @torch.no_grad()
    def initialize_states(self) -> None:
        """Makes the state of every parameter complete, whether it has a gradient or not.

        Raises ValueError, and RuntimeError, as the first step would; then no state has changed.
        """
        params, _, wheres = self._flat()
        for param, where in zip(params, wheres, strict=True):
            self._check_param(param, where)
        external = self._external(params, wheres)
        completed = [
            self._completed(param, self._formats(param), master, where)
            for param, master, where in zip(params, external, wheres, strict=True)
        ]
        for param, state in zip(params, completed, strict=True):
            self.state[param].update(state)

    def _completed(
        self, param: torch.Tensor, formats: Formats, external: torch.Tensor | None, where: str
    ) -> State:
        """What a parameter's state becomes; the state itself stays as it is."""
        own: State = self.state.get(param, {})
        names = {slot: state_name(slot, self.rule.moments) for slot in formats.state_slots}
        for name in names.values():
            check_sharding(own.get(name), param, f"{where}: state {name!r}")
        state, local = locals_of(own), local_of(param)
        complete(state, local, formats, self.rule, local_of(external))
        check_state(state, formats, local, names, where)
        return sharded_state(param, state, [*own.values(), external])

    def _index(self, param: torch.Tensor, params: list[torch.Tensor]) -> int:
        for index, own in enumerate(params):
            if own is param:
                return index
        raise ValueError(
            f"the tensor of shape {tuple(param.shape)} is no parameter of this optimizer"
        )

    def _formats(self, param: torch.Tensor) -> Formats:
        masters = self._wants_masters(self._master_weights)
        return formats_of(param, torch.float32, self.options, masters)

    def _slot(self, name: str) -> str:
        slots = {
            state_name(slot, self.rule.moments): slot for slot in ("first", "second", "master")
        }
        if name not in slots:
            raise ValueError(f"state_name={name!r} is not allowed: one of {', '.join(slots)}")
        return slots[name]

    @torch.no_grad()
    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """The fp32 value of a state tensor, whatever its format, of the parameter's shape.

        It is the tensor itself where it is stored as fp32, a new one otherwise; for a DTensor
        parameter a DTensor of its mesh and placements. Under
        store_param_remainders the master is put together from weight and remainder. A weight
        without a master gives its own value.

        Raises ValueError for a state that is not there, or yet: a step makes it for parameters with
        a gradient, `initialize_state` for any.
        """
        state: State = self.state.get(param, {})
        if state_name.endswith(SCALE) and state_name in state:
            scale: torch.Tensor = state[state_name]
            return scale
        form = getattr(self._formats(param), self._slot(state_name))
        local = local_of(param.detach())
        if state_name == MASTER and not form.present:
            value = value_of(local, self._formats(param))
        elif state.get(state_name) is None:
            params, _, wheres = self._flat()
            raise ValueError(
                f"{wheres[self._index(param, params)]}: state {state_name!r} must be there, got "
                "none: the first step with a gradient makes it, or initialize_state"
            )
        else:
            value = get_unscaled(locals_of(state), state_name, form, local)
        known = [own for own in state.values() if local_of(own) is value]
        return known[0] if known else sharded_as(param, value)

    @torch.no_grad()
    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor | bool
    ) -> None:
        """Stores an fp32 value in the state's format, making the state tensor if it is missing.

        Under store_param_remainders a master sets weight and remainder together. For a weight
        without a master, the master's value is the weight's. For a DTensor parameter the value is a
        DTensor of its mesh and placements. Anything but a tensor is ignored: Megatron-Core 0.16
        passes its padding flag through here.
        """
        if not isinstance(unscaled_state, torch.Tensor):
            return
        state: State = self.state.get(param, {})
        if state_name.endswith(SCALE) and state_name in state:
            state[state_name].copy_(unscaled_state)
            return
        form = getattr(self._formats(param), self._slot(state_name))
        fits = unscaled_state.shape == param.shape
        if not (fits or (unscaled_state.numel() == param.numel() and not is_dtensor(param))):
            raise ValueError(
                f"{state_name} of shape {tuple(unscaled_state.shape)} is not allowed: the "
                f"parameter's, {tuple(param.shape)}"
            )
        check_sharding(unscaled_state, param, state_name)
        state, local = self.state[param], local_of(param)
        new: torch.Tensor = local_of(unscaled_state)
        if state_name == MASTER and not form.present:
            value = new.to(param.device, torch.float32).reshape(local.shape)
            self._set_weight(local, value)
            state[MASTER] = None
            return
        external = not (self._master_weights is None or isinstance(self._master_weights, bool))
        if state_name == MASTER and state.get(MASTER) is None and external:
            params, _, wheres = self._flat()
            state[MASTER] = self._external(params, wheres)[self._index(param, params)]
        stored = locals_of(state)
        set_unscaled(stored, state_name, new, form, local)
        state.update(sharded_state(param, stored, list(state.values())))

    def _set_weight(self, param: torch.Tensor, value: torch.Tensor) -> None:
        weight = weight_of(param)
        if weight is not None and not isinstance(param, Float8Shard):
            weight.quantize_(value)
        elif weight is not None:
            params, _, wheres = self._flat()
            raise ValueError(
                f"{wheres[self._index(param, params)]}: {MASTER!r} is not allowed for a "
                "Float8Shard without a master: its codes go by the values of all ranks; "
                "quantize_ sets the whole weight"
            )
        else:
            param.copy_(self._formats(param).weight.encode_reference(value))

    def state_dict(self) -> dict[str, Any]:
        """State and groups as torch.optim.Optimizer gives them, codes exactly as stored.

        Every group also names the contract and adam_w_mode, so that a load can refuse another.
        """
        packed = super().state_dict()
        return state_dicts.mark(packed, self.options)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over state and groups, bit for bit, never through another dtype.

        State dicts of TransformerEngine's FusedAdam and of torch's Adam and AdamW load too; what
        they keep in fp32 is stored in this optimizer's formats, and masters that they lack are made
        at the next step.

        Raises:
            ValueError: another contract, format, group size or tensor shape; then nothing changed.
        """
        state_dict = dict(state_dict)  # a hook may write into it
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        params, _, wheres = self._flat()
        external = dict(zip(params, self._external(params, wheres), strict=True))
        loaded = state_dicts.read(state_dict, self, params, wheres)
        for param, state in loaded.states.items():
            if external.get(param) is not None and state.get(MASTER) is not None:
                local_of(external[param]).copy_(local_of(state[MASTER]))
                state[MASTER] = external[param]
        self.state.clear()
        self.state.update(loaded.states)
        self.param_groups = loaded.groups
        self._batches = None
        if self.options.capturable:
            self._to_device()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: everything but the tables on the device."""
        kept = {"options": self.options, "_master_weights": self._master_weights}
        kept |= {"use_decoupled_grad": self.use_decoupled_grad}
        return {**super().__getstate__(), **kept, "state": _viewed(self.state, FLOAT8, torch.uint8)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes up what __getstate__ gave."""
        super().__setstate__({**state, "state": _viewed(state["state"], torch.uint8, FLOAT8)})
        self._forget()
