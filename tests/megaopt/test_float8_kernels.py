"""fp8 weights: the kernels write what the reference writes, for every recipe, bit for bit."""

import pytest
import torch
from bits import assert_same_bits

from megaopt import FusedAdam
from megaopt.float8 import RECIPES, Float8Weight

MASTERS = {"dtype": torch.float32}
OPTIONS = {
    "fp32 masters": MASTERS,
    "no masters": {},
    "fp16 masters": {"master_weights": True, "master_weight_dtype": torch.float16},
    "fp16 and fp8 moments": {
        **MASTERS,
        "exp_avg_dtype": torch.float16,
        "exp_avg_sq_dtype": torch.uint8,
    },
}


def stepped(backend, recipe, shape, options, device, steps, **arguments):
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(shape, generator=generator) * 0.05).bfloat16().to(device)
    param = torch.nn.Parameter(Float8Weight.from_values(values, recipe))
    optimizer = FusedAdam([param], lr=1e-2, weight_decay=0.1, backend=backend, **options)
    for _ in range(steps):
        param.grad = torch.randn(shape, generator=generator).bfloat16().to(device)
        optimizer.step(**arguments)
    return param, optimizer


def assert_same_weights(one, other):
    (param, optimizer), (expected, reference) = one, other
    for name, tensor in param.tensors().items():
        assert_same_bits(tensor.cpu(), expected.tensors()[name].cpu(), name)
    for name, tensor in optimizer.state[param].items():
        if tensor is not None:
            assert_same_bits(tensor.cpu(), reference.state[expected][name].cpu(), name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_write_what_the_reference_writes(recipe):
    """A weight of two by two tiles, whole and cut; clipping goes through the controls."""
    each = [
        stepped(backend, recipe, (130, 160), MASTERS, "cpu", 2, clip_norm=1.0)
        for backend in ("triton", "reference")
    ]
    assert_same_weights(*each)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "shape", [(272, 304), (128, 256), (130, 77), (1, 1), (640, 1024), (257, 4096)], ids=str
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_kernels_write_what_the_reference_writes(recipe, shape, options):
    each = [
        stepped(backend, recipe, shape, options, "cuda", 3) for backend in ("triton", "reference")
    ]
    assert_same_weights(*each)
