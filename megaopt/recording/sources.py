"""The tensors of an optimizer, by parameter and quantity, whatever class it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megaopt.kernels.native import same_objects
from megaopt.kernels.shards import PLAIN, local_of
from megaopt.recording.looks import Looked, Looks, SameStates, same_params
from megaopt.recording.places import Known, ParameterRole, Parameters, of_state
from megaopt.recording.table import MASTER, Array, Launched, Listed, Number, Rows, Samples, held

RENAMED = {
    MASTER: "master",
    **dict.fromkeys(("data8", "_data", "_rowwise_data"), "codes"),
    **dict.fromkeys(("_scale_inv", "_rowwise_scale_inv"), "scale_inv"),
}
"""The recording's names of quantities, by those of libraries, where they differ."""
OWN = ("grad", "weight", "codes", "scale_inv", "forward", "backward")
"""Quantities of the recording that a state's key must not be taken for."""
FOREIGN = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")
"""Tensors of TransformerEngine's quantized ones."""


def flattened(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value: those of lists and dicts, and the inner ones of subclasses."""
    if isinstance(value, torch.Tensor):
        local = local_of(value)
        inner: Sequence[str] = ()
        if hasattr(local, "__tensor_flatten__"):
            inner = local.__tensor_flatten__()[0]
        elif type(local) not in PLAIN:
            inner = [a for a in FOREIGN if isinstance(getattr(local, a, None), torch.Tensor)]
        if not inner:
            yield name, local
        for attribute in inner:
            inner_name = f"{name}.{RENAMED.get(attribute, attribute)}"
            yield from flattened(inner_name, getattr(local, attribute))
    elif isinstance(value, (list, tuple, Mapping)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, element in items:
            yield from flattened(f"{name}.{key}", element)


CPU = torch.device("cpu")
Named = tuple[Known, str, torch.Tensor, torch.Tensor]
"""A tensor's name, shape and pieces, its quantity, the tensor itself, and its parameter."""


class Those(NamedTuple):
    """Tensors with their descriptions."""

    listed: Listed
    tensors: Sequence[torch.Tensor]
    addresses: Array | None = None
    """The addresses where a look found the tensors."""

    def before(self, indices: Sequence[int]) -> Those:
        """Some of them, as they are before the step."""
        addresses = None if self.addresses is None else self.addresses[[*indices]]
        return Those(self.listed.before(indices), [self.tensors[i] for i in indices], addresses)

    def rows(self, number: Number) -> list[Rows]:
        """Returns the tensors' digests; see `Listed.rows`."""
        return self.listed.rows(self.tensors, number, self.addresses)

    def samples(self, number: Number) -> list[Samples]:
        """Returns the tensors' sampled elements."""
        return self.listed.samples(self.tensors, number, self.addresses)


def those(entries: Sequence[Named]) -> Those:
    """Returns tensors with their descriptions."""
    return Those(Listed(held(*entry) for entry in entries), [tensor for *_, tensor, _ in entries])


NOTHING = those([])


@dataclass
class Count:
    """The steps of optimizers that have parameters in common, of which each makes some."""

    step: int = 0


class RecordedOptimizer:
    """An optimizer whose steps are recorded."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, number: int, parameters: Parameters
    ) -> None:
        self.optimizer, self.number, self._parameters = optimizer, number, parameters
        self.count = Count()
        self.is_described = False
        """Whether the files have its parameters' names as they are."""
        self.device = next((local_of(param).device for param in self.params()), CPU)
        self.after: tuple[int, Listed] | None = None
        """The step that left what was looked at last, and its tensors' descriptions."""
        self._since: tuple[int, Listed] | None = None
        """The value of `after` before the last look, whose writes are since."""
        self.sampled = 0
        """The step that was sampled last."""
        self.open: Any = None
        """A step that waits for the model's weights."""
        self._params: tuple[torch.Tensor, ...] = ()
        self._sizes: list[int] = []
        self._shapes: list[torch.Size] = []
        """The parameters' shapes, which p.data may change."""
        self._owners: list[ParameterRole] = []
        self.anew: dict[str, None] = {}
        """Names whose parameters are others than before, since the last description."""
        self._weights: Those | None = None
        self._looks = Looks(())
        self._looked: Looked | None = None
        """The looks at the weights, and what the last one found."""
        self._models: Those | None = None
        self._gradients: tuple[Listed, Looks] | None = None
        self._are_dense = True
        """Whether gradients are recorded as they are."""
        self._launched: tuple[Any, Launched] | None = None
        self._has_asked, self._asked = False, tuple[str, ...]()
        self._read = NOTHING
        """Gradients whose digests the launch sums up."""
        self._seen: list[torch.Tensor] = []
        self._states: SameStates | None = None
        """The state's values; None where tensors lie in lists or subclasses, and may be others."""

    def join(self, peers: Sequence[RecordedOptimizer]) -> None:
        """Counts together with the peers that step some of its parameters."""
        addresses = {*map(id, self.params())}
        same = [peer for peer in peers if not addresses.isdisjoint(map(id, peer.params()))]
        counts = [self.count, *(peer.count for peer in same)]
        count = max(counts, key=lambda count: count.step)
        for source in (self, *peers):
            if any(source.count is joined for joined in counts):
                source.count = count

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def names(self) -> list[list[str]]:
        """The parameters' names, group by group."""
        self.look()
        owners = iter(self._owners)
        return [[next(owners).placement.name for _ in group["params"]] for group in self.groups]

    def forget(self) -> None:
        """Looks everything up anew: a model or parameters have come."""
        self.is_described, self._params, self._sizes = False, (), []
        self._weights, self._models, self._gradients = None, None, None

    def params(self) -> list[torch.Tensor]:
        """The parameters in the groups' order."""
        return [param for group in self.groups for param in group["params"]]

    def look(self) -> None:
        """Looks the parameters up anew before a step where they are others than before."""
        if same_params(self.groups, self._params, self._sizes):
            return
        self.forget()
        self._name()

    def _name(self) -> None:
        """Looks up what the parameters are."""
        params, sizes = tuple(self.params()), [len(group["params"]) for group in self.groups]
        prefix = f"optimizer{self.number}." if self.number else ""
        places = ((i, j) for i, size in enumerate(sizes) for j in range(size))
        labels = [f"{prefix}param_groups.{i}.{j}" for i, j in places]
        self._owners = self._parameters.owners(self.number, params, labels)
        self._params, self._sizes = params, sizes
        self._shapes = [param.shape for param in params]
        owned = dict(zip(params, self._owners, strict=True))
        self.anew |= dict.fromkeys(self._parameters.came_anew(owned))

    def gradients(self) -> Those:
        """The gradients that the optimizer reads; of sparse ones a dense copy."""
        if not self._params:  # a closure's forward was the first that a model ran
            self.look()
        decoupled = getattr(self.optimizer, "use_decoupled_grad", False)
        attribute = "decoupled_grad" if decoupled else "grad"
        grads: Any = [getattr(param, attribute, None) for param in self._params]
        tensors = grads if self._are_dense else [*map(_dense, grads)]
        looked = None if self._gradients is None else self._gradients[1].look(tensors)
        if self._gradients is None or looked is None:
            tensors = [*map(_dense, grads)]
            self._are_dense = same_objects(tensors, grads)
            owned = zip(self._params, self._owners, tensors, strict=True)
            entries = [held(o.placement, "grad", t, p) for p, o, t in owned if t is not None]
            self._gradients = Listed(entries), Looks(tensors)
        listed = self._gradients[0]
        if len(listed.held) == len(tensors):
            return Those(listed, tensors, looked and looked.addresses)
        return Those(listed, [grad for grad in tensors if grad is not None])

    def weights(self) -> Those:
        """The parameters and the tensors of their state; `listed` is the same while these are."""
        selection = self._known()
        self._since, self.after = self.after, None  # in an interrupted step, or a capture, too
        self._looked = self._looks.look(selection.tensors)
        if self._looked is None:  # as model.to(...) makes others of the same objects
            self._weights = self._models = None
            selection = self._known()
            self._looked = self._looks.look(selection.tensors)
        return selection._replace(addresses=self._looked and self._looked.addresses)

    def _known(self) -> Those:
        """Returns what `weights` gives, before a look at the tensors."""
        is_same = self._states is not None and self._states.are(self.optimizer.state)
        if self._weights is not None and is_same:
            return self._weights
        # all tensors, without names
        tensors = list[torch.Tensor]()
        for param in self._params:
            for value in (param, *self.optimizer.state.get(param, {}).values()):
                if type(value) in PLAIN:
                    tensors.append(value)
                elif not isinstance(value, (int, float)):
                    tensors += (tensor for _, tensor in flattened("", value))
        if self._weights is None or not same_objects(tensors, self._seen):
            if self._shapes != [param.shape for param in self._params]:
                self._parameters.forget(self.number)
                self._name()
                self._models = self._gradients = None
            entries = list[Named]()
            for param, owner in zip(self._params, self._owners, strict=True):
                # the weight, then its state under the recording's names
                named = [(name, t, t) for name, t in weight_of(param, owner.quantity)]
                for key, value in self.optimizer.state.get(param, {}).items():
                    quantity = RENAMED.get(key, str(key))
                    if str(key) in OWN or str(key).startswith("old "):
                        quantity = f"state.{key}"
                    for name, tensor in flattened(quantity, value):
                        # a count on the host is a number of the group
                        if key != "step" or tensor.dim() or tensor.device.type != "cpu":
                            whole = value if tensor is local_of(value) else tensor
                            named.append((name, tensor, whole))
                entries += [(of_state(param, owner.placement, w), n, t, param) for n, t, w in named]
            self._weights = those(entries)
            self._seen, self._looks = tensors, Looks(self._weights.tensors)
        states = SameStates(self.optimizer.state)
        seen = itertools.chain(self._params, states.values)
        is_plain = all(type(local_of(value)) in (*PLAIN, int, float) for value in seen)
        self._states = states if is_plain and states.has_dicts else None
        return self._weights

    def models(self) -> Those | None:
        """The model's weights, of which the optimizer has masters alone."""
        if self._models is None:
            self.look()
            entries = list[Named]()
            for weight in (o.weight for o in self._owners if o.weight is not None):
                place, named = self._parameters.known(weight), weight_of(weight)
                entries += [(of_state(weight, place, t), n, t, weight) for n, t in named]
            self._models = those(entries)
        return self._models if self._models.tensors else None

    def ask(self) -> None:
        """Asks an optimizer of megaopt for the digests that its launch sums up.

        Not where somebody else has asked: what passes make has places of its own.
        """
        optimizer: Any = self.optimizer
        if not hasattr(optimizer, "record_digests"):
            return
        stepper = optimizer.stepper
        if not stepper.quantities:
            # a gradient that the step writes has its digest before
            read = () if stepper.options.write_unscaled_grads else ("grad",)
            moments = stepper.owned(()).all_moments
            optimizer.record_digests((*read, "weight", MASTER, *moments), passes=False)
            self._has_asked = True
        self._asked = () if stepper.passes else stepper.quantities

    def close(self) -> None:
        """Asks for nothing any more."""
        optimizer: Any = self.optimizer
        if self._has_asked and not optimizer.stepper.passes:
            optimizer.record_digests(None)

    def read(self, gradients: Those) -> Those:
        """The gradients that have their digests before the step; `rows` has those of the others."""
        self._read = gradients if "grad" in self._asked else NOTHING
        return NOTHING if "grad" in self._asked else gradients

    def rows(self, left: Those, number: Number) -> list[Rows]:
        """The digests of what a step has left, and of gradients: the launch's as far as it goes."""
        optimizer: Any = self.optimizer
        if not self._asked:
            return left.rows(number)
        read, self._read, digests = self._read, NOTHING, optimizer.digests
        key = [read.listed, left.listed, *(digest.params for digest in digests)]
        if self._launched is None or not same_objects(key, self._launched[0]):
            weight_names = {p: o.quantity for p, o in zip(self._params, self._owners, strict=True)}
            descriptions = [*read.listed.held, *left.listed.held]
            # the part of each parameter that the launch takes it to be
            views = {view.param: view for view in optimizer.stepper.owned(self.groups).views}
            names = descriptions, digests, weight_names
            launched = Launched(*names, lambda param: views[param].place(0), number)
            self._launched = key, launched
        return self._launched[1].rows([*read.tensors, *left.tensors], digests, number)

    def note(self, step: int) -> None:
        """Notes which step left the weights that were looked at last."""
        if self._weights is not None:
            self.after = step, self._weights.listed

    def changed(self, step: int, weights: Those) -> Sequence[int]:
        """The places among `weights` that were written since the step before, as torch knows."""
        since, looked = self._since, self._looked
        is_known = since is not None and since[0] == step - 1 and since[1] is weights.listed
        if looked is None or not is_known:
            return range(len(weights.tensors))
        return sorted({*looked.written, *weights.listed.weight_indices.intersection(looked.moved)})


def weight_of(param: torch.Tensor, quantity: str = "weight") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a parameter: itself, or the codes and scales that it is made of."""
    for name, tensor in flattened(quantity, param):
        yield name.partition(".")[2] or name, tensor


def _dense(grad: Any) -> Any:
    if type(grad) is not torch.Tensor:
        return local_of(grad)
    return grad if grad.layout == torch.strided else grad.to_dense()


def count_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int | None:
    """The number of the last update of a group, as the optimizer counts, where the host has it."""
    state_counts = (optimizer.state.get(param, {}).get("step") for param in group["params"])
    for count in itertools.chain([group.get("step")], state_counts):
        if isinstance(count, torch.Tensor) and count.device.type == "cpu":
            return int(count)
        if isinstance(count, int):
            return count
    return None
