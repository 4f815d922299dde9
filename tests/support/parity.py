"""Parameters, gradients and comparisons for steps beside another library's optimizer, on a GPU."""

import torch
from bits import assert_same_bits

# What an optimizer keeps of a parameter, ours and a peer's under the same names.

SCALED = (torch.float16, torch.uint8)


def states_of(optimizer, param):
    """Moments, master and scales, as stored; steps are counted in other places by each library."""
    found = {}
    # TransformerEngine's scales lie outside the state; that of a bf16 state is never read
    scales = getattr(optimizer, "_scales", {}).get(param, {})
    for name, value in optimizer.state.get(param, {}).items():
        if name == "step" or value is None:
            continue
        if hasattr(value, "_scale_inv"):
            # TransformerEngine's Float8Tensor, which calls itself fp32
            found[name], found[f"{name}_scale"] = value._data, value._scale_inv.reshape(1)
            continue
        found[name] = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
        if name in scales and value.dtype in SCALED:
            found[f"{name}_scale"] = scales[name].reshape(1)
    return found


def assert_same_state(theirs, ours, peer, optimizer):
    """Fails unless weights and states are equal, and none is there on one side alone."""
    for index, (other, param) in enumerate(zip(theirs, ours, strict=True)):
        assert_same_bits(param, other, f"weight {index}")
        expected, found = states_of(peer, other), states_of(optimizer, param)
        names = f"weight {index} has the states {sorted(found)}, not {sorted(expected)}"
        assert found.keys() == expected.keys(), names
        assert {"exp_avg", "exp_avg_sq"} <= expected.keys(), names
        for name, value in expected.items():
            assert_same_bits(found[name], value, f"{name} {index}")


SIZES = (1, 7, 1000, 4096, 65537)
HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.uint8  # as TransformerEngine calls it
STEPS = 5


def parameters(dtype, sizes=SIZES):
    generator = torch.Generator("cuda").manual_seed(0)
    draws = [torch.randn(n, device="cuda", generator=generator) * 0.05 for n in sizes]
    return [torch.nn.Parameter(values.to(dtype)) for values in draws]


def give_grads(params, step, dtype=None, attribute="grad"):
    """Gradients over 28 binades, the same for the same step; zeros of both signs in fp16."""
    generator = torch.Generator("cuda").manual_seed(100 + step)
    for param in params:
        values = torch.randn(param.shape, device="cuda", generator=generator)
        exponent = torch.randint(-24, 4, param.shape, device="cuda", generator=generator)
        values = values * torch.exp2(exponent.float())
        setattr(param, attribute, values.to(dtype or param.dtype))


def assert_same_grads(theirs, ours):
    """What a step under a GradScaler has left of them: unscaled; scaled, where it was skipped."""
    for index, (other, param) in enumerate(zip(theirs, ours, strict=True)):
        assert_same_bits(param.grad, other.grad, f"gradient {index}")


EXTREMES = (torch.inf, torch.nan, 3e38, 1e30, 6e4, 1e-41, 1.4e-45, 2.0**-126, 1e-7, 0.0)


def with_extremes(values, seed):
    """A tenth of the values replaced by extremes of both signs, as the dtype has them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    kind, sign = (
        torch.randint(0, most, values.shape, device="cuda", generator=generator)
        for most in (10 * len(EXTREMES), 2)
    )
    for code, value in enumerate(EXTREMES):
        signed = torch.where(sign == 0, value, -value).to(values.dtype)
        values = torch.where(kind == code, signed, values)
    return values


def assert_same_in_extremes(peer, theirs, optimizer, ours):
    """Five steps of both; weights and gradients hold extremes, NaN and infinity among them."""
    for params in (theirs, ours):
        for index, param in enumerate(params):
            param.data = with_extremes(param.data, 1000 + index)
    for step in range(STEPS):
        for params in (theirs, ours):
            give_grads(params, step)
            for index, param in enumerate(params):
                param.grad = with_extremes(param.grad, 10 * step + index)
        peer.step()
        optimizer.step()
        assert_same_state(theirs, ours, peer, optimizer)
    for value in (theirs[-1], peer.state[theirs[-1]]["exp_avg_sq"]):
        assert value.isnan().any()
        assert value.isfinite().any()
