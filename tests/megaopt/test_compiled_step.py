"""torch.compile leaves a step as it is: the bits are those of a loop that is not compiled."""

import pytest
import torch
from runs import assert_same_run

from megaopt import FusedAdam, FusedMuon


def trained(kind, compiled):
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16).bfloat16()
    optimizer = kind(model.parameters(), lr=1e-2, dtype=torch.float32)

    def step(x):
        model(x).square().mean().backward()
        optimizer.step(clip_norm=1.0)
        optimizer.zero_grad()

    step = torch.compile(step, backend="eager") if compiled else step
    for batch in torch.randn(3, 4, 16).bfloat16():
        step(batch)
    return optimizer


@pytest.mark.parametrize("kind", [FusedAdam, FusedMuon])
def test_a_compiled_loop_steps_as_a_plain_one_without_a_warning(kind):
    """The suite makes an error of each of the warnings that tracing a step gave."""
    assert_same_run(trained(kind, compiled=True), trained(kind, compiled=False))
