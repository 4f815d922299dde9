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
    """The comparison of a mode's bits: with what, and the first difference."""

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
    for label, candidate, baseline in pairs(mode, peer, tensors, device):
        if difference := first_difference(candidate, baseline):
            return f"{label} gradients, {difference}"
    return None


def pairs(
    mode: Subject, peer: Subject | None, tensors: TensorSet, device: torch.device
) -> Iterator[tuple[str, Instance, Instance]]:
    """Give the gradients' dtype, an instance of ours, and one of the peer or of the reference."""
    grad_dtypes: list[torch.dtype | None] = [None]
    if peer is not None and peer.decoupled_grad and mode.weight_dtype is not torch.float32:
        grad_dtypes.append(torch.float32)
    for dtype in grad_dtypes:
        arguments = (tensors, device, dtype)
        more: dict[str, Any] = {"use_decoupled_grad": True} if dtype else {}
        candidate = mode.instance(*arguments, backend="triton", **more)
        baseline = (
            peer.instance(*arguments, **more)
            if peer
            else mode.instance(*arguments, backend="reference")
        )
        yield str(dtype or mode.weight_dtype), candidate, baseline


def first_difference(candidate: Instance, baseline: Instance, steps: int = 4) -> str | None:
    """Step two new instances of one seed, and say where a weight or state first differs in a bit.

    Gradients are new at each step. None where all agree.
    """
    for step in range(1, steps + 1):
        for instance in (candidate, baseline):
            instance.draw_gradients()
            instance.optimizer.step()
        if difference := compare(candidate, baseline):
            return f"step {step}, {difference}"
    return None


def compare(candidate: Instance, baseline: Instance) -> str | None:
    """Return the first difference between two instances of one case, None where there is none."""
    one, two = (dict(_tensors(instance)) for instance in (candidate, baseline))
    kinds = (
        {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} for tensors in (one, two)
    )
    mismatches = differences(*kinds) or differences(_digests(one), _digests(two))
    return str(mismatches[0]) if mismatches else None


def _tensors(instance: Instance) -> Iterator[tuple[str, Tensor]]:
    for index, parameter in enumerate(instance.parameters):
        for name, tensor in state_tensors(instance, parameter).items():
            yield f"{name} of tensor {index}", tensor


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    digests = digest_many(list(tensors.values())).cpu()
    return dict(zip(tensors, map(hexadecimal, digests), strict=True))
