"""Each promise of the guarantee table in docs/numbers.md: what checks it here, or why nothing does.

A new promise is a row there and a row here;
tests/megaopt/commands/test_promises.py compares the names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from megaopt.commands.bench.modes import MODES
from megaopt.commands.bench.peers import PEERS
from megaopt.commands.parity import examine_parity
from megaopt.commands.promises import checks
from megaopt.kernels.backends import BACKENDS
from megaopt.state.writes import MissingMastersWarning

__all__ = ["PROMISES", "Outcome", "Promise", "examine_promises", "why_not"]


@dataclass(frozen=True)
class Promise:
    """A row of the guarantee table."""

    name: str
    """The operation, as the table calls it."""
    check: Callable[[], str | None] | None = None
    """What differs first, or None; no check where only `left_to` has one."""
    needs: tuple[str, ...] = ()
    """What the check needs, of NEEDS."""
    left_to: str | None = None
    """Why there is no check here, and what has one."""


@dataclass(frozen=True)
class Outcome:
    """What became of a promise here."""

    name: str
    holds: bool | None
    """Whether it holds; None where it could not be checked."""
    note: str
    """What was compared, what differs, or why it could not be checked."""


def _kernels() -> str | None:
    devices = ["cpu", *["cuda"] * torch.cuda.is_available()]
    reasons = [BACKENDS["triton"].why_not(torch.device(name)) for name in devices]
    return None if None in reasons else reasons[-1]


def _gpu() -> str | None:
    return None if torch.cuda.is_available() else "there is no CUDA GPU"


def _nvidia() -> str | None:
    return _gpu() or ("the GPU is not NVIDIA's" if torch.version.hip else None)


def _transformer_engine() -> str | None:
    return PEERS["transformerengine-bf16"].why_not()


NEEDS: dict[str, Callable[[], str | None]] = {
    "kernels": _kernels,
    "GPU": _gpu,
    "NVIDIA GPU": _nvidia,
    "TransformerEngine": _transformer_engine,
}
"""For each need what says why it is not met here; that returns None where it is."""


def parity(contract: str) -> str | None:
    """Each mode of the contract, stepped beside the library whose bits it promises."""
    found = examine_parity([name for name, mode in MODES.items() if mode.contract == contract])
    # without one that was compared, nothing has been shown
    wrong = [each for each in found if each.holds is False] or (
        [] if any(each.holds for each in found) else found
    )
    return f"{wrong[0].mode} beside {wrong[0].against}: {wrong[0].note}" if wrong else None


SUITE = "not checked here; covered by `make test`"
GPU_SUITE = "not checked here; covered by `make test-gpu`"
PROMISES = (
    Promise("scalars of a group", checks.scalars),
    Promise("update, Adam and AdamW", checks.update),
    Promise("update, AMSGrad, Lion and SGD; maximize", left_to=f"is of several rules: {SUITE}"),
    Promise("step in float32, bfloat16, float16, remainder16", checks.step),
    Promise("step in scaled_float16, scaled_float8_e4m3", checks.scaled_step, ("kernels",)),
    Promise("step in moments of 4 bits", left_to=f"is of several formats: {SUITE}"),
    Promise(
        "GaLoreAdamW, under one kernel, device and number of threads",
        left_to=f"is of several kernels: {SUITE}",
    ),
    Promise("GaLoreAdamW, DTensors, on one number of ranks", left_to=f"needs ranks: {SUITE}"),
    Promise(
        "GaLoreAdamW, capturable=True is capturable=False",
        left_to=f"is of several kernels: {SUITE}",
    ),
    Promise(
        "a CUDA graph's replays with refreshes between are eager steps, GaLoreAdamW",
        left_to=f"takes a hundred steps: {SUITE}",
    ),
    Promise(
        "training run by GaLoreAdamW, losses, weights, states",
        left_to="takes minutes: not checked here; covered by `megaopt regress CONFIG`",
    ),
    Promise("norm of the gradients", checks.norm),
    Promise("encoding bfloat16, float16", checks.encoding),
    Promise("encoding fp8", checks.float8_encoding),
    Promise("scales of fp8 weights", partial(checks.float8_weights, ("scale_inv",))),
    Promise("fp8 codes of whole tensors", partial(checks.float8_weights, ("codes",))),
    Promise("linear layers with fp8 weights, on a CPU: F.linear's products", checks.float8_linear),
    Promise("split and join of remainder16", checks.remainders),
    Promise("scalars made on the device", checks.capturable, ("kernels",)),
    Promise("unscaling, clipping, skipping", checks.clipping),
    Promise("capturable=True is capturable=False, contract ieee", checks.capturable),
    Promise(
        "a CUDA graph's replays are eager steps, contract ieee", checks.graph, ("GPU", "kernels")
    ),
    Promise(
        "states in host memory are states on the card", left_to=f"needs ranks and files: {SUITE}"
    ),
    Promise("scales of a tensor, one launch", checks.scaled_step, ("kernels",)),
    Promise("tensors past 2**31 elements", left_to=f"takes 30 GiB of a GPU's memory: {GPU_SUITE}"),
    Promise("contract te", partial(parity, "te"), ("NVIDIA GPU", "kernels", "TransformerEngine")),
    Promise(
        "contract te beside apex's FusedAdam (megaopt.integration.apex)",
        left_to=f"needs apex, built from its source: {GPU_SUITE}",
    ),
    Promise(
        "TransformerEngine's fp8 tensors: its FusedAdam over 100 steps, its "
        "quantize_master_weights",
        left_to=f"trains 100 steps beside TransformerEngine: {GPU_SUITE}",
    ),
    Promise("MXFP8 along columns", left_to=f"concerns TransformerEngine's own tensors: {SUITE}"),
    Promise(
        "gradients that a step unscales in place", left_to=f"concerns several formats: {SUITE}"
    ),
    Promise("contract torch", partial(parity, "torch"), ("NVIDIA GPU", "kernels")),
    Promise("step of DTensors", left_to=f"takes several processes: {SUITE}"),
    Promise("norm of DTensors, and what it decides", left_to=f"takes several processes: {SUITE}"),
    Promise("save, load, continue", checks.saving),
    Promise(
        "moments and step counts, to torch's AdamW and Adam and back",
        left_to=f"steps torch's optimizers too: {SUITE}",
    ),
    Promise(
        "training run, losses",
        left_to="takes minutes: not checked here; covered by `megaopt regress CONFIG`",
    ),
    Promise("step of fp8 weights", checks.float8_step),
    Promise(
        "step of fp8 weights without fp32 masters: drawn, and with remainders",
        checks.float8_step_alone,
    ),
    Promise(
        "training run with fp8 weights, losses",
        left_to="takes minutes: not checked here; covered by `megaopt regress "
        "configs/gpt_tiny_fp8.toml`",
    ),
)


def examine_promises() -> list[Outcome]:
    """Checks all promises that can be checked here."""
    # several promises may have one check
    found: dict[Callable[[], str | None], str | None] = {}
    with warnings.catch_warnings():  # weights without masters are stepped here on purpose
        warnings.simplefilter("ignore", MissingMastersWarning)
        return [_examine(promise, found) for promise in PROMISES]


def why_not(promise: Promise) -> str | None:
    """Why a promise cannot be checked here; None where it can."""
    reasons = (NEEDS[name]() for name in promise.needs)
    return next((reason for reason in reasons if reason is not None), promise.left_to)


def _examine(promise: Promise, found: dict[Callable[[], str | None], str | None]) -> Outcome:
    reason = why_not(promise)
    if promise.check is None or reason is not None:
        return Outcome(promise.name, None, reason or "there is no check")
    if promise.check not in found:
        try:
            found[promise.check] = promise.check()
        # whatever goes wrong is what the user asked about
        except Exception as error:
            found[promise.check] = f"{type(error).__name__}: {error}"
    difference = found[promise.check]
    described = (
        promise.check.func if isinstance(promise.check, partial) else promise.check
    ).__doc__
    note = (described or "").strip().split("\n")[0]
    return Outcome(promise.name, difference is None, difference or note)
