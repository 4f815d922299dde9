"""The gate before every measurement: a step whose bits are not those promised has no speed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megaopt.kernels.contracts import CONTRACTS
from megaopt.lab.bench.instance import Instance, state_tensors
from megaopt.lab.bench.sets import TensorSet
from megaopt.lab.bench.subjects import PEERS, Subject
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
    if peer is not None and peer.why_not() is not None:
        peer = None
    if peer is None and "reference" not in CONTRACTS[mode.contract].backends:
        return Check(None)
    against = "reference" if peer is None else peer.name
    try:
        for label, candidate, baseline in pairs(mode, peer, tensors, device):
            if difference := first_difference(candidate, baseline):
                return Check(against, f"{label} gradients, {difference}")
    except Exception as error:
        if peer is None:
            raise
        # another library fails in its own way; the run goes on
        return Check(against, f"not compared: {type(error).__name__}: {error}")
    return Check(against)


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
    kinds, digests = [], []
    for instance in (candidate, baseline):
        tensors = {
            f"{name} of tensor {index}": tensor
            for index, parameter in enumerate(instance.parameters)
            for name, tensor in state_tensors(instance, parameter).items()
        }
        kinds.append({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
        codes = digest_many(list(tensors.values())).cpu()
        digests.append(dict(zip(tensors, map(hexadecimal, codes), strict=True)))
    mismatches = differences(*kinds) or differences(*digests)
    return str(mismatches[0]) if mismatches else None
