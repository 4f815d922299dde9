"""Short runs of an optimizer, and everything that one leaves behind, to compare bit by bit."""

import io

import torch
from bits import assert_same_bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn
SCALED = {FP16, FP8}
"""The dtypes that a scale per tensor goes with, as masters and moments."""

MASTER = {"dtype": FP32}
REMAINDERS = {"dtype": FP32, "store_param_remainders": True}
FP16_MASTER = {"master_weights": True, "master_weight_dtype": FP16}

# One row for each format of master and moment, and mixes of them: not their product.
FORMATS = {
    "no_masters": {},
    "fp32_masters": MASTER,
    "remainders": REMAINDERS,
    "fp16_masters": FP16_MASTER,
    "bf16_moments": {**MASTER, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "fp16_moments": {**REMAINDERS, "exp_avg_dtype": FP16, "exp_avg_sq_dtype": FP16},
    "fp8_moments": {**MASTER, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8},
    "bf16_exp_avg_only": {**REMAINDERS, "exp_avg_dtype": BF16},
    "fp16_master_bf16_fp16": {**FP16_MASTER, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": FP16},
    "remainders_fp8_exp_avg_sq": {**REMAINDERS, "exp_avg_sq_dtype": FP8},
}

SHAPES = [(3, 4), (), (0,), (5,)]


def values(shape, seed, dtype=FP32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def on_cpu(value):
    """Copies in host memory of the tensors in it."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {name: on_cpu(content) for name, content in value.items()}
    return [on_cpu(content) for content in value] if isinstance(value, list) else value


def parameters(shapes=SHAPES, dtype=BF16):
    return [
        torch.nn.Parameter(values(shape, seed, dtype).contiguous())
        for seed, shape in enumerate(shapes)
    ]


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def give_gradients(params, step, dtype=None):
    for index, param in enumerate(params):
        own = values(param.shape, 1000 * (step + 1) + index, dtype or param.dtype)
        param.grad = own.to(param.device)


def train(optimizer, steps, first=0):
    """Steps number `first` to `first + steps - 1`, each with its own gradients."""
    params = params_of(optimizer)
    for step in range(first, first + steps):
        give_gradients(params, step)
        optimizer.step()


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: copied(content) for name, content in value.items()}
    return [copied(content) for content in value] if isinstance(value, (list, tuple)) else value


def snapshot(optimizer):
    """Weights, states and groups, copied; states by the parameter's place among all.

    Of fp8 weights the tensors that they are made of.
    """
    params = params_of(optimizer)
    weights = [param.tensors() if hasattr(param, "tensors") else param for param in params]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    states = [optimizer.state.get(param) for param in params]
    found = {"weights": weights, "states": states, "groups": groups, "all": len(optimizer.state)}
    return copied(found)


def everything(optimizer):
    """Weights, states, counts and gradients, copied."""
    params = params_of(optimizer)
    weights = [p.tensors() if hasattr(p, "tensors") else p.detach() for p in params]
    states = [dict(optimizer.state[p]) if p in optimizer.state else None for p in params]
    counts = [group["step"] for group in optimizer.param_groups]
    return copied([weights, states, counts, [param.grad for param in params]])


def assert_same(found, expected, what=""):
    """Fails unless two snapshots or parts of them are the same, tensors bit by bit."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        assert_same_bits(found, expected, what)
    elif isinstance(expected, dict) and isinstance(found, dict):
        assert found.keys() == expected.keys(), what
        for name in expected:
            assert_same(found[name], expected[name], f"{what}.{name}")
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        assert len(found) == len(expected), what
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{what}[{index}]")
    else:
        assert type(found) is type(expected), f"{what}: {found!r} is not {expected!r}"
        assert found == expected, f"{what}: {found!r} is not {expected!r}"


def assert_same_run(found, expected):
    """Fails unless two optimizers have the same weights, states and groups."""
    assert_same(snapshot(found), snapshot(expected))


def through_a_file(value):
    """What torch.load(weights_only=True) makes of what torch.save wrote."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
