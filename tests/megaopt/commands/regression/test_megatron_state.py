from types import SimpleNamespace

import pytest
import torch

from megaopt import FusedAdam
from megaopt.commands.regression.megatron.checkpoint import cast_masters
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


@pytest.mark.parametrize("overlaps", [False, True])
def test_cast_masters_are_gathered_where_no_forward_pass_does(overlaps):
    calls = []
    inner = [
        SimpleNamespace(_copy_main_params_to_model_params=lambda: calls.append("cast"))
        for _ in range(2)
    ]
    chunk = SimpleNamespace(
        ddp_config=SimpleNamespace(overlap_param_gather=overlaps),
        start_param_sync=lambda: calls.append("gather"),
    )
    cast_masters(chunk, SimpleNamespace(chained_optimizers=inner))
    assert calls == (["cast", "cast"] if overlaps else ["cast", "cast", "gather"])
