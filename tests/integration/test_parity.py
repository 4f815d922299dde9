"""Contracts te and torch against the optimizers that they promise to equal, bit for bit."""

import pytest
import torch
from bits import assert_same_bits
from parity import (
    BF16,
    FP8,
    FP16,
    FP32,
    HYPER,
    SIZES,
    STEPS,
    assert_same_grads,
    assert_same_in_extremes,
    assert_same_state,
    give_grads,
    parameters,
)

from megaopt import FusedAdam

pytestmark = pytest.mark.gpu

EXTREME_BETAS = [(0.1, 0.3), (0.9, 0.999), (0.0, 0.0)]
MASTERS = {"master_weights": True}
REMAINDERS = {**MASTERS, "store_param_remainders": True}


def moments(exp_avg, exp_avg_sq=None):
    return {"exp_avg_dtype": exp_avg, "exp_avg_sq_dtype": exp_avg_sq or exp_avg}


# weights, options, and gradients where these are decoupled
TE_CASES = {
    "bf16, fp32 masters": (BF16, MASTERS, None),
    "bf16, fp32 masters, fp32 gradients": (BF16, MASTERS, FP32),
    "fp16, fp32 masters": (FP16, MASTERS, None),
    "fp32": (FP32, {}, None),
    "bf16": (BF16, {}, None),
    "fp16": (FP16, {}, None),
    "remainders": (BF16, REMAINDERS, None),
    "bf16 moments": (BF16, {**MASTERS, **moments(BF16)}, None),
    "remainders, bf16 moments": (BF16, {**REMAINDERS, **moments(BF16)}, None),
    "fp16 moments": (BF16, {**MASTERS, **moments(FP16)}, None),
    "fp8 moments": (BF16, {**MASTERS, **moments(FP8)}, None),
    "remainders, fp8 moments, fp32 gradients": (BF16, {**REMAINDERS, **moments(FP8)}, FP32),
    "fp32, fp8 and fp16 moments": (FP32, moments(FP8, FP16), None),
    "fp16, bf16 and fp8 moments": (FP16, {**MASTERS, **moments(BF16, FP8)}, None),
    "fp16 masters": (BF16, {**MASTERS, "master_weight_dtype": FP16}, None),
}
capturable_or_not = pytest.mark.parametrize(
    "capturable", [False, True], ids=["plain", "capturable"]
)
corrected_or_not = pytest.mark.parametrize(
    "bias_correction", [True, False], ids=["corrected", "uncorrected"]
)
both_modes = pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "l2"])
both_names = pytest.mark.parametrize("name", ["AdamW", "Adam"])
each_dtype = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)


def of_torch(name, dtype, sizes=SIZES, shift=0, own=None, **options):
    """torch's optimizer and ours over equal parameters, with moments of their dtype; own: ours."""
    given = {**HYPER, "weight_decay": 0.1, **options}
    theirs, ours = (
        [torch.nn.Parameter(base.detach()[shift:]) for base in parameters(dtype, sizes)]
        for _ in range(2)
    )
    peer = getattr(torch.optim, name)(theirs, fused=True, **given)
    given |= {"adam_w_mode": name == "AdamW", **moments(dtype), **(own or {})}
    return peer, theirs, FusedAdam(ours, **{"contract": "torch", **given}), ours


def of_te(te, dtype, **options):
    """TransformerEngine's optimizer and ours over equal parameters."""
    from megaopt.integration.transformer_engine import FusedAdam as Ours

    options = {**HYPER, "weight_decay": 0.1, **options}
    theirs, ours = parameters(dtype), parameters(dtype)
    return te.FusedAdam(theirs, **options), theirs, Ours(ours, **options), ours


@pytest.fixture
def te():
    reason = "TransformerEngine is not installed"
    return pytest.importorskip("transformer_engine.pytorch.optimizers", reason=reason)


def assert_same_steps(peer, theirs, optimizer, ours, dtype=None, attribute="grad"):
    for step in range(STEPS):
        for params in (theirs, ours):
            give_grads(params, step, dtype, attribute)
        peer.step()
        optimizer.step()
        assert_same_state(theirs, ours, peer, optimizer)


def assert_same_scaled_steps(peer, theirs, optimizer, ours, scale):
    """Under a GradScaler of each; where that is on, the third step overflows."""
    sides = [
        (*own, torch.amp.GradScaler("cuda", init_scale=scale or 1.0, enabled=scale is not None))
        for own in ((theirs, peer), (ours, optimizer))
    ]
    for step in range(STEPS):
        for params, optimizer, scaler in sides:
            give_grads(params, step)
            if scaler.is_enabled() and step == 2:
                params[-1].grad[5] = torch.inf
            scaler.scale(torch.zeros((), device="cuda"))  # as a loss would, it makes the scale
            scaler.step(optimizer)
            scaler.update()
        assert_same_state(theirs, ours, peer, optimizer)
        assert_same_grads(theirs, ours)


