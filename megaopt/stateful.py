"""The state of an optimizer's parameters: made, read, set, saved and loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megaopt import state_dict as state_dicts
from megaopt.batches import MASTER, SCALE, check_state, state_name
from megaopt.checks import is_dense, one_of, refuse, same
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
from megaopt.groups import GroupedOptimizer, States
from megaopt.kernels.step.batch import Formats
from megaopt.memory import check_writable
from megaopt.overwriting import overwrite
from megaopt.ownership import Versions, refresh, widened, written_elements
from megaopt.state import (
    State,
    complete,
    encoded,
    formats_of,
    get_unscaled,
    picklable,
    value_of,
)


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
        where = f"{wheres[index]}, whose master is stored as {formats.master.name}"
        one_of(f"store_param_remainders for {where},", store_param_remainders, (None, *own))
        external = self._external(params, wheres)[index]
        self._commit({param: self._completed(param, formats, external, wheres[index])})

    @torch.no_grad()
    def initialize_states(self) -> None:
        """Makes the state of every parameter complete, whether it has a gradient or not.

        Raises ValueError, and RuntimeError, as the first step would; then no state has changed.
        """
        params, _, wheres = self._flat()
        for param, where in zip(params, wheres, strict=True):
            self._check_param(param, where)
        external = self._external(params, wheres)
        self._commit(
            {
                param: self._completed(param, self._formats(param), master, where)
                for param, master, where in zip(params, external, wheres, strict=True)
            }
        )

    def _completed(
        self, param: torch.Tensor, formats: Formats, external: torch.Tensor | None, where: str
    ) -> State:
        """What a parameter's state becomes; the state itself stays as it is."""
        own: State = self.state.get(param, {})
        names = {slot: state_name(slot) for slot in formats.state_slots}
        for name in names.values():
            check_sharding(own.get(name), param, f"{where}: state {name!r}")
        state, local = locals_of(own), local_of(param)
        # a step within inference mode makes no such tensors
        with torch.inference_mode(False), torch.no_grad():
            complete(state, local, formats, local_of(external))
        check_state(state, formats, local, names, where)
        return sharded_state(param, state, [*own.values(), external])

    def _commit(self, completed: Mapping[torch.Tensor, State]) -> None:
        """Takes over what `_completed` made; a weight that became fp32 takes its master's value."""
        values = {p: widened(local_of(p), locals_of(self.state.get(p, {}))) for p in completed}
        for param, state in completed.items():
            value = values[param]
            if state.get(MASTER) is None and value is not None:
                local_of(param).copy_(value)
            self.state[param].update(state)

    def refresh_masters(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Gives masters the values of weights that were written outside the optimizer.

        Elements whose weight is still the cast of their master keep every bit of it. A step does
        this by itself for writes that torch counts (`p._version`): load_state_dict, fill_, clamp_,
        copy_. torch does not count writes to `p.data`, by collectives of torch.distributed (a
        broadcast), into Megatron's buffers, by other libraries' kernels, or within the replay of a
        CUDA graph: call this after them. A master that is kept as a remainder moves with its
        weight anyway.

        Args:
            params: parameters of this optimizer; None for all. Those without a master, or without
                state yet, are left as they are.

        Raises:
            ValueError: one is no parameter of this optimizer.
        """
        own = self._flat()[0]
        chosen = own if params is None else [own[self._index(param, own)] for param in params]
        for param in chosen:
            self._refreshed(param)

    @torch.no_grad()
    def _refreshed(self, param: torch.Tensor, only_look: bool = False) -> torch.Tensor | bool:
        """Refreshes one master; whether any element had been written."""
        state, formats = locals_of(self.state.get(param, {})), self._formats(param)
        known = isinstance(state.get(MASTER), torch.Tensor)
        if not (known and formats.master.present) or formats.master.joined:
            return False
        if only_look:
            return written_elements(local_of(param), state, formats).any()
        return refresh(local_of(param), state, formats)

    def _index(self, param: torch.Tensor, params: list[torch.Tensor]) -> int:
        for index, own in enumerate(params):
            if own is param:
                return index
        refuse("param", "a parameter of this optimizer", param)

    def _formats(self, param: torch.Tensor) -> Formats:
        masters = self._wants_masters(self._master_weights)
        return formats_of(param, torch.float32, self.rule.moments, self.options, masters)

    def _slot(self, name: str) -> str:
        slots = {state_name(slot): slot for slot in (*self.rule.moments, "master")}
        one_of("state_name", name, slots)
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
        form = self._formats(param).by_slot[self._slot(state_name)]
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
        self._check_own(param)
        state, local = self.state.get(param, {}), local_of(param)
        if any(same(state_name, name) for name in state if name.endswith(SCALE)):
            self._store(param, state, {state_name: _one_number(unscaled_state, state_name, local)})
            return
        formats, slot = self._formats(param), self._slot(state_name)
        _check_value(unscaled_state, param, state_name)
        check_sharding(unscaled_state, param, state_name)
        value: torch.Tensor = local_of(unscaled_state.detach())
        if state_name == MASTER and not formats.master.present:
            self._set_weight(param, value.to(local.device, torch.float32).reshape(local.shape))
            return
        if state_name == MASTER and state.get(MASTER) is None and self._has_external:
            params, _, wheres = self._flat()
            external = self._external(params, wheres)[self._index(param, params)]
            state = {**state, MASTER: external}
        self._store(param, state, *encoded(state_name, value, formats.by_slot[slot], local))
        if state_name == MASTER:
            self._versions.note(param)

    def _store(
        self, param: torch.Tensor, state: State, new: State, weight: torch.Tensor | None = None
    ) -> None:
        """Writes new tensors over those of a state, or adds them, and the weight: all or none."""
        stored, pairs = locals_of(state), []
        if weight is not None:
            check_writable(local_of(param), "the parameter")
            pairs.append((local_of(param), weight))
        for name, tensor in new.items():
            if stored.get(name) is None:
                stored[name] = tensor
            else:
                _check_like(stored[name], tensor, f"state {name!r}")
                pairs.append((stored[name], tensor))
        completed = sharded_state(param, stored, list(state.values()))
        overwrite(pairs, lambda: self.state[param].update(completed))

    @property
    def _has_external(self) -> bool:
        return not (self._master_weights is None or isinstance(self._master_weights, bool))

    def _check_own(self, param: Any) -> None:
        params = (own for group in self.param_groups for own in group["params"])
        is_tensor = isinstance(param, torch.Tensor)
        if not is_tensor or (param not in self.state and all(own is not param for own in params)):
            refuse("param", "a parameter of this optimizer", param)

    def _set_weight(self, param: torch.Tensor, value: torch.Tensor) -> None:
        """The weight becomes an fp32 value of its shard's shape, where that is no master's."""
        local = local_of(param)
        weight = weight_of(local)
        if weight is None:
            check_writable(local, "the parameter")
            code = self._formats(param).weight.encode_reference(value).clone()
            overwrite([(local, code)], lambda: self.state[param].update({MASTER: None}))
            return
        if isinstance(local, Float8Shard):
            params, _, wheres = self._flat()
            raise ValueError(
                f"{wheres[self._index(param, params)]}: {MASTER!r} is not allowed for a "
                "Float8Shard without a master: its codes go by the values of all ranks; "
                "quantize_ sets the whole weight"
            )
        weight.quantize_(value)
        self.state[param][MASTER] = None

    def _hear(self) -> None:
        """Raises what ranks found in the last step, for which the host did not wait."""
        notices, self._notices = self._notices, []
        for notice in notices:
            if notice.is_set():
                if not self.options.capturable:  # the host counted a step that was left out
                    for group in self.param_groups:
                        group["step"] -= 1
                raise ValueError(notice.message)

    def state_dict(self) -> dict[str, Any]:
        """State and groups as torch.optim.Optimizer gives them, codes exactly as stored.

        Every group also names the contract and adam_w_mode, so that a load can refuse another.
        "not_made" has, for each parameter whose state is not complete yet, the names of what it
        lacks, so that a load can refuse a state dict that has lost some.
        torch's own optimizers load what FusedAdam.to_torch_state_dict gives, not this.
        Raises ValueError where ranks differed in the last step, which then left it out.
        """
        self._hear()
        packed = super().state_dict()
        return state_dicts.mark(packed, self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over state and groups, bit for bit, never through another dtype.

        State dicts of TransformerEngine's FusedAdam and of torch's Adam and AdamW load too; what
        they keep in fp32 is stored in this optimizer's formats, and masters that they lack are made
        at the next step.

        Parameters are taken by their place; where both sides have param_names, these must agree.
        Pre hooks come before everything else, post hooks when the load is done: an error of a post
        hook leaves the optimizer loaded.

        Raises:
            ValueError: a state dict of another contract, format, group size or tensor shape, with
                other names, a number out of range, or a state that is missing; and a master of the
                caller's that cannot be written. After this and any other error nothing has
                changed.
        """
        if isinstance(state_dict, Mapping):
            state_dict = dict(state_dict)  # a hook may write into it
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        params, _, wheres = self._flat()
        masters = self._external(params, wheres)
        loaded = state_dicts.read(state_dict, self, params, wheres)
        if self.options.capturable:
            numbers = self._numbers(loaded.groups)
            loaded.groups = [{**g, **n} for g, n in zip(loaded.groups, numbers, strict=True)]
        pairs = []
        for param, master in zip(params, masters, strict=True):
            state = loaded.states.get(param, {})
            if master is not None and state.get(MASTER) is not None:
                pairs.append((local_of(master), local_of(state[MASTER])))
                state[MASTER] = master
        self._batches, self._notices = None, []
        new = {"state": States(dict, loaded.states), "param_groups": loaded.groups}
        overwrite(pairs, lambda: vars(self).update(new))
        self._versions = Versions(params)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, torch.save and deepcopy: everything but the tables on the device.

        What comes back goes on with the same bits; but pickle keeps no Float8Weight's initial
        value, so that a master that the first step makes afterwards starts from the codes.
        """
        return {
            **super().__getstate__(),
            "state": defaultdict(dict, {p: picklable(own) for p, own in self.state.items()}),
            "options": self.options,
            "_master_weights": self._master_weights,
            "use_decoupled_grad": self.use_decoupled_grad,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes up what __getstate__ gave."""
        super().__setstate__(state)
        self._forget()
        self.state = States(dict, self.state)
        self._versions = Versions(self._flat()[0])


def _is_real(value: torch.Tensor) -> bool:
    """Whether it has elements to read, and none is complex."""
    return is_dense(value) and not value.is_meta and not value.is_complex()


def _one_number(value: torch.Tensor, name: str, local: torch.Tensor) -> torch.Tensor:
    """A new fp32 tensor of shape (1,) beside a shard; raises ValueError for what is no number."""
    if not _is_real(value) or value.numel() != 1:
        refuse(name, "one real number", value)
    return value.detach().to(local.device, torch.float32, copy=True).reshape(1)


def _check_value(value: torch.Tensor, param: torch.Tensor, name: str) -> None:
    """Raises ValueError for a tensor that is no fp32 value of so many elements."""
    is_whole = not is_dtensor(param)  # then any shape of as many elements
    fits = _is_real(value) and (
        value.shape == param.shape or (is_whole and value.numel() == param.numel())
    )
    if not fits:
        refuse(name, f"real numbers of the parameter's shape, {tuple(param.shape)}", value)


def _check_like(own: Any, new: torch.Tensor, where: str) -> None:
    """Raises ValueError unless the new tensor's content can go into a state's own."""
    wanted = (new.dtype, tuple(new.shape), new.device)
    if not is_dense(own) or (own.dtype, tuple(own.shape), own.device) != wanted:
        refuse(where, f"{wanted[0]} of shape {wanted[1]} on {wanted[2]}", own)
    check_writable(own, where)
