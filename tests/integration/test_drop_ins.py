"""The drop-ins for TransformerEngine and apex: their faces, their refusals, and contract te's."""

import inspect
from importlib import import_module

import pytest
import torch

from megaopt import FusedAdam

TRANSFORMER_ENGINE = {
    "params": inspect.Parameter.empty,
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "bias_correction": True,
    "adam_w_mode": True,
    "capturable": False,
    "master_weights": False,
    "master_weight_dtype": torch.float32,
    "exp_avg_dtype": torch.float32,
    "exp_avg_sq_dtype": torch.float32,
    "use_decoupled_grad": False,
    "store_param_remainders": False,
    "set_grad_none": None,
}
APEX = {
    "params": inspect.Parameter.empty,
    "lr": 1e-3,
    "bias_correction": True,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "adam_w_mode": True,
    "weight_decay": 0.0,
    "amsgrad": False,
    "set_grad_none": True,
    "capturable": False,
    "master_weights": False,
}
FACES = {"transformer_engine": TRANSFORMER_ENGINE, "apex": APEX}


def drop_in(system):
    return import_module(f"megaopt.integration.{system}").FusedAdam


def parameter(device="cpu"):
    return torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device=device))


@pytest.mark.parametrize("system", FACES)
def test_arguments_have_the_peers_order_and_defaults(system):
    found = inspect.signature(drop_in(system)).parameters
    assert [(name, found[name].default) for name in found] == list(FACES[system].items())


@pytest.mark.parametrize("system", FACES)
def test_a_cpu_parameter_is_refused_with_the_reason(system):
    with pytest.raises(RuntimeError, match=r"contract='te' .* on cpu: .*needs an NVIDIA GPU.*ieee"):
        drop_in(system)([parameter()])


@pytest.mark.parametrize("contract", ["te", "torch"])
@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
def test_no_backend_gives_a_gpus_bits_on_a_cpu(contract, backend):
    with pytest.raises(RuntimeError, match=f"contract='{contract}' does not work .* NVIDIA GPU"):
        FusedAdam([parameter()], contract=contract, backend=backend)


def test_apex_has_no_masters_without_capturable():
    with pytest.raises(ValueError, match="master_weights=True is not allowed: apex keeps masters"):
        drop_in("apex")([parameter()], master_weights=True)


def test_deprecated_set_grad_none_is_refused():
    with pytest.raises(ValueError, match="set_grad_none=True is not allowed: pass set_to_none"):
        drop_in("transformer_engine")([parameter()], set_grad_none=True)


def test_l2_decay_under_contract_torch_is_refused():
    with pytest.raises(ValueError, match=r"weight_decay=0.1 is not allowed with contract='torch'"):
        FusedAdam([parameter()], contract="torch", adam_w_mode=False, weight_decay=0.1)


@pytest.mark.parametrize("name", ["exp_avg_dtype", "exp_avg_sq_dtype"])
@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        (torch.float16, "float16"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.uint8, "float8_e4m3fn"),
    ],
    ids=str,
)
def test_scaled_moments_under_contract_torch_are_refused(name, dtype, named):
    message = rf"{name}=torch.{named} is not allowed with .*; torch.float32, torch.bfloat16$"
    with pytest.raises(ValueError, match=message):
        FusedAdam([parameter()], contract="torch", **{name: dtype})


@pytest.mark.gpu
@pytest.mark.parametrize("set_grad_none", [True, False])
def test_apex_zero_grad_follows_set_grad_none(set_grad_none):
    param = parameter("cuda")
    param.grad = torch.ones_like(param)
    drop_in("apex")([param], set_grad_none=set_grad_none).zero_grad()
    assert (param.grad is None) is set_grad_none
    assert set_grad_none or not bool(param.grad.any())
