"""The peers: imported only when used, skipped with the reason, their bytes counted on tensors."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megaopt.commands.bench.instance import Instance, build, bytes_per_step, state_tensors
from megaopt.commands.bench.peers import PEERS, Peer
from megaopt.commands.bench.sets import TensorSet

CPU = torch.device("cpu")
TENSORS = TensorSet(name="s", description="", sizes=(4096, 8192))
TORCH = {name: peer for name, peer in PEERS.items() if peer.package == "torch"}


@pytest.mark.parametrize("peer", TORCH.values(), ids=TORCH)
def test_torch_moves_the_declared_bytes(peer: Peer) -> None:
    assert peer.why_not() is None
    instance = build(peer.optimizer, TENSORS, peer.weight_dtype, CPU)
    instance.optimizer.step()
    assert bytes_per_step(instance) == sum(TENSORS.sizes) * peer.bytes_per_parameter
    (group,) = instance.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (1e-3, 0.1)
    assert [name for name in ("fused", "foreach") if group[name]] == [peer.name.split("-")[1]]
    assert peer.version() == torch.__version__


def test_library_that_is_missing_is_named() -> None:
    peer = replace(PEERS["apex-fp32"], module="no_such_library.optimizers")
    assert peer.why_not() == "no_such_library is not installed"


def test_library_that_fails_to_import_gives_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library_of_another_cuda.py").write_text("raise OSError('libcudart.so.99')")
    monkeypatch.syspath_prepend(tmp_path)
    peer = replace(PEERS["apex-fp32"], module="library_of_another_cuda")
    reason = peer.why_not()
    assert reason is not None
    assert reason.endswith("cannot be imported: OSError: libcudart.so.99")


def test_no_library_is_imported_before_it_is_used() -> None:
    libraries = sorted({peer.package for peer in PEERS.values()} - {"torch"})
    code = (
        f"import sys, megaopt.commands.bench; print([n for n in {libraries} if n in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout == "[]\n"
    assert len(libraries) == 5


class Codes:
    """8-bit codes with a scale for each 256, as low-bit libraries keep them."""

    def __init__(self, numel: int) -> None:
        self.codes = torch.zeros(numel, dtype=torch.uint8)
        self.scale = torch.zeros(numel // 256)
        self.qmap = torch.zeros(256)


class Flattened(Codes):
    def __tensor_flatten__(self):
        return ["codes", "scale", "qmap"], None


class WithTranspose(Codes):
    def __init__(self, numel: int) -> None:
        super().__init__(numel)
        self._data, self._transpose = self.codes, self.codes.clone()


class Plain:
    def __init__(self, numel: int) -> None:
        codes = Codes(numel)
        self._data, self._quantized, self._scales = None, codes.codes, codes.scale


def with_state(state: dict, dtype: torch.dtype = torch.bfloat16) -> Instance:
    tensors = TensorSet(name="s", description="", sizes=(4096,))
    kind = lambda parameters: torch.optim.SGD(parameters, lr=1.0)  # noqa: E731
    instance = build(kind, tensors, dtype, CPU)
    instance.optimizer.state[instance.parameters[0]] = state
    return instance


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Flattened, 6 + 2 * (1 + 4 / 256)),
        (Plain, 6 + 2 * (1 + 4 / 256)),
        (WithTranspose, 6 + 2),  # a transpose is not what a step must move
    ],
)
def test_bytes_of_low_bit_states_are_counted(kind: type, expected: float) -> None:
    state = {"exp_avg": kind(4096), "step": torch.tensor(1.0), "qmap1": torch.zeros(256)}
    assert bytes_per_step(with_state(state)) == 4096 * expected


def test_scales_kept_outside_the_state_are_found() -> None:
    moments = {
        "exp_avg": torch.zeros(4096, dtype=torch.float16),
        "exp_avg_sq": torch.zeros(4096, dtype=torch.bfloat16),
    }
    instance = with_state(moments)
    scales = {name: torch.full([1], 2.0) for name in moments}
    instance.optimizer._scales = {instance.parameters[0]: scales}
    found = state_tensors(instance, instance.parameters[0])
    assert list(found) == ["weight", "exp_avg", "exp_avg_scale", "exp_avg_sq"]
    assert found["exp_avg_scale"] is scales["exp_avg"]


class Float8Tensor:
    """Codes and scale as TransformerEngine keeps them; it calls itself fp32."""

    dtype = torch.float32

    def __init__(self) -> None:
        self._data = torch.arange(4096).to(torch.uint8)
        self._scale_inv = torch.full([1], 3.0)


def test_codes_and_scale_of_a_float8_tensor_have_our_names_and_dtype() -> None:
    exp_avg = Float8Tensor()
    instance = with_state({"exp_avg": exp_avg})
    instance.optimizer._scales = {instance.parameters[0]: {"exp_avg": torch.full([1], 2.0)}}
    found = state_tensors(instance, instance.parameters[0])
    assert list(found) == ["weight", "exp_avg", "exp_avg_scale"]
    assert found["exp_avg"].dtype == torch.float8_e4m3fn
    assert torch.equal(found["exp_avg"].view(torch.uint8), exp_avg._data)
    assert found["exp_avg_scale"] is exp_avg._scale_inv


def test_options_go_to_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    module = SimpleNamespace(FusedAdam=lambda *_, **options: made.append(options))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.optimizers", module)
    for name in ("transformerengine-bf16-remainders", "transformerengine-fp8-moments"):
        PEERS[name].optimizer([], use_decoupled_grad=True)
    shared = {"lr": 1e-3, "weight_decay": 0.1, "master_weights": True, "use_decoupled_grad": True}
    assert made[0] == {**shared, "store_param_remainders": True}
    assert made[1] == {**shared, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
