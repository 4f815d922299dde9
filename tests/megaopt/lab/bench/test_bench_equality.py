"""The gate before a measurement: it passes for the kernel, and it sees a single bit."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from megaopt import FusedAdam
from megaopt.kernels.digest.codes import codes_of
from megaopt.lab.bench import equality
from megaopt.lab.bench.equality import check
from megaopt.lab.bench.instance import Instance, state_tensors
from megaopt.lab.bench.modes import MODES
from megaopt.lab.bench.sets import TensorSet

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TENSORS = TensorSet(name="s", description="", sizes=(1, 1000, 5000), flat=True)
MATRICES = TensorSet.of_shapes("m", "", [(130, 256), (96,), (16, 48)])
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.parametrize("name", ["bf16-remainders", "fp8-current", "blocks"])
def test_kernel_passes(name: str) -> None:
    mode = MODES[name]
    tensors = MATRICES if mode.weight or "blocks" in mode.name else TENSORS
    ((_, one, other),) = equality.pairs(mode, None, tensors, DEVICE)
    backends = [each.optimizer.options.backend for each in (one, other)]
    assert backends == ["triton", "reference"]
    assert equality.first_difference(one, other, steps=2) is None


def stepped(mode_name: str) -> Instance:
    tensors = TensorSet.of_shapes("s", "", [(3,), (32, 128) if mode_name == "blocks" else (8, 40)])
    instance = MODES[mode_name].instance(tensors, DEVICE, backend="reference")
    instance.optimizer.step()
    return instance


NAMED = ["bf16-remainders", "fp8-moments", "blocks", "fp8-delayed", "fp8-mxfp8-remainder8-8bit"]
SCALED = ("fp8-moments", "blocks")
FLOAT8 = [name for name, mode in MODES.items() if mode.recipe]


@pytest.mark.parametrize("mode_name", NAMED)
def test_one_flipped_bit_is_named_in_every_tensor(mode_name: str) -> None:
    reference = stepped(mode_name)
    names = list(state_tensors(reference, reference.parameters[1]))
    assert {"weight", "exp_avg", "exp_avg_sq"} <= set(names)
    assert ("exp_avg_scale" in names) == (mode_name in SCALED)
    assert ("weight_scale_inv" in names) == (mode_name in FLOAT8)
    assert ("weight_amax_history" in names) == (mode_name.startswith("fp8-delayed"))
    for name in names:
        other = stepped(mode_name)
        assert equality.compare(other, reference) is None
        values = state_tensors(other, other.parameters[1])[name]
        at = min(17, values.numel() - 1)
        codes_of(values).view(-1)[at] ^= 1
        found = equality.compare(other, reference)
        assert found is not None
        assert found.startswith(f"{name} of tensor 1: ")


def test_signed_zeros_are_different_and_equal_nans_are_not() -> None:
    one, other = stepped("fp32"), stepped("fp32")
    for instance, value in ((one, 0.0), (other, -0.0)):
        instance.parameters[0].data[1] = value
    assert str(equality.compare(one, other)).startswith("weight of tensor 0: ")
    for instance in (one, other):
        instance.parameters[0].data[1] = float("nan")
    assert equality.compare(one, other) is None


class Wrong(FusedAdam):
    """Flips the lowest bit of one moment in its third step."""

    remaining = 3

    def step(self) -> None:
        super().step()
        self.remaining -= 1
        if self.remaining == 0:
            parameter = self.param_groups[0]["params"][1]
            self.state[parameter]["exp_avg_sq"].view(torch.int32)[999] ^= 1


@needs_triton
def test_kernel_that_is_wrong_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(parameters: Any, *, backend: str, **options: Any) -> FusedAdam:
        kind = Wrong if backend == "triton" else FusedAdam
        return kind(parameters, backend=backend, **options)

    monkeypatch.setattr("megaopt.FusedAdam", made, raising=False)
    found = check(MODES["bf16"], TENSORS, DEVICE)
    assert found.against == "reference"
    assert str(found.difference).startswith(
        "torch.bfloat16 gradients, step 3, exp_avg_sq of tensor 1: "
    )
