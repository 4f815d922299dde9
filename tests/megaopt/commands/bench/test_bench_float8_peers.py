"""The peers with fp8 weights, around a stand-in for TransformerEngine."""

import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from megaopt import FusedAdam
from megaopt.commands.bench import float8_peers
from megaopt.commands.bench.equality import Check, check
from megaopt.commands.bench.instance import build, bytes_per_step
from megaopt.commands.bench.modes import MODES, Mode
from megaopt.commands.bench.peers import PEERS, Peer
from megaopt.commands.bench.sets import TensorSet
from megaopt.float8 import RECIPES, Float8Recipe
from megaopt.kernels.contracts import CONTRACTS, Contract
from megaopt.kernels.float8 import dequantize_reference, quantize_reference

CPU = torch.device("cpu")
MATRICES = TensorSet.of_shapes("m", "", [(130, 160), (96,), (16, 48)])
FLOAT8 = {name: peer for name, peer in PEERS.items() if peer.scaling}
E4M3 = object()
SEEN: list[Any] = []


class Quantized(torch.Tensor):
    """A tensor of TransformerEngine's: plain values to torch, codes and scales in attributes."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def detach(self) -> "Quantized":
        made = super().detach().as_subclass(Quantized)
        made.__dict__.update(self.__dict__)
        return made


class Quantizer:
    scale: Any = None
    amax: Any = None

    def __init__(self, *args: Any, recipe: str, rowwise: bool, columnwise: bool) -> None:
        assert (rowwise, columnwise) == (True, False)
        self.recipe = RECIPES[recipe]
        if recipe == "delayed":
            self.scale, self.amax, dtype = args
        else:
            dtype = args[0]
        assert dtype is E4M3

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        made = values.clone().as_subclass(Quantized)
        made._quantizer = self
        self.write(values, made, self.recipe)
        return made

    def write(self, values: torch.Tensor, into: Any, recipe: Float8Recipe) -> None:
        made = quantize_reference(values, recipe, torch.bfloat16, self.scale)
        scale_inv = made.scale_inv
        if recipe.scaling == "block_128x128":
            scale_inv = torch.nn.functional.pad(scale_inv, (0, -scale_inv.shape[1] % 4), value=7.0)
            into._rowwise_data, into._rowwise_scale_inv = made.codes.view(torch.uint8), scale_inv
        else:
            into._data, into._scale_inv = made.codes.view(torch.uint8), scale_inv
        if self.amax is not None:
            self.amax.copy_(torch.maximum(self.amax, made.amax))


class Float8CurrentScalingQuantizer(Quantizer):
    def __init__(self, dtype: Any, device: torch.device, **usage: Any) -> None:
        super().__init__(dtype, recipe="current", **usage)


class Adam:
    """FusedAdam: masters by megaopt's reference, and delayed fp8 weights written directly."""

    def __init__(
        self, parameters: list[Any], *, master_weights: bool = False, **options: Any
    ) -> None:
        SEEN.append({"master_weights": master_weights, **options})
        self.name = "decoupled_grad" if options.pop("use_decoupled_grad", False) else "grad"
        self.parameters, self.masters, self.fused = parameters, {}, master_weights
        self.state: dict[Any, dict[str, Any]] = {}
        for parameter in parameters:
            self.masters[parameter] = Parameter(self.first_master(parameter))
        self.adam = FusedAdam(
            list(self.masters.values()), backend="reference", use_decoupled_grad=True, **options
        )

    def first_master(self, parameter: Any) -> torch.Tensor:
        if not hasattr(parameter, "_quantizer"):
            return parameter.detach().float().clone()
        codes = parameter._data.view(torch.float8_e4m3fn)
        recipe = parameter._quantizer.recipe
        return dequantize_reference(codes, parameter._scale_inv, recipe, torch.bfloat16).float()

    def initialize_state(self, parameter: Any, store_param_remainders: bool) -> None:
        assert not store_param_remainders

    def set_scaled_state(self, parameter: Any, name: str, value: torch.Tensor) -> None:
        assert name == "master_param"
        assert value.dtype == torch.float32
        self.masters[parameter].data.copy_(value)

    def step(self) -> None:
        for parameter, master in self.masters.items():
            master.decoupled_grad = getattr(parameter, self.name).detach()
        self.adam.step()
        for parameter, master in self.masters.items():
            own = self.adam.state[master]
            state = {name: own[name] for name in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = state | ({"master_param": master.data} if self.fused else {})
            if hasattr(parameter, "_quantizer"):
                direct = Float8Recipe("delayed", direct=True)
                parameter._quantizer.write(master.data, parameter, direct)
            else:
                parameter.data.copy_(master.data)


def quantize_master_weights(weights: Any, masters: Any, starts: Any, group: Any) -> None:
    assert group == "group"
    assert starts == [0] * len(weights)
    for weight, master in zip(weights, masters, strict=True):
        assert master.dim() == 1
        weight._quantizer.write(master.view(weight.shape), weight, weight._quantizer.recipe)


def move_scales(amaxes: Any, histories: Any, scales: Any, algorithm: str, *rest: Any) -> None:
    assert (algorithm, rest) == ("max", (E4M3, 0))
    for amax, history, scale in zip(amaxes, histories, scales, strict=True):
        assert history.shape == (1024, 1)
        largest = torch.maximum(history[1:].amax(), amax)
        scale.copy_(torch.full_like(scale, 448.0) / largest)
        history[:-1], history[-1] = history[1:].clone(), amax
        history[0] = 0.0


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    def quantizer(recipe: str) -> Any:
        return lambda *args, **usage: Quantizer(*args, recipe=recipe, **usage)

    te = "transformer_engine.pytorch"
    tex = SimpleNamespace(
        DType=SimpleNamespace(kFloat8E4M3=E4M3),
        fused_amax_and_scale_update_after_reduction=move_scales,
    )
    modules = {
        te: SimpleNamespace(),
        "transformer_engine_torch": tex,
        f"{te}.optimizers": SimpleNamespace(FusedAdam=Adam),
        f"{te}.tensor.utils": SimpleNamespace(quantize_master_weights=quantize_master_weights),
        f"{te}.tensor.float8_tensor": SimpleNamespace(
            Float8Quantizer=quantizer("delayed"),
            Float8CurrentScalingQuantizer=Float8CurrentScalingQuantizer,
        ),
        f"{te}.tensor.float8_blockwise_tensor": SimpleNamespace(
            Float8BlockQuantizer=quantizer("block_128x128")
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(float8_peers, "one_rank_group", lambda _: "group")
    monkeypatch.setattr(Peer, "why_not", lambda _: None)
    SEEN.clear()
    return tex


class OnReference(Mode):
    """A mode of ours whose kernel is the reference."""

    def optimizer(self, parameters: Any, *, backend: str, **more: Any) -> FusedAdam:
        return super().optimizer(parameters, backend="reference", **more)


@pytest.fixture
def promised(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives a mode of ours, of the operations of ieee, that promises a peer's bits."""

    def make(peer: Peer) -> Mode:
        contract = Contract("promised", "the peer's", CONTRACTS["ieee"].backends)
        monkeypatch.setitem(CONTRACTS, "ieee", contract)
        mode = MODES[f"fp8-{peer.scaling}"]
        values = {field.name: getattr(mode, field.name) for field in fields(mode)}
        direct = not peer.separate_cast
        recipe = Float8Recipe(peer.scaling, direct=direct)
        return OnReference(**values | {"twin": peer.name, "recipe": recipe})

    return make


@pytest.mark.parametrize("peer", FLOAT8.values(), ids=FLOAT8)
def test_peer_steps_from_the_same_masters_to_the_same_bits(peer: Peer, promised: Any) -> None:
    """Codes, scales, histories, masters and moments, four steps, gradients of both dtypes."""
    assert check(promised(peer), MATRICES, CPU) == Check(peer.name)
    assert all((seen["lr"], seen["weight_decay"]) == (1e-3, 0.1) for seen in SEEN)


@pytest.mark.parametrize("peer", FLOAT8.values(), ids=FLOAT8)
def test_peers_bytes_are_those_of_ours(peer: Peer) -> None:
    counted = []
    mode = MODES[f"fp8-{peer.scaling}"]
    for subject in (peer, mode):
        instance = build(subject.optimizer, MATRICES, torch.bfloat16, CPU, weight=subject.weight)
        instance.optimizer.step()
        counted.append(bytes_per_step(instance))
    assert counted[0] == counted[1]


def first_difference(peer: Peer, promised: Any) -> str:
    return str(check(promised(peer), MATRICES, CPU).difference)


FUSED, CURRENT = FLOAT8["transformerengine-fp8-delayed"], FLOAT8["transformerengine-fp8-current"]


def test_scales_that_stay_are_seen(promised: Any, library: Any) -> None:
    library.fused_amax_and_scale_update_after_reduction = lambda *_: None
    assert "step 1, tensor 0, weight_scale" in first_difference(FUSED, promised)


def test_masters_of_dequantized_weights_are_seen(
    promised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adam, "set_scaled_state", lambda *_: None)
    assert "step 1, tensor 0, " in first_difference(FUSED, promised)


def test_another_rounding_is_seen(promised: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Quantizer.write

    def direct(self: Any, values: Any, into: Any, recipe: Float8Recipe) -> None:
        write(self, values, into, Float8Recipe(recipe.scaling, direct=True))

    monkeypatch.setattr(Quantizer, "write", direct)
    assert "step 1, tensor 0, weight" in first_difference(CURRENT, promised)


def test_peer_that_fails_gives_no_pass(promised: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("needs another card")

    monkeypatch.setattr(Quantizer, "__call__", failing)
    expected = Check(CURRENT.name, "not compared: RuntimeError: needs another card")
    assert check(promised(CURRENT), MATRICES, CPU) == expected


def test_set_without_norms_has_one_adam() -> None:
    tensors = TensorSet.of_shapes("m", "", [(16, 16)])
    build(CURRENT.optimizer, tensors, torch.bfloat16, CPU, weight=CURRENT.weight).optimizer.step()
    assert [seen["master_weights"] for seen in SEEN] == [False]


def test_group_of_one_rank_reduces() -> None:
    code = """
import torch, torch.distributed as dist
from megaopt.commands.bench.float8_peers import one_rank_group
assert one_rank_group("gloo") is one_rank_group("gloo") is dist.group.WORLD
values = torch.tensor([3.0])
dist.all_reduce(values, dist.ReduceOp.MAX, group=one_rank_group("gloo"))
assert (values.item(), dist.get_world_size(one_rank_group("gloo"))) == (3.0, 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
