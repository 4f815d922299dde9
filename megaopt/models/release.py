"""Steps each parameter as soon as its gradient is there, and frees the gradient.

A parameter has a step of its own: the optimizer's, over a group of this parameter alone, with its
batches kept from step to step. Numbers, states and masters are the optimizer's own objects.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megaopt.kernels.refusals import refuse, shown
from megaopt.kernels.shards import local_of
from megaopt.optimizer import FusedOptimizer
from megaopt.options.replicas import Replicas
from megaopt.params import view_of
from megaopt.state.masters import places_of
from megaopt.state.memory import NamedTensor, check_memory
from megaopt.state.numbers import given_numbers
from megaopt.state.owned import Owned, owned_of
from megaopt.state.tensors import written_tensors
from megaopt.step.collect import NO_GRADIENTS
from megaopt.step.request import Asked
from megaopt.step.stepper import Stepper

WHILE = "while gradients are released"
FSDP1 = "FullyShardedDataParallel"
RELEASED: weakref.WeakKeyDictionary[FusedOptimizer, GradientRelease] = weakref.WeakKeyDictionary()
"""The releases of optimizers that release gradients; an optimizer's copy does not."""


def release_gradients(
    model_or_params: nn.Module | Iterable[torch.Tensor], optimizer: FusedOptimizer
) -> GradientRelease:
    """Steps each parameter within the backward pass, as soon as its gradient is accumulated.

    The gradient is freed at once: few gradients are alive at a time. The bits are those of
    `optimizer.step()` after the backward pass. That call stays where it is, once after each
    backward pass: it counts the step, and steps parameters that were not chosen here. So
    schedulers, groups and state dicts work as always; zero_grad has nothing to do. Hooks of the
    optimizer's step run with that call.

    DTensors (FSDP2's) are stepped shard by shard. Of plain parameters that DistributedDataParallel
    sums up over ranks, the gradient would be that of one rank: a model that it wraps is refused;
    a list of its parameters is not, as they do not show it.

    Where states are in host memory, steps go to a stream of their own, while the backward pass goes
    on; what comes after the backward pass waits for them.

    Between backward pass and `optimizer.step()` weights are of this step and counts of the last:
    take state dicts after `optimizer.step()`. What looks at `.grad` in between finds none:
    torch.nn.utils.clip_grad_norm_ clips nothing, and zero_grad takes no backward pass back.

    Args:
        model_or_params: a model, of which the optimizer's parameters are meant; or some of the
            optimizer's parameters. Frozen ones (requires_grad=False) are left out.
        optimizer: of this package.

    Returns:
        What ends it: `remove()`.

    Raises:
        ValueError: what is chosen has no parameter of the optimizer, or one that is not its own, or
            an fp8 weight that other ranks share; the model is wrapped in DistributedDataParallel or
            FullyShardedDataParallel; the optimizer's gradients are released already; nonfinite is
            not "propagate", capturable or use_decoupled_grad is True. In `optimizer.step()`:
            clip_norm or clip_coefficient is given, or a GradScaler steps.
        RuntimeError: in the backward pass, a second gradient comes before `optimizer.step()`.
    """
    chosen = _chosen(model_or_params, optimizer)
    _check_options(optimizer)
    owned = optimizer._owned
    # every parameter as a step would check it
    for param in chosen:
        label = owned.labels[owned.index(param)]
        owned.check_param(param, label)
        if view_of(param).group is not None:
            raise ValueError(
                f"{label} must not be an fp8 weight that other ranks share, {WHILE}: they meet "
                "once a step, for all such weights"
            )
    # memory of all weights and states at once: steps of one parameter do not compare them
    owned.check_places()
    written: list[NamedTensor] = []
    for view, label in zip(owned.views, owned.labels, strict=True):
        param_state = optimizer.state.get(view.param, {})
        written += written_tensors(view, param_state, owned.state_names(view), label)
    check_memory(written)
    return GradientRelease(chosen, optimizer)


@dataclass
class _Spot:
    group: int
    place: int
    entry: int | None
    """Its master's place in the caller's list."""
    number: int
    """The parameter's number, for its random bits."""
    name: str


