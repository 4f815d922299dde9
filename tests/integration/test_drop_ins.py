"""The drop-ins for TransformerEngine and apex: their faces, their refusals, and contract te's."""

import functools
import inspect
import math
import pickle
from importlib import import_module

import pytest
import torch
from bits import assert_same_bits
from runs import assert_same, assert_same_run, snapshot

from megaopt import FusedAdam
from megaopt.integration.grad_scaler import step_with

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
    advice = r"megaopt.FusedAdam with contract='ieee' works everywhere"
    message = rf"contract='te' .* on cpu: .*needs an NVIDIA GPU.*{advice}$"
    with pytest.raises(RuntimeError, match=message):
        drop_in(system)([parameter()])


@pytest.mark.parametrize("contract", ["te", "torch"])
@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
def test_no_backend_gives_a_gpus_bits_on_a_cpu(contract, backend):
    with pytest.raises(RuntimeError, match=f"contract='{contract}' does not work .* NVIDIA GPU"):
        FusedAdam([parameter()], contract=contract, backend=backend)


def test_apex_has_no_masters_without_capturable():
    with pytest.raises(ValueError, match=r"master_weights must be False .* apex keeps masters"):
        drop_in("apex")([parameter()], master_weights=True)


@pytest.mark.parametrize("set_grad_none", [True, False])
def test_deprecated_set_grad_none_warns_and_holds(set_grad_none):
    with pytest.warns(DeprecationWarning, match="set_grad_none .* deprecated: pass set_to_none"):
        optimizer = without_parameters("transformer_engine", set_grad_none=set_grad_none)
    optimizer = pickle.loads(pickle.dumps(optimizer))
    param = parameter()
    optimizer.param_groups[0]["params"].append(param)  # past the check that refuses a CPU
    for asked in (None, set_grad_none):
        param.grad = torch.ones_like(param)
        optimizer.zero_grad(asked)
        assert (param.grad is None) is set_grad_none
        assert set_grad_none or not bool(param.grad.any())
    message = f"set_to_none must be .* set_grad_none, {set_grad_none}, got {not set_grad_none}"
    with pytest.raises(ValueError, match=message):
        optimizer.zero_grad(not set_grad_none)


def test_transformer_engines_zero_grad_makes_none_unless_it_is_told():
    optimizer, param = without_parameters("transformer_engine"), parameter()
    optimizer.param_groups[0]["params"].append(param)
    for asked in (None, True, False):
        param.grad = torch.ones_like(param)
        optimizer.zero_grad(asked)
        assert (param.grad is None) is (asked is not False)


@pytest.mark.parametrize("set_grad_none", [True, False])
def test_apexs_drop_in_and_its_copy_clear_gradients_as_they_were_told(set_grad_none):
    optimizer, param = without_parameters("apex", set_grad_none=set_grad_none), parameter()
    for each in (optimizer, pickle.loads(pickle.dumps(optimizer))):
        each.param_groups[0]["params"].append(param)
        param.grad = torch.ones_like(param)
        each.zero_grad()
        assert (param.grad is None) is set_grad_none
        assert set_grad_none or not bool(param.grad.any())


@pytest.mark.parametrize("name", ["exp_avg_dtype", "exp_avg_sq_dtype"])
@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        (torch.float8_e4m3fn, "torch.float8_e4m3fn"),
        (torch.uint8, "torch.float8_e4m3fn"),
        ("scaled_float8_e4m3", "scaled_float8_e4m3"),
        ("scaled_float16", "scaled_float16"),
    ],
    ids=str,
)
def test_scaled_moments_under_contract_torch_are_refused(name, dtype, named):
    allowed = "torch.float32, torch.bfloat16, torch.float16"
    message = rf"{name} must be one of {allowed} with contract='torch', got {named}: .*no scales$"
    with pytest.raises(ValueError, match=message):
        FusedAdam([parameter()], contract="torch", **{name: dtype})


def without_parameters(system, **options):
    """On a CPU the contract te allows no parameter; a rank may have none."""
    return drop_in(system)([{"params": []}], **options)


SCALERS = {"an object": object(), "0": 0, "GradScaler": torch.amp.GradScaler("cpu")}


@pytest.mark.parametrize("system", FACES)
@pytest.mark.parametrize("scaler", SCALERS.values(), ids=SCALERS)
def test_a_scaler_that_the_peers_ignore_is_refused(system, scaler):
    optimizer = without_parameters(system)
    with pytest.raises(ValueError, match=r"grad_scaler must be None with capturable=False"):
        optimizer.step(grad_scaler=scaler)
    assert optimizer.param_groups[0]["step"] == 0


@pytest.mark.parametrize("system", FACES)
def test_what_is_no_scaler_is_refused(system):
    optimizer = without_parameters(system, capturable=True)
    with pytest.raises(ValueError, match=r"grad_scaler must be a torch.amp.*, got 1024"):
        optimizer.step(grad_scaler=1024)
    assert int(optimizer.param_groups[0]["step"]) == 0


@pytest.mark.parametrize("system", FACES)
@pytest.mark.parametrize("capturable", [False, True])
def test_scaling_is_left_to_the_step_with_capturable_alone(system, capturable):
    optimizer = without_parameters(system, capturable=capturable)
    assert optimizer._step_supports_amp_scaling is capturable
    assert pickle.loads(pickle.dumps(optimizer))._step_supports_amp_scaling is capturable


