"""The fused optimizer: gathers weights, gradients and state, and hands them to the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from megaopt.kernels.refusals import one_of, refuse, shown
from megaopt.kernels.rules import Rule
from megaopt.kernels.shards import local_of
from megaopt.kernels.untraced import torchs, unless_heard, untraced
from megaopt.options.choices import MasterWeights
from megaopt.options.groups import States, check_new_group, entries_of, hints_of, taken_from
from megaopt.options.options import MISSING, Options
from megaopt.options.overwriting import overwrite
from megaopt.options.placement import Homes, placement_of
from megaopt.options.replicas import Replicas, checked_replicas
from megaopt.params.dtensor import locals_of
from megaopt.params.flat import FLAT, PARTS
from megaopt.state.masters import check_master_weights
from megaopt.state.owned import Owned
from megaopt.state.ownership import refreshed
from megaopt.state.tensors import MASTER, clear_moments, picklable
from megaopt.step.counts import restart
from megaopt.step.probing import is_asked_by_torch
from megaopt.step.request import Asked
from megaopt.step.stages import norm_of
from megaopt.step.stepper import Stepper

if TYPE_CHECKING:
    from megaopt.kernels.digest.launch import StepDigests


class FusedOptimizer(torch.optim.Optimizer):
    """Owns the step of every parameter it is given; a subclass names the update rule.

    `state[p]` holds the rule's moments and `master_param` (None where there is no master, as for an
    fp32 weight), each in its storage format; a format with a scale per tensor adds `<name>_scale`.
    State appears at a step, by `initialize_state`, or by a load: nothing is bound to the parameters
    before, so `param_groups` may be replaced after construction.
    """

    use_decoupled_grad: bool = False
    """Read `p.decoupled_grad` instead of `p.grad`; may be assigned at any time."""
    step_unscales: bool = False
    """Whether torch.amp.GradScaler leaves it to the step to unscale gradients as it reads them, and
    to leave itself out after an overflow; may be assigned at any time. So fp16 gradients can be
    stepped, and under capturable the host waits for nothing; but Lightning refuses to clip then,
    and Accelerate does not see that a step was skipped, as with torch.optim.AdamW(fused=True). A
    GradScaler sees no decoupled gradients, and leaves these to the step in any case."""
    _is_being_made = False
    _is_released = False
    """The backward pass steps parameters: a GradScaler's scale has to reach the step, which refuses
    it."""
    _given: set[int] | None = None
    """id() of each parameter that an optimizer with a rule for whole matrices was given; None in
    copies, which do not know, and in other optimizers."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        options: Options,
        master_weights: MasterWeights,
        replicas: Any = None,
    ) -> None:
        self.options = options
        # by these ids it is seen when others replace matrices by flat tensors
        self._given = None if options.MATRIX is None else set()
        # filled by `add_param_group`, which torch's constructor calls for each group
        homes = Homes(placement_of(options.state_device))
        copies = Replicas(checked_replicas(replicas))
        self.stepper = Stepper(options, self.rule, None, homes, copies)
        # checks over all parameters wait until all groups are there
        self._is_being_made = True
        super().__init__(entries_of("params", params), {**defaults, **options.group_keys})
        self._is_being_made = False
        # torch has made a plain defaultdict; masters are checked against all groups at once
        self.state = States(dict)
        self.master_weights = master_weights
        if options.draws:
            self._owned.check_places()  # once: it looks at all parameters

    @property
    def rule(self) -> Rule:
        """The update rule under the optimizer's contract."""
        raise NotImplementedError

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler, Lightning and Fabric ask for it by this name."""
        return self.step_unscales or self.use_decoupled_grad or self._is_released

    @property
    def _owned(self) -> Owned:
        return self.stepper.owned(self.param_groups)

    def _check(self, owned: Owned, places: Iterable[int]) -> None:
        """Raises for parameters that the optimizer cannot own, before a step changes anything."""
        # optimizers around this one put flat tensors in the place of the matrices that were given
        # (DeepSpeed's ZeRO, Megatron's distributed optimizer), which do not say what they were
        if self._given is not None:
            key, off = self.options.MATRIX_OFF
            for index, group in enumerate(owned.groups):
                params, value = group["params"], group.get(key)
                # all are flat, none was given to the constructor, and nothing says what they are of
                is_flat = bool(params) and all(
                    param.dim() == 1 and not hasattr(param, PARTS) and id(param) not in self._given
                    for param in params
                )
                if is_flat and value is not off:
                    refuse(
                        f"group {index}: {key}", f"{off} beside tensors of one dimension that were "
                        f"put in the place of the parameters given: each may be a {FLAT}", value,
                    )  # fmt: skip
        for place in places:
            self._check_param(owned.params[place], owned.labels[place])

    def _check_param(self, param: torch.Tensor, label: str) -> None:
        """Raises ValueError or RuntimeError for a parameter that the optimizer cannot own."""
        self._owned.check_param(param, label)

    # --- the step

    def _patch_step_function(self) -> None:
        """Puts torch's hooks and its range for profiles around the step where they are heard of."""
        # torch wraps the class's step once, for all optimizers of it
        kind: Any = type(self)
        step = kind.step
        super()._patch_step_function()
        if kind.step is not step:
            kind.step = unless_heard(step, kind.step)

    @untraced  # to trace a step takes torch.compile half a minute, and gains nothing
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        clip_norm: float | None = None,
        clip_coefficient: torch.Tensor | None = None,
    ) -> Any:
        """Updates every parameter that has a gradient.

        torch.amp.GradScaler unscales the gradients, and leaves the step out after an overflow, as
        with torch.optim.AdamW. With `step_unscales` it sets `grad_scale` and `found_inf` on the
        optimizer instead: the step unscales the gradients as it reads them, and an overflow leaves
        everything as it is. Without capturable the host waits for found_inf.

        With DTensors, a first step with lr=0 in all groups and gradients that are 0 on all ranks
        makes the state and nothing else: so torch.distributed.checkpoint asks which state there is.

        Args:
            closure: reevaluates the model and returns the loss.
            clip_norm: the largest L2 norm of all gradients together (of DTensors, on all ranks,
                which have to take the step together); larger ones count multiplied
                by clip_norm / (norm + 1e-6), as torch.nn.utils.clip_grad_norm_ multiplies them, but
                stay as they are themselves. `grad_norm` then has the norm. Nothing waits for it.
            clip_coefficient: instead, what gradients are multiplied by, of a norm over other ranks'
                gradients too, say: on the parameters' device one fp32 number, or one for each
                group, of shape (groups,).

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a gradient, parameter, state tensor or hyper-parameter cannot be used; then
                no weight, no state and no step count has changed. Where ranks share matrices, also
                on all of them if options, groups or parameters differ before the first step, which
                they compare then; of GaLoreAdamW and FusedMuon. With a norm over ranks, and with
                fp8 weights that ranks share, also on all ranks where they do not step the same or
                one raises an error: nothing has changed then either, except that a first step has
                made the state. On a GPU a rank that did not change itself raises it in its next
                step or state_dict, and has left this one out.
            FloatingPointError: nonfinite="error", and an infinity or NaN is among the gradients;
                then nothing has changed either, except that a first step has made the state.
            RuntimeError: a CUDA graph captures what it cannot repeat.
            TypeError: closure is no function.
        """
        if not (closure is None or callable(closure)):
            raise TypeError(
                f"closure must be None or a function that gives the loss, got {shown(closure)}"
            )
        # gradients are made in here, before anything of the step looks at them
        loss = None if closure is None else torch.enable_grad()(closure)()
        # attributes that a GradScaler sets around the step, and deletes behind it
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        arguments = (clip_norm, clip_coefficient, grad_scale, found_inf, self.use_decoupled_grad)
        self.stepper.step(self.param_groups, self.state, Asked(*arguments), self._check)
        return loss

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients that the step reads, as torch.optim.Optimizer.zero_grad."""
        # torch clears .grad; decoupled gradients are cleared here
        torchs("zero_grad")(self, set_to_none)
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
        return norm_of(self.stepper.preparations)

    def record_digests(self, quantities: Iterable[str] | None, *, passes: bool = True) -> None:
        """Lets later steps find the digests of what they read and store (see `digests`).

        On a GPU the step's launch sums them up, where no scale of its own has to be known first;
        elsewhere passes of their own do, with the same result. Nothing is waited for.

        Args:
            quantities: of "grad", as the step finds it, "weight", "master_param", the moments'
                names ("exp_avg"), and with "_scale" behind them what belongs to their codes; all as
                they are stored. What a parameter does not have is left out. None: no digests.
            passes: whether passes of their own make what launches do not sum up; otherwise that is
                left out of `digests`.

        Raises ValueError for another name.
        """
        self.stepper.record_digests(quantities, passes)

    @property
    def digests(self) -> list[StepDigests]:
        """The digests of the last step, for each kind of parameter that was stepped alike.

        Each has `params`, `quantities` and `lanes`, int64 [params, quantities, 2]: what
        megaopt.digest gives for the stored tensor; of DTensors this rank's shard at its place. The
        next step writes into the same memory. Of a step that is left out they are those of what
        stayed. Empty before the first step behind `record_digests`.
        """
        return self.stepper.digests

    # --- groups and masters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch.optim.Optimizer does.

        Keys that no step reads are kept, saved and loaded. A warning, one for each, names those
        that may be misspelled, or that ask for another optimizer of this package.

        Raises ValueError, TypeError, or RuntimeError for a device; then nothing has changed, the
        dict that was given included.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"param_group must be a dict with 'params', got {shown(param_group)}")
        # a copy is changed, and the caller's dict only at the end: an error leaves both as they
        # were
        index, snapshot = len(self.param_groups), dict(param_group)
        group = {**param_group, "params": entries_of("params", param_group["params"])}
        homes, copies = self.stepper.homes.groups, self.stepper.replicas.groups
        try:
            # keys that are no numbers of a step are taken out: where states live, who has copies
            placement, ranks = taken_from(group, self.options, f"group {index}")
            group |= {k: v for k, v in self._group_defaults(group).items() if k not in group}
            # torch checks the parameters, fills in defaults, and appends the group
            torchs("add_param_group")(self, group)
            for param in group["params"]:
                for by_param, choice in ((homes, placement), (copies, ranks)):
                    by_param.pop(param, None)
                    if choice is not MISSING:
                        by_param[param] = choice
            # numbers of the group, then each of its parameters
            check_new_group(group, self.options, f"group {index}")
            owned = self._owned
            for place, param in enumerate(group["params"]):
                self._check_param(param, owned.label(index, place))
            # all groups together: random bits that two parameters would share
            if self.options.draws and not self._is_being_made:
                owned.check_places()
            # under capturable lr and step of all groups become tensors on the device
            numbers = owned.device_numbers(self.param_groups) if self.options.capturable else []
            # all checks are done: the caller's own dict becomes the group
            param_group.clear()
            param_group.update(group)
            self.param_groups[index] = param_group
            for stored_group, new in zip(self.param_groups, numbers, strict=False):
                stored_group.update(new)
            if self._given is not None:
                self._given.update(map(id, param_group["params"]))
            self.stepper.writes.hint(hints_of(snapshot, self.options, f"group {index}"))
        except BaseException:
            # after Ctrl-C, too: groups and the caller's dict are as they were
            del self.param_groups[index:]
            param_group.clear()
            param_group.update(snapshot)
            raise

    def _group_defaults(self, group: dict[str, Any]) -> dict[str, Any]:
        """Gives what a new group lacks, beside the defaults that torch knows of."""
        return {}

    @property
    def master_weights(self) -> MasterWeights:
        """Whether weights have masters, or the list of external ones, as it was assigned.

        May be assigned: True gives each weight that is not fp32 a master, also under another
        library's names, whose arguments know none. A list has, in group order, one tensor for each
        parameter (None for an fp32 weight), or for each that is not fp32. The tensors are used as
        they are: `state[p]["master_param"]` is the entry itself; one replaced in the list counts
        from the next step on. Raises ValueError for a list of another length, or an entry of wrong
        shape, dtype or device. Weights are compared with entries where they had no master before.
        """
        return self.stepper.masters

    @master_weights.setter
    def master_weights(self, masters: MasterWeights) -> None:
        # checked as if they were assigned already
        options, writes, owned = self.options, self.stepper.writes, self._owned
        arguments = (owned.rule, masters, owned.homes, owned.replicas)
        assigned = Owned(owned.groups, options, *arguments)
        views, labels, has_masters = assigned.views, assigned.labels, assigned.wants_masters
        check_master_weights(masters, views, labels, options)
        if options.weight_rounding == "stochastic" and has_masters:
            raise ValueError(
                "weight_rounding='stochastic' is for weights without masters: leave it out, or "
                "pass master_weights=False and no dtype"
            )
        kind, remainders = options.master_weight_dtype, options.store_param_remainders
        if isinstance(kind, str) and not has_masters:
            raise ValueError(
                f"master_weight_dtype={kind!r} needs masters to keep: pass master_weights=True"
            )
        if remainders and not has_masters:
            raise ValueError(
                "store_param_remainders=True needs masters to keep: pass master_weights=True or "
                "dtype=torch.float32"
            )
        # kinds of parameters that these options cannot step
        for view, label in zip(views, labels, strict=True):
            if not view.is_idle:
                view.check(label, options, assigned.moments(view), has_masters)
        if remainders and views and all(view.param.dtype != torch.bfloat16 for view in views):
            raise ValueError(
                "store_param_remainders=True needs torch.bfloat16 weights; none of the "
                f"{len(views)} parameters is"
            )
        # masters made here take the values of weights that were written since the last step
        is_list = isinstance(masters, (list, tuple))  # whose entries are used as they are
        written = () if is_list else writes.moved_anywhere(owned.params, self.state)
        self.stepper.masters = masters
        self.stepper.reset(owned, self.state, written)

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
        # a tensor would be taken for the list of its rows
        owned = self._owned
        if isinstance(params, torch.Tensor):
            refuse("params", "a list of parameters", params)
        chosen = range(len(owned.params)) if params is None else [owned.index(p) for p in params]
        # parameters with a state; a master lies beside it
        for place in chosen:
            view = owned.views[place]
            if self.state.get(view.param):
                refreshed(view, locals_of(self.state[view.param]), owned.formats(view))

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
        master = owned.formats(owned.views[index]).master
        allowed = {self.options.store_param_remainders, master.joined}
        where = f"{owned.labels[index]}, whose master is stored as {master.name}"
        one_of(f"store_param_remainders for {where},", store_param_remainders, (None, *allowed))
        self.stepper.make_states(self.param_groups, self.state, [index], self._check)

    @torch.no_grad()
    def initialize_states(self) -> None:
        """Makes the state of every parameter complete, whether it has a gradient or not.

        Frozen ones of a kind that nothing steps (codes of int8, say) have none.

        Raises ValueError, and RuntimeError, as the first step would; then no state has changed.
        """
        # frozen parameters of a kind that nothing steps are passed over
        places = [i for i, view in enumerate(self._owned.views) if not view.is_idle]
        self.stepper.make_states(self.param_groups, self.state, places, self._check)

    @torch.no_grad()
    def reset_moments(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Begins anew with moments and step counts; weights and masters stay as they are.

        Moments, and what is kept with them (GaLore's projections, NorMuon's second moment), become
        what they are before a first step, in the memory that they have; other keys of a state stay.
        The next update is a first one, as its bias correction is. A state that is deleted instead
        (`del optimizer.state[p]`) loses its master too. On ranks that share parameters all call it.

        Args:
            params: parameters of this optimizer; None for all. Those without a state yet are left
                as they are.

        Raises ValueError for other tensors; and where parameters count the steps of their group
        (step_counts="group"), for some of a group whose others have a state. Nothing has changed
        then.
        """
        # a difference between ranks takes its step's count back, before counts begin anew
        self.stepper.hear(self.param_groups)
        owned = self._owned
        if isinstance(params, torch.Tensor):
            refuse("params", "a list of parameters", params)
        chosen = range(len(owned.params)) if params is None else [owned.index(p) for p in params]
        # counts first, which may be refused; then moments, once copies to host memory are done
        restart(owned, self.state, chosen)
        owned.homes.wait()
        for view in map(owned.views.__getitem__, chosen):
            if self.state.get(view.param):
                clear_moments(locals_of(self.state[view.param]), view, owned.formats(view))

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
        from megaopt.state.access import unscaled

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
        from megaopt.state.access import set_scaled

        # a parameter that is in no group any more may still have a state
        owned = self._owned
        if not (isinstance(param, torch.Tensor) and param in self.state):
            owned.index(param)
        set_scaled(owned, self.state, owned.view(param), state_name, unscaled_state)
        # weight and master are alike now: the next step takes no write for somebody else's
        if state_name == MASTER:
            self.stepper.writes.note(param, self.state)

    def state_dict(self) -> dict[str, Any]:
        """State and groups as torch.optim.Optimizer gives them, codes exactly as stored.

        Every group also names the contract and what else a state's bits depend on, as adam_w_mode,
        so that a load can refuse another.
        "not_made" says what states that are not complete lack, "written" which weights were written
        since the last step. torch's own optimizers load what to_torch_state_dict gives, not this.
        As torch's, it has the optimizer's own tensors, and step counts as tensors, which go on as
        long as somebody keeps it: all of it is of now, but for the other numbers of groups.
        copy.deepcopy keeps what it is now. With capturable=True and step_counts="parameter" the
        counts of parameters are copies.

        What others keep in a parameter's state, or under a text in `state`, is there as it is. The
        state of a parameter that is in no group any more is left out, with a warning.

        To get_optimizer_state_dict of torch.distributed.checkpoint a group names the contract by a
        tensor whose size goes by the formats: load compares sizes before it writes into the state.
        States that lack something (masters that were asked for late) are completed before.

        Raises ValueError where ranks differed in the last step, which then left it out; and for a
        state that no load would take, as of a group that asks for another rule since.
        """
        from megaopt.saving import state_dict as state_dicts

        # sized: torch.distributed.checkpoint compares sizes, and loads into what is there
        self.stepper.hear(self.param_groups)
        owned, sized = self._owned, is_asked_by_torch()
        _ = owned.params  # an error where something else is among them
        places = state_dicts.incomplete(owned, self.state) if sized else []
        if places:
            with torch.no_grad():
                self.stepper.make_states(self.param_groups, self.state, places, self._check)
        writes, state = self.stepper.writes, self.state
        # names of another count than the parameters say nothing
        for index, group in enumerate(owned.groups):
            if not state_dicts.has_its_names(group):
                message = (
                    f"group {index}: param_names must be a list of {len(group['params'])} names, "
                    f"got {shown(group['param_names'])}: left out of the state dict"
                )
                writes.hint({"param_names": message})
        # states of parameters that have left the groups, whose places torch could not name: it
        # packs self.state, which is without them for this call
        params = {*owned.params}
        left = [key for key in state if isinstance(key, torch.Tensor) and key not in params]
        if left:
            message = (
                f"{len(left)} parameters with a state are in no group any more, the first of shape "
                f"{tuple(left[0].shape)}: their states are left out of the state dict. "
                "requires_grad=False freezes a parameter and keeps its state there"
            )
            writes.hint({"params": message})
            gone = {*left}
            self.state = States(dict, {key: state[key] for key in state if key not in gone})
        try:
            packed: dict[str, Any] = torchs("state_dict")(self)
        finally:
            self.state = state
        return state_dicts.mark(packed, owned, writes, self.stepper.given_counts, sized)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over state and groups, bit for bit, never through another dtype.

        State dicts of TransformerEngine's FusedAdam and of torch's Adam and AdamW load too; what
        they keep in fp32 is stored in this optimizer's formats, and masters that they lack are made
        at the next step.

        What others keep in states and groups comes back as it was saved, tensors of it on the
        parameter's device.

        Parameters are taken by their place; where both sides have param_names, these must agree,
        apart from the parts that wrappers put there (`_orig_mod.`, `module.` in front, ...).
        Post hooks come when the load is done: an error of one leaves the optimizer loaded.

        Raises:
            ValueError: a state dict of another contract, format, group size or tensor shape, with
                other names, a number out of range, or a state that is missing; another rule for
                matrices than a group asks for (use_muon, rank); and a master of the caller's that
                cannot be written. After this and any other error nothing has
                changed.
        """
        from megaopt.saving import state_dict as state_dicts

        if isinstance(state_dict, Mapping):
            state_dict = dict(state_dict)  # a hook may write into it
        # as torch: a hook may return another dict
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        owned = self._owned
        # everything is made beside what there is: an error changes nothing
        with torch.inference_mode(False):  # later steps write what a load makes
            loaded = state_dicts.load(state_dict, owned, self.state)
        self.stepper.writes.hint(loaded.hints)
        new = {"state": loaded.states, "param_groups": loaded.groups}
        # the caller's masters are written in place; behind them states and groups change at once
        overwrite(loaded.masters, lambda: vars(self).update(new))
        self.stepper.given_counts.remaining.clear()  # as are the moments in state dicts of before
        # batches and versions are of tensors that are gone
        self.stepper.reset(self._owned, self.state, loaded.written)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Returns all but the tables on the device, for pickle, torch.save and deepcopy.

        What comes back goes on with the same bits; but pickle keeps no Float8Weight's initial
        value, so that a master that the first step makes afterwards starts from the codes, and no
        `replicas`: process groups are of a process.
        """
        # the device may still write states in host memory
        self.stepper.homes.wait()
        return {
            **super().__getstate__(),
            "state": defaultdict(
                dict, {key: picklable(entry) for key, entry in self.state.items()}
            ),
            "options": self.options,
            "_masters": self.master_weights,
            "_homes": self.stepper.homes,
            "_replicas": self.stepper.replicas,
            "use_decoupled_grad": self.use_decoupled_grad,
            "step_unscales": self.step_unscales,
            "_written": self.stepper.writes.moved_anywhere(self._owned.params, self.state),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes up what __getstate__ gave."""
        super().__setstate__(state)
        # the stepper is made anew, as no table on the device comes back
        attributes = vars(self)
        masters, homes, written = (attributes.pop(f"_{n}") for n in ("masters", "homes", "written"))
        replicas = attributes.pop("_replicas", Replicas())  # not in pickles of before
        self.stepper = Stepper(self.options, self.rule, masters, homes, replicas)
        self.state = States(dict, self.state)
        # unpickled states are in memory that is not pinned: new tensors there with the same bits,
        # of each parameter with a state in host memory; the caller's masters stay where they are
        owned = self._owned
        places = [
            i for i, view in enumerate(owned.views) if view.home and self.state.get(view.param)
        ]
        with owned.room({}, places):
            for view in map(owned.views.__getitem__, places):
                param_state = self.state[view.param]
                new = {
                    name: view.keep(name, local_of(value))
                    for name, value in param_state.items()
                    if isinstance(value, torch.Tensor) and view.is_apart(name)
                    if name in owned.state_names(view)
                    if name != MASTER or not owned.has_external_masters
                }
                param_state.update(view.wrap_state(new))
        self.stepper.reset(owned, self.state, written)
