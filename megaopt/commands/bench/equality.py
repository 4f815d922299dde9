"""The gate before every measurement: a step whose bits are not those promised has no speed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaopt.commands.bench.instance import Instance, state_tensors
from megaopt.commands.bench.sets import TensorSet
from megaopt.commands.bench.subjects import PEERS, Subject
from megaopt.kernels.contracts import CONTRACTS
from megaopt.recording.digest import digest_many, hexadecimal
from megaopt.recording.pair import differences


@dataclass(frozen=True)
class Check:
    """What a mode's bits were compared with, and what came of it."""

    against: str | None
    """"reference", or a peer's name; None where there was nothing to compare with."""
    difference: str | None = None


def check(mode: Subject, tensors: TensorSet, device: torch.device) -> Check:
    """Compare the Triton kernel with the peer that the contract names, or with the reference.

    Without the peer, a contract that the reference backend keeps is compared with that; any other
    contract stays unchecked.
    """
    peer = PEERS[mode.twin] if mode.twin else None
    if peer is not None and peer.why_not() is None:
        try:
            return Check(peer.name, _difference(mode, peer, tensors, device))
        except Exception as error:  # another library fails in its own way; the run goes on
            return Check(peer.name, f"not compared: {type(error).__name__}: {error}")
    if "reference" in CONTRACTS[mode.contract].backends:
        return Check("reference", _difference(mode, None, tensors, device))
    return Check(None)


def _difference(
    mode: Subject, peer: Subject | None, tensors: TensorSet, device: torch.device
) -> str | None:
    for label, ours, theirs in pairs(mode, peer, tensors, device):
        if found := first_difference(ours, theirs):
            return f"{label} gradients, {found}"
    return None


def pairs(
    mode: Subject, peer: Subject | None, tensors: TensorSet, device: torch.device
) -> Iterator[tuple[str, Instance, Instance]]:
    """Give the gradients' dtype, an instance of ours, and one of the peer or of the reference."""
    grad_dtypes: list[torch.dtype | None] = [None]
    if peer is not None and peer.decoupled_grad and mode.weight_dtype is not torch.float32:
        grad_dtypes.append(torch.float32)
    for dtype in grad_dtypes:
        own = (tensors, device, dtype)
        more: dict[str, Any] = {"use_decoupled_grad": True} if dtype else {}
        ours = mode.instance(*own, backend="triton", **more)
        theirs = peer.instance(*own, **more) if peer else mode.instance(*own, backend="reference")
        yield str(dtype or mode.weight_dtype), ours, theirs


def first_difference(ours: Instance, theirs: Instance, steps: int = 4) -> str | None:
    """Step two new instances of one seed, and say where a weight or state first differs in a bit.

    Gradients are new at each step. None where all agree.
    """
    for step in range(1, steps + 1):
        for instance in (ours, theirs):
            instance.draw_gradients()
            instance.optimizer.step()
        if found := compare(ours, theirs):
            return f"step {step}, {found}"
    return None


def compare(ours: Instance, theirs: Instance) -> str | None:
    """Return the first difference between two instances of one case, None where there is none."""
    one, two = (dict(_tensors(each)) for each in (ours, theirs))
    kinds = ({name: (t.dtype, tuple(t.shape)) for name, t in each.items()} for each in (one, two))
    found = differences(*kinds) or differences(_digests(one), _digests(two))
    return str(found[0]) if found else None


def _tensors(instance: Instance) -> Iterator[tuple[str, Tensor]]:
    for index, parameter in enumerate(instance.parameters):
        for name, tensor in state_tensors(instance, parameter).items():
            yield f"{name} of tensor {index}", tensor


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    found = digest_many(list(tensors.values())).cpu()
    return dict(zip(tensors, map(hexadecimal, found), strict=True))
