"""Writes to weights that the optimizer did not do, and 16-bit weights without masters.

torch counts a tensor's version up at every operation in place, those of load_state_dict, fill_ and
clamp_ included. The optimizer notes the counters after each of its steps and looks at them before
the next. `p.data = new` counts nothing, and is known by the address. A state may also come to a
parameter from another one (`state[q] = state.pop(p)`): the optimizer knows which master it compared
with which weight last. FusedAdam.refresh_masters says which writes are not seen.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch

from megaopt.options.placement import STEP
from megaopt.params import ParamView, view_of
from megaopt.params.dtensor import locals_of
from megaopt.state.owned import Owned
from megaopt.state.ownership import refreshed
from megaopt.state.tensors import MASTER
from megaopt.state.watch import is_plain_class

Spot = tuple[int, torch.dtype, torch.Size]
"""The address of a weight, its dtype, and its shape."""
States = Mapping[Any, Mapping[str, Any]]


class MissingMastersWarning(UserWarning):
    """16-bit weights are stepped without fp32 masters, and nobody asked for that."""


class ExternalWrites:
    """Notices weights that were written between steps, and warns once of what that means.

    It has the version counters of the parameters as they were after the last step, where the
    weights lay, and which masters they were compared with.

    Args:
        warning_keys: the keys of the warnings that were given, to share with others.
    """

    def __init__(self, warning_keys: set[str]) -> None:
        self.warning_keys = warning_keys
        self.unstepped: set[int] = set()
        """Ids of parameters whose masters were made here: until a step is counted, they follow."""
        self.follow([])

    def follow(
        self,
        params: Sequence[torch.Tensor],
        stepped: Iterable[int] = (),
        before: ExternalWrites | None = None,
        state: States | None = None,
    ) -> None:
        """Notes what is looked at from now on.

        Args:
            params: all parameters of the optimizer.
            stepped: places, among these, of those that the coming steps write.
            before: what was noted so far, here or elsewhere. Counters that it does not know are
                taken as they are now.
            state: the optimizer's; None: no state has a master yet.
        """
        # versions that were noted before go on, those of new tensors are taken as they are
        noted: dict[torch.Tensor, int] = {}
        if before is not None:
            tensors, row = before.counted
            noted = before._known | dict(zip(tensors, row.tolist(), strict=True))
        views, places = [view_of(param) for param in params], list(stepped)
        pairs = [(tensor, place) for place in places for tensor in views[place].counted]
        everything = [tensor for view in views for tensor in view.counted]
        versions = {tensor: noted.get(tensor, tensor._version) for tensor in everything}
        # where weights lay, and the master of each: both outlive the batches
        spots = {} if before is None else before._spots
        new_spots = {view.param: spots.get(view.param, _spot(view)) for view in views}
        compared = {} if before is None else before.compared
        states: States = {} if state is None else state
        unmatched = set() if before is None else before._all_unmatched(params, states)
        # int64, in the order of the tensors: compared, and counted up, by the extension
        tensors = [tensor for tensor, _ in pairs]
        row = numpy.array([versions[tensor] for tensor in tensors], dtype=numpy.int64)

        self._params, self._stepped = params, places
        self._known: dict[torch.Tensor, int] = versions
        self.counted: tuple[list[torch.Tensor], numpy.ndarray] = (tensors, row)
        """The tensors whose counters count writes to stepped weights, and the versions noted."""
        self._places = [place for _, place in pairs]
        self._rows = {tensor: index for index, tensor in enumerate(tensors)}
        self._spots: dict[torch.Tensor, Spot | None] = new_spots
        self.compared: dict[torch.Tensor, weakref.ref[torch.Tensor]] = {
            param: compared[param] for param in params if param in compared
        }
        """The master that each weight was compared with last."""
        self.unmatched: set[torch.Tensor] = unmatched
        """Parameters that have to be compared with their masters, whatever was written."""

    def reset(
        self, params: Iterable[torch.Tensor], state: Mapping[Any, Any], written: Iterable[int] = ()
    ) -> None:
        """Notes that weights and masters are as they should be, but for those at `written`."""
        param_list = list(params)
        self.follow(param_list)
        self.match(param_list, state)
        # these have to be compared with their masters
        self.unmatched.update(param_list[place] for place in written)

    def _all_unmatched(self, params: Iterable[torch.Tensor], state: States) -> set[torch.Tensor]:
        """Returns the parameters that have a master, and were not compared with it.

        Another master in the state of the same parameter is the user's own, and counts as it is.
        """
        masters = ((param, master()) for param, master in self.compared.items())
        # masters that still exist, by their ids: whose they were
        owners = {id(master): param for param, master in masters if master is not None}
        unmatched_params = set()
        for param in params:
            # a master that came from another parameter, or that is new here, was not compared
            master = state.get(param, {}).get(MASTER)
            is_known = param in self.compared and owners.get(id(master), param) is param
            if param in self.unmatched or not (master is None or is_known):
                unmatched_params.add(param)
        return unmatched_params

    def moved_anywhere(self, params: Sequence[torch.Tensor], state: States) -> list[int]:
        """Places, among these parameters, of all that somebody has written or replaced since."""
        # for all parameters, those without a gradient included
        (tensors, row), unmatched = self.counted, self._all_unmatched(params, state)
        noted = self._known | dict(zip(tensors, row.tolist(), strict=True))
        return [
            place
            for place, param in enumerate(params)
            if any(noted.get(t, t._version) != t._version for t in view_of(param).counted)
            or param in unmatched
            or self._is_replaced(param)
        ]

    def _is_replaced(self, param: torch.Tensor) -> bool:
        """Whether other memory is in a weight's place, of the same dtype: half() is no write."""
        now, before = _spot(view_of(param)), self._spots.get(param)
        return bool(now and before and now != before and now[1] == before[1])

    def match(self, params: Iterable[torch.Tensor], state: States) -> None:
        """Notes that the masters in these parameters' states are those of their weights."""
        param_list = list(params)
        masters = {param: state.get(param, {}).get(MASTER) for param in param_list}
        self.compared.update({p: weakref.ref(m) for p, m in masters.items() if m is not None})
        self.unmatched.difference_update(param_list)

    def note(self, param: torch.Tensor, state: States) -> None:
        """Notes that weight and master are as they should be now, whatever was written."""
        view = view_of(param)
        self._spots[param] = _spot(view)
        self.match([param], state)
        for tensor in view.counted:
            # the row that the watch compares is another place for the same number
            self._known[tensor] = tensor._version
            if tensor in self._rows:
                self.counted[1][self._rows[tensor]] = tensor._version

    # --- what is done about writes

    def take_moved(
        self, owned: Owned, state: Mapping[Any, Any], written: Sequence[int], elsewhere: bool
    ) -> None:
        """Takes over what was written, or put in a weight's place, since the last step.

        written: which of the counted tensors; elsewhere: whether a weight lies elsewhere.
        """
        # places of stepped parameters: counted writes, then what no counter tells
        places = {self._places[index] for index in written}
        stepped = {place: self._params[place] for place in self._stepped}
        for place, param in stepped.items() if elsewhere else ():
            if param in self.unmatched or self._is_replaced(param):
                places.add(place)
        self.take_over(owned, state, sorted(places))
        # masters go with the stepped weights where these lie now
        self._spots.update({param: _spot(view_of(param)) for param in stepped.values()})
        self.match(stepped.values(), state)

    def take_over(self, owned: Owned, state: Mapping[Any, Any], places: list[int]) -> None:
        """Gives masters the values that others wrote into the weights at these places.

        Raises RuntimeError instead with on_external_write="error". Masters that no step has
        written yet, as those that torch.distributed.checkpoint asks for, follow their weights
        without a word.
        """
        # "ignore" leaves masters alone, which put old values back in this step
        policy = owned.options.on_external_write
        if policy == "ignore":
            return
        for place in places:
            view, label = owned.views[place], owned.labels[place]
            param_state = locals_of(state.get(view.param, {}))
            if param_state.get(MASTER) is None:
                continue
            # a master made here that no step has counted: it follows without a word
            if id(view.param) in self.unstepped and not owned.options.capturable:
                count: Any = param_state.get(STEP)
                if count is None:
                    count = owned.groups[owned.group_numbers[place]][STEP]
                if not int(count):
                    with torch.no_grad():
                        refreshed(view, param_state, owned.formats(view))
                    continue
            with torch.no_grad():
                # with "error" it only looks
                is_written = refreshed(
                    view, param_state, owned.formats(view), only_look=policy == "error"
                )
            if policy == "error" and bool(is_written):
                raise RuntimeError(
                    f"{label} must not be written between steps with "
                    "on_external_write='error', got elements that are no cast of their master; "
                    "refresh_masters() takes them over"
                )
            # under capturable the host does not wait to know
            if not ("written" in self.warning_keys or owned.options.capturable) and bool(
                is_written
            ):
                self.warning_keys.add("written")
                warn_caller(
                    f"{label} was written outside the optimizer: its master takes the "
                    "written values. on_external_write='error' refuses such writes, 'ignore' puts "
                    "the old values back"
                )

    def warn_of_lost_masters(self, owned: Owned, params: Iterable[torch.Tensor]) -> None:
        """Warns once where states were deleted with their masters, and new ones are made."""
        # those that had been compared with a master, and come without one
        lost = [param for param in params if param in self.compared]
        if lost and "lost masters" not in self.warning_keys:
            self.warning_keys.add("lost masters")
            warn_caller(
                f"{len(lost)} parameters ({owned.labels[owned.index(lost[0])]} the first) have no "
                "master any more, which was in the state: a new one starts from the weight as it "
                "is rounded, and the group's step count goes on. optimizer.reset_moments() begins "
                "anew with moments and counts, and keeps masters"
            )

    def warn_without_masters(self, owned: Owned, params: Iterable[torch.Tensor]) -> None:
        """Warns once where nobody said whether 16-bit weights are to have masters."""
        is_chosen = owned.options.dtype is not None or owned.masters is not None
        drawn = owned.options.weight_rounding == "stochastic"  # then no update is lost
        if is_chosen or drawn or "no masters" in self.warning_keys:
            return
        labels = dict(zip(owned.params, owned.labels, strict=True))
        short = [labels[p] for p in params if p.dtype in (torch.bfloat16, torch.float16)]
        if short:
            self.warning_keys.add("no masters")
            warn_caller(
                f"{len(short)} parameters ({short[0]} the first) are 16-bit and have no fp32 "
                "master: updates smaller than half a unit in a weight's last place are lost, and "
                "at common learning rates weights stand still. Pass dtype=torch.float32 for fp32 "
                "masters (or set optimizer.master_weights = True before the first step), "
                "weight_rounding='stochastic' to lose none in the mean, or master_weights=False to "
                "train without",
                MissingMastersWarning,
            )

    def hint(self, messages: Mapping[str, str]) -> None:
        """Warns of what may be a mistake, once for each key.

        messages: by key.
        """
        for key, message in messages.items():
            if f"key {key}" not in self.warning_keys:
                self.warning_keys.add(f"key {key}")
                warn_caller(message)


def _spot(view: ParamView) -> Spot | None:
    """Returns the spot of a weight; None where nobody says what writes it."""
    if not view.counted:
        return None
    codes = view.codes
    is_memory = is_plain_class(type(codes)) and codes.layout == torch.strided
    return (codes.data_ptr(), codes.dtype, codes.shape) if is_memory else None


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line that called into this package, past torch's wrappers of step()."""
    # up the stack to the first frame outside
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in (
        "megaopt",
        "torch",
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
