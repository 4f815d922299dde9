"""torch's global switches change no bit of a step, or the step raises before anything changed."""

import contextlib
import functools

import pytest
import torch
from handling import both_backends
from kinds import KINDS, params_for
from runs import assert_same, everything

from megaopt import FusedAdam, GaLoreAdamW, release_gradients

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [(40, 128), (33, 7), (9,)]


@contextlib.contextmanager
def switched(read, write, value):
    was = read()
    write(value)
    try:
        yield
    finally:
        write(was)


def default_dtype(dtype):
    return switched(torch.get_default_dtype, torch.set_default_dtype, dtype)


def fill_uninitialized(value):
    torch.utils.deterministic.fill_uninitialized_memory = value


@contextlib.contextmanager
def deterministic():
    are = torch.are_deterministic_algorithms_enabled
    fills = switched(
        lambda: torch.utils.deterministic.fill_uninitialized_memory, fill_uninitialized, True
    )
    with switched(are, torch.use_deterministic_algorithms, True), fills:
        yield


SWITCHES = {
    "autocast bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast fp16": lambda: torch.autocast("cpu", torch.float16),
    "default dtype bf16": lambda: default_dtype(torch.bfloat16),
    "default dtype fp64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: switched(lambda: None, torch.set_default_device, "meta"),
    "matmul precision medium": lambda: switched(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "deterministic": deterministic,
    "grad enabled": torch.enable_grad,
    "grad disabled": torch.no_grad,
    "threads": lambda: switched(
        torch.get_num_threads, torch.set_num_threads, 3 - min(torch.get_num_threads(), 2)
    ),
}


def numbers(shape, seed):
    """Of all sizes: subnormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator)
    return value * 2.0 ** torch.randint(-140, 4, shape, generator=generator)


def plain(dtype=BF16):
    return [torch.nn.Parameter(numbers(shape, i).to(dtype)) for i, shape in enumerate(SHAPES)]


CASES = {
    name: (kind, functools.partial(params_for, name), options)
    for name, (kind, options) in KINDS.items()
}


def run(case, switch=contextlib.nullcontext, steps=2, **arguments):
    kind, make, options = case
    params = make()
    optimizer = kind(params, lr=0.01, weight_decay=0.1, backend="reference", **options)
    for step in range(steps):
        for i, param in enumerate(params):
            param.grad = numbers(param.shape, 50 + 10 * step + i).to(param.dtype)
        with switch():
            optimizer.step(**arguments)
    return everything(optimizer)


@functools.cache
def run_of(name):
    """Without a switch."""
    return run(CASES[name])


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.sample(2)
def test_every_rule_and_format_has_the_same_bits(switch):
    for name, case in CASES.items():
        assert_same(run(case, SWITCHES[switch]), run_of(name), name)


@pytest.mark.parametrize("switch", SWITCHES)
def test_clipping_and_loss_scales_have_the_same_bits(switch):
    case = (FusedAdam, plain, {"dtype": FP32})
    assert_same(run(case, SWITCHES[switch], clip_norm=0.3), run(case, clip_norm=0.3))
    found = []
    for own in (SWITCHES[switch], contextlib.nullcontext):
        params = plain()
        optimizer = FusedAdam(params, dtype=FP32, nonfinite="skip")
        for i, param in enumerate(params):
            param.grad = numbers(param.shape, i).to(BF16)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(3.0), torch.tensor(0.0)
        with own():
            optimizer.step()
        found.append(everything(optimizer))
    assert_same(*found)


@pytest.mark.parametrize("switch", [name for name in SWITCHES if name != "threads"])
def test_galores_products_and_refreshes_have_the_same_bits(switch):
    """Of threads nothing is promised: the products are torch's."""

    def galore(params, **options):
        return GaLoreAdamW(params, rank=4, update_proj_gap=1, **options)

    def matrices():
        return [torch.nn.Parameter(torch.randn(24, 64, generator=torch.Generator().manual_seed(1)))]

    case = (galore, matrices, {})
    assert_same(run(case, SWITCHES[switch]), run(case))


@both_backends
def test_released_gradients_within_autocast_are_stepped_as_without(backend):
    found = []
    for switch in (SWITCHES["autocast bf16"], contextlib.nullcontext):
        weight = torch.nn.Parameter(torch.randn(24, 64, generator=torch.Generator().manual_seed(1)))
        optimizer = GaLoreAdamW([weight], rank=4, lr=0.01, kernel="torch")
        release_gradients([weight], optimizer)
        with switch():
            (weight * numbers((24, 64), 3)).sum().backward()
            optimizer.step()
        found.append(everything(optimizer))
    assert_same(*found)


def test_a_step_within_inference_mode_has_the_same_bits():
    """Its states are made outside of it; weights of before are no inference tensors."""
    for name in ("fp32_masters", "remainders", "fp8 mxfp8, stochastic"):
        assert_same(run(CASES[name], torch.inference_mode), run(CASES[name]))


@pytest.mark.parametrize("precision", [None, "ieee", "bf16"])
def test_subnormal_numbers_that_would_be_flushed_raise_before_anything_changes(precision):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes no subnormal numbers")
    torch.set_flush_denormal(False)
    params = plain()
    optimizer = FusedAdam(params, dtype=FP32)
    if precision is not None:
        params = [torch.nn.Parameter(numbers((24, 64), 3).to(BF16))]
        optimizer = GaLoreAdamW(params, rank=4, dtype=FP32, precision=precision)
    for i, param in enumerate(params):
        param.grad = numbers(param.shape, i).to(BF16)
    before = everything(optimizer)
    torch.set_flush_denormal(True)
    try:
        with pytest.raises(RuntimeError, match=r"torch\.set_flush_denormal"):
            optimizer.step()
    finally:
        torch.set_flush_denormal(False)
    # weights and counts; states may be there, and say nothing yet
    assert_same(everything(optimizer)[::2], before[::2])
    optimizer.step()