class GradientRelease:
    """The release of gradients that `release_gradients` begins; `remove()` ends it."""

    def __init__(self, params: Iterable[torch.Tensor], optimizer: FusedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # which holds this
        # where each parameter is among groups and masters, looked up again where these change
        self._known: tuple[Any, Any] = (None, None)
        """Groups and masters of the optimizer when its parameters were looked up."""
        self._numbers: list[Any] = []
        """The groups' param_numbers then, where something draws; how many masters were listed."""
        self._spots: dict[torch.Tensor, _Spot] = {}

        # a stepper for each parameter, with its batches
        self._alone: dict[torch.Tensor, Stepper] = {}
        self._counts: dict[torch.Tensor, int] = {}
        """The group's step count at which each parameter was stepped last."""
        # steps of states in host memory run on it
        self._side = SideStream()
        # autograd calls the hook once the gradient is accumulated
        hook = _hook(weakref.ref(self))
        param_list: list[Any] = list(params)  # torch's method has no types
        self._handles = [param.register_post_accumulate_grad_hook(hook) for param in param_list]
        self._handles.append(optimizer.register_step_pre_hook(_check_step))
        optimizer.stepper.writes.warning_keys.add(NO_GRADIENTS)  # they are gone at optimizer.step()
        RELEASED[optimizer] = self
        optimizer._is_released = True

    @property
    def active(self) -> bool:
        """Whether gradients are released."""
        return bool(self._handles)

    def remove(self) -> None:
        """Ends the release: from the next backward pass on gradients stay, for `optimizer.step()`.

        May be called at any time, also twice: after a backward pass `optimizer.step()` still
        counts it.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._alone.clear()
        optimizer = self._optimizer()
        if optimizer is not None and RELEASED.get(optimizer) is self:
            del RELEASED[optimizer]
            optimizer._is_released = False

    def join(self) -> None:
        """Makes this stream wait for all steps: work that comes next on it comes after them."""
        self._side.join()

    def step(self, param: torch.Tensor) -> None:
        """Steps one parameter that has its gradient, and frees the gradient."""
        optimizer = self._optimizer()
        if optimizer is None or param.grad is None:
            return
        # learning rates may have changed since the last backward pass
        optimizer.stepper.check_numbers(optimizer.param_groups)  # with the names of its groups
        # the group's count moves in optimizer.step(): a second gradient before it is refused
        spot = self._spot(optimizer, param)
        count = optimizer.param_groups[spot.group]["step"]
        if self._counts.get(param) == count:
            is_named = optimizer.param_groups[spot.group].get("param_names")
            label = repr(spot.name) if is_named else spot.name
            raise RuntimeError(
                f"parameter {label} must get one gradient between two calls of "
                f"optimizer.step() {WHILE}, got a second: several micro-batches need their sum, "
                "and a missing optimizer.step() counts no step"
            )

        # a group of this parameter alone, with the state that the optimizer has for it
        # steps of states in host memory, where the bus takes its time, go to a side stream
        homes = optimizer.stepper.homes
        is_beside = param.device.type == "cuda" and homes.of(param) is not None
        with self._side.after(local_of(param.grad)) if is_beside else nullcontext():
            stepper, group = self._own(optimizer, param, spot)
            stepper.step([group], {param: optimizer.state[param]}, Asked(), optimizer._check)
        # the step has written the weight: it is no external write; the gradient's memory is free
        optimizer.stepper.writes.note(param, optimizer.state)
        self._counts[param] = count
        param.grad = None

    def _spot(self, optimizer: FusedOptimizer, param: torch.Tensor) -> _Spot:
        """The place of the parameter now; a load makes new groups."""
        # groups and masters are the same objects, and param_numbers the same, since the last look
        now, spot = (optimizer.param_groups, optimizer.master_weights), self._spots.get(param)
        numbers = given_numbers(now[0]) if optimizer.options.draws else []
        numbers.append(len(now[1]) if isinstance(now[1], list) else None)
        is_known = all(map(operator.is_, now, self._known)) and numbers == self._numbers
        if is_known and spot is not None and spot.group < len(now[0]):
            group_params = now[0][spot.group]["params"]
            if spot.place < len(group_params) and group_params[spot.place] is param:
                return spot

        # looked up again for all parameters; steppers of old groups go
        owned = optimizer._owned
        owned.check_places()
        self._known, self._numbers, self._spots = now, numbers, _spots(owned)
        self._alone.clear()
        self._counts.clear()
        if param not in self._spots:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} must be the optimizer's {WHILE}, got "
                "one that is in no group any more: remove() the release first"
            )
        return self._spots[param]

    def _own(
        self, optimizer: FusedOptimizer, param: torch.Tensor, spot: _Spot
    ) -> tuple[Stepper, dict[str, Any]]:
        """The stepper of the parameter alone, and its group with the present numbers."""
        # the caller's list has an entry for this parameter, or none where it is its own master
        whole, masters = optimizer.stepper, optimizer.master_weights
        if isinstance(masters, (list, tuple)):
            masters = [] if spot.entry is None else [masters[spot.entry]]
        stepper = self._alone.get(param)
        if stepper is None:
            # without replicas: ranks would wait for each parameter's update by itself
            arguments = (masters, whole.homes, Replicas(), whole.writes.warning_keys)
            stepper = Stepper(whole.options, whole.rule, *arguments)
            stepper.writes.follow([param], (), whole.writes, optimizer.state)
            stepper.was_stepped = True  # no step of it asks which states there would be
            self._alone[param] = stepper
        if isinstance(stepper.masters, list) and isinstance(masters, list):
            stepper.masters[:] = masters  # an entry may have been replaced
        # numbers of the group as they are now; the number and name are the parameter's in the whole
        group = optimizer.param_groups[spot.group]
        numbers = [spot.number] if whole.options.draws else None
        named = {"param_numbers": numbers, "param_names": [spot.name]}
        return stepper, {**group, "params": [param], **named}


def _check_step(optimizer: FusedOptimizer, _: Any, arguments: dict[str, Any]) -> None:
    """Raises ValueError, before `optimizer.step()`, for what it is asked for too late."""
    for name in ("clip_norm", "clip_coefficient"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"{name} must be None {WHILE}, got {shown(arguments[name])}: the weights were "
                "stepped before the norm of all gradients could be known"
            )
    for name in ("grad_scale", "found_inf"):
        if getattr(optimizer, name, None) is not None:
            raise ValueError(
                f"{name} must not be set {WHILE}, got {shown(getattr(optimizer, name))}: the "
                "weights have taken the scaled gradients already; train without a GradScaler, "
                "or remove() the release"
            )
    _check_options(optimizer, is_new=False)
    RELEASED[optimizer].join()


def _hook(release: weakref.ref[GradientRelease]) -> Callable[[torch.Tensor], None]:
    """The function that autograd calls with a parameter; it keeps nothing alive."""

    def step(param: torch.Tensor) -> None:
        live_release = release()
        if live_release is not None:
            live_release.step(param)

    return step


def _spots(owned: Owned) -> dict[torch.Tensor, _Spot]:
    # entries: the place in the caller's list of each parameter's master; a list that does not fit
    # the parameters any more is refused
    owned.external_masters()
    masters: Any = owned.masters if owned.has_external_masters else ()
    places = places_of(masters, owned.views, owned.options) or []
    entries = {place: entry for entry, place in enumerate(places)}
    # index: the place among all parameters, in group order
    spots, index = {}, 0
    for number, group in enumerate(owned.groups):
        names = group.get("param_names") or [None] * len(group["params"])
        for place, param in enumerate(group["params"]):
            name = names[place] or f"{place} of group {number}"
            spots[param] = _Spot(number, place, entries.get(index), owned.numbers[index], name)
            index += 1
    return spots


# --- what is refused


def _chosen(chosen: Any, optimizer: FusedOptimizer) -> list[torch.Tensor]:
    """The parameters that are meant, once each; frozen ones have no gradients."""
    owned = owned_of(optimizer)
    if isinstance(chosen, nn.Module):
        # where nobody has imported FSDP1 there is none
        sharding = sys.modules.get("torch.distributed.fsdp")
        kinds = (DistributedDataParallel, *filter(None, [getattr(sharding, FSDP1, None)]))
        for module in chosen.modules():
            if isinstance(module, kinds):
                raise ValueError(
                    f"model must not be wrapped in {type(module).__name__} {WHILE}: its gradients "
                    "are those of one rank when they are accumulated; FSDP2's fully_shard works"
                )
        mine = set(owned.params)
        params: list[torch.Tensor] = [param for param in chosen.parameters() if param in mine]
    elif isinstance(chosen, torch.Tensor) or not isinstance(chosen, Iterable):
        refuse("model_or_params", "a model or a list of parameters", chosen)
    else:
        params = list(dict.fromkeys(chosen))
        for param in params:
            # raises for a parameter that is not the optimizer's
            owned.index(param)
    trainable_params = [param for param in params if param.requires_grad]
    if not trainable_params:
        raise ValueError(
            "model_or_params must have parameters of the optimizer that get gradients, got none"
        )
    return trainable_params


def _check_options(optimizer: FusedOptimizer, is_new: bool = True) -> None:
    if is_new and optimizer in RELEASED:
        raise ValueError(
            "optimizer must keep its gradients, got one whose gradients are released already: "
            "remove() what release_gradients gave first"
        )
    nonfinite, capturable = optimizer.options.nonfinite, optimizer.options.capturable
    decoupled = optimizer.use_decoupled_grad
    for name, allowed, value, reason in (
        ("nonfinite", "propagate", nonfinite, "a step cannot be left out when half of it is done"),
        ("capturable", False, capturable, "the host counts such steps"),
        ("use_decoupled_grad", False, decoupled, "autograd accumulates into p.grad"),
    ):
        if value != allowed:
            raise ValueError(f"{name} must be {allowed!r} {WHILE}, got {value!r}: {reason}")


class SideStream:
    """One stream a device; what is stepped there is done before what follows the backward pass."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._is_awaited = False

    @contextmanager
    def after(self, grad: torch.Tensor) -> Iterator[None]:
        """Sends the work within it to the side stream, behind all that the device was given so far.

        grad: what that work reads; its memory is not used again before.
        """
        device = grad.device
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        # the side stream waits for all that the current stream has so far, the gradient among it
        side.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            # the allocator keeps the gradient's memory until the side stream is past this point
            grad.record_stream(side)
            # once a backward pass: autograd calls join at its end
            if not self._is_awaited:
                self._is_awaited = True
                try:
                    torch.autograd.Variable._execution_engine.queue_callback(self.join)
                except RuntimeError:  # no backward pass is going on
                    self.join()

    def join(self) -> None:
        """Makes the current streams wait for what was stepped on the side."""
        self._is_awaited = False
        # the current stream of each device waits for the side stream, not the host
        for device, side in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(side)