@pytest.mark.sample(3)
@corrected_or_not
@both_modes
@pytest.mark.parametrize("case", TE_CASES.values(), ids=TE_CASES)
def test_te_is_transformer_engine(te, case, adam_w_mode, bias_correction):
    dtype, options, grad_dtype = case
    options = {**options, "adam_w_mode": adam_w_mode, "bias_correction": bias_correction}
    pair = of_te(te, dtype, use_decoupled_grad=grad_dtype is not None, **options)
    assert_same_steps(*pair, grad_dtype, "decoupled_grad" if grad_dtype else "grad")


# remainders and scaled states differ there on purpose: docs/numbers.md
PLAIN_TE_CASES = [
    "bf16, fp32 masters",
    "fp16, fp32 masters",
    "fp32",
    "bf16",
    "fp16",
    "bf16 moments",
]


@pytest.mark.sample(3)
@capturable_or_not
@pytest.mark.parametrize("betas", EXTREME_BETAS, ids=str)
@both_modes
@pytest.mark.parametrize("case", PLAIN_TE_CASES)
def test_te_is_transformer_engine_in_extremes(te, case, adam_w_mode, betas, capturable):
    dtype, options, _ = TE_CASES[case]
    own = {"betas": betas, "adam_w_mode": adam_w_mode, "capturable": capturable}
    assert_same_in_extremes(*of_te(te, dtype, **options, **own))


