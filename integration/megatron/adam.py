"""The optimizers inside Megatron's distributed optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import megaopt
from megaopt.kernels.refusals import refuse
from megaopt.kernels.rules.base import Rule
from megaopt.kernels.shards import local_of
from megaopt.optimizer import FusedOptimizer
from megaopt.params import view_of
from megaopt.state.tensors import MASTER
from megaopt.step.request import Asked

State = dict[str, Any]
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Main shards and their weights."""
MADE = "that Megatron's distributed optimizer made"


class Shards(FusedOptimizer):
    """A fused optimizer over shards of weights, with what Megatron does to an inner optimizer."""

    clip_coefficient: torch.Tensor | None = None
    """The next step's factor of gradients, fp32 of one element; the step clears it."""

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One update with the clip coefficient that was set."""
        coefficient, self.clip_coefficient = self.clip_coefficient, None
        return super().step(closure, clip_coefficient=coefficient, **kwargs)

    def withdraw(self) -> None:
        """Tells the other ranks that this one cannot begin the step, in which they may wait."""
        self.stepper.withdraw(self.param_groups, self.state, Asked())

    def weight_of(self, shard: torch.Tensor) -> torch.Tensor:
        """The shard itself: Megatron's parameters are the weights."""
        return shard

    def state_dict(self) -> dict[str, Any]:
        """The fused optimizer's, in dicts of its own: Megatron writes step counts into them."""
        return copied(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as the fused optimizer; tensors that are its own stay, without a copy.

        Megatron first hands over what `state_dict` gave, then fills the tensors.
        """
        state_dict = cleaned(state_dict)
        # Megatron first hands over the very tensors of the state: groups alone are new then
        new_states, old_states = state_dict["state"], super().state_dict()["state"]
        is_the_same = new_states.keys() == old_states.keys() and all(
            old_states[place].get(name) is tensor
            for place, state in new_states.items()
            for name, tensor in state.items()
        )
        if not is_the_same:
            super().load_state_dict(state_dict)
            return
        # loaded without states, which come back as the same objects
        tensor_states = dict(self.state)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.state.update(tensor_states)


class ShardAdam(Shards, megaopt.FusedAdam):
    """megaopt.FusedAdam over shards; a captured step has the bits of an eager one.

    So under contract te too, where TransformerEngine rounds differently with capturable=True.
    """

    @property
    def rule(self) -> Rule:
        """AdamW or Adam, under the optimizer's contract, capturable or not."""
        return self.eager_rule


class ShardLion(Shards, megaopt.FusedLion):
    """megaopt.FusedLion over shards."""


class ShardGaLore(Shards, megaopt.GaLoreAdamW):
    """megaopt.GaLoreAdamW over shards."""


class ShardSGD(Shards, megaopt.FusedSGD):
    """megaopt.FusedSGD over shards."""


class MainShardsAdapter(torch.optim.Optimizer):
    """Shows Megatron a fused optimizer whose groups and state are those of its main shards.

    Args:
        fused: its groups have the main shards, all fp32. It steps the weights from then on, with
            the mains as their masters.
        pairs: for each group a list of main shards, each with its weight: a view of the parameter
            buffer, or a part of an fp8 weight; the main shard itself where the weight is fp32.
            Empty shards may be among them of which Megatron does not know: those of weights of
            which it gives this rank nothing, but which ranks step together.
    """

    def __init__(self, fused: Shards, pairs: Sequence[Pairs]) -> None:
        # torch's constructor wants a parameter; groups and state are replaced below
        super().__init__([{"params": []}], fused.defaults)
        # Megatron's groups have main shards, the fused optimizer's the weights, in one order
        self.fused = fused
        self.param_groups = fused.param_groups
        self._lists = [group["params"] for group in self.param_groups]
        fused.param_groups = [
            {**group, "params": [weight for _, weight in group_pairs]}
            for group, group_pairs in zip(self.param_groups, pairs, strict=True)
        ]

        # one list of masters in group order: the main shards, None for fp32 weights
        together = [pair for group_pairs in pairs for pair in group_pairs]
        fused.master_weights = [self.master_of(main, weight) for main, weight in together]
        self._weights = dict(together)
        self.state = MainState(fused, self._weights)  # type: ignore[assignment]  # of one meaning

    def weight_of(self, main: torch.Tensor) -> torch.Tensor:
        """The weight whose main shard this is."""
        return self._weights[main]

    def master_of(self, main: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """The master of a weight as the step takes it; None for a weight that is its own."""
        return None if main is weight else main

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of main shards, moments and weights in one launch.

        Raises ValueError where a group has another list of parameters than it was made with.
        """
        # other ranks may wait in this step: they are told before the error goes up
        try:
            self._hand_over()
        except Exception:
            self.fused.withdraw()
            raise
        # Megatron's groups show the count that the step has moved
        loss = self.fused.step(closure)
        for group, fused_group in zip(self.param_groups, self.fused.param_groups, strict=True):
            group["step"] = fused_group["step"]
        return loss

    def _hand_over(self) -> None:
        """Gives the hyper-parameters, which Megatron's scheduler writes into our groups."""
        # a replaced list would be stepped by nobody
        lists = [group.get("params") for group in self.param_groups]
        if len(lists) != len(self._lists):
            refuse("param_groups", f"the {len(self._lists)} groups {MADE}", f"{len(lists)} groups")
        for index, (now, original) in enumerate(zip(lists, self._lists, strict=True)):
            if now is not original:
                refuse(f"group {index}: params", f"the list of parameters {MADE}", now)
        # everything but parameters: lr and weight decay above all
        for group, fused_group in zip(self.param_groups, self.fused.param_groups, strict=True):
            fused_group.update({name: value for name, value in group.items() if name != "params"})

    def state_dict(self) -> dict[str, Any]:
        """Moments by the place of their main shard; the main shards themselves are Megatron's."""
        self._hand_over()
        packed = self.fused.state_dict()
        for state in packed["state"].values():
            state.pop(MASTER, None)
        return packed

    @torch.no_grad()
    def initialize_states(self) -> None:
        """Makes all states complete for a load, also where it has brought the weights already.

        Masters that no state has yet become what such weights are; the load brings their own.
        """
        for main, weight in self._weights.items():
            # main shards beside fp8 weights stay as they are
            is_new = self.master_of(main, weight) is not None and not self.fused.state.get(weight)
            if is_new and view_of(weight).weight is None:
                # where the cast of the master is the weight already, it keeps its other bits
                local = local_of(weight)
                if not torch.equal(main.to(local.dtype), local):
                    main.copy_(local)
        self.fused.initialize_states()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as Shards do; the main shards stay as they are."""
        self._hand_over()
        state_dict = cleaned(state_dict)
        if state_dict["state"]:
            self.initialize_states()
        # main shards are no part of the states: each state gets the one it has now
        held = self.fused.state_dict()["state"]
        for place, state in state_dict["state"].items():
            state[MASTER] = held.get(place, {}).get(MASTER)
        self.fused.load_state_dict(state_dict)
        for group, fused_group in zip(self.param_groups, self.fused.param_groups, strict=True):
            group.update({name: value for name, value in fused_group.items() if name != "params"})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: gradients are DDP's buffer, which it zeroes itself."""


class MainState(Mapping[torch.Tensor, State]):
    """The state of weights, by their main shards; the very dicts that the step looks at."""

    def __init__(self, fused: Shards, weights: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._fused, self._weights = fused, weights

    def __getitem__(self, main: torch.Tensor) -> State:
        return self._fused.state[self._weights[main]]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (main for main, weight in self._weights.items() if weight in self._fused.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def copied(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same tensors in new dicts."""
    states = {place: dict(state) for place, state in state_dict["state"].items()}
    groups = [dict(group) for group in state_dict["param_groups"]]
    return {**state_dict, "state": states, "param_groups": groups}


def cleaned(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Without the step counts that Megatron adds to each parameter for torch's AdamW.

    Those of the groups become whole numbers, which torch's are not.
    """
    state_dict = copied(state_dict)
    for state in state_dict["state"].values():
        state.pop("step", None)
    for group in state_dict["param_groups"]:
        if "step" in group:
            group["step"] = int(group["step"])
    return state_dict
