"""The gate before a measurement: it passes for the kernel, and it sees a single bit."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from megaopt import FusedAdam
from megaopt.commands.bench import equality
from megaopt.commands.bench.equality import Check, check
from megaopt.commands.bench.instance import Instance, build, state_tensors
from megaopt.commands.bench.modes import MODES, Mode
from megaopt.commands.bench.peers import PEERS, SHARED, Peer
from megaopt.commands.bench.sets import TensorSet
from megaopt.commands.bits import as_integers
from megaopt.kernels.contracts import CONTRACTS, Contract

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TENSORS = TensorSet(name="s", description="", sizes=(1, 1000, 5000), flat=True)
MATRICES = TensorSet.of_shapes("m", "", [(130, 256), (96,), (16, 48)])
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.parametrize("name", ["bf16-remainders", "fp8-current", "blocks"])
def test_kernel_passes(name: str) -> None:
    mode = MODES[name]
    tensors = MATRICES if mode.weight or "blocks" in mode.name else TENSORS
    ((label, one, other),) = equality._beside_reference(mode, tensors, DEVICE)
    assert label == str(mode.weight_dtype)
    assert (one.optimizer.options.backend, other.optimizer.options.backend) == (
        "triton",
        "reference",
    )
    assert equality.first_difference(one, other, steps=2) is None
    if "blocks" in mode.name:
        moments = list(state_tensors(one, one.parameters[0]).values())[1:]
        assert moments[0].dtype is torch.uint8


def stepped(mode_name: str) -> Instance:
    mode = MODES[mode_name]
    make = partial(mode.optimizer, backend="reference")
    tensors = TensorSet.of_shapes("s", "", [(3,), (32, 128) if mode_name == "blocks" else (8, 40)])
    instance = build(make, tensors, mode.weight_dtype, DEVICE, weight=mode.weight)
    instance.optimizer.step()
    return instance


NAMED = ["bf16-remainders", "fp8-moments", "blocks", "fp8-delayed", "fp8-mxfp8-remainder8-8bit"]
SCALED = ("fp8-moments", "blocks", "fp8-mxfp8-remainder8-8bit")
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
        as_integers(values).view(-1)[at] ^= 1
        found = equality.compare(other, reference)
        assert found is not None
        assert found.startswith(f"tensor 1, {name}[{at}]: 0x")


def test_signed_zero_and_nan_payloads_count_as_different() -> None:
    one, other = stepped("fp32"), stepped("fp32")
    for instance, value in ((one, 0.0), (other, -0.0)):
        instance.parameters[0].data[1] = value
    expected = "tensor 0, weight[1]: 0x00000000 against 0x80000000"
    assert equality.compare(one, other) == expected
    for instance in (one, other):
        instance.parameters[0].data[1] = float("nan")
    assert equality.compare(one, other) is None


def test_another_state_dtype_or_kind_is_a_difference() -> None:
    assert "bfloat16" in str(equality.compare(stepped("bf16-moments"), stepped("bf16")))
    assert "states" in str(equality.compare(stepped("bf16"), stepped("fp32")))


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
        "torch.bfloat16 gradients, step 3, tensor 1, exp_avg_sq"
    )


# --- beside a peer: a stand-in for the library, and the reference in the kernel's place

BF16 = MODES["bf16"]
PEER = PEERS["transformerengine-bf16"]


class StandIn(Peer):
    """A peer whose optimizer `options` give, installed or not."""

    def why_not(self) -> str | None:
        return None if self.options["make"] else "not installed"

    def optimizer(self, parameters: Any, **more: Any) -> torch.optim.Optimizer:
        self.options["seen"].append(more)
        return self.options["make"](parameters, **SHARED, **BF16.options, **more)


class OnReference(Mode):
    """A mode of ours whose kernel is the reference."""

    def optimizer(self, parameters: Any, *, backend: str, **more: Any) -> FusedAdam:
        return BF16.optimizer(parameters, backend="reference", **more)


def as_kind(kind: Any, value: Any, **changes: Any) -> Any:
    return kind(**{field.name: getattr(value, field.name) for field in fields(value)} | changes)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Mode, list[dict[str, Any]]]]:
    """Puts a stand-in for a peer into the table; gives a mode that promises its bits, and what the
    stand-in's optimizers were told.
    """

    def install(make: Any, backends: tuple[str, ...] = ("triton",)) -> tuple[Mode, list[Any]]:
        options: dict[str, Any] = {"make": make, "seen": []}
        monkeypatch.setitem(PEERS, PEER.name, as_kind(StandIn, PEER, options=options))
        contract = Contract("promised", "the peer's", backends)
        monkeypatch.setitem(CONTRACTS, contract.name, contract)
        mode = as_kind(OnReference, BF16, contract=contract.name, twin=PEER.name)
        return mode, options["seen"]

    return install


def test_a_peers_bits_pass_with_gradients_of_both_dtypes(peer) -> None:
    mode, seen = peer(FusedAdam)
    assert check(mode, TENSORS, DEVICE) == Check("transformerengine-bf16")
    assert seen == [{}, {"use_decoupled_grad": True}]


def test_a_peers_other_bits_are_refused(peer) -> None:
    mode, _ = peer(Wrong)
    found = check(mode, TENSORS, DEVICE)
    assert found.against == "transformerengine-bf16"
    assert "step 3, tensor 1, exp_avg_sq[999]" in str(found.difference)


def test_fp32_gradients_are_compared_too(peer) -> None:
    class RoundsGradients(FusedAdam):
        """Right for gradients of the weight's dtype alone."""

        def step(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                if self.use_decoupled_grad:
                    parameter.decoupled_grad = parameter.decoupled_grad.bfloat16()
            super().step()

    mode, _ = peer(RoundsGradients)
    found = check(mode, TENSORS, DEVICE)
    assert str(found.difference).startswith("torch.float32 gradients, step 1, tensor 0")


def test_without_anything_to_compare_with_it_says_so(peer) -> None:
    mode, seen = peer(None)
    assert check(mode, TENSORS, DEVICE) == Check(None)
    assert seen == []


def test_peer_that_cannot_be_compared_with_gives_no_pass(peer) -> None:
    class Broken(FusedAdam):
        def step(self) -> None:
            raise RuntimeError("no kernel image")

    mode, _ = peer(Broken)
    expected = "not compared: RuntimeError: no kernel image"
    assert check(mode, TENSORS, DEVICE) == Check("transformerengine-bf16", expected)