@pytest.mark.sample(3)
@capturable_or_not
@pytest.mark.parametrize("betas", EXTREME_BETAS, ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@each_dtype
@both_names
def test_torch_is_torch_in_extremes(name, dtype, weight_decay, betas, capturable):
    options = {"weight_decay": weight_decay, "betas": betas, "own": {"capturable": capturable}}
    assert_same_in_extremes(*of_torch(name, dtype, **options))


def test_te_frozen_and_empty_parameters(te):
    from megaopt.integration.transformer_engine import FusedAdam as Ours

    sides = []
    for cls in (te.FusedAdam, Ours):
        params = parameters(BF16, (100, 0, 50, 30))
        optimizer = cls(params, **HYPER, master_weights=True)
        for step in range(STEPS):
            give_grads(params, step)
            params[2].grad = None
            optimizer.step()
        sides.append((params, optimizer))
    (theirs, peer), (ours, optimizer) = sides
    assert len(peer.state) == len(optimizer.state) == 4
    assert_same_state(theirs, ours, peer, optimizer)


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
@pytest.mark.parametrize("scale", [None, 3.0, 65536.0])
@corrected_or_not
@both_modes
@pytest.mark.parametrize("case", PLAIN_TE_CASES)
def test_te_is_transformer_engine_capturable(te, case, adam_w_mode, bias_correction, scale):
    """With a GradScaler the third step's gradients overflow, and it is skipped."""
    dtype, options, _ = TE_CASES[case]
    if dtype == BF16 and scale is not None:
        pytest.skip("torch's GradScaler does not unscale bf16 gradients")
    own = {"adam_w_mode": adam_w_mode, "bias_correction": bias_correction, "capturable": True}
    assert_same_scaled_steps(*of_te(te, dtype, **options, **own), scale)


def test_capturable_te_bias_corrections_are_the_hosts():
    """The GPU's pow and the C library's, rounded to the fp32 corrections that both kernels use."""
    from megaopt.kernels.rules import RULES
    from megaopt.kernels.step.preparation import Request
    from megaopt.kernels.step.prepare import TritonPreparation

    rule = RULES["adamw", "te"]
    steps = [*range(1, 400), *range(400, 100_000, 1009)]
    for beta1, beta2 in ((0.9, 0.999), (0.95, 0.98), (0.5, 0.9999), (0.0, 0.99)):
        groups = [
            {**HYPER, "betas": (beta1, beta2), "weight_decay": 0.1, "bias_correction": True}
            for _ in steps
        ]
        for group, step in zip(groups, steps, strict=True):
            group["lr"] = torch.full((), 3e-3, device="cuda")
            group["step"] = torch.full((1,), step - 1, dtype=torch.int32, device="cuda")
        preparation = TritonPreparation(rule.capturable, torch.device("cuda"))
        found, _ = preparation.make(groups, len(groups), Request(), [])
        rows = [
            rule.scalars({**g, "lr": 3e-3, "step": n}) for g, n in zip(groups, steps, strict=True)
        ]
        assert_same_bits(found.cpu(), torch.tensor(rows, dtype=torch.float32), f"{beta1} {beta2}")


@pytest.mark.sample(3)
@pytest.mark.parametrize("start", [0, 3, 1000, 4094, 99_990])
@each_dtype
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@both_names
@capturable_or_not
def test_torch_is_torch(name, dtype, weight_decay, start, capturable):
    """Moments have the parameter's dtype, as torch keeps them; steps from 1 to 100,000."""
    own = {"capturable": capturable, "step_counts": "group"}  # whose count may be set
    peer, theirs, optimizer, ours = of_torch(name, dtype, weight_decay=weight_decay, own=own)
    optimizer.param_groups[0]["step"] += start
    for param in theirs:
        zeros = {moment: torch.zeros_like(param) for moment in ("exp_avg", "exp_avg_sq")}
        peer.state[param] = {"step": torch.tensor(float(start), device="cuda"), **zeros}
    assert_same_steps(peer, theirs, optimizer, ours)


@pytest.mark.parametrize("capturable", [False, True], ids=["plain", "capturable"])
@each_dtype
@both_names
def test_a_run_goes_from_torch_to_ours_and_back(name, dtype, capturable):
    """Two steps of torch's, two of ours, two of torch's: the bits of six of torch's."""
    peer, straight, middle, moved = of_torch(name, dtype, own={"capturable": capturable})
    first, last = (
        getattr(torch.optim, name)(moved, fused=True, **HYPER, weight_decay=0.1) for _ in range(2)
    )
    for step in range(6):
        if step == 2:
            middle.load_state_dict(first.state_dict())
        if step == 4:
            last.load_state_dict(middle.to_torch_state_dict())
        for params in (straight, moved):
            give_grads(params, step)
        peer.step()
        (first, middle, last)[step // 2].step()
        assert_same_state(straight, moved, peer, (first, middle, last)[step // 2])


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
@each_dtype
def test_torch_is_torch_wherever_its_tensors_lie(dtype, shift):
    """L2 decay: torch's bits depend on alignment and size, for one tensor and its copy."""
    assert_same_steps(*of_torch("Adam", dtype, (200_000, 70_003, 4099, 516), shift))


@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0])
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@both_names
def test_torch_is_torch_under_a_grad_scaler(name, dtype, scale):
    """torch divides by the scale inside its kernel; the third step overflows and is skipped."""
    own = {"capturable": True, "write_unscaled_grads": True}
    peer, theirs, optimizer, ours = of_torch(name, dtype, own=own)
    optimizer.step_unscales = True
    assert_same_scaled_steps(peer, theirs, optimizer, ours, scale)


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("step", [1, 2, 3, 6, 100, 5000])
def test_torch_twin_on_the_gpu_is_the_kernel(adam_w_mode, step):
    sides = []
    for backend in ("triton", "reference"):
        params = parameters(FP32)
        options = {**HYPER, "weight_decay": 0.1, "adam_w_mode": adam_w_mode, "step_counts": "group"}
        optimizer = FusedAdam(params, contract="torch", backend=backend, **options)
        optimizer.param_groups[0]["step"] = step - 1
        give_grads(params, step)
        optimizer.step()
        sides.append((params, optimizer))
    (ours, optimizer), (theirs, twin) = sides
    assert_same_state(theirs, ours, twin, optimizer)


def test_parity_would_notice_another_contract():
    """ieee in the place of torch does not pass."""
    with pytest.raises(AssertionError, match="differ"):
        assert_same_steps(*of_torch("AdamW", FP32, own={"contract": "ieee"}))


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adam", "amsgrad"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@both_names
@pytest.mark.parametrize("scale", [None, 4.0])
def test_torch_is_torch_with_amsgrad_and_maximize(scale, name, dtype, amsgrad, maximize):
    """With a loss scale its kernel contracts other elements' decay."""
    options = {"amsgrad": amsgrad, "maximize": maximize}
    peer, theirs, optimizer, ours = of_torch(name, dtype, **options)
    if scale is not None:  # as a GradScaler hands it over
        for each in (peer, optimizer):
            each.grad_scale = torch.tensor(scale, device="cuda")
            each.found_inf = torch.zeros((), device="cuda")
    for step in range(STEPS):
        for params in (theirs, ours):
            give_grads(params, step)
        peer.step()
        optimizer.step()
    for index, (param, own) in enumerate(zip(theirs, ours, strict=True)):
        assert_same_bits(own.detach(), param.detach(), f"weight {index}")
        for moment in optimizer.rule.moments:
            found, expected = optimizer.state[own][moment], peer.state[param][moment]
            assert_same_bits(found, expected, f"{moment} {index}")
