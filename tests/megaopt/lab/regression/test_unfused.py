"""The baseline against the kernels' oracle, whose operations are each rounded once."""

import numpy as np
import pytest
import torch
from oracle import adam
from torch import nn

from megaopt.kernels.digest.codes import codes_of
from megaopt.lab.config import OptimizerConfig, UnfusedVariant
from megaopt.lab.regression.unfused import (
    UnfusedWeights,
    adam_update,
    round_nearest_away,
    round_nearest_even,
    square_root,
)

LEARNING_RATE = 0.00123
CONFIG = OptimizerConfig(learning_rate=LEARNING_RATE, beta2=0.95, eps=1e-6, weight_decay=0.1)


def numpy_adam(param, grad, exp_avg, exp_avg_sq, config, step):
    return adam(param, exp_avg, exp_avg_sq, grad, group_of(config, step), config.adam_w_mode)


def group_of(config, step):
    names = ("bias_correction", "eps", "weight_decay", "adam_w_mode")
    group = {name: getattr(config, name) for name in names} | {"step": step}
    return group | {"betas": (config.beta1, config.beta2), "lr": config.learning_rate}


def values(seed, exponents=(-30, 10), count=4001):
    generator = np.random.default_rng(seed)
    scale = np.exp2(generator.uniform(*exponents, count))
    return (generator.standard_normal(count) * scale).astype(np.float32)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_the_update_is_the_contract_bit_for_bit(adam_w_mode, bias_correction):
    config = CONFIG.model_copy(
        update={"adam_w_mode": adam_w_mode, "bias_correction": bias_correction}
    )
    param = values(1)
    expected = (param, np.zeros_like(param), np.zeros_like(param))
    tensors = [torch.from_numpy(array.copy()) for array in expected]
    for step in range(1, 8):
        grad = values(10 + step)
        expected = numpy_adam(expected[0], grad, *expected[1:], config, step)
        adam_update(tensors[0], torch.from_numpy(grad), *tensors[1:], group_of(config, step))
        for tensor, array in zip(tensors, expected, strict=True):
            assert array.dtype == np.float32
            assert np.array_equal(tensor.numpy().view(np.int32), array.view(np.int32))


@pytest.mark.parametrize("exponents", [(-149, -120), (-126, 120)], ids=["denormal", "normal"])
def test_the_root_is_correctly_rounded(exponents):
    x = np.abs(values(3, exponents, count=200_000))
    root = square_root(torch.from_numpy(x)).numpy()
    assert np.array_equal(root.view(np.int32), np.sqrt(x).view(np.int32))


TIES = {
    # fp32 bits: (to nearest even, to nearest away), bf16 bits
    0x3F808000: (0x3F80, 0x3F81),
    0x3F818000: (0x3F82, 0x3F82),
    0xBF808000: (0xBF80, 0xBF81),
    0x3F807FFF: (0x3F80, 0x3F80),
    0x3F808001: (0x3F81, 0x3F81),
    0x00008000: (0x0000, 0x0001),
    0x80008000: (0x8000, 0x8001),
    0x7F7F8000: (0x7F80, 0x7F80),
    0x7F7F7FFF: (0x7F7F, 0x7F7F),
    0x7F800000: (0x7F80, 0x7F80),
    0xFF800000: (0xFF80, 0xFF80),
}


@pytest.mark.parametrize("bits", TIES, ids=hex)
def test_ties_are_rounded_as_the_name_says(bits):
    master = torch.tensor([bits], dtype=torch.uint32).view(torch.float32)
    rounded = [
        f(master).view(torch.uint16).item() for f in (round_nearest_even, round_nearest_away)
    ]
    assert tuple(rounded) == TIES[bits]


class Pair(nn.Module):
    """One bf16 matrix and one fp32 norm weight."""

    def __init__(self):
        super().__init__()
        matrix = torch.from_numpy(values(5, (-3, 0), 12)).view(3, 4)
        self.matrix = nn.Parameter(matrix.bfloat16())
        self.norm = nn.Parameter(torch.from_numpy(values(6, (-3, 0), 4)))


def set_gradients(model, step):
    for number, parameter in enumerate(model.parameters()):
        grad = torch.from_numpy(values(100 * number + step, (-3, 0), parameter.numel()))
        parameter.grad = grad.view(parameter.shape).to(parameter.dtype)


def test_masters_feed_the_weights_and_norms_are_their_own():
    model = Pair()
    owner = UnfusedWeights(model, CONFIG, UnfusedVariant(name="a"))
    master = model.matrix.detach().float().numpy().ravel()
    norm = model.norm.detach().clone().numpy()
    state, norm_state = [np.zeros_like(master)] * 2, [np.zeros_like(norm)] * 2
    for step in range(1, 4):
        set_gradients(model, step)
        gradients = [p.grad.float().numpy().ravel() for p in model.parameters()]
        owner.step(LEARNING_RATE)
        master, *state = numpy_adam(master, gradients[0], *state, CONFIG, step)
        no_decay = CONFIG.model_copy(update={"weight_decay": 0.0})
        norm, *norm_state = numpy_adam(norm, gradients[1], *norm_state, no_decay, step)
    found = {(value.name, value.quantity): tensor for value, tensor in owner.parts()}
    assert [name for name, quantity in found if quantity == "weight"] == ["matrix", "norm"]
    assert ("norm", "master") not in found
    assert np.array_equal(found["matrix", "master"].numpy().ravel(), master)
    assert np.array_equal(found["norm", "weight"].numpy(), norm)
    expected = torch.from_numpy(master).view(3, 4).bfloat16()
    assert torch.equal(codes_of(model.matrix), codes_of(expected))
