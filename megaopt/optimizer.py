"""The fused optimizer: gathers weights, gradients and state, and hands them to the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megaopt.kernels.rules import Rule
from megaopt.kernels.step.preparation import Request
from megaopt.kernels.step.table import is_capturing
from megaopt.options.checks import one_of, refuse
from megaopt.options.groups import States, check_new_group, entries_of, new_group
from megaopt.options.options import Options
from megaopt.options.placement import Homes, taken_from
from megaopt.params.dtensor import locals_of
from megaopt.saving import state_dict as state_dicts
from megaopt.saving.probing import is_asked_by_torch, is_probe
from megaopt.state.access import set_scaled, unscaled
from megaopt.state.masters import MasterWeights
from megaopt.state.numbers import CheckedNumbers
from megaopt.state.owned import Owned
from megaopt.state.ownership import commit, refreshed
from megaopt.state.tensors import MASTER, picklable
from megaopt.state.watch import Grads, grads_of
from megaopt.state.writes import ExternalWrites
from megaopt.step.batches import Batches
from megaopt.step.capture import check_capture, check_captured_batches
from megaopt.step.collect import (
    StepRun,
    collect,
    completed_states,
    make_batches,
    resolve_grads,
    writes_grads,
)
from megaopt.step.preparations import Preparations, is_skipped, requested
from megaopt.step.ranks.meeting import Meeting, meeting_of


class FusedOptimizer(torch.optim.Optimizer):
    """Owns the step of every parameter it is given; a subclass names the update rule.

    `state[p]` holds the rule's moments and `master_param` (None where there is no master, as for an
    fp32 weight), each in its storage format; a format with a scale per tensor adds `<name>_scale`.
    State appears at a step, by `initialize_state`, or by a load: nothing is bound to the parameters
    before, so `param_groups` may be replaced after construction.
    """

    use_decoupled_grad: bool = False
    """Read `p.decoupled_grad` instead of `p.grad`; may be assigned at any time."""
    _is_being_made = False
    _step_supports_amp_scaling = True  # torch.amp.GradScaler leaves unscaling and skipping to us

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        options: Options,
        master_weights: MasterWeights,
    ) -> None:
        self.options = options
        self._master_weights: MasterWeights = None
        self._homes = Homes(options.placement)
        self._forget()
        self._is_being_made = True
        super().__init__(entries_of("params", params), {**defaults, **options.group_keys})
        self._is_being_made = False
        self.state = States(dict)
        self.master_weights = master_weights
        self._owned.check_places()  # once: it looks at all parameters

    def _forget(self) -> None:
        """Lets go of everything that is made again when it is needed."""
        self._batches: Batches | None = None
        self._captured: list[Batches] = []  # CUDA graphs read their tables
        self._preparations = Preparations()
        self._meeting: Meeting | None = None  # of the last step
        self._writes, self._numbers = ExternalWrites(), CheckedNumbers()
        self._was_stepped = False
        self._release: Any = None  # a megaopt.models.release.GradientRelease

    @property
    def rule(self) -> Rule:
        """The update rule under the optimizer's contract."""
        raise NotImplementedError

    @property
    def _owned(self) -> Owned:
        masters = self._master_weights
        return Owned(self.param_groups, self.options, self.rule, masters, self._homes)

    def _check_param(self, param: torch.Tensor, label: str) -> None:
        """Raises ValueError or RuntimeError for a parameter that the optimizer cannot own."""
        self._owned.check_param(param, label)

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
        if self._release is not None:
            self._release.check_step(clip_norm, clip_coefficient)
        self._hear()
        loss = None if closure is None else torch.enable_grad()(closure)()
        run = self._collect(clip_norm, clip_coefficient)
        if run is not None:
            request = self._agreed(run)
            try:
                self._take(run, request)
            except BaseException:
                run.batches.take_back()
                self._writes.versions.count_up()
                raise
        return loss

    def _collect(self, clip_norm: float | None, coefficient: torch.Tensor | None) -> StepRun | None:
        """Checks everything, and finds what there is to step; None if only states were made."""
        owned, skips_nonfinite = self._owned, self._skips_nonfinite
        try:
            request = requested(self, skips_nonfinite, clip_norm, coefficient)
            if clip_norm is not None:
                owned.check_one_device(f"clip_norm={clip_norm!r}")
            # before anything that waits for a device, which would break a capture
            check_capture(owned.device, self.options.capturable, owned.backend)
            if self._makes_states_for_a_checkpoint(owned, request):
                return None
            run = StepRun(owned, request, self._rows(owned), *self._gather(owned))
            run.add_rows()
            writes = writes_grads(run)
            self._writes.take_over(owned, self.state, run.batches.weights_at())
            for batch in run.batches.fed:
                batch.stage_inputs(run.grads, writes)
            run.make_ready()
            run.meeting = self._meeting = self._meeting_of(run)
        except Exception:
            measures = clip_norm is not None or skips_nonfinite
            others = meeting_of(owned.shared_views, measures=measures, last=self._meeting)
            if others is not None:
                others.withdraw(self._waits)
            raise
        return run

    def _meeting_of(self, run: StepRun) -> Meeting | None:
        """With the other ranks; None where none are met in this step."""
        own, measures, batches = run.owned, run.request.needs_norm, run.batches
        if measures not in batches.meetings:
            given = (own.views, own.labels, batches.batches, measures, self._meeting)
            batches.meetings[measures] = meeting_of(*given)
        return batches.meetings[measures]

    def _agreed(self, run: StepRun) -> Request | None:
        """The request as all ranks see it; None where the host knows that there is no step."""
        request = run.request
        if run.meeting is not None:
            look = partial(self._preparations.nonfinite, run.owned, run.batches.batches)
            return run.meeting.meet(request, self._waits, look)
        if request.found_inf is None or not self._waits:
            return request
        return None if bool(request.found_inf) else replace(request, found_inf=None)

    def _take(self, run: StepRun, request: Request | None) -> None:
        """The step itself, unless it is left out; ranks that have met raise together."""
        meeting, batches, gathered = run.meeting, run.batches, None
        whole = nullcontext if meeting is None else meeting.whole
        with whole():
            if request is None or not self._prepare(run, request):
                batches.abandon()
                return
            if any(is_capturing(device) for device in run.prepared):
                self._captured.append(batches)
            run.launch()
            if meeting is not None:
                gathered = meeting.gather(batches.quantized)
            if not gathered:
                run.finish()
        if meeting is not None and gathered:
            with whole():
                meeting.exchange(gathered)
                run.finish()
        run.count()
        self._writes.versions.count_up()

    def _prepare(self, run: StepRun, request: Request) -> bool:
        """Makes scalars and controls; whether there is a step."""
        groups = run.counted_groups if self.options.capturable else None
        run.batches.keep_counts(groups or ())
        run.prepared = self._preparations.make(run.owned, groups, run.batches, request)
        looks = run.rows is not None and request.skip_nonfinite
        return not (looks and is_skipped(run.prepared, self.options.nonfinite))

    def _hear(self) -> None:
        """Raises what ranks found in the last step; the host then takes its count back."""
        if self._meeting is not None:
            counted = self._batches.counts.counted if self._batches else []
            on_host = not self.options.capturable
            self._meeting.hear([*self.param_groups, *counted] if on_host else [])

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

    def _makes_states_for_a_checkpoint(self, owned: Owned, request: Request) -> bool:
        """Makes the states, and steps nothing, if torch.distributed.checkpoint asks for that.

        It does so by a first step with lr=0 and gradients of 0 (megaopt.saving.probing).
        """
        was_stepped, self._was_stepped = self._was_stepped, True
        if was_stepped or not request.is_empty:
            return False
        if not is_probe(owned, self.state, self.use_decoupled_grad):
            return False
        if self.use_decoupled_grad:
            self.initialize_states()
        else:
            self._gather(owned)
        return True

    def _rows(self, owned: Owned) -> list[tuple[float, ...]] | None:
        """The groups' scalars for the coming step, None where they are made on the device."""
        self._numbers.check(owned)
        return None if self.options.capturable else owned.rows(self.param_groups)

    def _gather(self, owned: Owned) -> tuple[Batches, Grads]:
        """The batches of this step: those of the last one where everything is as it was."""
        now = (self.param_groups, self.state, self.use_decoupled_grad)
        batches, self._batches = self._batches, None  # only batches that fit may stay
        grads = None if batches is None else batches.look(*now)
        found = grads is None and resolve_grads(owned.params, self.use_decoupled_grad)
        if found and batches is not None:
            grads = batches.look(*now)
        check_captured_batches(owned.device, batches, grads is not None)
        if grads is None:
            batches = self._sort(owned, grads_of(owned.params, self.use_decoupled_grad))
            grads = batches.look(*now)
        if batches is None or grads is None:
            raise RuntimeError("batches made from the tensors at hand do not fit them")
        self._batches = batches
        return batches, grads

    def _sort(self, owned: Owned, grads: Grads) -> Batches:
        """Checks everything, completes the states, and makes the batches anew."""
        found = collect(owned, self.state, grads, self._check_param)
        self._writes.warn_without_masters(owned, found.states)
        commit(self.state, found.states)  # now that nothing was refused
        batches = make_batches(owned, self.state, found)
        self._writes.watch(owned, found.places)
        return batches

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients that the step reads, as torch.optim.Optimizer.zero_grad."""
        super().zero_grad(set_to_none)
        for param in self._owned.params if self.use_decoupled_grad else ():
            if set_to_none:
                param.decoupled_grad = None  # type: ignore[attr-defined]
            elif getattr(param, "decoupled_grad", None) is not None:
                param.decoupled_grad.zero_()  # type: ignore[attr-defined]

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
        return self._preparations.norm

    # --- groups and masters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch.optim.Optimizer does.

        Raises ValueError, TypeError, or RuntimeError for a device; then nothing has changed, the
        dict that was given included.
        """
        group, index, given = new_group(param_group), len(self.param_groups), dict(param_group)
        try:
            placement = taken_from(group, self.options, f"group {index}")
            super().add_param_group(group)
            self._homes.put(group["params"], placement)
            check_new_group(group, self.options, f"group {index}")
            for place, param in enumerate(group["params"]):
                self._check_param(param, self._owned.label(index, place))
            owned = self._owned
            if not self._is_being_made:
                owned.check_places()
            numbers = owned.device_numbers(self.param_groups) if self.options.capturable else []
            param_group.clear()
            param_group.update(group)
            self.param_groups[index] = param_group
            for own, new in zip(self.param_groups, numbers, strict=False):
                own.update(new)
        except BaseException:
            del self.param_groups[index:]
            param_group.clear()
            param_group.update(given)
            raise

    @property
    def master_weights(self) -> MasterWeights:
        """Whether weights have masters, or the list of external ones, as it was assigned.

        A list has, in group order, one tensor for each parameter (None for an fp32 weight), or for
        each that is not fp32. The tensors are used as they are: `state[p]["master_param"]` is the
        entry itself; one replaced in the list counts from the next step on. Raises ValueError for a
        list of another length, or an entry of wrong shape, dtype or device. Weights are compared
        with entries where they had no master before.
        """
        return self._master_weights

    @master_weights.setter
    def master_weights(self, masters: MasterWeights) -> None:
        Owned(self.param_groups, self.options, self.rule, masters, self._homes).check_masters()
        self._batches = None
        self._master_weights = masters
        self._writes.reset(self._owned.params)

    def refresh_masters(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Gives masters the values of weights that were written outside the optimizer.

        Elements whose weight is still the cast of their master keep every bit of it. A step does
        this by itself for writes that torch counts (`p._version`): load_state_dict, fill_, clamp_,
        copy_; and for `p.data = new`, by its address. Nobody sees writes in place to `p.data`, by
        collectives of torch.distributed (a broadcast), into Megatron's buffers, by other libraries'
        kernels, or within the replay of a CUDA graph: call this after them. A master that is kept
        as a remainder moves with its weight anyway.

        Args:
            params: parameters of this optimizer, else ValueError; None for all. Those without a
                master, or without state yet, are left as they are.
        """
        owned = self._owned
        if isinstance(params, torch.Tensor):
            refuse("params", "a list of parameters", params)
        chosen = range(len(owned.params)) if params is None else [owned.index(p) for p in params]
        for place in chosen:
            view = owned.views[place]
            refreshed(view, locals_of(self.state.get(view.param, {})), owned.formats(view))

    # --- states

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
        owned = self._owned
        index = owned.index(param)
        self._check_param(param, owned.labels[index])
        master = owned.formats(owned.views[index]).master
        own = {self.options.store_param_remainders, master.joined}
        where = f"{owned.labels[index]}, whose master is stored as {master.name}"
        one_of(f"store_param_remainders for {where},", store_param_remainders, (None, *own))
        commit(self.state, completed_states(owned, self.state, [index]))

    @torch.no_grad()
    def initialize_states(self) -> None:
        """Makes the state of every parameter complete, whether it has a gradient or not.

        Raises ValueError, and RuntimeError, as the first step would; then no state has changed.
        """
        owned = self._owned
        for param, label in zip(owned.params, owned.labels, strict=True):
            self._check_param(param, label)
        commit(self.state, completed_states(owned, self.state, range(len(owned.params))))

    @torch.no_grad()
    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """The fp32 value of a state tensor, whatever its format, of the parameter's shape.

        It is the tensor itself where it is stored as fp32, a new one otherwise; for a DTensor
        parameter a DTensor of its mesh and placements. A master that lies beside its weight is put
        together from both. A weight without a master gives its own value, and one that became fp32
        since the last step (model.float()) that of the master it had.

        Raises ValueError for a state that is not there, or yet: a step makes it, of parameters as
        makes_states says, and `initialize_state` of any.
        """
        return unscaled(self._owned, self.state, param, state_name)

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
        owned = self._owned
        if not (isinstance(param, torch.Tensor) and param in self.state):
            owned.index(param)
        set_scaled(owned, self.state, owned.view(param), state_name, unscaled_state)
        if state_name == MASTER:
            self._writes.versions.note(param)

    def state_dict(self) -> dict[str, Any]:
        """State and groups as torch.optim.Optimizer gives them, codes exactly as stored.

        Every group also names the contract and adam_w_mode, so that a load can refuse another.
        "not_made" says what states that are not complete lack, "written" which weights were written
        since the last step. torch's own optimizers load what to_torch_state_dict gives, not this.
        To get_optimizer_state_dict of torch.distributed.checkpoint a group names the contract by a
        tensor whose size goes by the formats: load compares sizes before it writes into the state.
        Raises ValueError where ranks differed in the last step, which then left it out.
        """
        self._hear()
        owned = self._owned.checked()
        packed, sized = super().state_dict(), is_asked_by_torch()
        return state_dicts.mark(packed, owned, self._writes.versions, sized)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over state and groups, bit for bit, never through another dtype.

        State dicts of TransformerEngine's FusedAdam and of torch's Adam and AdamW load too; what
        they keep in fp32 is stored in this optimizer's formats, and masters that they lack are made
        at the next step.

        Parameters are taken by their place; where both sides have param_names, these must agree.
        Post hooks come when the load is done: an error of one leaves the optimizer loaded.

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
        state_dicts.load(self, state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, torch.save and deepcopy: everything but the tables on the device.

        What comes back goes on with the same bits; but pickle keeps no Float8Weight's initial
        value, so that a master that the first step makes afterwards starts from the codes.
        """
        self._homes.wait()
        return {
            **super().__getstate__(),
            "state": defaultdict(dict, {p: picklable(own) for p, own in self.state.items()}),
            "options": self.options,
            "_master_weights": self._master_weights,
            "_homes": self._homes,
            "use_decoupled_grad": self.use_decoupled_grad,
            "_written": self._writes.versions.moved_anywhere(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes up what __getstate__ gave."""
        super().__setstate__(state)
        self._forget()
        self.state = States(dict, self.state)
        self._owned.keep_at_home(self.state)
        self._writes.reset(self._owned.params, vars(self).pop("_written", ()))
