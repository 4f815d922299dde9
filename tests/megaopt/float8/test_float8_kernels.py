"""fp8 weights: the kernels write what the reference writes, for every recipe, bit for bit."""

import pytest
import torch
from bits import assert_same_bits

from megaopt import FusedAdam
from megaopt.float8 import RECIPES, Float8Recipe, Float8Weight, update_scales

MASTERS = {"dtype": torch.float32}
BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
PAIRS = {"master_weights": True, "master_weight_dtype": "remainder8_stochastic"}
OPTIONS = {
    "fp32 masters": MASTERS,
    "no masters": {},
    "fp16 masters": {"master_weights": True, "master_weight_dtype": torch.float16},
    "stochastic": {"weight_rounding": "stochastic"},
    "stochastic, blocks": {"weight_rounding": "stochastic", **BLOCKS},
    "remainder8": {"master_weights": True, "master_weight_dtype": "remainder8"},
    "remainder8_stochastic": PAIRS,
    "remainder8_stochastic, blocks": {**PAIRS, **BLOCKS},
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


AMAXES = [0.0, 3.5, torch.inf, torch.nan, 2.0**-149, 2.0**-127, 3.4028234663852886e38]


@pytest.mark.parametrize("skip", [None, 0.0, 1.0])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3, 1024])
def test_the_kernel_moves_scales_as_update_scales_does(length, algorithm, skip, device):
    """A weight for each amax that a step may leave, beside histories of all of them."""
    recipe = Float8Recipe("delayed", amax_history_len=length, amax_compute_algo=algorithm, margin=1)
    generator = torch.Generator().manual_seed(length)
    histories = [torch.rand(length, generator=generator).to(device) for _ in AMAXES]
    for index, history in enumerate(histories):
        history[:: index + 2] = AMAXES[index]
        history[length // 2] = AMAXES[-1 - index]
    scales = [torch.full((1,), 3.0, device=device) for _ in AMAXES]
    amaxes = [torch.full((1,), amax, device=device) for amax in AMAXES if amax == amax]
    amaxes.append(torch.zeros(1, device=device))  # the step passes NaNs over
    weights = []
    for history, scale, amax in zip(histories, scales, amaxes, strict=True):
        codes = torch.zeros(1, device=device).to(recipe.dtype)
        own = (torch.ones(1, device=device), scale.clone(), history.clone())
        weight = Float8Weight(codes, *own, recipe)
        if not skip:
            weight.latest_amax.copy_(torch.maximum(weight.latest_amax, amax))
        update_scales(weight, None if skip is None else torch.tensor(skip != 0, device=device))
        weights.append(weight)
    controls = None
    if skip is not None:
        controls = torch.tensor([[1.0, 1.0, 1.0, skip, 0.0]], device=device)
    table = [[tensor.data_ptr() for tensor in each] for each in (histories, scales, amaxes)]
    table.append([0] * len(AMAXES))
    recipe.quantizer.move(torch.tensor(table, device=device), recipe, controls)
    for index, weight in enumerate(weights):
        assert_same_bits(scales[index], weight.scale, f"scale {index}")
        assert_same_bits(histories[index], weight.amax_history, f"history {index}")


@pytest.mark.sample(8)
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
