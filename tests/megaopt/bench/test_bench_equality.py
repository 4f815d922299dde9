"""The gate before a measurement: it passes for the kernel, and it sees a single bit."""

from importlib.util import find_spec

import pytest
import torch

from megaopt import FusedAdam
from megaopt.bench import equality
from megaopt.bench.cases import MODES
from megaopt.bench.instance import Instance, build, state_tensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = (1, 1000, 9000)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_kernel_passes(mode) -> None:
    assert equality.first_difference(mode, SIZES, DEVICE, steps=2) is None


def stepped(mode_name: str) -> Instance:
    instance = build(MODES[mode_name], (3, 40), DEVICE, "reference")
    instance.optimizer.step()
    return instance


@pytest.mark.parametrize("mode_name", ["bf16", "bf16-remainders", "bf16-moments", "fp32"])
def test_one_flipped_bit_is_named_in_every_tensor(mode_name: str) -> None:
    reference = stepped(mode_name)
    names = list(state_tensors(reference, reference.parameters[1]))
    assert {"weight", "exp_avg", "exp_avg_sq"} <= set(names)
    for name in names:
        other = stepped(mode_name)
        assert equality.compare(other, reference) is None
        values = state_tensors(other, other.parameters[1])[name]
        values.view(equality.INTEGERS[values.element_size()])[17] ^= 1
        found = equality.compare(other, reference)
        assert found is not None
        assert found.startswith(f"tensor 1, {name}[17]: triton 0x")


def test_signed_zero_and_nan_payloads_count_as_different() -> None:
    one, other = stepped("fp32"), stepped("fp32")
    for instance, value in ((one, 0.0), (other, -0.0)):
        instance.parameters[0].data[1] = value
    expected = "tensor 0, weight[1]: triton 0x00000000, reference 0x80000000"
    assert equality.compare(one, other) == expected
    for instance in (one, other):
        instance.parameters[0].data[1] = float("nan")
    assert equality.compare(one, other) is None


def test_another_state_dtype_or_kind_is_a_difference() -> None:
    assert "bfloat16" in equality.compare(stepped("bf16-moments"), stepped("bf16"))
    assert "states" in equality.compare(stepped("bf16"), stepped("fp32"))


@needs_triton
def test_kernel_that_is_wrong_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(FusedAdam):
        """Flips the lowest bit of one moment in its third step, on the Triton backend."""

        def __init__(self, parameters, *, backend, **options) -> None:
            super().__init__(parameters, backend=backend, **options)
            self.remaining = 3 if backend == "triton" else -1

        def step(self) -> None:
            super().step()
            self.remaining -= 1
            if self.remaining == 0:
                parameter = self.param_groups[0]["params"][1]
                self.state[parameter]["exp_avg_sq"].view(torch.int32)[999] ^= 1

    monkeypatch.setattr("megaopt.bench.instance.FusedAdam", Wrong)
    found = equality.first_difference(MODES["bf16"], SIZES, DEVICE)
    assert found is not None
    assert found.startswith("step 3, tensor 1, exp_avg_sq[999]: triton 0x")
