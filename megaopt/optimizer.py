"""The fused optimizer: gathers weights, gradients and state, and hands them to the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megaopt import state_dict as state_dicts
from megaopt.batches import MASTER, SCALE, Batch, Batches, check_grad, check_state, state_name
from megaopt.capture import check_capture, check_captured_batches, check_device_numbers, to_device
from megaopt.float8.batch import Float8Batch, extent_of, plan_formats, weight_of
from megaopt.float8.weight import Float8Weight
from megaopt.kernels.backends import BACKENDS, default_backend, why_not
from megaopt.kernels.contracts import CONTRACTS
from megaopt.kernels.rules import Rule
from megaopt.kernels.step.batch import Formats
from megaopt.kernels.step.controls import SKIP
from megaopt.kernels.step.preparation import Request
from megaopt.kernels.step.table import is_capturing
from megaopt.kernels.step.watch import Grads, grads_of
from megaopt.masters import MasterWeights, check_master_weights
from megaopt.options import Options, check_clipping, check_group, check_weight
from megaopt.state import State, complete, formats_of, get_unscaled, set_unscaled, value_of


class FusedOptimizer(torch.optim.Optimizer):
    """Owns the step of every parameter it is given; a subclass names the update rule.

    `state[p]` holds the rule's moments and `master_param` (None where there is no master), each in
    its storage format; a format with a scale per tensor adds `<name>_scale`. State appears at the
    first step with a gradient, by `initialize_state`, or by a load: nothing is bound to the
    parameters before, so `param_groups` may be replaced after construction.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler leaves unscaling and skipping to us

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
        super().__init__(params, {**defaults, "step": 0})
        self.master_weights = master_weights

    def _forget(self) -> None:
        """Lets go of everything that is made again when it is needed."""
        self._batches: Batches | None = None
        self._captured: list[Batches] = []  # CUDA graphs read their tables
        self._preparations: dict[torch.device, Any] = {}

    @property
    def rule(self) -> Rule:
        """The update rule under the optimizer's contract."""
        raise NotImplementedError

    # --- parameters and masters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch.optim.Optimizer does; raises ValueError before it is added."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group, f"group {len(self.param_groups) - 1}")
            for index, param in enumerate(group["params"]):
                self._check_param(param, self._where(len(self.param_groups) - 1, index))
            if self.options.capturable:
                self._to_device()
        except (ValueError, RuntimeError):
            self.param_groups.pop()
            raise

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
        self._master_weights = masters
        self._batches = None

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
            check_group(group, where)

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

    def _to_device(self) -> None:
        self._check_one_device()
        device = self._device()
        for group in self.param_groups:
            to_device(group, device)

    def _check_param(self, param: torch.Tensor, where: str) -> None:
        subclass: object = param  # for mypy, to which no tensor is such a subclass
        if is_traceable_wrapper_subclass(subclass) and weight_of(param) is None:
            raise ValueError(
                f"{where}: tensor subclass {type(subclass).__name__} is not allowed: torch.Tensor, "
                "or megaopt.float8.Float8Weight"
            )
        masters = self._wants_masters(self._master_weights)
        check_weight(param, where, self.options, masters, weight_of(param) is not None)
        contract = CONTRACTS[self.options.contract]
        reason = why_not(self._backend(param.device), contract, param.device)
        if reason is not None:
            asked = "contract" if contract.needs_gpu else "backend"
            everywhere = "contract='ieee'" if contract.needs_gpu else "backend='reference'"
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

    # --- the step

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        clip_norm: float | None = None,
        clip_coefficient: torch.Tensor | None = None,
    ) -> Any:
        """One update of every parameter that has a gradient.

        torch.amp.GradScaler works natively: `grad_scaler.step(optimizer)` sets `grad_scale` and
        `found_inf` on the optimizer, the step unscales the gradients as it reads them, and an
        overflow leaves everything as it is. Without capturable the host waits for found_inf.

        Args:
            closure: reevaluates the model and returns the loss.
            clip_norm: the largest L2 norm of all gradients together; larger ones count multiplied
                by clip_norm / (norm + 1e-6), as torch.nn.utils.clip_grad_norm_ multiplies them, but
                stay as they are themselves. `grad_norm` then has the norm. Nothing waits for it.
            clip_coefficient: instead, what gradients are multiplied by: one fp32 number on the
                parameters' device, of a norm over other ranks' gradients too, say.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a gradient, parameter, state tensor or hyper-parameter is not allowed; then
                no weight, no state and no step count has changed.
            FloatingPointError: nonfinite="error", and an infinity or NaN is among the gradients;
                then nothing has changed either, except that a first step has made the state.
            RuntimeError: a CUDA graph captures what it cannot repeat.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        request = self._request(clip_norm, clip_coefficient)
        self._check_capture()
        if not self.options.capturable and request.found_inf is not None:
            if bool(request.found_inf):
                return loss
            request = replace(request, found_inf=None)
        rows = self._rows()
        batches, grads = self._gather()
        for batch in batches.batches:
            batch.enter(grads)
        prepared = self._prepare(batches, request)
        if rows is not None:
            if request.skip_nonfinite and self._is_skipped(prepared):
                for batch in batches.batches:
                    batch.abandon()
                return loss
            for group in self.param_groups:  # also the empty ones
                group["step"] += 1
        elif any(is_capturing(device) for device in prepared):
            self._captured.append(batches)
        for batch in batches.batches:
            scalars, controls = prepared[batch.device]
            batch.plan.step(rows if scalars is None else scalars, controls)
            batch.leave(controls)
        return loss

    @property
    def grad_norm(self) -> torch.Tensor:
        """The gradients' L2 norm, fp32 of shape (), at the last step that had to know it.

        After unscaling, before clipping. Steps know it that have clip_norm, or nonfinite other than
        "propagate". The next such step writes into the same tensor. Raises RuntimeError before the
        first, and with parameters on several devices.
        """
        found = [each for each in self._preparations.values() if each.measured]
        if len(found) != 1:
            raise RuntimeError(
                f"grad_norm is known on {len(found)} devices: a step with clip_norm, or under "
                "nonfinite='skip', with all parameters on one device, finds it"
            )
        norm: torch.Tensor = found[0].norm
        return norm

    def _request(self, clip_norm: float | None, coefficient: torch.Tensor | None) -> Request:
        """What the arguments of a step, a GradScaler's attributes and the options ask for."""
        check_clipping(clip_norm, coefficient)
        if clip_norm is not None:
            self._check_one_device(f"clip_norm={clip_norm!r}")
        found_inf = getattr(self, "found_inf", None)
        # a GradScaler looks for infinities in p.grad alone
        unseen = found_inf is not None and self.use_decoupled_grad
        return Request(
            grad_scale=getattr(self, "grad_scale", None),
            # a GradScaler that saw no gradient sets the number 0
            found_inf=found_inf if isinstance(found_inf, torch.Tensor) else None,
            coefficient=coefficient,
            clip_norm=None if clip_norm is None else float(clip_norm),
            skip_nonfinite=self.options.nonfinite != "propagate" or unseen,
        )

    def _prepare(self, batches: Batches, request: Request) -> dict[torch.device, tuple[Any, Any]]:
        """For each device the scalars, if they are made there, and the controls."""
        groups = self.param_groups if self.options.capturable else None
        prepared = {}
        # the first parameter's too, which may have no gradient
        for device in {self._device(), *(batch.device for batch in batches.batches)}:
            if device not in self._preparations:
                self._preparations[device] = self._preparation(device)
            plans = [batch.plan for batch in batches.batches if batch.device == device]
            prepared[device] = self._preparations[device].make(groups, request.on(device), plans)
        return prepared

    def _preparation(self, device: torch.device) -> Any:
        backend = BACKENDS[self._backend(device)]
        if backend.why_not(device) is not None:
            backend = BACKENDS["reference"]  # there are no parameters, only steps to count
        return backend.preparation(self.rule, device)

    def _is_skipped(self, prepared: dict[torch.device, tuple[Any, Any]]) -> bool:
        """Whether an infinity or NaN among the gradients ends the step here; waits to see."""
        found = any(bool(controls[SKIP]) for _, controls in prepared.values())
        if found and self.options.nonfinite == "error":
            raise FloatingPointError(
                "an infinity or NaN is among the gradients, which nonfinite='error' does not allow"
            )
        return found

    def _check_capture(self) -> None:
        """Before anything that waits for a device, which would break a capture."""
        device = self._device()
        check_capture(device, self.options.capturable, self._backend(device))

    def _gather(self) -> tuple[Batches, Grads]:
        """The batches of this step: those of the last one where everything is as it was."""
        now = (self.param_groups, self.state, self.use_decoupled_grad)
        batches, self._batches = self._batches, None  # only batches that fit may stay
        grads = None if batches is None else batches.look(*now)
        staged = batches is not None and any(batch.staged for batch in batches.batches)
        check_captured_batches(self._device(), grads is not None, staged)
        if grads is None:
            batches = self._sort(grads_of(self._flat()[0], self.use_decoupled_grad))
            grads = batches.look(*now)
        if batches is None or grads is None:
            raise RuntimeError("batches made from the tensors at hand do not fit them")
        self._batches = batches
        return batches, grads

    def _rows(self) -> list[tuple[float, ...]] | None:
        """The groups' scalars for the coming step, None where they are made on the device.

        The hyper-parameters must be in range.
        """
        device = self._device() if self.options.capturable else torch.device("cpu")
        self._check_groups(device)
        if self.options.capturable:
            return None
        return [self.rule.scalars({**g, "step": g["step"] + 1}) for g in self.param_groups]

    def _sort(self, grads: Grads) -> Batches:
        """Checks everything, completes the states, and makes the batches anew."""
        if self.options.capturable:
            self._check_one_device()
        params, groups, wheres = self._flat()
        for param, grad, where in zip(params, grads, wheres, strict=True):
            if grad is not None:
                self._check_param(param, where)
                check_grad(grad, param, where)
        external = self._external(params, wheres)
        kinds: dict[tuple[torch.device, Formats, bool, Any], list[int]] = {}
        masters = self._wants_masters(self._master_weights)
        completed: dict[torch.Tensor, State] = {}
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is not None:
                formats = formats_of(param, grad.dtype, self.options, masters)
                state = self._completed(param, formats, external[index], wheres[index])
                staged = self._is_staged(param, grad, formats, state)
                ranks = getattr(param, "group", None)
                kinds.setdefault((param.device, formats, staged, ranks), []).append(index)
                completed[param] = state
        for param, state in completed.items():  # now that nothing was refused
            self.state[param].update(state)
        batches = [self._batch(*kind[:3], where, params, groups) for kind, where in kinds.items()]
        return Batches(batches, self.param_groups, self.state)

    def _completed(
        self, param: torch.Tensor, formats: Formats, external: torch.Tensor | None, where: str
    ) -> State:
        """What a parameter's state becomes; the state itself stays as it is."""
        state: State = dict(self.state.get(param, {}))
        complete(state, param, formats, self.rule, external)
        names = {slot: state_name(slot, self.rule.moments) for slot in formats.state_slots}
        check_state(state, formats, param, names, where)
        return state

    def _is_staged(
        self, param: torch.Tensor, grad: torch.Tensor, formats: Formats, state: State
    ) -> bool:
        if formats.cast is not None:
            return False
        stored = [state[state_name(slot, self.rule.moments)] for slot in formats.state_slots]
        return not all(tensor.is_contiguous() for tensor in (param, grad, *stored))

    def _batch(
        self,
        device: torch.device,
        formats: Formats,
        staged: bool,
        positions: list[int],
        params: list[torch.Tensor],
        groups: list[int],
    ) -> Batch:
        own = [params[position] for position in positions]
        numels = [param.numel() for param in own]
        rows = [groups[position] for position in positions]
        backend = BACKENDS[self._backend(device)]
        float16 = self.rule.plain_float16 if formats.first.name == "float16" else None
        states = [self.state[param] for param in own]
        if formats.cast is not None:
            extents = [extent_of(param) for param in own]
            plan = backend.plan(
                plan_formats(formats), float16 or self.rule, numels, rows, device, extents
            )
            return Float8Batch(formats, plan, self.rule.moments, positions, own, states, staged)
        plan = backend.plan(formats, float16 or self.rule, numels, rows, device)
        return Batch(formats, plan, self.rule.moments, positions, own, states, staged)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients that the step reads, as torch.optim.Optimizer.zero_grad."""
        super().zero_grad(set_to_none)
        if not self.use_decoupled_grad:
            return
        for param in self._flat()[0]:
            if set_to_none:
                param.decoupled_grad = None  # type: ignore[attr-defined]
            elif getattr(param, "decoupled_grad", None) is not None:
                param.decoupled_grad.zero_()  # type: ignore[attr-defined]

    # --- state

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

        It is the tensor itself where it is stored as fp32, a new one otherwise. Under
        store_param_remainders the master is put together from weight and remainder. A weight
        without a master gives its own value.
        """
        state: State = self.state.get(param, {})
        if state_name.endswith(SCALE) and state_name in state:
            scale: torch.Tensor = state[state_name]
            return scale
        form = getattr(self._formats(param), self._slot(state_name))
        if state_name == MASTER and not form.present:
            return value_of(param.detach(), self._formats(param))
        return get_unscaled(state, state_name, form, param.detach())

    @torch.no_grad()
    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor | bool
    ) -> None:
        """Stores an fp32 value in the state's format, making the state tensor if it is missing.

        Under store_param_remainders a master sets weight and remainder together. For a weight
        without a master, the master's value is the weight's. Anything but a tensor is ignored:
        Megatron-Core 0.16 passes its padding flag through here.
        """
        if not isinstance(unscaled_state, torch.Tensor):
            return
        state: State = self.state.get(param, {})
        if state_name.endswith(SCALE) and state_name in state:
            state[state_name].copy_(unscaled_state)
            return
        form = getattr(self._formats(param), self._slot(state_name))
        if unscaled_state.numel() != param.numel():
            raise ValueError(
                f"{state_name} of shape {tuple(unscaled_state.shape)} is not allowed: the "
                f"parameter's, {tuple(param.shape)}"
            )
        state = self.state[param]
        if state_name == MASTER and not form.present:
            value = unscaled_state.to(param.device, torch.float32).reshape(param.shape)
            self._set_weight(param, value)
            state[MASTER] = None
            return
        external = not (self._master_weights is None or isinstance(self._master_weights, bool))
        if state_name == MASTER and state.get(MASTER) is None and external:
            params, _, wheres = self._flat()
            state[MASTER] = self._external(params, wheres)[self._index(param, params)]
        set_unscaled(state, state_name, unscaled_state, form, param)

    def _set_weight(self, param: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(param, Float8Weight):
            param.quantize_(value)
        elif weight_of(param) is not None:
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
                external[param].copy_(state[MASTER])  # type: ignore[union-attr]
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
        return {**super().__getstate__(), **kept, "use_decoupled_grad": self.use_decoupled_grad}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes up what __getstate__ gave."""
        super().__setstate__(state)
        self._forget()