@pytest.mark.parametrize("system", FACES)
def test_capturable_counts_where_there_are_no_parameters(system):
    optimizer = without_parameters(system, capturable=True)
    optimizer.step()
    optimizer.step(grad_scaler=None)
    (group,) = optimizer.param_groups
    assert_same_bits(group["step"], torch.tensor([2], dtype=torch.int32))
    assert_same_bits(group["lr"], torch.tensor(1e-3))


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms"])
def test_apexs_older_arguments_are_refused(name):
    optimizer = without_parameters("apex")
    with pytest.raises(ValueError, match=rf"{name} must be None, got \[1\]"):
        optimizer.step(**{name: [1]})
    assert optimizer.param_groups[0]["step"] == 0


@pytest.mark.parametrize("capturable", [False, True])
def test_the_first_step_makes_the_state_of_parameters_without_a_gradient(capturable):
    """Zeros and masters, which later steps without a gradient leave alone."""
    options = {"master_weights": True, "capturable": capturable, "makes_states": "all"}
    stepped, frozen = parameter(), parameter()
    frozen.requires_grad_(False)
    optimizer, alone = (
        FusedAdam([frozen, stepped], **options),
        FusedAdam([parameter()], **options),
    )
    with pytest.raises(ValueError, match="parameter 0 of group 0: state 'exp_avg' must be there"):
        optimizer.get_unscaled_state(frozen, "exp_avg")
    for _ in range(3):
        for param in (stepped, *alone.param_groups[0]["params"]):
            param.grad = torch.full((3,), 0.5, dtype=torch.bfloat16)
        optimizer.step()
        alone.step()
        assert set(optimizer.state[frozen]) == set(optimizer.state[stepped])
        assert_same_bits(optimizer.get_unscaled_state(frozen, "exp_avg"), torch.zeros(3))
        assert_same_bits(optimizer.get_unscaled_state(frozen, "exp_avg_sq"), torch.zeros(3))
        assert_same_bits(optimizer.get_unscaled_state(frozen, "master_param"), torch.ones(3))
    assert_same(optimizer.state[stepped], alone.state[alone.param_groups[0]["params"][0]])
    assert_same_bits(frozen.detach(), torch.ones(3, dtype=torch.bfloat16))


def test_a_plain_step_makes_no_state_of_a_frozen_parameter():
    stepped, frozen = parameter(), parameter()
    frozen.requires_grad_(False)
    optimizer = FusedAdam([frozen, stepped], master_weights=True)
    stepped.grad = torch.ones_like(stepped)
    optimizer.step()
    assert set(optimizer.state) == {stepped}


class WithScaler(FusedAdam):
    """The drop-ins' step on a CPU, under a contract that works there."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, grad_scaler=None):
        return step_with(self, functools.partial(super().step, closure), grad_scaler, "the peer")


def scaled_step(optimizer, scaler, gradient, before=lambda: None):
    """One step as torch's loop has it, with the warning that torch gives for such optimizers."""
    scaler.scale(torch.ones(()))
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.full_like(param, gradient) * scaler.get_scale()
    before()
    with pytest.warns(FutureWarning, match="stop passing itself"):
        scaler.step(optimizer)
    scaler.update()


def with_scaler():
    return WithScaler([parameter()], capturable=True, master_weights=True)


@pytest.mark.parametrize("unscaled_before", [False, True])
def test_a_scaler_that_passes_itself_unscales_once(unscaled_before):
    found, expected = with_scaler(), FusedAdam([parameter()], capturable=True, master_weights=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    before = functools.partial(scaler.unscale_, found) if unscaled_before else lambda: None
    for gradient in (0.25, -3.0):
        scaled_step(found, scaler, gradient, before)
        expected.param_groups[0]["params"][0].grad = torch.full(
            (3,), gradient, dtype=torch.bfloat16
        )
        expected.step()
    assert_same_run(found, expected)
    assert not hasattr(found, "grad_scale")
    assert not hasattr(found, "found_inf")


def test_a_scaler_that_passes_itself_skips_and_backs_off():
    optimizer, scaler = with_scaler(), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scaled_step(optimizer, scaler, 0.25)
    before = snapshot(optimizer)
    scaled_step(optimizer, scaler, math.inf)
    assert_same(snapshot(optimizer), before)
    assert scaler.get_scale() == 2.0**11
    scaled_step(optimizer, scaler, 0.25)
    assert int(optimizer.param_groups[0]["step"]) == 2


def test_a_drop_in_leaves_unscaled_gradients_behind():
    """So that what reads p.grad after the step, a log of norms say, finds what it finds there."""
    for system in FACES:
        assert without_parameters(system).options.write_unscaled_grads
    optimizer = WithScaler([parameter()], capturable=True, write_unscaled_grads=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scaled_step(optimizer, scaler, 0.25)
    (param,) = optimizer.param_groups[0]["params"]
    assert_same_bits(param.grad, torch.full((3,), 0.25, dtype=torch.bfloat16))
    scaled_step(optimizer, scaler, math.inf)
    assert_same_bits(param.grad, torch.full((3,), math.inf, dtype=torch.bfloat16))


def test_a_disabled_scaler_that_is_passed_changes_nothing():
    found, expected = with_scaler(), with_scaler()
    for optimizer in (found, expected):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(3, dtype=torch.bfloat16)
    found.step(grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    expected.step()
    assert_same_run(found, expected)


@pytest.mark.gpu
def test_apexs_unused_masters_are_refused():
    with pytest.raises(
        ValueError, match=r"must be .* with master_weights=True, got torch.bfloat16"
    ):
        drop_in("apex")([parameter("cuda")], master_weights=True, capturable=True)
