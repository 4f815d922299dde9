"""Steps that the host has queued long before the device takes them, and steps on other streams."""

import pytest
import torch

from megaopt import FusedAdam

pytestmark = pytest.mark.gpu
STEPS = 12


def optimizer_of(count=20):
    generator = torch.Generator("cuda").manual_seed(1)
    params = [
        torch.nn.Parameter(
            torch.randn(500 + i, device="cuda", generator=generator).to(torch.bfloat16)
        )
        for i in range(count)
    ]
    return FusedAdam(params, lr=1e-3, weight_decay=0.1, dtype=torch.float32)


def gradients_of(optimizer):
    generator = torch.Generator("cuda").manual_seed(2)
    params = optimizer.param_groups[0]["params"]
    return [
        [torch.randn(p.shape, device="cuda", generator=generator).to(p.dtype) for p in params]
        for _ in range(STEPS)
    ]


def stepped(before_step):
    """Weights and masters after steps with new gradients and a new lr each."""
    optimizer = optimizer_of()
    params = optimizer.param_groups[0]["params"]
    gradients = gradients_of(optimizer)
    torch.cuda.synchronize()
    for index, grads in enumerate(gradients):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.param_groups[0]["lr"] = 1e-3 * (index + 1)
        before_step(index, optimizer.step)
    torch.cuda.synchronize()
    return [p.detach() for p in params] + [optimizer.state[p]["master_param"] for p in params]


def waiting(index, step):
    step()
    torch.cuda.synchronize()


def lagging(index, step):
    torch.cuda._sleep(50_000_000)
    step()


def on_streams():
    streams = [torch.cuda.Stream() for _ in range(3)]
    last = [torch.cuda.current_stream()]

    def take(index, step):
        stream = streams[index % 3]
        stream.wait_stream(last[0])
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            step()
        last[0] = stream

    return take


@pytest.mark.parametrize("way", ["lagging", "on streams"])
def test_each_step_has_its_own_numbers_and_addresses(way):
    found = stepped(lagging if way == "lagging" else on_streams())
    assert all(map(torch.equal, found, stepped(waiting)))
