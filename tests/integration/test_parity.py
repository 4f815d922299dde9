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
    STEPS,
    assert_same_grads,
    assert_same_in_extremes,
    give_grads,
    parameters,
)
from peer_states import assert_same_state

from megaopt import FusedAdam

pytestmark = pytest.mark.gpu

EXTREME_BETAS = [(0.1, 0.3), (0.9, 0.999), (0.0, 0.0)]
TE_CASES = {
    "bf16, fp32 masters": (BF16, {"master_weights": True}, None),
    "bf16, fp32 masters, fp32 gradients": (
        BF16,
        {"master_weights": True, "use_decoupled_grad": True},
        FP32,
    ),
    "fp16, fp32 masters": (FP16, {"master_weights": True}, None),
    "fp32": (FP32, {}, None),
    "bf16": (BF16, {}, None),
    "fp16": (FP16, {}, None),
    "remainders": (BF16, {"master_weights": True, "store_param_remainders": True}, None),
    "bf16 moments": (
        BF16,
        {"master_weights": True, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
        None,
    ),
    "remainders, bf16 moments": (
        BF16,
        {
            "master_weights": True,
            "store_param_remainders": True,
            "exp_avg_dtype": BF16,
            "exp_avg_sq_dtype": BF16,
        },
        None,
    ),
    "fp16 moments": (
        BF16,
        {"master_weights": True, "exp_avg_dtype": FP16, "exp_avg_sq_dtype": FP16},
        None,
    ),
    "fp8 moments": (
        BF16,
        {"master_weights": True, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8},
        None,
    ),
    "remainders, fp8 moments, fp32 gradients": (
        BF16,
        {
            "master_weights": True,
            "store_param_remainders": True,
            "exp_avg_dtype": FP8,
            "exp_avg_sq_dtype": FP8,
            "use_decoupled_grad": True,
        },
        FP32,
    ),
    "fp32, fp8 and fp16 moments": (FP32, {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP16}, None),
    "fp16, bf16 and fp8 moments": (
        FP16,
        {"master_weights": True, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": FP8},
        None,
    ),
    "fp16 masters": (BF16, {"master_weights": True, "master_weight_dtype": FP16}, None),
}


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


def assert_same_scaled_steps(sides):
    """Parameters, optimizer and GradScaler of each; where that is on, the third step overflows."""
    for step in range(STEPS):
        for params, optimizer, scaler in sides:
            give_grads(params, step)
            if scaler.is_enabled() and step == 2:
                params[-1].grad[5] = torch.inf
            scaler.scale(torch.zeros((), device="cuda"))  # as a loss would, it makes the scale
            scaler.step(optimizer)
            scaler.update()
        (theirs, peer, _), (ours, optimizer, _) = sides
        assert_same_state(theirs, ours, peer, optimizer)
        assert_same_grads(theirs, ours)


@pytest.mark.sample(3)
@pytest.mark.parametrize("bias_correction", [True, False], ids=["corrected", "uncorrected"])
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("case", TE_CASES.values(), ids=TE_CASES)
def test_te_is_transformer_engine(te, case, adam_w_mode, bias_correction):
    from megaopt.integration.transformer_engine import FusedAdam as Ours

    dtype, options, grad_dtype = case
    options = {**HYPER, **options, "weight_decay": 0.1, "adam_w_mode": adam_w_mode}
    theirs, ours = parameters(dtype), parameters(dtype)
    peer = te.FusedAdam(theirs, bias_correction=bias_correction, **options)
    optimizer = Ours(ours, bias_correction=bias_correction, **options)
    attribute = "decoupled_grad" if grad_dtype else "grad"
    assert_same_steps(peer, theirs, optimizer, ours, grad_dtype, attribute)


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
@pytest.mark.parametrize("capturable", [False, True], ids=["plain", "capturable"])
@pytest.mark.parametrize("betas", EXTREME_BETAS, ids=str)
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("case", PLAIN_TE_CASES)
def test_te_is_transformer_engine_in_extremes(te, case, adam_w_mode, betas, capturable):
    from megaopt.integration.transformer_engine import FusedAdam as Ours

    dtype, options, _ = TE_CASES[case]
    options = {**HYPER, **options, "weight_decay": 0.1, "betas": betas}
    options = {**options, "adam_w_mode": adam_w_mode, "capturable": capturable}
    theirs, ours = parameters(dtype), parameters(dtype)
    peer, optimizer = te.FusedAdam(theirs, **options), Ours(ours, **options)
    assert_same_in_extremes(peer, theirs, optimizer, ours)


@pytest.mark.sample(3)
@pytest.mark.parametrize("capturable", [False, True], ids=["plain", "capturable"])
@pytest.mark.parametrize("betas", EXTREME_BETAS, ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_torch_is_torch_in_extremes(name, dtype, weight_decay, betas, capturable):
    options = {**HYPER, "weight_decay": weight_decay, "betas": betas}
    theirs, ours = parameters(dtype), parameters(dtype)
    peer = getattr(torch.optim, name)(theirs, fused=True, **options)
    options |= {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype, "capturable": capturable}
    optimizer = FusedAdam(ours, contract="torch", adam_w_mode=name == "AdamW", **options)
    assert_same_in_extremes(peer, theirs, optimizer, ours)


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
@pytest.mark.parametrize("bias_correction", [True, False], ids=["corrected", "uncorrected"])
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("case", PLAIN_TE_CASES)
def test_te_is_transformer_engine_capturable(te, case, adam_w_mode, bias_correction, scale):
    """With a GradScaler the third step's gradients overflow, and it is skipped."""
    from megaopt.integration.transformer_engine import FusedAdam as Ours

    dtype, options, _ = TE_CASES[case]
    if dtype == BF16 and scale is not None:
        pytest.skip("torch's GradScaler does not unscale bf16 gradients")
    options = {**HYPER, **options, "weight_decay": 0.1, "adam_w_mode": adam_w_mode}
    sides = []
    for cls in (te.FusedAdam, Ours):
        params = parameters(dtype)
        optimizer = cls(params, bias_correction=bias_correction, capturable=True, **options)
        scaler = torch.amp.GradScaler("cuda", init_scale=scale or 1.0, enabled=scale is not None)
        sides.append((params, optimizer, scaler))
    assert_same_scaled_steps(sides)


def test_capturable_te_bias_corrections_are_the_hosts():
    """The GPU's pow and the C library's, rounded to the fp32 corrections that both kernels use."""
    from megaopt.kernels.rules import RULES
    from megaopt.kernels.step.preparation import Request, TritonPreparation

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
        found, _ = preparation.make(groups, Request(), [])
        rows = [
            rule.scalars({**g, "lr": 3e-3, "step": n}) for g, n in zip(groups, steps, strict=True)
        ]
        assert_same_bits(found.cpu(), torch.tensor(rows, dtype=torch.float32), f"{beta1} {beta2}")


@pytest.mark.sample(3)
@pytest.mark.parametrize("start", [0, 3, 1000, 4094, 99_990])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("name", "weight_decay"), [("AdamW", 0.0), ("AdamW", 0.1), ("Adam", 0.0), ("Adam", 0.1)]
)
@pytest.mark.parametrize("capturable", [False, True], ids=["plain", "capturable"])
def test_torch_is_torch(name, dtype, weight_decay, start, capturable):
    """Moments have the parameter's dtype, as torch keeps them; steps from 1 to 100,000."""
    options = {**HYPER, "weight_decay": weight_decay}
    theirs, ours = parameters(dtype), parameters(dtype)
    peer = getattr(torch.optim, name)(theirs, fused=True, **options)
    moments = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    adam_w_mode = name == "AdamW"
    options = {**options, **moments, "adam_w_mode": adam_w_mode, "capturable": capturable}
    # by the group's count, which may be set
    optimizer = FusedAdam(ours, contract="torch", step_counts="group", **options)
    optimizer.param_groups[0]["step"] += start
    for param in theirs:
        peer.state[param] = {
            "step": torch.tensor(float(start), device="cuda"),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
    assert_same_steps(peer, theirs, optimizer, ours)


@pytest.mark.parametrize("capturable", [False, True], ids=["plain", "capturable"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_a_run_goes_from_torch_to_ours_and_back(name, dtype, capturable):
    """Two steps of torch's, two of ours, two of torch's: the bits of six of torch's."""
    options = {**HYPER, "weight_decay": 0.1}
    own = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype, "adam_w_mode": name == "AdamW"}
    straight, moved = parameters(dtype), parameters(dtype)
    peer, first, last = (
        getattr(torch.optim, name)(params, fused=True, **options)
        for params in (straight, moved, moved)
    )
    middle = FusedAdam(moved, contract="torch", capturable=capturable, **options, **own)
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
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_torch_is_torch_wherever_its_tensors_lie(dtype, shift):
    """L2 decay: torch's bits depend on alignment and size, for one tensor and its copy."""
    options = {**HYPER, "weight_decay": 0.1}
    sides = []
    for _ in range(2):
        bases = parameters(dtype, (200_000, 70_003, 4099, 516))
        views = [base.detach()[shift:] for base in bases]
        sides.append([torch.nn.Parameter(view) for view in views])
    peer = torch.optim.Adam(sides[0], fused=True, **options)
    moments = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    optimizer = FusedAdam(sides[1], contract="torch", adam_w_mode=False, **options, **moments)
    assert_same_steps(peer, sides[0], optimizer, sides[1])


@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0])
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_torch_is_torch_under_a_grad_scaler(name, dtype, scale):
    """torch divides by the scale inside its kernel; the third step overflows and is skipped."""
    options = {**HYPER, "weight_decay": 0.1}
    own = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype, "adam_w_mode": name == "AdamW"}
    sides = []
    for make in (
        lambda params: getattr(torch.optim, name)(params, fused=True, **options),
        lambda params: FusedAdam(
            params, contract="torch", capturable=True, write_unscaled_grads=True, **options, **own
        ),
    ):
        params = parameters(dtype)
        sides.append((params, make(params), torch.amp.GradScaler("cuda", init_scale=scale)))
    assert_same_scaled_steps(sides)


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
    theirs, ours = parameters(FP32), parameters(FP32)
    peer = torch.optim.AdamW(theirs, fused=True, **HYPER)
    optimizer = FusedAdam(ours, contract="ieee", weight_decay=1e-2, **HYPER)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_steps(peer, theirs, optimizer, ours)


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adam", "amsgrad"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_torch_is_torch_with_amsgrad_and_maximize(scale, name, dtype, amsgrad, maximize):
    """With a loss scale its kernel contracts other elements' decay."""
    options = {**HYPER, "weight_decay": 0.1, "amsgrad": amsgrad, "maximize": maximize}
    theirs, ours = parameters(dtype), parameters(dtype)
    peer = getattr(torch.optim, name)(theirs, fused=True, **options)
    moments = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    optimizer = FusedAdam(ours, contract="torch", adam_w_mode=name == "AdamW", **options, **moments)
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
