import pytest
import torch

from megaopt import FusedAdam
from megaopt.commands.regression.megatron.state import as_master, memory_of


def test_masters_come_back_from_remainders():
    weight = torch.nn.Parameter(torch.randn(4096).bfloat16())
    keys = {"backend": "reference", "master_weights": True, "lr": 1e-2}
    optimizer = FusedAdam([weight], store_param_remainders=True, **keys)
    for _ in range(3):
        weight.grad = torch.randn(4096).bfloat16()
        optimizer.step()
    stored = optimizer.state[weight]["master_param"]
    assert stored.dtype == torch.int16
    assert (stored < 0).any()
    master = optimizer.get_unscaled_state(weight, "master_param")
    assert torch.equal(as_master(weight.detach(), stored), master)


@pytest.mark.parametrize("name", ["_data", "_rowwise_data"])
def test_of_an_fp8_tensor_the_codes_are_compared(name):
    codes = torch.randint(0, 256, (4, 8), dtype=torch.uint8)
    weight = torch.zeros(4, 8)
    setattr(weight, name, codes)
    assert torch.equal(memory_of(weight), codes.view(-1))
