"""GaLoreAdamW's launches on a GPU become one of a CUDA graph; the bits stay those of launches."""

import pytest
import torch
from replays import fill, graph_launches
from runs import BF16, FP32, MASTER, assert_same, parameters, snapshot

from megaopt import GaLoreAdamW

pytestmark = pytest.mark.gpu

SHAPES = [(96, 40), (64, 200), (200, 64), (256, 512), (1000, 77)]
KINDS = {
    "bf16": {"precision": "bf16"},
    "bf16, left, grouped": {"precision": "bf16", "proj_type": "left", "kernel": "grouped"},
    "tf32, left": {"precision": "tf32", "proj_type": "left"},
    "tf32, moments in blocks": {"precision": "tf32", "exp_avg_dtype": "block_int8"},
    "ieee": {},
}


def made(weights=BF16, **options):
    params = [torch.nn.Parameter(weight.cuda()) for weight in parameters(SHAPES, weights)]
    masters = MASTER if weights is BF16 else {}
    return GaLoreAdamW([{"params": params, "rank": 16}], lr=0.02, **masters, **options)


@pytest.mark.parametrize("weights", [BF16, FP32])
@pytest.mark.parametrize("name", KINDS)
def test_steps_have_the_bits_of_those_whose_gradients_move(name, weights):
    """These make every launch; projections are made again, and the learning rate changes."""
    optimizers = [made(weights, update_proj_gap=5, **KINDS[name]) for _ in range(2)]
    for step in range(14):
        for optimizer, moved in zip(optimizers, (False, True), strict=True):
            fill(optimizer, step, moved)
            optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
            optimizer.step(clip_norm=1.0)
        assert_same(*map(snapshot, optimizers))


def test_later_steps_are_a_graphs_launch():
    optimizer, launches = made(precision="bf16"), []
    for step in range(6):
        fill(optimizer, step)
        launches.append(graph_launches(optimizer.step))
    assert launches[0][0] == 0
    assert launches[5][0] == 2  # of matrices that are projected on the right, and on the left
    assert launches[0][1] > 8 > launches[5][1]


def test_projections_with_gaps_have_the_bits_of_those_without():
    """They are copied in each step: no graph can hold the copies."""
    optimizers = [made(precision="bf16", update_proj_gap=1000, stagger=False) for _ in range(2)]
    for step in range(6):
        for optimizer, has_gaps in zip(optimizers, (True, False), strict=True):
            fill(optimizer, step)
            optimizer.step()
            if has_gaps and step == 2:
                for state in optimizer.state.values():
                    projection = state["projection"]
                    state["projection"] = torch.stack([projection, projection], -1)[..., 0]
        tensors = [
            [state["projection"].contiguous() for state in optimizer.state.values()]
            + [param.detach() for param in optimizer.param_groups[0]["params"]]
            for optimizer in optimizers
        ]
        assert_same(*tensors)
