"""Takes the steps of a case and hashes what it sees after each."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

import megaopt
from megaopt.float8 import Float8Weight
from megaopt.kernels.digest.codes import codes_of
from megaopt.lab.golden.cases import GoldenCase
from megaopt.lab.golden.tensors import copies, gradient, parameters, project, select, specs_of
from megaopt.lab.regression.parts import alike_codes
from megaopt.optimizer import FusedOptimizer

STEPS = 20
WRITE, RESUME = 9, 10
"""The steps after which somebody else writes weights, and the run goes on from a state dict."""

GROUPS: tuple[dict[str, Any], ...] = (
    {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1, "momentum": 0.9,
     "dampening": 0.3, "scale": 0.3},
    # of few bits, so that results are often halfway between two numbers of a 16-bit format
    {"lr": 2.0**-4, "betas": (0.75, 0.875), "eps": 2.0**-10, "weight_decay": 2.0**-3,
     "momentum": 0.75, "dampening": 0.25, "scale": 0.25},
)  # fmt: skip
LATE_STEPS = (99_990, 4_090)
CLIP_NORMS = (100.0, 10_000.0)
"""Even steps are clipped, odd ones stay below."""
OVERFLOWS = (3, 13)

DIGITS = 12
"""The hexadecimal digits of a hash in the record."""

SCALES = ("scale", "scale_inv", "amax_history")
QUANTITIES = {"data8": "weights", "master_param": "masters"}


class Hashes:
    """A SHA-256 for each quantity, over all steps."""

    def __init__(self, any_nan: bool) -> None:
        self._any_nan = any_nan
        self._hashes: dict[str, Any] = {}

    def add(self, name: str, where: str, tensor: Tensor) -> None:
        """Takes in name, place, dtype, shape and the elements' bytes, little end first."""
        quantity = "scales" if name.endswith(SCALES) else QUANTITIES.get(name, name)
        hasher = self._hashes.setdefault(quantity, hashlib.sha256())
        hasher.update(f"{where} {name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        tensor = tensor.detach().cpu()
        codes = alike_codes if self._any_nan and tensor.element_size() > 1 else codes_of
        array = codes(tensor).numpy()
        hasher.update(numpy.asarray(array, dtype=array.dtype.newbyteorder("<")).tobytes())

    def digests(self) -> dict[str, str]:
        """The first digits of each, by quantity."""
        return {name: hasher.hexdigest()[:DIGITS] for name, hasher in sorted(self._hashes.items())}


def run(case: GoldenCase, backend: str, device: torch.device) -> dict[str, str]:
    """The digests of a case, by quantity.

    Args:
        case: what is stepped.
        backend: "triton" or "reference".
        device: where the parameters are.

    Returns:
        By name, "weights", "masters", "exp_avg", "exp_avg_sq", "scales", "norms" and "steps", of
        those that there are, over STEPS steps: DIGITS hexadecimal digits of a SHA-256.

    Raises:
        RuntimeError: the backend does not keep the case's contract on the device.
    """
    # only ieee promises one pattern for all NaNs
    hashes = Hashes(any_nan=case.contract != "ieee")
    params = parameters(case, device)
    with warnings.catch_warnings():
        # 16-bit weights without masters, and written ones, are what some cases are about
        warnings.simplefilter("ignore", UserWarning)
        optimizer = _optimizer(case, params, backend)
        if case.is_projected:
            optimizer.initialize_states()
            for index, state in enumerate(optimizer.state.values()):
                if "projection" in state and "precision" in case.options:
                    project(state["projection"], index)
                elif "projection" in state:
                    select(state["projection"])
        if case.has("late"):
            for group, number in zip(optimizer.param_groups, LATE_STEPS, strict=True):
                if isinstance(group["step"], Tensor):
                    group["step"].fill_(number)
                else:
                    group["step"] = number
        # before the first step too: fp8 weights are made by then
        for step in range(STEPS + 1):
            if step:
                for index, param in enumerate(params):
                    # decoupled_grad as Megatron sets it
                    name = "decoupled_grad" if case.options["use_decoupled_grad"] else "grad"
                    setattr(param, name, gradient(case, index, step, device))
                if case.has("grad-scale") or case.has("overflow"):
                    overflows = case.has("overflow") and step in OVERFLOWS
                    # as torch.amp.GradScaler sets them
                    scaled: Any = optimizer
                    scale = 1024.0 if step % 2 else 1000.0
                    scaled.grad_scale = torch.full((1,), scale, device=device)
                    scaled.found_inf = torch.full((1,), float(overflows), device=device)
                optimizer.step(clip_norm=CLIP_NORMS[step % 2] if case.has("clip") else None)
            for name, where, tensor in _seen(case, params, optimizer, step):
                hashes.add(name, f"{step} {where}", tensor)
            if case.has("external-write") and step == WRITE:
                with torch.no_grad():
                    for param in params:
                        param.copy_(param.detach().clamp(-0.5, 0.5))
            if case.has("resume") and step == RESUME:
                params, saved = copies(params, case), copy.deepcopy(optimizer.state_dict())
                optimizer = _optimizer(case, params, backend)
                optimizer.load_state_dict(saved)
    return hashes.digests()


def _optimizer(case: GoldenCase, params: list[Tensor], backend: str) -> FusedOptimizer:
    specs = specs_of(case)
    names = ("lr", "weight_decay", *case.kind.numbers)
    groups = [
        {
            "params": [p for p, spec in zip(params, specs, strict=True) if spec.group == index],
            **{name: group[name] for name in names},
        }
        for index, group in enumerate(GROUPS)
    ]
    if case.is_projected:
        for index, group in enumerate(groups):
            group["param_numbers"] = [500 + i for i, s in enumerate(specs) if s.group == index]
    options = case.options
    if case.kind.optimizer == "FusedAdam":  # contract torch's records too were made with these
        options = {**options, "step_counts": "group"}
    if case.has("external-masters"):
        masters = []
        for p in params:
            # the values that a master made by the optimizer would start with
            values = p.high_precision_initial_value() if isinstance(p, Float8Weight) else p
            assert values is not None
            masters.append(values.detach().to(torch.float32, copy=True))
        options = {**options, "dtype": None, "master_weights": masters}
    optimizer: FusedOptimizer = getattr(megaopt, case.kind.optimizer)(
        groups, backend=backend, **options
    )
    return optimizer


def _seen(
    case: GoldenCase, params: list[Tensor], optimizer: FusedOptimizer, step: int
) -> Iterator[tuple[str, str, Tensor]]:
    """Gives all that a step may have changed: its name, where it belongs, the tensor."""
    packed = optimizer.state_dict()
    for index, param in enumerate(params):
        parts = param.tensors() if isinstance(param, Float8Weight) else {"weights": param}
        for name, part in parts.items():
            yield name, f"{index} weight", part
        for name, value in packed["state"].get(index, {}).items():
            yield name, str(index), value
    for index, group in enumerate(packed["param_groups"]):
        yield "steps", f"group {index}", torch.tensor(int(group["step"]))
    if step and (case.has("clip") or case.has("skip")):
        yield "norms", "", optimizer.grad_norm
