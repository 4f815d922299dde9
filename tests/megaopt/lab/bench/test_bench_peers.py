"""The peers: imported only when used, skipped with the reason, their bytes counted on tensors."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from megaopt.lab.bench.instance import Instance, build, bytes_per_step
from megaopt.lab.bench.sets import TensorSet
from megaopt.lab.bench.subjects import PEERS, Subject

CPU = torch.device("cpu")
TENSORS = TensorSet(name="s", description="", sizes=(4096, 8192))
TORCH = {name: peer for name, peer in PEERS.items() if peer.package == "torch"}


@pytest.mark.parametrize("peer", TORCH.values(), ids=TORCH)
def test_torch_moves_the_declared_bytes(peer: Subject) -> None:
    assert peer.why_not() is None
    instance = peer.instance(TENSORS, CPU)
    instance.optimizer.step()
    assert bytes_per_step(instance) == sum(TENSORS.sizes) * peer.bytes_per_parameter
    (group,) = instance.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (1e-3, 0.1)
    assert [name for name in ("fused", "foreach") if group[name]] == [peer.name.split("-")[1]]
    assert peer.version() == torch.__version__


def test_library_that_is_missing_is_named() -> None:
    peer = replace(PEERS["apex-fp32"], module="no_such_library.optimizers")
    assert peer.why_not() == "no_such_library is not installed"


def test_no_library_is_imported_before_it_is_used() -> None:
    libraries = sorted({peer.package for peer in PEERS.values()} - {"torch"})
    code = f"import sys, megaopt.lab.bench; print([n for n in {libraries} if n in sys.modules])"
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
