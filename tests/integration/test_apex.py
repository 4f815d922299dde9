"""The drop-in for apex's FusedAdam against apex's own, built from its source, bit for bit."""

import pytest
import torch
from bits import assert_same_bits
from parity import (
    BF16,
    FP16,
    FP32,
    HYPER,
    STEPS,
    assert_same_grads,
    assert_same_in_extremes,
    give_grads,
    parameters,
)

pytestmark = pytest.mark.gpu

CASES = {
    "fp32": (FP32, {}),
    "bf16": (BF16, {}),
    "fp16": (FP16, {}),
    "fp32, capturable": (FP32, {"capturable": True}),
    "fp32, capturable, masters": (FP32, {"capturable": True, "master_weights": True}),
    "fp16, capturable, masters": (FP16, {"capturable": True, "master_weights": True}),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def both(case, **options):
    """apex's optimizer and ours over equal parameters."""
    apex = pytest.importorskip("apex.optimizers", reason="apex is not installed")
    from megaopt.integration.apex import FusedAdam

    dtype, own = case
    options = {**HYPER, "weight_decay": 0.1, **own, **options}
    theirs, ours = parameters(dtype), parameters(dtype)
    return apex.FusedAdam(theirs, **options), theirs, FusedAdam(ours, **options), ours


def assert_same_steps(peer, theirs, optimizer, ours):
    """Weights, moments, and masters, which apex keeps outside its state."""
    for index, (other, param) in enumerate(zip(theirs, ours, strict=True)):
        assert_same_bits(param.detach(), other.detach(), f"weight {index}")
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(optimizer.state[param][name], peer.state[other][name], name)
    if not peer.master_weights or theirs[0].dtype == FP32:
        return
    masters = peer.param_groups_master[0]["params"]
    for index, (master, param) in enumerate(zip(masters, ours, strict=True)):
        assert_same_bits(optimizer.state[param]["master_param"], master.data, f"master {index}")


@pytest.mark.parametrize("bias_correction", [True, False], ids=["corrected", "uncorrected"])
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "l2"])
@each_case
def test_steps_are_those_of_apex(case, adam_w_mode, bias_correction):
    options = {"adam_w_mode": adam_w_mode, "bias_correction": bias_correction}
    peer, theirs, optimizer, ours = both(case, **options)
    for step in range(STEPS):
        for params in (theirs, ours):
            give_grads(params, step)
        peer.step()
        optimizer.step()
        assert_same_steps(peer, theirs, optimizer, ours)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_apex_rounds_moments_that_ours_keeps(dtype):
    """Capturable, 16-bit weights, no masters: apex casts its fp32 moments to the weights' dtype."""
    peer, theirs, optimizer, ours = both((dtype, {"capturable": True}))
    for params in (theirs, ours):
        give_grads(params, 0)
    peer.step()
    optimizer.step()
    kept = False
    for other, param in zip(theirs, ours, strict=True):
        assert_same_bits(param.detach(), other.detach())
        for name, value in peer.state[other].items():
            own = optimizer.state[param][name]
            assert_same_bits(own.to(dtype).float(), value)
            kept = kept or not torch.equal(own, value)
    assert kept


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("case", [c for c in CASES.values() if "master_weights" not in c[1]])
def test_extremes_are_those_of_apex(case, adam_w_mode):
    assert_same_in_extremes(*both(case, adam_w_mode=adam_w_mode))


@pytest.mark.parametrize("case", [c for c in CASES.values() if "capturable" in c[1]])
def test_unscaling_and_skipping_are_those_of_apex(case):
    """Gradients too: apex writes back what it unscaled."""
    peer, theirs, optimizer, ours = both(case)
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**10) for _ in range(2)]
    for step in range(STEPS):
        for params, own, scaler in ((theirs, peer, scalers[0]), (ours, optimizer, scalers[1])):
            give_grads(params, step)
            scaler.scale(torch.zeros((), device="cuda"))
            own.step(grad_scaler=scaler)
        assert_same_steps(peer, theirs, optimizer, ours)
        assert_same_grads(theirs, ours)
