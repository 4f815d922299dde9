"""A captured step of fp8 weights, replayed, beside eager steps: the same bits."""

import pytest
import torch
from runs import assert_same, copied, values

from megaopt import FusedAdam
from megaopt.float8 import RECIPES, Float8Weight

pytestmark = pytest.mark.gpu

FP32 = torch.float32
SHAPES = [(130, 257), (128, 128), (272, 304), (1, 33)]
OPTIONS = {
    "fp32_masters": {"dtype": FP32},
    "no_masters": {},
    "fp16_masters": {"master_weights": True, "master_weight_dtype": torch.float16},
}
WARM, STEPS = 2, 60


def made(recipe, options, capturable):
    weights = [
        torch.nn.Parameter(Float8Weight.from_values(values(s, i).bfloat16().cuda(), recipe))
        for i, s in enumerate(SHAPES)
    ]
    own = FusedAdam(weights, 0.01, weight_decay=0.1, capturable=capturable, **options)
    own.grad_scale = torch.ones((), device="cuda")
    own.found_inf = torch.zeros((), device="cuda")
    for weight in weights:
        weight.grad = torch.zeros(weight.shape, dtype=torch.bfloat16, device="cuda")
    return weights, own


def feed(weights, own, step):
    """Into tensors that stay where they are; each seventh step is skipped."""
    for index, weight in enumerate(weights):
        weight.grad.copy_(values(weight.shape, 100 * (step % 8) + index) * 2.0 ** (step % 3))
    own.grad_scale.fill_(2.0 ** (step % 3))
    own.found_inf.fill_(float(step % 7 == 4))


def everything(weights, own):
    parts = [
        {name: tensor.view(torch.uint8) for name, tensor in weight.tensors().items()}
        for weight in weights
    ]
    return copied({"parts": parts, "states": [dict(own.state[weight]) for weight in weights]})


@pytest.mark.sample(4)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_are_eager_steps(recipe, options):
    (weights, own), (expected_weights, expected) = (
        made(recipe, options, capturable) for capturable in (True, False)
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(WARM):
            feed(weights, own, step)
            own.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own.step()
    seen = everything(weights, own)
    for step in range(STEPS):
        feed(expected_weights, expected, step)
        expected.step()
        if step < WARM:
            continue
        feed(weights, own, step)
        if step % 5 == 3:
            own.step()  # eager, between replays
        else:
            graph.replay()
        if step in (WARM, 4, 20, STEPS - 1):
            found = everything(weights, own)
            assert_same(found, everything(expected_weights, expected), f"step {step}")
    assert int(own.param_groups[0]["step"]) == expected.param_groups[0]["step"] < STEPS
    before, after = (each["parts"][0]["data8"] for each in (seen, everything(weights, own)))
    assert not torch.equal(before, after)
