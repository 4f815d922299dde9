"""The fused optimizer: gathers weights, gradients and state, and hands them to the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from megaopt.batches import (
    Batch,
    Batches,
    check_grad,
    check_plain,
    check_written_grads,
    resolved,
    state_name,
)
from megaopt.capture import check_capture, check_captured_batches, check_captured_float8
from megaopt.dtensor import (
    ShardedBatch,
    check_sharding,
    is_dtensor,
    local_of,
    split_of,
)
from megaopt.float8.batch import Float8Batch, extent_of, kind_of, plan_formats, share_amaxes
from megaopt.float8.ranks import Agreement, check_shared
from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.step.batch import Formats
from megaopt.kernels.step.controls import SKIP
from megaopt.kernels.step.preparation import Request
from megaopt.kernels.step.table import is_capturing
from megaopt.kernels.step.watch import Grads, grads_of
from megaopt.memory import check_memory
from megaopt.options import check_clipping
from megaopt.ownership import Versions
from megaopt.ranks import Meeting, is_zero, measured, on_any_rank, withdraw
from megaopt.state import State, formats_of, written_tensors
from megaopt.stateful import StatefulOptimizer


class FusedOptimizer(StatefulOptimizer):
    """Owns the step of every parameter it is given; a subclass names the update rule.

    `state[p]` holds the rule's moments and `master_param` (None where there is no master), each in
    its storage format; a format with a scale per tensor adds `<name>_scale`. State appears at the
    first step with a gradient, by `initialize_state`, or by a load: nothing is bound to the
    parameters before, so `param_groups` may be replaced after construction.
    """

    _makes_all_states = False
    """Whether a step makes the state of parameters that have no gradient too."""
    _step_supports_amp_scaling = True  # torch.amp.GradScaler leaves unscaling and skipping to us

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

        With DTensors, a first step with lr=0 in all groups and gradients that are 0 on all ranks
        makes the state and nothing else: so torch.distributed.checkpoint asks which state there is.

        Args:
            closure: reevaluates the model and returns the loss.
            clip_norm: the largest L2 norm of all gradients together (of DTensors, on all ranks,
                which have to take the step together); larger ones count multiplied
                by clip_norm / (norm + 1e-6), as torch.nn.utils.clip_grad_norm_ multiplies them, but
                stay as they are themselves. `grad_norm` then has the norm. Nothing waits for it.
            clip_coefficient: instead, what gradients are multiplied by: one fp32 number on the
                parameters' device, of a norm over other ranks' gradients too, say.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a gradient, parameter, state tensor or hyper-parameter is not allowed; then
                no weight, no state and no step count has changed. With a norm over ranks, and with
                fp8 weights that ranks share, also on all ranks where they do not step the same or
                one raises an error: nothing has changed then either, except that a first step has
                made the state. On a GPU a rank that did not change itself raises it in its next
                step or state_dict, and has left this one out.
            FloatingPointError: nonfinite="error", and an infinity or NaN is among the gradients;
                then nothing has changed either, except that a first step has made the state.
            RuntimeError: a CUDA graph captures what it cannot repeat.
        """
        self._hear()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._told(clip_norm is not None or self._skips_nonfinite):
            request = self._request(clip_norm, clip_coefficient)
            self._check_capture()
            if self._only_makes_state(request):
                return loss
            rows = self._rows()
            batches, grads = self._gather()
            writes_grads = self._writes_grads(request, grads)
            self._take_over_writes()
            for batch in batches.batches:
                batch.enter(grads, writes_grads)
        known = self._known(request, batches)
        if known is None:
            batches.abandon()
            return loss
        request = known
        prepared = self._prepare(batches, request)
        if rows is not None and request.skip_nonfinite and self._is_skipped(prepared):
            batches.abandon()
            return loss
        if any(is_capturing(device) for device in prepared):
            self._captured.append(batches)
        for batch in batches.batches:
            scalars, controls = prepared[batch.device]
            batch.plan.step(rows if scalars is None else scalars, controls)
        if rows is not None:
            for group in self.param_groups:  # also the empty ones
                group["step"] += 1
        self._amax_counts = share_amaxes(batches.batches)
        for batch in batches.batches:
            batch.leave(prepared[batch.device][1])
        self._versions.count_up()
        return loss

    def _writes_grads(self, request: Request, grads: Grads) -> bool:
        """Whether this step stores unscaled gradients, which then have to be fit for it."""
        writes = self.options.write_unscaled_grads and request.grad_scale is not None
        if writes:
            check_written_grads([local_of(grad) for grad in grads], self._flat()[2])
        return writes

    @contextmanager
    def _told(self, measures: bool) -> Iterator[None]:
        """An error of this rank alone becomes one on all that would wait for it."""
        try:
            yield
        except Exception:
            params = self._flat()[0]
            if not is_capturing(self._device()):
                if measures:
                    withdraw(params)
                Agreement(params, {}).withdraw(self._waits, self._amax_counts)
            raise

    @property
    def _skips_nonfinite(self) -> bool:
        # a GradScaler looks for infinities in p.grad alone
        unseen = getattr(self, "found_inf", None) is not None and self.use_decoupled_grad
        return self.options.nonfinite != "propagate" or unseen

    @property
    def _waits(self) -> bool:
        """Whether the host waits to know if there is a step, as it does on all ranks or on none."""
        is_skippable = isinstance(getattr(self, "found_inf", None), torch.Tensor)
        return (is_skippable or self._skips_nonfinite) and not self.options.capturable

    def _known(self, request: Request, batches: Batches) -> Request | None:
        """The request as ranks see it that share tensors; None where the host knows of no step."""
        was_given = request.found_inf is not None
        if request.needs_norm:
            if batches.meeting is None:
                params, _, wheres = self._flat()
                batches.meeting = Meeting(params, wheres, batches.batches)
            request, self._notices = batches.meeting.meet(request, self._waits)
        if batches.agreement is not None:
            return self._agreed(request, batches, batches.agreement)
        if not (was_given and self._waits):
            return request
        return None if bool(request.found_inf) else replace(request, found_inf=None)

    def _agreed(self, request: Request, batches: Batches, agreement: Agreement) -> Request | None:
        """The request as all ranks that share fp8 weights see it; None if there is no step.

        A rank that left a step out alone would let the others wait for its amaxes for ever.
        """
        own = self._own_flags(request, batches, agreement.device)
        flags, notices = agreement.reach(own, self._waits, self._amax_counts)
        self._notices = [*self._notices, *notices]
        if self._waits:  # the host has to know, which counts the steps
            return None if bool(flags[0]) else replace(request, found_inf=flags[1])
        if not (request.is_skippable or notices):
            return request
        return replace(request, found_inf=flags.amax())

    def _own_flags(self, request: Request, batches: Batches, device: torch.device) -> torch.Tensor:
        """int64: whether found_inf is set; whether an infinity or NaN is to be skipped here."""
        flags = torch.zeros(2, dtype=torch.int64, device=device)
        if request.found_inf is not None:
            flags[:1].copy_(request.found_inf.reshape(1) != 0)
        if request.skip_nonfinite:
            for own in {batch.device for batch in batches.batches}:
                plans = [batch.plan for batch in batches.batches if batch.device == own]
                found = self._preparation_on(own).has_nonfinite(plans)
                flags[1:].copy_(torch.maximum(flags[1:], found.to(device, torch.int64)))
        return flags

    @property
    def grad_norm(self) -> torch.Tensor:
        """The gradients' L2 norm, fp32 of shape (), at the last step that had to know it.

        After unscaling, before clipping. Steps know it that have clip_norm, or nonfinite other than
        "propagate". The next such step writes into the same tensor.

        A step that a GradScaler's found_inf leaves out measures nothing, and the last norm stays;
        with capturable, where the host does not wait for found_inf, it does measure: an infinity or
        NaN. So does a step that nonfinite leaves out.

        Raises RuntimeError before the first norm, and with parameters on several devices.
        """
        found = [each for each in self._preparations.values() if each.measured]
        if not found:
            raise RuntimeError(
                "no step has measured the norm yet: a step with clip_norm, or under "
                "nonfinite='skip' or 'error', does, unless found_inf leaves it out"
            )
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
        return Request(
            grad_scale=getattr(self, "grad_scale", None),
            # a GradScaler that saw no gradient sets the number 0
            found_inf=found_inf if isinstance(found_inf, torch.Tensor) else None,
            coefficient=coefficient,
            clip_norm=None if clip_norm is None else float(clip_norm),
            skip_nonfinite=self._skips_nonfinite,
        )

    def _prepare(self, batches: Batches, request: Request) -> dict[torch.device, tuple[Any, Any]]:
        """For each device the scalars, if they are made there, and the controls."""
        groups = self.param_groups if self.options.capturable else None
        prepared = {}
        # the first parameter's too, which may have no gradient
        devices = (self._device(), *(batch.device for batch in batches.batches))
        for device in dict.fromkeys(devices):
            plans = measured(batches, device) if request.needs_norm else []
            made = self._preparation_on(device).make(groups, request.on(device), plans)
            prepared[device] = made
        return prepared

    def _preparation_on(self, device: torch.device) -> Any:
        if device not in self._preparations:
            self._preparations[device] = self._preparation(device)
        return self._preparations[device]

    def _only_makes_state(self, request: Request) -> bool:
        """Whether this step is that of torch.distributed.checkpoint, which wants states to load to.

        It is the first, has lr=0 and gradients that are 0 on all ranks, and makes the state:
        nothing is counted, decayed or divided by eps=0. Only with DTensors, as ranks that do not
        know of one another have to agree. All meet at a first step with lr=0, whatever is in the
        state of one.
        """
        was_stepped, self._was_stepped = self._was_stepped, True
        if was_stepped or not request.is_empty:
            return False
        params = self._flat()[0]
        if not any(map(is_dtensor, params)):
            return False
        if any(group["lr"] is None or float(group["lr"]) for group in self.param_groups):
            return False
        if on_any_rank(not self._is_probed(params), params):
            return False
        if self.use_decoupled_grad:
            self.initialize_states()
        else:
            self._gather()
        return True

    def _is_probed(self, params: list[torch.Tensor]) -> bool:
        """Whether there is no state, and p.grad is 0 wherever there could be a gradient.

        torch.distributed.checkpoint gives p.grad, whatever the optimizer reads.
        """
        given = [param.grad for param in params if param.requires_grad]
        if any(self.state.values()) or not given or any(grad is None for grad in given):
            return False
        decoupled = grads_of(params, decoupled=True) if self.use_decoupled_grad else []
        return all(grad is None for grad in decoupled) and all(map(is_zero, given))

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
                "an infinity or NaN is among the gradients (here, or on a rank that shares fp8 "
                "weights), which nonfinite='error' does not allow"
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
        if grads is None and self._resolve_grads() and batches is not None:
            grads = batches.look(*now)
        staged = batches is not None and any(batch.staged for batch in batches.batches)
        check_captured_batches(self._device(), grads is not None, staged)
        if batches is not None:
            check_captured_float8(self._device(), batches.batches)
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
                check_shared(param, where)
                check_sharding(grad, param, f"{where}: as a gradient")
                check_grad(grad, param, where)
                check_plain(local_of(grad), where)
                if is_dtensor(param):
                    check_grad(local_of(grad), local_of(param), where)
        external = self._external(params, wheres)
        kinds: dict[tuple[torch.device, Formats, bool, Any], list[int]] = {}
        masters = self._wants_masters(self._master_weights)
        completed: dict[torch.Tensor, State] = {}
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is not None:
                formats = formats_of(param, grad.dtype, self.rule.moments, self.options, masters)
                state = self._completed(param, formats, external[index], wheres[index])
                staged = self._is_staged(param, grad, formats, state)
                kind = (param.device, formats, staged, (split_of(param), *kind_of(param)))
                kinds.setdefault(kind, []).append(index)
                completed[param] = state
            elif self._makes_all_states:
                own = self._formats(param)
                completed[param] = self._completed(param, own, external[index], wheres[index])
        names = dict(zip(params, wheres, strict=True))
        check_memory(
            [own for p, state in completed.items() for own in written_tensors(p, state, names[p])]
        )
        self._warn_without_masters(completed, names)
        self._commit(completed)  # now that nothing was refused
        batches = [self._batch(*kind[:3], where, params, groups) for kind, where in kinds.items()]
        stepped = {place: kind[1] for kind, places in kinds.items() for place in places}
        self._versions = Versions(params, sorted(stepped), self._versions)
        agreement = Agreement(params, stepped)
        shared = agreement if agreement.signatures else None
        return Batches(batches, self.param_groups, self.state, shared)

    def _resolve_grads(self) -> bool:
        """Waits for gradients that a collective still writes, and makes pending signs real.

        Such a gradient is replaced in its attribute. Returns whether there was any.
        """
        params, found = self._flat()[0], False
        for param, grad in zip(params, grads_of(params, self.use_decoupled_grad), strict=True):
            plain = resolved(grad)
            if plain is not grad:
                setattr(param, "decoupled_grad" if self.use_decoupled_grad else "grad", plain)
                found = True
        return found

    def _take_over_writes(self) -> None:
        """What others wrote into weights since the last step becomes their masters' value."""
        policy = self.options.on_external_write
        places = [] if policy == "ignore" else self._versions.moved()
        if not places:
            return
        params, _, wheres = self._flat()
        for place in places:
            found = self._refreshed(params[place], only_look=policy == "error")
            if policy == "error" and bool(found):
                raise RuntimeError(
                    f"{wheres[place]} must not be written between steps with "
                    "on_external_write='error', got elements that are no cast of their master; "
                    "refresh_masters() takes them over"
                )
            if not (self._warned or self.options.capturable) and bool(found):
                self._warned = True
                warnings.warn(
                    f"{wheres[place]} was written outside the optimizer: its master takes the "
                    "written values. on_external_write='error' refuses such writes, 'ignore' puts "
                    "the old values back",
                    stacklevel=5,
                )

    def _warn_without_masters(
        self, params: Iterable[torch.Tensor], names: Mapping[torch.Tensor, str]
    ) -> None:
        """Once, where nobody said whether 16-bit weights are to have masters."""
        asked = self.options.dtype is not None or self._master_weights is not None
        if asked or self._warned_of_masters:
            return
        short = [names[p] for p in params if p.dtype in (torch.bfloat16, torch.float16)]
        if short:
            self._warned_of_masters = True
            warnings.warn(
                f"{len(short)} parameters ({short[0]} the first) are 16-bit and have no fp32 "
                "master: updates smaller than half a unit in a weight's last place are lost, and "
                "at common learning rates weights stand still. Pass dtype=torch.float32 for fp32 "
                "masters, or master_weights=False to train without",
                MissingMastersWarning,
                stacklevel=6,
            )

    def _is_staged(
        self, param: torch.Tensor, grad: torch.Tensor, formats: Formats, state: State
    ) -> bool:
        if formats.cast is not None:
            return False
        stored = [state[state_name(slot)] for slot in formats.state_slots]
        return not all(local_of(each).is_contiguous() for each in (param, grad, *stored))

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
        numels = [local_of(param).numel() for param in own]
        rows = [groups[position] for position in positions]
        backend = BACKENDS[self._backend(device)]
        states = [self.state[param] for param in own]
        if formats.cast is not None:
            extents = [extent_of(param) for param in own]
            plan = backend.plan(plan_formats(formats), self.rule, numels, rows, device, extents)
            return Float8Batch(formats, plan, positions, own, states, staged)
        plan = backend.plan(formats, self.rule, numels, rows, device)
        kind = ShardedBatch if any(map(is_dtensor, own)) else Batch
        return kind(formats, plan, positions, own, states, staged)

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


class MissingMastersWarning(UserWarning):
    """16-bit weights are stepped without fp32 masters, and nobody asked for that."""
